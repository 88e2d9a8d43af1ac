"""State follows its parameter: formats are read from what is stored, memory order and device from the parameter.

Steps walk memory, so an element of the state must lie where the parameter's does. A model may be moved or laid out anew
(``model.cuda()``, ``model.to(memory_format=torch.channels_last)``), a state may have been set by hand, and options of
a group may change after state was made: a step asks the tensors, not what was once decided.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from acceler8.errors import DtypeError, HardwareError
from acceler8.kernels.adam import MOMENT_FORMATS
from acceler8.optim.formats import StateFormats
from acceler8.optim.state import (
    SCALE,
    Moment,
    load_master_state,
    load_moment_state,
    local,
    moment_layout,
    new_master,
    shard,
)

_MOMENTS = {
    (*moment_layout(Moment("", is_unsigned), fmt), is_unsigned): fmt
    for is_unsigned in (False, True)
    for fmt in MOMENT_FORMATS
}
_MASTERS = {
    (torch.float32, False): "fp32", (torch.int16, False): "bf16_remainder", (torch.float16, True): "fp16"
}  # fmt: skip
_WITHOUT_MASTER = ("none", "stochastic")


def stored_formats(p: Tensor, state: dict[str, Any], moments: Sequence[Moment], wanted: StateFormats) -> StateFormats:
    """Formats of a state that is there, by its tensors' dtypes and scales; ``wanted`` itself if they are those.

    Raises: DtypeError for tensors that no format has.
    """
    found = []
    for moment in moments:
        name = moment.name
        fmt = _MOMENTS.get((state[name].dtype, name + SCALE in state, moment.is_unsigned))
        if fmt is None:
            raise _no_format(p, state, name)
        found.append(fmt)
    stored = state.get("master")
    if stored is None:
        master = wanted.master if wanted.master in _WITHOUT_MASTER else "none"
    else:
        master = _MASTERS.get((stored.dtype, "master_scale" in state), "")
        if not master or (master == "bf16_remainder" and p.dtype is not torch.bfloat16):
            raise _no_format(p, state, "master")
    formats = tuple(found)
    if formats == wanted.moments and master == wanted.master:
        return wanted
    return StateFormats(formats, master, "as its state is stored")


def entries_of(moments: Sequence[Moment], formats: StateFormats) -> dict[str, torch.dtype]:
    """Names and dtypes of the tensors of a state in ``formats``, beside its step."""
    layouts = {m.name: moment_layout(m, fmt) for m, fmt in zip(moments, formats.moments, strict=True)}
    if formats.master not in _WITHOUT_MASTER:
        layouts["master"] = next(layout for layout, fmt in _MASTERS.items() if fmt == formats.master)
    scales = {name + SCALE: torch.float32 for name, (_, has_scales) in layouts.items() if has_scales}
    return {name: dtype for name, (dtype, _) in layouts.items()} | scales


def is_settled(param: Tensor, state: dict[str, Any], entries: dict[str, torch.dtype]) -> bool:
    """True if a step may walk the memory of ``state``: it has ``entries``, each as the local ``param`` lies.

    Asked for every parameter in every step, so it is the cheapest look that sees all of it (2 us).
    """
    device = param.device
    if state["step"].device != device or ("master" in state and "master" not in entries):
        return False
    stride = None if param.is_contiguous() else param.stride()  # no scales then, whose strides are others
    for name, dtype in entries.items():
        stored = state.get(name)
        if stored is None:
            return False
        if type(stored) is not Tensor:
            stored = shard(stored)
        if stored.dtype is not dtype or stored.device != device:
            return False
        if not stored.is_contiguous() if stride is None else stored.stride() != stride:
            return False
    return True


def settle(p: Tensor, state: dict[str, Any], moments: Sequence[Moment], wanted: StateFormats) -> StateFormats:
    """Make ``state`` fit for a step of ``p``, and return the formats in which it is.

    A master that ``p`` came to need is made, one of a parameter that became float32 is dropped. What lies in another
    order of memory or on another device is copied to where the parameter is, as it is stored; blocks of a parameter
    that is no longer contiguous become FP32.
    Raises: DtypeError for tensors that no format has; HardwareError if state or parameter alone is on "meta".
    """
    if "master" not in state:
        if wanted.master not in _WITHOUT_MASTER:
            state.update(new_master(p, wanted.master))
    elif p.dtype is torch.float32:  # its own master: what was one belongs to the BF16 or FP16 weight that it was
        _drop(state, "master")
    formats, param = stored_formats(p, state, moments, wanted), shard(p)
    if not param.is_contiguous() and formats.has_blocks:
        moments_now = (
            "fp32" if moment.code(fmt) else fmt for moment, fmt in zip(moments, formats.moments, strict=True)
        )
        master = "fp32" if formats.master == "fp16" else formats.master
        formats = StateFormats(tuple(moments_now), master, "not contiguous")
    if not is_settled(param, state, entries_of(moments, formats)):
        _lay_out(p, state, moments, formats)
    return formats


def _lay_out(p: Tensor, state: dict[str, Any], moments: Sequence[Moment], formats: StateFormats) -> None:
    """Store ``state`` anew in ``formats``, where and as ``p`` lies."""
    where, device = f"the state of a parameter of shape {list(p.shape)}:", local(p).device
    kinds = {device.type} | {local(value).device.type for value in state.values() if isinstance(value, Tensor)}
    if "meta" in kinds and len(kinds) > 1:
        raise HardwareError(
            f"{where} it and the parameter are on {sorted(kinds)}; allowed: devices with memory, or meta for both; load"
            " weights and the optimizer's state once the model has left the meta device"
        )
    made: dict[str, Any] = {"step": state["step"].to(device)}
    for moment, fmt in zip(moments, formats.moments, strict=True):
        made |= load_moment_state(p, state, moment, fmt, where)
    made |= load_master_state(p, state, formats.master, where)
    for name in ("master", *(moment.name for moment in moments)):
        _drop(state, name)
    state.update(made)


def _drop(state: dict[str, Any], name: str) -> None:
    state.pop(name, None)
    state.pop(name + SCALE, None)


def _no_format(p: Tensor, state: dict[str, Any], name: str) -> DtypeError:
    scales = "with" if name + SCALE in state else "without"
    return DtypeError(
        f"{name} of a {p.dtype} parameter of shape {list(p.shape)} is {local(state[name]).dtype} {scales} scales;"
        " allowed: what this optimizer makes, and remainders of bfloat16 parameters alone; set state by"
        " load_state_dict(), and build a new optimizer where a parameter's dtype changed"
    )
