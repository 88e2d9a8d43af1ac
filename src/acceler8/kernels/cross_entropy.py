"""Cross-entropy of each row of logits, and its gradient in place of them.

    z = scale * logits,  or  cap * tanh(scale * logits / cap)
    loss = log(sum(exp(z))) - (1 - s) * z[label] - s * mean(z)                    s: label smoothing
    d loss / d logits = (exp(z) / sum(exp(z)) - (1 - s) * (column == label) - s / V) * dz / dlogits

Rows whose label is ``ignore_index`` have loss 0 and gradient 0. An output head's logits are the largest tensor of many
models, and PyTorch holds them several times: as logits, in FP32, as log-softmax, as gradients of each. Here the
gradient takes the place of the logits, in their dtype, so that nothing of that size is added. It is that of the sum
over rows, which the caller multiplies by the upstream gradient and, for a mean, divides by their number; divided
before it is stored, it would underflow in FP16.

A program takes one row of any length in two passes: the first keeps a running maximum and the sum of exponentials
relative to it, the second writes. FP32 inside.

Source: Milakov and Gimelshein 2018, arXiv:1805.02867 (online softmax); Hsu et al. 2024, arXiv:2410.10989 (Liger Kernel:
the gradient made in forward, in place); Szegedy et al. 2015, arXiv:1512.00567 (label smoothing).
"""

from __future__ import annotations

import torch
from torch import Tensor

from acceler8.errors import DtypeError, LabelError, ShapeError
from acceler8.kernels import _triton
from acceler8.kernels._cross_entropy_kernel import cross_entropy_kernel
from acceler8.kernels._launch import Launch, Plans, address, alignment, stream_of
from acceler8.kernels._library import library, may_go_direct

