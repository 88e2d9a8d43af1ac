"""Optimizer state under parameter names.

``torch.optim`` numbers parameters by their order, so a reordered group loads the wrong momentum in silence.
Here each state stands under its parameter's name, and each group is found again by the names that it holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer

from acceler8.checkpoint.model import name_differences
from acceler8.checkpoint.sharded import Stored, local
from acceler8.errors import CheckpointError
from acceler8.optim import StateFormatsOptimizer
from acceler8.optim.saving import scales_by_rows
from acceler8.optim.state import SCALE

Named = nn.Module | Mapping[str, nn.Parameter]
"""A model, or Parameters by name: several models together."""
# What the optimizers of torch keep: in the shape of the parameter, never below 0, as one number, and always.
_SHAPED = frozenset(
    {
        *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "sum", "grad_avg"),
        *("acc_delta", "exp_inf", "ax", "prev", "step_size"),
    }
)
_NOT_NEGATIVE = frozenset(
    {"exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "acc_delta", "exp_inf", "row_var", "col_var", "variance"}
)
_NUMBERS = frozenset({"step", "eta", "mu", "mu_product"})
_ALWAYS = {
    **dict.fromkeys(("Adam", "AdamW", "NAdam", "RAdam"), ("step", "exp_avg", "exp_avg_sq")),
    "RMSprop": ("step", "square_avg"),
    "Adagrad": ("step", "sum"),
    "Adadelta": ("step", "square_avg", "acc_delta"),
    "Adamax": ("step", "exp_avg", "exp_inf"),
    "ASGD": ("step", "eta", "mu", "ax"),
    "Rprop": ("step", "prev", "step_size"),
    "Adafactor": ("step",),
}
_OF_SCHEDULERS = frozenset({"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"})
_ROUNDING = 1e-9  # by so much a schedule that ends at 0 may miss it
_ADVICE = "build the optimizer as it was saved; if it is, the checkpoint is damaged: use another one"


def named_parameters(model: Named) -> dict[str, nn.Parameter]:
    """Parameters by name."""
    return dict(model.named_parameters() if isinstance(model, nn.Module) else model)


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """The optimizer that owns the state: a wrapper (``accelerator.prepare`` makes one) names it ``optimizer``."""
    inner = optimizer.__dict__.get("optimizer")
    return unwrapped(inner) if isinstance(inner, Optimizer) else optimizer


def named_state(model: Named, optimizer: Optimizer, packed: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """``optimizer.state_dict()``, or what is given as ``packed``, with names in the place of numbers.

    Keys: ``kind`` the class; ``groups`` a list of ``{"names", "options"}``; ``state`` name -> what the
    optimizer keeps; ``shared`` state under keys that are no parameter; ``more`` whatever else its state_dict
    holds.
    Raises: CheckpointError if a group holds a parameter that is not the model's.
    """
    optimizer = unwrapped(optimizer)
    packed = optimizer.state_dict() if packed is None else packed
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


def rebuild_state_dict(
    saved: dict[str, Any], model: Named, optimizer: Optimizer, *, strict: bool, torch_version: object = None
) -> dict[str, Any]:
    """A state_dict for ``optimizer.load_state_dict``, in this optimizer's order. Changes nothing.

    Parameters may stand in another order and groups too; which parameters a group holds must be as saved,
    since its learning rate and decay are theirs.
    Options that an optimizer of torch lacks in the checkpoint are those that it has now.
    Raises: CheckpointError for other names or groups, and, when ``strict``, for another class of optimizer and, saved
        by the same ``torch_version``, for other options of one of torch's.
    """
    if strict and saved["kind"] != _kind(optimizer):
        raise CheckpointError(
            f"the checkpoint holds the state of {saved['kind']}, the optimizer is {_kind(optimizer)}; build "
            "the one that was saved, or restore without optimizer to start with a fresh one"
        )
    _check_codes(saved, optimizer)
    names = group_names(model, optimizer)
    _check_names(saved, names)
    packed = _packed_groups(optimizer)
    number_of = {
        name: number
        for inside, group in zip(names, packed, strict=True)
        for name, number in zip(inside, group["params"], strict=True)
    }
    matched = list(_match_groups(saved["groups"], names))
    if _is_torchs(optimizer):
        if strict and torch_version == torch.__version__:
            _check_option_names(matched, packed, optimizer)
        matched = [
            options | {key: group[key] for key in optimizer.defaults if key in group and key not in options}
            for options, group in zip(matched, packed, strict=True)
        ]
    groups = [_options(options, group) for options, group in zip(matched, packed, strict=True)]
    state = saved["shared"] | {number_of[name]: value for name, value in saved["state"].items()}
    return {**saved["more"], "state": state, "param_groups": groups}


def load_named_state(
    saved: dict[str, Any],
    model: Named,
    optimizer: Optimizer,
    *,
    strict: bool,
    torch_version: object = None,
    load: Callable[[Mapping[str, Any]], None] | None = None,
) -> Callable[[], None]:
    """The action that loads a checked state, which ``torch_version`` wrote; ``load`` does where it is an engine's.

    ``Optimizer.load_state_dict`` casts floating state to the parameter's dtype (FP32 moments of a BF16 weight
    would lose half their bits) and breaks strings; after it every value that is not as saved is put right, on
    the device that torch chose. A class with a ``load_state_dict`` of its own is trusted with it.
    """
    optimizer = unwrapped(optimizer)
    parameter_of = named_parameters(model)
    try:
        state_dict = rebuild_state_dict(saved, model, optimizer, strict=strict, torch_version=torch_version)
        _check_state(saved, parameter_of, optimizer)
        _check_options(state_dict["param_groups"], optimizer)
    except CheckpointError:
        raise
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"the optimizer's state is damaged ({error!r}); use another checkpoint") from error

    def apply() -> None:
        if load is not None:
            load(state_dict)
            return
        optimizer.load_state_dict(state_dict)
        if type(optimizer).load_state_dict is not Optimizer.load_state_dict:
            return
        for name, values in saved["state"].items():
            loaded = optimizer.state[parameter_of[name]]
            for key, value in values.items():
                if key != "step":  # a step counter's place is the optimizer's business
                    loaded[key] = _exact(value, loaded[key], parameter_of[name])

    return apply


def full_shape(parameter: Tensor) -> torch.Size:
    """The shape of all of it: an engine that takes Parameters apart (DeepSpeed's ZeRO-3) notes it beside them."""
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def _packed_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Groups as ``state_dict()`` has them, without asking for it: an engine's gathers its state for that."""
    numbers: dict[int, int] = {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            numbers.setdefault(id(p), len(numbers))
    return [group | {"params": [numbers[id(p)] for p in group["params"]]} for group in optimizer.param_groups]


def place_state(saved: dict[str, Any], model: Named, optimizer: Optimizer) -> dict[str, Any]:
    """``saved``, whose tensors are ``Stored``, with tensors of which each lies as its parameter does."""
    parameter_of, ours = named_parameters(model), unwrapped(optimizer)
    placed: dict[Any, Any] = {}
    for name, values in saved["state"].items():
        p = parameter_of.get(name)
        if isinstance(p, DTensor) and isinstance(ours, StateFormatsOptimizer) and isinstance(values, dict):
            values = _by_rows(values, p, ours)
        placed[name] = _place(values, p)
    return {key: placed if key == "state" else _place(value, None) for key, value in saved.items()}


def _by_rows(values: dict[str, Any], p: DTensor, optimizer: StateFormatsOptimizer) -> dict[str, Any]:
    """Scales that were saved whole in rows, as ``scales_by_rows`` has them; their parameter is sharded by rows."""
    scales = [value for key, value in values.items() if key.endswith(SCALE) and isinstance(value, Stored)]
    if all(scale.was_sharded for scale in scales):
        return values
    whole = {key: value.whole() if isinstance(value, Stored) else value for key, value in values.items()}
    made = scales_by_rows(whole, tuple(p.shape), optimizer.MOMENTS)
    return {
        key: replace(Stored.whole_of(value), was_sharded=True) if isinstance(value, Tensor) else value
        for key, value in made.items()
    }


def _place(value: Any, p: Tensor | None) -> Any:
    if isinstance(value, Stored):
        return _place_tensor(value, p)
    if isinstance(value, dict):
        return type(value)({key: _place(item, p) for key, item in value.items()})
    return type(value)(_place(item, p) for item in value) if type(value) in (list, tuple) else value


def _place_tensor(stored: Stored, p: Tensor | None) -> Tensor:
    """A DTensor where the parameter is one and the tensor was, or is as large; sharded if it has all the rows."""
    if not isinstance(p, DTensor) or not stored.shape or not (stored.was_sharded or stored.shape == tuple(p.shape)):
        return stored.whole(copy=True)
    dims = [placement.dim for placement in p.placements if isinstance(placement, Shard)]
    if all(dim < len(stored.shape) and stored.shape[dim] == p.shape[dim] for dim in dims):
        return stored.placed(p, p.placements, copy=True)
    return stored.placed(p, (Replicate(),) * len(p.placements), copy=True)


def _is_torchs(optimizer: Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.optim.")


def _check_state(saved: dict[str, Any], parameter_of: Mapping[str, nn.Parameter], optimizer: Optimizer) -> None:
    """What torch's own optimizers keep is known; ``load_state_dict`` would take anything under any name."""
    if not _is_torchs(optimizer):
        return
    # Another class, which strict=False lets through, has state of its own.
    always = _ALWAYS.get(type(optimizer).__name__, ()) if saved["kind"] == _kind(optimizer) else ()
    for name, values in saved["state"].items():
        if not isinstance(values, dict):
            raise TypeError(f"the state of {name} is a {type(values).__name__}")
        lacks = [key for key in always if key not in values] if values else []
        problem = f"the optimizer's state of {name} lacks {lacks[0]}" if lacks else None
        for key, value in values.items():
            if problem is None and (wrong := _wrong_state(key, value, parameter_of[name])):
                problem = f"the optimizer's {key} of {name} {wrong}"
        if problem:
            raise CheckpointError(f"{problem}; the checkpoint is damaged: use another one")


def _wrong_state(key: str, value: Any, parameter: Tensor) -> str | None:
    """What is wrong with one value of the state, in words."""
    if key in _NUMBERS:
        is_one = isinstance(value, Tensor) and value.ndim == 0 and not value.is_complex()
        if not is_one and type(value) not in (int, float):
            return f"is {_short(value)}; allowed: one number"
        return None if math.isfinite(value) and value >= 0 else f"is {_short(value)}; allowed: finite and from 0"
    if key in _SHAPED and not (key == "momentum_buffer" and value is None):
        if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
            return f"is {_short(value)}; allowed: a floating tensor of the parameter's shape"
        if value.shape != full_shape(parameter):
            return f"has shape {list(value.shape)}, the parameter {list(full_shape(parameter))}"
    is_signed = key not in _NOT_NEGATIVE or not isinstance(value, Tensor) or not value.is_floating_point()
    if not is_signed and bool((local(value) < 0).any()):
        return "holds values below 0"
    return None


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        return str(value.item()) if value.numel() == 1 else f"a tensor of {value.dtype}, shape {list(value.shape)}"
    return repr(value)[:80]


def _check_option_names(saved: list[dict[str, Any]], current: list[dict[str, Any]], optimizer: Optimizer) -> None:
    for number, (options, group) in enumerate(zip(saved, current, strict=True)):
        if lacks := [key for key in optimizer.defaults if key in group and key not in options]:
            raise CheckpointError(f"optimizer group {number} has no {lacks[0]!r} in the checkpoint; {_ADVICE}")
        extra = sorted(str(key) for key in options.keys() - group.keys() - _OF_SCHEDULERS - {"param_names"})
        if extra:
            raise CheckpointError(
                f"optimizer group {number} has {extra[0][:80]!r} in the checkpoint and not now; {_ADVICE}, or pass"
                " strict=False"
            )


def _check_options(groups: list[dict[str, Any]], optimizer: Optimizer) -> None:
    """Every option has the kind that it has now; a learning rate or decay is a number, and not NaN."""
    for number, (saved, current) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        for key, value in current.items():
            if key == "params" or key not in saved:
                continue
            if allowed := _wrong_option(key, saved[key], value, _is_torchs(optimizer) and key in optimizer.defaults):
                raise CheckpointError(
                    f"optimizer group {number} has {key}={_short(saved[key])}; allowed: {allowed}; {_ADVICE}"
                )


def _wrong_option(key: str, got: Any, current: Any, is_torchs: bool) -> str | None:
    """What is allowed in the place of ``got``; None if it is fine."""
    if key == "lr" and _is_number(got) and not (math.isfinite(got) and got >= -_ROUNDING):
        return "a number, finite and from 0"
    if _is_number(current):
        if got is None and not is_torchs:
            return None
        is_fine = _is_number(got) and (math.isfinite(got) if is_torchs else not math.isnan(got))
        return None if is_fine else "a number" + (", finite" if is_torchs else ", not NaN")
    if not is_torchs:
        return None
    if isinstance(current, bool):
        is_fine = isinstance(got, bool) or (got is None and key in ("foreach", "fused"))
        return None if is_fine else "True or False"
    if isinstance(current, tuple | list):
        is_fine = isinstance(got, tuple | list) and len(got) == len(current)
        pairs = zip(got, current, strict=True) if is_fine else ()
        is_fine = is_fine and all((g is c is None) or (_is_number(g) and math.isfinite(g)) for g, c in pairs)
        if is_fine and key == "betas":
            is_fine = all(0 <= g <= 1 for g in got)
        return None if is_fine else f"{len(current)} finite numbers" + (" from 0 to 1" if key == "betas" else "")
    if current is None or isinstance(current, str):
        return None if got is None or isinstance(got, bool | str) else "None, True, False or a word"
    return None


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex() and value.dtype is not torch.bool
    return isinstance(value, int | float) and not isinstance(value, bool)


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


def _check_codes(saved: dict[str, Any], optimizer: Optimizer) -> None:
    """Codes with scales beside them are numbers to nobody else, and FP16 or FP8 codes would pass for some."""
    ours = "acceler8.optim."
    if not str(saved["kind"]).startswith(ours) or _kind(optimizer).startswith(ours):
        return
    coded = {key for values in saved["state"].values() for key in values if key.endswith("_scale") or key == "master"}
    if coded:
        raise CheckpointError(
            f"the checkpoint holds the codes of {saved['kind']} ({', '.join(sorted(coded))}), which {_kind(optimizer)}"
            " would read as numbers; allowed: the optimizer that was saved; load it there and give its"
            " export_state_dict() to the other"
        )


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
