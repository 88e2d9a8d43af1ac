"""Output head and cross-entropy in one operation, without ever holding the logits of all tokens.

    logits = hidden @ weight.T (+ bias)             for a chunk of tokens
    losses, d = cross_entropy(logits, labels)       d in the place of logits
    dhidden = d @ weight        dweight += d.T @ hidden        dbias += sum over tokens of d

At width 4096, 32000 words and 16384 tokens the usual head and ``cross_entropy(logits.float())`` hold 1 GiB of BF16
logits, 2 GiB of them in FP32 and as much again of log-softmax and of gradients; here it is a chunk's logits, dhidden,
and dweight in FP32. The GEMMs do the same work (a chunk still fills a GPU), the loss costs two reads and a write.

Gradients are made in forward, while a chunk's logits are there; backward multiplies them by the upstream gradient and
by one over the number of tokens. d itself is divided by nothing: in FP16 a probability over thousands of tokens would
be zero, whatever a GradScaler multiplies it by later. dweight stays FP32 until then and is rounded once.

Source: Hsu et al. 2024, arXiv:2410.10989 (Liger Kernel's fused linear cross-entropy: chunks, gradients in forward);
Wijmans et al. 2024, arXiv:2411.09009 (Cut Cross-Entropy: logits that never are in memory). Rejected: recomputing the
logits in backward, a GEMM more a step for one dweight less between forward and backward, where little else is alive.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from acceler8.errors import ConfigError, DtypeError, ShapeError
from acceler8.functional.call import once_only
from acceler8.kernels import check_labels, cross_entropy_

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_CHUNK_BYTES = 2**28
_LEAST_TOKENS, _TOKENS = 1024, 128  # fewer rows no longer fill a GPU; a multiple of its tiles


class _Call(NamedTuple):
    """What one call carries beside its tensors."""

    dtype: torch.dtype
    ignore_index: int
    label_smoothing: float
    logit_scale: float
    softcap: float | None
    is_mean: bool
    chunk_tokens: int
    needs: tuple[bool, bool, bool]


def chunk_size(tokens: int, vocabulary: int, element_size: int) -> int:
    """Tokens a chunk: as even as multiples of 128 allow, logits of some 256 MiB, but no fewer than 1024 tokens."""
    most = max(_LEAST_TOKENS, _CHUNK_BYTES // (vocabulary * element_size) // _TOKENS * _TOKENS)
    chunks = max(1, -(-tokens // most))
    return -(-tokens // chunks // _TOKENS) * _TOKENS or _TOKENS


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        num_items: Tensor | None,
        call: _Call,
    ) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            total, dx, dw, db = _run_chunks(hidden, weight, bias, labels, call)
        divisor = num_items
        if divisor is None and call.is_mean:
            divisor = (labels != call.ignore_index).sum().to(total.dtype)
        ctx.save_for_backward(dx, dw, db, divisor)
        ctx.w_dtype, ctx.b_dtype = weight.dtype, None if bias is None else bias.dtype
        return total if divisor is None else total / divisor

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dloss,) = grads
        dx, dw, db, divisor = ctx.saved_tensors
        with torch.no_grad():
            # what a second backward over this graph would read must stay; else the memory is the gradient's
            stays = torch.compiler.is_compiling() or torch._C._autograd._get_current_graph_task_keep_graph()
            by = dloss.reshape(1)  # with a dimension, so that it is not rounded to 16 bit to multiply 16 bit
            if divisor is not None:  # no token had a label: a mean of nothing, whose gradient is 0 as in PyTorch
                by = torch.where(divisor == 0, 0.0, by / divisor)
            dx = None if dx is None else _multiplied(dx, by, dx.dtype, stays)
            dw = None if dw is None else _multiplied(dw, by, ctx.w_dtype, stays)
            db = None if db is None else _multiplied(db, by, ctx.b_dtype, stays)
        return *once_only(dx, dw, db), None, None, None


def _multiplied(t: Tensor, by: Tensor, dtype: torch.dtype, stays: bool) -> Tensor:
    if t.dtype is dtype and not stays:
        return t.mul_(by)
    if torch.compiler.is_compiling():
        return (t * by).to(dtype)
    return torch.mul(t, by, out=torch.empty_like(t, dtype=dtype))  # one kernel, and nothing in FP32 between


def _run_chunks(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, call: _Call
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """``(sum of losses, dx, dw, db)``: gradients of that sum, None where they are not needed."""
    needs_dx, needs_dw, needs_db = call.needs
    flat, labels = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    w = weight.to(call.dtype)
    b = None if bias is None else bias.to(call.dtype)
    dx = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device) if needs_dx else None
    dx_rows = None if dx is None else dx.view(flat.shape)
    dw = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if needs_dw else None
    db = torch.zeros(weight.shape[0], dtype=torch.float32, device=weight.device) if needs_db else None
    losses = []
    for start in range(0, len(flat), call.chunk_tokens):
        stop = min(start + call.chunk_tokens, len(flat))
        x = flat[start:stop].to(call.dtype)
        logits = torch.mm(x, w.t()) if b is None else torch.addmm(b, x, w.t())
        losses.append(
            cross_entropy_(
                logits, labels[start:stop], ignore_index=call.ignore_index, label_smoothing=call.label_smoothing,
                logit_scale=call.logit_scale, softcap=call.softcap, gradient=any(call.needs),
            )
        )  # fmt: skip
        if dx_rows is not None:
            dx_rows[start:stop] = torch.mm(logits, w)
        if dw is not None:
            _add_product(dw, logits.t(), x)
        if db is not None:
            db += logits.sum(0, dtype=torch.float32)
        del logits  # before the next chunk's
    total = torch.cat(losses).sum() if losses else torch.zeros((), device=hidden.device)
    return total, dx, dw, db


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """``total += a @ b`` in FP32, whatever the dtype of ``a`` and ``b``."""
    if a.dtype is torch.float32 or not a.is_cuda:
        total.addmm_(a.float(), b.float())
    elif torch.compiler.is_compiling() or not _adds_in_fp32(a.device, a.dtype):
        total.add_(torch.mm(a, b))  # rounded to 16 bit once a chunk
    else:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)


@functools.cache
def _adds_in_fp32(device: torch.device, dtype: torch.dtype) -> bool:
    """True if cuBLAS adds products of 16-bit matrices to an FP32 one (PyTorch 2.8 on)."""
    total, a = torch.zeros(16, 16, device=device), torch.zeros(16, 16, device=device, dtype=dtype)
    try:
        torch.addmm(total, a, a, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):
        return False
    return True


def head_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum"] = "mean",
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    num_items: int | Tensor | None = None,
    chunk_tokens: int | None = None,
) -> Tensor:
    """``cross_entropy(hidden @ weight.T + bias, labels)`` that never holds the logits of all tokens.

    Shape: hidden [..., D], weight [V, D], bias [V] or None, labels [...] of an integer dtype -> [] FP32. hidden and
        weight bf16, fp16 or fp32, the same unless autocast is on, which then says the dtype of the GEMMs. Any strides.
        Labels are not shifted.
    ``logit_scale`` multiplies the logits; ``softcap`` c then makes them ``c * tanh(logits / c)``. ``ignore_index``,
        ``label_smoothing`` as in ``torch.nn.functional.cross_entropy``.
    ``reduction`` "mean": over the tokens whose label is not ``ignore_index``, or, with ``num_items`` (a number or a
        tensor [], as Hugging Face's ``num_items_in_batch``), the sum over that.
    ``chunk_tokens`` whose logits are held at a time; None: as many as make 256 MiB, at least 1024.
    Numerics: logits and their gradient in the GEMMs' dtype, softmax and sums in FP32. Before PyTorch 2.8, and in
        ``torch.compile``, a chunk's share of a 16-bit weight's gradient is rounded to 16 bit on a GPU before it is
        added.
    Memory: a chunk's logits; from forward to backward the gradient of hidden in its dtype and that of weight in FP32,
        in backward for a moment also in its own; none for what is frozen or under ``torch.no_grad()``.
    If every label is ignored the mean is NaN and gradients are 0; the same for no tokens. A label outside the
        vocabulary raises on a CPU; on a GPU its row is NaN, and with it the loss.
    Raises: ShapeError, DtypeError, ConfigError; LabelError; DoubleBackwardError for a second derivative.
    """
    _check(hidden, weight, bias, labels)
    if reduction not in ("mean", "sum") or (reduction == "sum" and num_items is not None):
        raise ConfigError(
            f"head_loss got reduction={reduction!r}, num_items={num_items!r}; allowed: reduction 'mean' or 'sum', and"
            " num_items, which divides the sum, with 'mean' only"
        )
    if not 0.0 <= label_smoothing <= 1.0 or (chunk_tokens is not None and chunk_tokens < 1) or softcap == 0:
        raise ConfigError(
            f"head_loss got label_smoothing={label_smoothing}, chunk_tokens={chunk_tokens}, softcap={softcap};"
            " allowed: a label_smoothing from 0 to 1; None or at least 1 token; None or a softcap other than 0"
        )
    device = hidden.device.type
    autocast = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if autocast else hidden.dtype
    if not autocast and weight.dtype is not dtype:
        raise DtypeError(
            f"head_loss got hidden {hidden.dtype} and weight {weight.dtype}; allowed: the same, or autocast"
        )
    labels = labels.to(hidden.device)
    if device == "cpu" and not torch.compiler.is_compiling():
        check_labels(labels, weight.shape[0], ignore_index)
    divisor = None
    if isinstance(num_items, Tensor):
        divisor = num_items.to(hidden.device, torch.float32, non_blocking=True).reshape(())
    elif num_items is not None:
        divisor = torch.full((), num_items, dtype=torch.float32, device=hidden.device)
    tokens = labels.numel()
    grad = torch.is_grad_enabled()
    call = _Call(
        dtype, ignore_index, label_smoothing, logit_scale, softcap, reduction == "mean",
        chunk_tokens or chunk_size(tokens, weight.shape[0], dtype.itemsize),
        (grad and hidden.requires_grad, grad and weight.requires_grad,
         grad and bias is not None and bias.requires_grad),
    )  # fmt: skip
    loss: Tensor = _HeadLoss.apply(hidden, weight, bias, labels, divisor, call)  # type: ignore[no-untyped-call]
    return loss


def _check(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> None:
    fits = (
        hidden.ndim > 0
        and weight.ndim == 2
        and weight.shape[0] > 0
        and hidden.shape[-1] == weight.shape[1]
        and labels.shape == hidden.shape[:-1]
        and (bias is None or bias.shape == weight.shape[:1])
    )
    if not fits:
        of_bias = "" if bias is None else f", bias {tuple(bias.shape)}"
        raise ShapeError(
            f"head_loss got hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, labels {tuple(labels.shape)}"
            f"{of_bias}; allowed: hidden [..., D], weight [V, D], labels [...], bias [V]"
        )
    named = {"hidden": hidden, "weight": weight} | ({} if bias is None else {"bias": bias})
    for name, t in named.items():
        if t.dtype not in _DTYPES:
            raise DtypeError(f"head_loss got {name} {t.dtype}; allowed: bf16, fp16, fp32")
    if labels.dtype.is_floating_point or labels.dtype.is_complex or labels.dtype is torch.bool:
        raise DtypeError(f"head_loss got labels {labels.dtype}; allowed: an integer dtype, one index a token")