_MOST_COLUMNS, _PER_WARP, _MOST_WARPS = 8192, 512, 16  # 16 elements a thread
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def cross_entropy_ref(
    logits: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    gradient: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Reference: ``(losses [M], gradient [M, V] in the dtype of logits or None)`` in plain PyTorch; takes FP64 too."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    slope: Tensor | float = logit_scale
    z = wide * logit_scale
    if softcap:
        t = torch.tanh(wide * (logit_scale / softcap))
        z, slope = t * softcap, (1 - t * t) * logit_scale
    is_ignored, vocabulary = labels == ignore_index, logits.shape[1]
    is_bad = ~is_ignored & ((labels < 0) | (labels >= vocabulary))
    at = torch.where(is_ignored | is_bad, 0, labels)[:, None]
    top = z.amax(1, keepdim=True)  # an infinite one makes the row NaN, as in PyTorch's cross_entropy
    log_sum = ((z - top).exp_().sum(1, keepdim=True).log_() + top).masked_fill(is_bad[:, None], torch.nan)
    losses = (log_sum - (1 - label_smoothing) * z.gather(1, at)).squeeze(1)
    if label_smoothing:
        losses = losses - label_smoothing * z.mean(1)
    losses = losses.masked_fill(is_ignored, 0.0)
    if not gradient:
        return losses, None
    d = torch.exp(z - log_sum)
    d -= label_smoothing / vocabulary
    d.scatter_add_(1, at, torch.full_like(at, label_smoothing - 1, dtype=d.dtype))
    d *= slope
    return losses, d.masked_fill_(is_ignored[:, None], 0.0).to(logits.dtype)


_plans: Plans[Launch] = Plans()


def _cross_entropy_triton(
    logits: Tensor,
    labels: Tensor,
    ignore_index: int,
    label_smoothing: float,
    logit_scale: float,
    softcap: float,
    gradient: bool,
) -> Tensor:
    """Launch the kernel on ``logits``, not empty, whose rows are contiguous, and on contiguous int64 ``labels``."""
    options = (label_smoothing, logit_scale, softcap, gradient)
    device = logits.get_device()
    losses = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    with torch.cuda.device_of(logits):
        key = (
            logits.shape, logits.stride(0), logits.dtype, device, alignment(logits), alignment(labels), ignore_index,
            options,
        )  # fmt: skip
        launch = _plans.get(key, lambda: _make_launch(logits, labels, ignore_index, *options))
        launch(stream_of(device), address(logits), address(labels), address(losses))
    return losses


def _make_launch(
    logits: Tensor,
    labels: Tensor,
    ignore_index: int,
    label_smoothing: float,
    logit_scale: float,
    softcap: float,
    gradient: bool,
) -> Launch:
    rows, vocabulary = logits.shape
    block = min(_MOST_COLUMNS, 1 << (vocabulary - 1).bit_length())
    return Launch(
        cross_entropy_kernel,
        rows,
        (logits, labels, torch.float32),
        (
            logits.stride(0), vocabulary, ignore_index,
            label_smoothing, label_smoothing / vocabulary, logit_scale, softcap, gradient, block,
        ),
        max(1, min(_MOST_WARPS, block // _PER_WARP)),
    )  # fmt: skip


def _cross_entropy(
    logits: Tensor,
    labels: Tensor,
    ignore_index: int,
    label_smoothing: float,
    logit_scale: float,
    softcap: float,
    gradient: bool,
) -> Tensor:
    takes_kernel = _triton.runs_on(logits) and logits.dtype is not torch.float64 and logits.numel() > 0
    if takes_kernel and (logits.stride(1) == 1 or logits.shape[1] == 1):
        options = (ignore_index, label_smoothing, logit_scale, softcap, gradient)
        return _cross_entropy_triton(logits, labels.to(torch.int64).contiguous(), *options)
    losses, found = cross_entropy_ref(
        logits, labels.to(torch.int64), ignore_index=ignore_index, label_smoothing=label_smoothing,
        logit_scale=logit_scale, softcap=softcap, gradient=gradient,
    )  # fmt: skip
    if found is not None:
        logits.copy_(found)
    return losses


def _cross_entropy_fake(
    logits: Tensor,
    labels: Tensor,
    ignore_index: int,
    label_smoothing: float,
    logit_scale: float,
    softcap: float,
    gradient: bool,
) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.promote_types(logits.dtype, torch.float32))


library.define(
    "cross_entropy_(Tensor(a!) logits, Tensor labels, int ignore_index, float label_smoothing, float logit_scale,"
    " float softcap, bool gradient) -> Tensor"
)
library.impl("cross_entropy_", _cross_entropy, "CompositeExplicitAutograd")
torch.library.register_fake("acceler8::cross_entropy_", _cross_entropy_fake, lib=library)


def cross_entropy_(
    logits: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    gradient: bool = True,
) -> Tensor:
    """Losses [M] of the rows of ``logits``, which with ``gradient`` become d loss / d logits.

    Shape: logits [M, V] bf16, fp16, fp32 or fp64, labels [M] of an integer dtype -> [M] FP32 (FP64 for FP64). Strided
        logits are taken; only those whose rows are contiguous run the kernel.
    Numerics: FP32 inside; gradients round to nearest in the dtype of ``logits``. Deterministic. NaN, +inf or nothing
        but -inf in a row makes that row NaN and no other; a single -inf has probability 0. A label outside [0, V) that
        is not ``ignore_index`` makes its row NaN: nobody could raise without waiting for the GPU; ``check_labels``
        does on a CPU.
    Raises: ShapeError, DtypeError.
    """
    if logits.ndim != 2 or labels.shape != logits.shape[:1] or logits.shape[1] == 0:
        raise ShapeError(
            f"cross_entropy_ got logits {tuple(logits.shape)} and labels {tuple(labels.shape)};"
            " allowed: logits [M, V] with V > 0 and labels [M]"
        )
    if logits.dtype not in _DTYPES or labels.dtype.is_floating_point or labels.dtype in (torch.bool, torch.complex64):
        raise DtypeError(
            f"cross_entropy_ got logits {logits.dtype} and labels {labels.dtype};"
            " allowed: logits bf16, fp16, fp32, fp64; labels of an integer dtype"
        )
    options = (ignore_index, float(label_smoothing), float(logit_scale), float(softcap or 0.0), gradient)
    if may_go_direct(logits):
        return _cross_entropy(logits, labels, *options)
    losses: Tensor = torch.ops.acceler8.cross_entropy_.default(logits, labels, *options)
    return losses


def check_labels(labels: Tensor, vocabulary: int, ignore_index: int) -> None:
    """Raise LabelError if ``labels`` on a CPU has one that is neither in [0, vocabulary) nor ``ignore_index``."""
    is_bad = (labels != ignore_index) & ((labels < 0) | (labels >= vocabulary))
    if bool(is_bad.any()):
        raise LabelError(
            f"label {int(labels[is_bad][0])} is outside the vocabulary; allowed: 0 to {vocabulary - 1}, and"
            f" ignore_index={ignore_index} for tokens without a loss"
        )
