"""Optimizer state under parameter names.

``torch.optim`` numbers parameters by their order, so a reordered group loads the wrong momentum in silence.
Here each state stands under its parameter's name, and each group is found again by the names that it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from acceler8.checkpoint.model import name_differences
from acceler8.errors import CheckpointError

Named = nn.Module | Mapping[str, nn.Parameter]
"""A model, or Parameters by name: several models together."""
# State that the optimizers of torch keep in the shape of the parameter.
_SHAPED = frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "sum", "grad_avg"})


def named_parameters(model: Named) -> dict[str, nn.Parameter]:
    """Parameters by name."""
    return dict(model.named_parameters() if isinstance(model, nn.Module) else model)


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """The optimizer that owns the state: a wrapper (``accelerator.prepare`` makes one) names it ``optimizer``."""
    inner = optimizer.__dict__.get("optimizer")
    return unwrapped(inner) if isinstance(inner, Optimizer) else optimizer


def named_state(model: Named, optimizer: Optimizer) -> dict[str, Any]:
    """``optimizer.state_dict()`` with names in the place of numbers.

    Keys: ``kind`` the class; ``groups`` a list of ``{"names", "options"}``; ``state`` name -> what the
    optimizer keeps; ``shared`` state under keys that are no parameter; ``more`` whatever else its state_dict
    holds.
    Raises: CheckpointError if a group holds a parameter that is not the model's.
    """
    optimizer = unwrapped(optimizer)
    packed = optimizer.state_dict()
    names = group_names(model, optimizer)
    name_of = {
        number: name
        for group, inside in zip(packed["param_groups"], names, strict=True)
        for number, name in zip(group["params"], inside, strict=True)
    }
    groups = [
        {"names": inside, "options": {key: value for key, value in group.items() if key != "params"}}
        for group, inside in zip(packed["param_groups"], names, strict=True)
    ]
    return {
        "kind": _kind(optimizer),
        "groups": groups,
        "state": {name_of[key]: value for key, value in packed["state"].items() if key in name_of},
        "shared": {key: value for key, value in packed["state"].items() if key not in name_of},
        "more": {key: value for key, value in packed.items() if key not in ("state", "param_groups")},
    }


def group_names(model: Named, optimizer: Optimizer) -> list[list[str]]:
    """The model's name of each parameter, group by group.

    Raises: CheckpointError for a parameter that the model does not have, say after a wrapper replaced it.
    """
    name_of = {id(parameter): name for name, parameter in named_parameters(model).items()}
    names: list[list[str]] = []
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if id(parameter) not in name_of:
                raise CheckpointError(
                    f"parameter {place} of optimizer group {number}, shape {list(parameter.shape)}, is not "
                    "one of the model's; pass the model that this optimizer was built for"
                )
        names.append([name_of[id(parameter)] for parameter in group["params"]])
    return names


def rebuild_state_dict(saved: dict[str, Any], model: Named, optimizer: Optimizer, *, strict: bool) -> dict[str, Any]:
    """A state_dict for ``optimizer.load_state_dict``, in this optimizer's order. Changes nothing.

    Parameters may stand in another order and groups too; which parameters a group holds must be as saved,
    since its learning rate and decay are theirs.
    Raises: CheckpointError for other names or groups, and, when ``strict``, for another class of optimizer.
    """
    if strict and saved["kind"] != _kind(optimizer):
        raise CheckpointError(
            f"the checkpoint holds the state of {saved['kind']}, the optimizer is {_kind(optimizer)}; build "
            "the one that was saved, or restore without optimizer to start with a fresh one"
        )
    names = group_names(model, optimizer)
    _check_names(saved, names)
    packed = optimizer.state_dict()["param_groups"]
    number_of = {
        name: number
        for inside, group in zip(names, packed, strict=True)
        for name, number in zip(inside, group["params"], strict=True)
    }
    groups = [
        _options(options, group) for options, group in zip(_match_groups(saved["groups"], names), packed, strict=True)
    ]
    state = saved["shared"] | {number_of[name]: value for name, value in saved["state"].items()}
    return {**saved["more"], "state": state, "param_groups": groups}


def load_named_state(saved: dict[str, Any], model: Named, optimizer: Optimizer, *, strict: bool) -> Callable[[], None]:
    """The action that loads a checked state.

    ``Optimizer.load_state_dict`` casts floating state to the parameter's dtype (FP32 moments of a BF16 weight
    would lose half their bits) and breaks strings; after it every value that is not as saved is put right, on
    the device that torch chose. A class with a ``load_state_dict`` of its own is trusted with it.
    """
    optimizer = unwrapped(optimizer)
    parameter_of = named_parameters(model)
    try:
        state_dict = rebuild_state_dict(saved, model, optimizer, strict=strict)
        _check_shapes(saved, parameter_of, optimizer)
        _check_options(state_dict["param_groups"], optimizer)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(f"the optimizer's state is damaged ({error!r}); use another checkpoint") from error

    def apply() -> None:
        optimizer.load_state_dict(state_dict)
        if type(optimizer).load_state_dict is not Optimizer.load_state_dict:
            return
        for name, values in saved["state"].items():
            loaded = optimizer.state[parameter_of[name]]
            for key, value in values.items():
                if key != "step":  # a step counter's place is the optimizer's business
                    loaded[key] = _exact(value, loaded[key], parameter_of[name])

    return apply


def _check_shapes(saved: dict[str, Any], parameter_of: Mapping[str, nn.Parameter], optimizer: Optimizer) -> None:
    """Moments of torch's own optimizers have their parameter's shape; ``load_state_dict`` would take any."""
    if not type(optimizer).__module__.startswith("torch.optim."):
        return
    for name, values in saved["state"].items():
        for key in _SHAPED & values.keys():
            value, shape = values[key], parameter_of[name].shape
            if isinstance(value, Tensor) and value.shape != shape:
                raise CheckpointError(
                    f"the optimizer's {key} of {name} has shape {list(value.shape)}, the parameter {list(shape)}; the"
                    " checkpoint is damaged: use another one"
                )


def _check_options(groups: list[dict[str, Any]], optimizer: Optimizer) -> None:
    """A learning rate or decay is a number, and not NaN."""
    for number, (saved, current) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        for key, value in current.items():
            if type(value) not in (int, float) or (got := saved.get(key, value)) is None:
                continue
            if isinstance(got, bool) or not isinstance(got, int | float | Tensor) or bool(got != got):
                raise CheckpointError(
                    f"optimizer group {number} has {key}={got!r}; allowed: a number; the checkpoint is damaged: use"
                    " another one"
                )


def _exact(saved: Any, loaded: Any, parameter: Tensor) -> Any:
    if isinstance(saved, Tensor):
        kept = isinstance(loaded, Tensor) and loaded.dtype == saved.dtype
        return loaded if kept else saved.to(parameter.device)
    if isinstance(saved, dict):
        return type(saved)({key: _exact(value, loaded[key], parameter) for key, value in saved.items()})
    if isinstance(saved, list | tuple):
        return type(saved)(_exact(value, old, parameter) for value, old in zip(saved, loaded, strict=True))
    return saved


def _options(saved: dict[str, Any], current: dict[str, Any]) -> dict[str, Any]:
    """A saved group's options around the current group's parameters; tensors, say a lr, change device."""
    options = {
        key: value.to(current[key].device)
        if isinstance(value, Tensor) and isinstance(current.get(key), Tensor)
        else value
        for key, value in saved.items()
        if key != "param_names" or key in current
    }
    return options | {key: current[key] for key in ("param_names", "params") if key in current}


def _check_names(saved: dict[str, Any], names: list[list[str]]) -> None:
    before = [name for group in saved["groups"] for name in group["names"]]
    differences = name_differences(before, (name for group in names for name in group), owner="optimizer")
    if differences:
        raise CheckpointError(
            "the optimizer holds other parameters than when it was saved: "
            + "; ".join(differences)
            + "; build it over the same parameters, or restore without optimizer"
        )


def _match_groups(saved: list[dict[str, Any]], names: list[list[str]]) -> Iterable[dict[str, Any]]:
    left = list(saved)
    for number, inside in enumerate(names):
        match = next((group for group in left if set(group["names"]) == set(inside)), None)
        if match is None:
            first = next((name for name in inside), "none")
            was = next((i for i, group in enumerate(saved) if first in group["names"]), None)
            raise CheckpointError(
                f"optimizer group {number} holds {len(inside)} parameters ({first}, ...); when saved, "
                f"{first} was in group {was} among {len(saved[was]['names']) if was is not None else 0}; "
                "make the groups as they were saved"
            )
        left.remove(match)
        yield match["options"]
    if left:
        raise CheckpointError(
            f"the checkpoint has {len(saved)} optimizer groups, the optimizer {len(names)}; make the groups "
            "as they were saved"
        )


def _kind(optimizer: Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
