"""A parameter's state as tensors: made, sized, read in FP32, and written from FP32 or from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from acceler8.errors import CheckpointError
from acceler8.formats import (
    BLOCK,
    E4M3_BLOCK,
    FP16_BLOCK,
    FP16_POW2,
    FP16_UNSIGNED,
    UE5M3_BLOCK,
    BlockCode,
    block_count,
    decode_blocks,
    encode_blocks,
    join_bf16,
)
from acceler8.kernels.adam import FIRST_CODES, SECOND_CODES

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SCALE = "_scale"


class Moment(NamedTuple):
    """A moment that an optimizer keeps: its key in the state, and whether it is never below zero."""

    name: str
    is_unsigned: bool = False

    def code(self, fmt: str) -> BlockCode | None:
        """The blocks' code of a format; None for FP32 and BF16, which have none."""
        return (SECOND_CODES if self.is_unsigned else FIRST_CODES).get(fmt)


def shard(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor; any other tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """``shard``, detached, which costs more than the rest of a row of a step."""
    return shard(tensor).detach()


def like(p: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
    """``make`` of the local tensor, sharded as ``p`` is."""
    made = make(local(p))
    return made if not isinstance(p, DTensor) else _sharded(made, p, p.shape)


def _sharded(made: Tensor, p: DTensor, shape: torch.Size | tuple[int, ...]) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        made, p.device_mesh, p.placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def zero_scales(p: Tensor) -> Tensor:
    """A scale for each block of the local tensor, all zero, as of codes that are: FP32 [ceil(n / 128)].

    Of a DTensor, whose rows are whole blocks then, [rows, blocks of a row] and sharded as it is, so that checkpoints of
    distributed tensors know whose they are.
    """
    count = block_count(local(p).numel())
    if not isinstance(p, DTensor):
        return torch.zeros(count, device=p.device)
    per_row = p.numel() // p.shape[0] // BLOCK
    rows = local(p).shape[0]
    own = torch.zeros(rows, count // rows if rows else per_row, device=local(p).device)
    return _sharded(own, p, (p.shape[0], per_row))


def moment_layout(moment: Moment, fmt: str) -> tuple[torch.dtype, bool]:
    """Dtype of a moment in a format, and whether it has scales."""
    code = moment.code(fmt)
    return (_DTYPES[fmt], False) if code is None else (code.dtype, True)


def new_moment(p: Tensor, moment: Moment, fmt: str) -> dict[str, Tensor]:
    """A moment that is zero: its entries of the state."""
    dtype, has_scales = moment_layout(moment, fmt)
    made = {moment.name: like(p, lambda t: torch.zeros_like(t, dtype=dtype))}
    return made | {moment.name + SCALE: zero_scales(p)} if has_scales else made


def new_master(p: Tensor, fmt: str) -> dict[str, Tensor]:
    """Master weights that hold what the parameter holds; empty if the format has none of its own."""
    if fmt == "fp32":
        return {"master": like(p, lambda t: t.float().clone())}
    if fmt == "bf16_remainder":
        return {"master": like(p, lambda t: torch.zeros_like(t, dtype=torch.int16))}
    if fmt != "fp16":
        return {}
    scales = zero_scales(p)
    codes = like(p, lambda t: torch.empty_like(t, dtype=torch.float16))
    write_blocks(local(p), codes, scales, FP16_POW2)
    return {"master": codes, "master_scale": scales}


def write_blocks(x: Tensor, codes: Tensor, scales: Tensor, code: BlockCode) -> None:
    """Encode a local ``x`` in slices, so that no FP32 copy of all of it is made."""
    step = 2**18
    flat, into, of = x.reshape(-1), local(codes).view(-1), local(scales).view(-1)
    for start in range(0, flat.numel(), step):
        some, scale_inv = encode_blocks(flat[start : start + step].float(), code)
        into[start : start + step].copy_(some)
        of[start // BLOCK : (start + step) // BLOCK].copy_(scale_inv)


def moment_code(stored: Tensor, scale: Tensor | None, moment: Moment) -> BlockCode | None:
    """What a stored moment is in, from its dtype and whether it has scales; None if it is plain numbers."""
    if scale is None:
        return None
    codes = {torch.float8_e4m3fn: E4M3_BLOCK, torch.uint8: UE5M3_BLOCK}
    return codes.get(stored.dtype, FP16_UNSIGNED if moment.is_unsigned else FP16_BLOCK)


def read_moment(state: Mapping[str, Any], moment: Moment) -> Tensor:
    """A moment in FP32, sharded as it is stored."""
    stored, scale = state[moment.name], state.get(moment.name + SCALE)
    code = moment_code(stored, scale, moment)
    if code is None or scale is None:
        return stored.float().clone() if isinstance(stored, DTensor) else stored.to(torch.float32, copy=True)
    return like(stored, lambda t: decode_blocks(t, local(scale).reshape(-1), code))


def read_master(p: Tensor, state: Mapping[str, Any]) -> Tensor:
    """The weight that the optimizer updates, in FP32, sharded as the parameter."""
    master, scale = state.get("master"), state.get("master_scale")
    if master is None:
        return like(p, lambda t: t.to(torch.float32, copy=True))
    if master.dtype is torch.int16:
        return like(p, lambda t: join_bf16(t, local(master).to(t.device)))
    if scale is not None:
        return like(p, lambda _: decode_blocks(local(master), local(scale).reshape(-1), FP16_POW2))
    return like(p, lambda _: local(master).to(torch.float32, copy=True))


def load_moment_state(p: Tensor, saved: Mapping[str, Any], moment: Moment, fmt: str, where: str) -> dict[str, Tensor]:
    """The entries of one moment from a saved state in any format; bit for bit if it is in ``fmt`` already.

    Raises: CheckpointError for another shape, dtype or number of scales, and for a negative second moment.
    """
    stored, scale = saved[moment.name], saved.get(moment.name + SCALE)
    _check(stored, p, f"{where} {moment.name}")
    fresh = new_moment(p, moment, fmt)
    code = moment_code(stored, scale, moment)
    if code is not None and (
        code.dtype is not stored.dtype
        or (code is E4M3_BLOCK and moment.is_unsigned)
        or (code is UE5M3_BLOCK and not moment.is_unsigned)
    ):
        raise CheckpointError(
            f"{where} {moment.name} is {stored.dtype} with scales; allowed: codes that acceler8.optim writes; use"
            " another checkpoint"
        )
    if code is None and stored.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise CheckpointError(
            f"{where} {moment.name} is {stored.dtype} without scales; allowed: float32, bfloat16, float16, or codes"
            f" with {moment.name}_scale; use another checkpoint"
        )
    if scale is not None:
        _check_scale(scale, p, f"{where} {moment.name}_scale")
    source, target = local(stored), local(fresh[moment.name])
    if moment.is_unsigned and code is None and bool((source < 0).any()):
        raise CheckpointError(f"{where} {moment.name} holds values below 0; the state is damaged: use another one")
    wanted = moment.code(fmt)
    if code is wanted and (code is not None or source.dtype is target.dtype):
        target.copy_(source)
        if code is not None and scale is not None:
            local(fresh[moment.name + SCALE]).view(-1).copy_(local(scale).reshape(-1))
        return fresh
    x = source.to(target.device)
    if code is not None and scale is not None:
        x = decode_blocks(x, local(scale).reshape(-1).to(target.device), code)
    if wanted is None:
        target.copy_(x)
    else:
        write_blocks(x.contiguous(), fresh[moment.name], fresh[moment.name + SCALE], wanted)
    return fresh


def load_master_state(p: Tensor, saved: Mapping[str, Any], fmt: str, where: str) -> dict[str, Tensor]:
    """The entries of the master weights from a saved state; empty if none were saved: the first step makes them.

    Raises: CheckpointError for another shape, or for a remainder where there is none and the other way round: it is
        half of a number of which the parameter, which may be loaded later, is the other.
    """
    master, scale = saved.get("master"), saved.get("master_scale")
    if master is None or fmt in ("none", "stochastic"):
        return {}
    _check(master, p, f"{where} master")
    if (master.dtype is torch.int16) != (fmt == "bf16_remainder"):
        raise CheckpointError(
            f"{where} master is {master.dtype}, and this optimizer has master={fmt!r}; allowed: a BF16 parameter's"
            " remainder only where it was saved; build the optimizer with the master format that was saved"
        )
    if fmt == "bf16_remainder":
        return _master_of(p, local(master), torch.int16)
    if scale is not None:
        _check_scale(scale, p, f"{where} master_scale")
    if fmt == "fp32" and scale is None:
        return _master_of(p, local(master), torch.float32)
    fresh = {"master": like(p, lambda t: torch.empty_like(t, dtype=torch.float16)), "master_scale": zero_scales(p)}
    if fmt == "fp16" and scale is not None:
        local(fresh["master"]).copy_(local(master))
        local(fresh["master_scale"]).view(-1).copy_(local(scale).reshape(-1))
        return fresh
    x = local(master).float() if scale is None else decode_blocks(local(master), local(scale).reshape(-1), FP16_POW2)
    x = x.to(local(p).device)
    if fmt == "fp32":
        return _master_of(p, x, torch.float32)
    write_blocks(x, fresh["master"], fresh["master_scale"], FP16_POW2)
    return fresh


def _master_of(p: Tensor, numbers: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """A master of local ``numbers`` in memory of the parameter's order, which may not be that of a checkpoint."""
    return {"master": like(p, lambda t: torch.empty_like(t, dtype=dtype).copy_(numbers))}


def _check(stored: Any, p: Tensor, what: str) -> None:
    if not isinstance(stored, Tensor) or stored.shape != p.shape:
        got = list(stored.shape) if isinstance(stored, Tensor) else type(stored).__name__
        raise CheckpointError(
            f"{what} is {got}; allowed: a tensor of the parameter's shape {list(p.shape)}; load the state of this model"
        )
    if isinstance(stored, DTensor) and (not isinstance(p, DTensor) or stored.placements != p.placements):
        raise CheckpointError(
            f"{what} is a DTensor placed as {stored.placements}, the parameter is not; load a state that was saved"
            " under the same sharding, or one of full tensors exported by export_state_dict()"
        )
    if not isinstance(stored, DTensor) and isinstance(p, DTensor):
        raise CheckpointError(
            f"{what} is a full tensor, the parameter is a DTensor; distribute it first:"
            " torch.distributed.checkpoint.state_dict.set_optimizer_state_dict(..., full_state_dict=True)"
        )


def _check_scale(scale: Tensor, p: Tensor, what: str) -> None:
    count = block_count(local(p).numel())
    if local(scale).numel() != count or scale.dtype is not torch.float32:
        raise CheckpointError(
            f"{what} is {scale.dtype} with {local(scale).numel()} numbers; allowed: float32, {count}, one for each"
            f" {BLOCK} elements; use another checkpoint"
        )
