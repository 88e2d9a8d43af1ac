"""Which formats a parameter's state has: what its group asks for, or FP32 where few bits cost most and save least.

Vectors (norm gains, biases), embeddings and output heads keep FP32 moments unless asked (``quantize="all"``): rows of
an embedding see gradients rarely and then large ones, which is where 8-bit states were seen to cost quality
(bitsandbytes keeps embeddings too), and vectors are a thousandth of a model. An optimizer sees which of its tensors are
embeddings or heads by their names, if it is built with ``model.named_parameters()``, or from
``parameter_groups(model)``. What is decided looks at the whole parameter, not at one rank's shard.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from acceler8.conversion.filters import HEAD_NAMES
from acceler8.errors import DtypeError, ShapeError, unknown_name
from acceler8.formats import BLOCK
from acceler8.kernels.adam import MASTER_FORMATS, MOMENT_FORMATS
from acceler8.nn.gradients import stored_gradient

QUANTIZE = ("matrices", "all", "none", "level")
EMBEDDING_NAMES = frozenset(
    {
        *("embed", "embedding", "embeddings", "embed_tokens", "embed_positions", "embed_in", "tok_embeddings"),
        *("word_embeddings", "position_embeddings", "token_type_embeddings", "wte", "wpe", "shared"),
    }
)
_PARAMS = (torch.float32, torch.bfloat16, torch.float16)


class StateFormats(NamedTuple):
    """How one parameter's state is stored. moments: a format for each, in the optimizer's order."""

    moments: tuple[str, ...]
    master: str
    reason: str
    """Why it is not what the group asks for; empty if it is."""

    @property
    def has_blocks(self) -> bool:
        """True if any of it is in blocks with scales."""
        return any(m in ("fp16", "fp8") for m in self.moments) or self.master == "fp16"


def with_formats(group: Mapping[str, Any], moments: tuple[str, ...]) -> dict[str, Any]:
    """The group with the constructor's words for formats as the keys that groups keep: ``moments`` is that of every
    moment, ``exp_avg`` that of one.
    """
    made = dict(group)
    of_all = made.pop("moments", None)
    for name in moments:
        asked = made.pop(name, of_all)
        if asked is not None:
            made.setdefault(f"{name}_format", asked)
    return made


def check_group(group: Mapping[str, Any], moments: tuple[str, ...]) -> None:
    """Raises ShapeError or DtypeError for a format that is unknown or that a parameter of the group cannot have."""
    for key, valid in (
        *((f"{name}_format", MOMENT_FORMATS) for name in moments),
        ("master", MASTER_FORMATS),
        ("quantize", QUANTIZE),
    ):
        if group[key] not in valid:
            raise DtypeError(unknown_name(key, group[key], valid))
    for p in group["params"]:
        check_parameter(p, group["master"])


def check_parameter(p: Tensor, master: str) -> None:
    """Raises: DtypeError or ShapeError if the parameter cannot be stepped with that kind of master weights."""
    shape = list(p.shape)
    if p.dtype not in _PARAMS:
        raise DtypeError(f"a parameter of shape {shape} is {p.dtype}; allowed: float32, bfloat16, float16")
    if p.layout is not torch.strided:
        raise ShapeError(f"a parameter of shape {shape} has layout {p.layout}; allowed: torch.strided")
    if master in ("bf16_remainder", "stochastic") and p.dtype is torch.float16:
        raise DtypeError(
            f"master={master!r} got a float16 parameter of shape {shape}; allowed: bfloat16 (and float32, which is its"
            " own master); use master='fp32' or 'fp16', or make the parameter bfloat16"
        )


def formats_of(p: Tensor, group: Mapping[str, Any], moments: tuple[str, ...], name: str | None) -> StateFormats:
    """Formats of one parameter of ``group``; ``name`` is its name in the model, if known."""
    asked = tuple(group[f"{moment}_format"] for moment in moments)
    master = "none" if p.dtype is torch.float32 else group["master"]
    formats = StateFormats(asked, master, "")
    if group["quantize"] == "none":
        return _kept(formats, "kept by its group")
    if group["quantize"] == "level" and stored_gradient(p) is None:
        return _kept(formats, "no weight of its level")
    if group["quantize"] == "matrices" and (reason := _role(p, name)):
        return _kept(formats, reason)
    if formats.has_blocks and (reason := _no_blocks(p)):
        return _kept(formats, reason)
    return formats


def _role(p: Tensor, name: str | None) -> str:
    if p.ndim < 2:
        return "vector"
    owner = name.split(".")[-2:-1] if name else []
    if owner and owner[0] in EMBEDDING_NAMES:
        return "embedding"
    return "output head" if owner and owner[0] in HEAD_NAMES else ""


def _no_blocks(p: Tensor) -> str:
    """Why blocks of 128 along the flattened parameter would not stay whole; empty if they do."""
    if not isinstance(p, DTensor):
        return "" if p.is_contiguous() else "not contiguous"
    if not p._local_tensor.is_contiguous():
        return "not contiguous"
    length = p.numel() // p.shape[0] if p.shape[0] else 0
    if length % BLOCK:
        return f"sharded, and its rows of {length} are no multiple of {BLOCK}"
    for size, placement in zip(p.device_mesh.shape, p.placements, strict=True):
        if isinstance(placement, Shard) and (
            type(placement) is not Shard
            or placement.dim > 1
            or (placement.dim == 1 and (p.ndim > 2 or p.shape[1] // BLOCK % size or p.shape[1] % BLOCK))
        ):
            return f"sharded as {placement} over {size}, which divides blocks of {BLOCK}"
    return ""


def _kept(formats: StateFormats, reason: str) -> StateFormats:
    master = "fp32" if formats.master in ("fp16", "stochastic") else formats.master
    kept = StateFormats(("fp32",) * len(formats.moments), master, reason)
    return kept if kept[:2] != formats[:2] else formats
