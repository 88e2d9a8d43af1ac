"""Between an optimizer's state and state_dicts: torch's, its own, and those of others, which are refused by name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from acceler8.errors import CheckpointError
from acceler8.formats import BLOCK, FP16_POW2, decode_blocks
from acceler8.optim.state import (
    SCALE,
    Moment,
    load_master_state,
    load_moment_state,
    local,
    moment_code,
    read_moment,
)

if TYPE_CHECKING:
    from acceler8.optim.base import StateFormatsOptimizer

# A key that tells whose state it is, by the optimizer that keeps it.
_OTHERS = {
    "momentum_buffer": "SGD or Muon", "square_avg": "RMSprop or Adadelta", "sum": "Adagrad", "exp_inf": "Adamax",
    "mu_product": "NAdam", "ax": "ASGD", "prev": "Rprop", "row_var": "Adafactor", "exp_avg_sq_row": "Adafactor",
    "state1": "bitsandbytes' 8-bit optimizers", "qmap1": "bitsandbytes' 8-bit optimizers",
    "max_exp_avg_sq": "Adam or AdamW with amsgrad=True", "master_param": "TransformerEngine's FusedAdam",
}  # fmt: skip
FORMAT_OPTIONS = ("master", "quantize")


def format_options(optimizer: StateFormatsOptimizer) -> tuple[str, ...]:
    """Options of a group that say formats, and no numbers."""
    return (*(f"{name}_format" for name in optimizer.moment_names()), *FORMAT_OPTIONS)


def export(optimizer: StateFormatsOptimizer) -> dict[str, Any]:
    """See ``StateFormatsOptimizer.export_state_dict``."""
    packed = optimizer.state_dict()
    order = [p for group in optimizer.param_groups for p in group["params"]]
    state = {}
    for number, p in enumerate(order):
        own = optimizer.state.get(p)
        if own and "step" in own:
            moments = {moment.name: read_moment(own, moment) for moment in optimizer.MOMENTS}
            state[number] = {"step": own["step"].detach().cpu().clone(), **moments}
    ours = format_options(optimizer)
    groups = [{key: value for key, value in group.items() if key not in ours} for group in packed["param_groups"]]
    return {"state": state, "param_groups": groups}


def convert(
    optimizer: StateFormatsOptimizer, saved: Mapping[str, Any]
) -> tuple[defaultdict[Any, Any], list[dict[str, Any]]]:
    """State and groups of ``saved`` as ``optimizer`` keeps them. Changes nothing."""
    groups, current = deepcopy(saved["param_groups"]), optimizer.param_groups
    if [len(group["params"]) for group in groups] != [len(group["params"]) for group in current]:
        raise ValueError(
            f"load_state_dict got groups of {[len(group['params']) for group in groups]} parameters; this optimizer has"
            f" {[len(group['params']) for group in current]}; build it with the groups that were saved"
        )
    numbers = [number for group in groups for number in group["params"]]
    order = dict(zip(numbers, (p for group in current for p in group["params"]), strict=True))
    state: defaultdict[Any, Any] = defaultdict(dict)
    for number, values in saved["state"].items():
        if number not in order:
            state[number] = values
        elif values:
            state[order[number]] = _convert_one(optimizer, order[number], values, f"parameter {number}:")
    _check_kind(optimizer, groups)
    keep = {"params", "param_names", *format_options(optimizer)}  # names decide formats, and are this model's
    merged = [
        {**own, **{key: value for key, value in group.items() if key not in keep}}
        for own, group in zip(current, groups, strict=True)
    ]
    return state, merged


def scales_by_rows(values: Mapping[str, Any], shape: tuple[int, ...], moments: tuple[Moment, ...]) -> dict[str, Any]:
    """The state of one whole parameter of ``shape``, as one that is sharded by rows keeps it.

    Where rows are whole blocks the scales stand in rows, [rows, blocks of a row]; else what they scale is in FP32, as
    ``formats_of`` has it then.
    """
    made, rows = dict(values), shape[0]
    is_unsigned = {moment.name: moment.is_unsigned for moment in moments}
    for key in [key for key in values if key.endswith(SCALE)]:
        name, scale = key.removesuffix(SCALE), values[key].reshape(-1)
        if rows and values[name].numel() // rows % BLOCK == 0:
            made[key] = scale.reshape(rows, -1)
            continue
        code = FP16_POW2 if name == "master" else moment_code(values[name], scale, Moment(name, is_unsigned[name]))
        assert code is not None  # there are scales
        made[name] = decode_blocks(values[name], scale, code)
        del made[key]
    return made


def _check_kind(optimizer: StateFormatsOptimizer, groups: list[dict[str, Any]]) -> None:
    for number, (saved, own) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        if saved.get("amsgrad"):
            raise CheckpointError(
                f"optimizer group {number} was saved with amsgrad=True, which {type(optimizer).__name__} does not have;"
                " go on with torch's optimizer, or load its exp_avg and exp_avg_sq with amsgrad False in the groups"
            )
        key = "decoupled_weight_decay"
        if key in own and key in saved and bool(saved[key]) != own[key]:
            was, now = ("Adam", "AdamW") if own[key] else ("AdamW", "Adam")
            raise CheckpointError(
                f"optimizer group {number} holds the state of {was}; this is {now}, whose weight decay differs;"
                f" allowed: the state of {now}; build acceler8.optim.{was}"
            )


def _convert_one(optimizer: StateFormatsOptimizer, p: Tensor, values: Mapping[str, Any], where: str) -> dict[str, Any]:
    names = optimizer.moment_names()
    known = {"step", "master", "master_scale", *names, *(name + "_scale" for name in names)}
    foreign = [key for key in values if key not in known]
    lacks = [key for key in ("step", *names) if key not in values]
    if foreign or lacks:
        theirs = next((_OTHERS[key] for key in foreign if key in _OTHERS), None)
        what = f"the state of {theirs}" if theirs else "the state of another optimizer"
        raise CheckpointError(
            f"{where} this is {what}: it holds {sorted(map(str, values))}; {type(optimizer).__name__} keeps"
            f" {['step', *names]}; build the optimizer that was saved, or start without its state"
        )
    formats = optimizer.wanted_formats(p)
    step = torch.as_tensor(values["step"], dtype=torch.float32).detach().reshape(())
    if not bool(step >= 0) or not bool(step.isfinite()):
        raise CheckpointError(f"{where} step is {float(step)}; allowed: finite and from 0; use another checkpoint")
    state: dict[str, Any] = {"step": step.to(local(p).device, copy=True)}
    for moment, fmt in zip(optimizer.MOMENTS, formats.moments, strict=True):
        state.update(load_moment_state(p, values, moment, fmt, where))
    return state | load_master_state(p, values, formats.master, where)
