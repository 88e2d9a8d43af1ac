"""The Triton kernel of ``cross_entropy.py`` (formula, reference, launch, dispatch)."""

from __future__ import annotations

from acceler8.kernels._triton import as_fp32, hidden, jit, rounded_to, tl


@jit
def _tanh(x):  # type: ignore[no-untyped-def]
    """To a few units of FP32's last place: a series near 0, where the quotient would cancel."""
    size = tl.abs(x)
    shrunk = tl.exp(-2.0 * size)
    far = (1.0 - shrunk) / (1.0 + shrunk)
    square = x * x
    near = x * (1.0 + square * (-0.3333333333333333 + square * (0.13333333333333333 - square * 0.05396825396825397)))
    return tl.where(size < 0.1, near, tl.where(x < 0.0, -far, far))


@jit
def _block(  # type: ignore[no-untyped-def]
    row_ptr, cols, vocabulary, SCALE: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """``(z, slope)`` of columns ``cols`` of a row: z = CAP * tanh(SCALE / CAP * logit), or SCALE * logit where CAP is
    0, and dz/dlogit. z is -inf beyond the vocabulary.
    """
    inside = cols < vocabulary
    z = as_fp32(tl.load(row_ptr + cols, mask=inside, other=0.0))
    slope = tl.zeros_like(z) + SCALE
    if CAP != 0.0:
        t = _tanh(z * (SCALE / CAP))
        z = t * CAP
        slope = slope * (1.0 - t * t)
    elif SCALE != 1.0:
        z = z * SCALE
    return tl.where(inside, z, float("-inf")), slope


@jit
def cross_entropy_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, labels_ptr, loss_ptr,
    row_stride, vocabulary, ignored,
    SMOOTHING: tl.constexpr, EVEN: tl.constexpr, SCALE: tl.constexpr, CAP: tl.constexpr, GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One row a program: its loss, and with GRADIENT the gradient in place of its logits.

    EVEN is SMOOTHING over the vocabulary. The row is read twice; nothing of it is written before all of it was read,
    for the sums that every thread waits for need all of it.
    """
    row = tl.program_id(0).to(tl.int64)  # offsets may pass 2**31
    row_ptr = logits_ptr + row * row_stride
    label = tl.load(labels_ptr + row)
    vocabulary = hidden(vocabulary, BLOCK)
    if label == ignored:
        tl.store(loss_ptr + row, 0.0)
        if GRADIENT:
            for start in range(0, vocabulary, BLOCK):
                cols = start + tl.arange(0, BLOCK)
                nothing = rounded_to(tl.zeros([BLOCK], tl.float32), row_ptr.dtype.element_ty)
                tl.store(row_ptr + cols, nothing, mask=cols < vocabulary)
    else:
        is_label = (label >= 0) & (label < vocabulary)
        at = tl.where(is_label, label, 0).to(tl.int32)
        target = _block(row_ptr, at + tl.arange(0, 1), vocabulary, SCALE, CAP)[0]
        largest, total, plain = float("-inf"), 0.0, 0.0
        for start in range(0, vocabulary, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            z = _block(row_ptr, cols, vocabulary, SCALE, CAP)[0]
            above = tl.maximum(largest, tl.max(z, 0))
            zero = tl.where(above == float("-inf"), 0.0, above)  # so far all are -inf, whose difference is NaN
            total = total * tl.exp(largest - zero) + tl.sum(tl.exp(z - zero), 0)
            largest = above
            if SMOOTHING != 0.0:
                plain += tl.sum(tl.where(cols < vocabulary, z, 0.0), 0)
        log_sum = tl.where(is_label, largest + tl.log(total), float("nan"))
        loss = log_sum - (1.0 - SMOOTHING) * tl.sum(target, 0)
        if SMOOTHING != 0.0:
            loss -= EVEN * plain
        tl.store(loss_ptr + row, loss)
        if GRADIENT:
            for start in range(0, vocabulary, BLOCK):
                cols = start + tl.arange(0, BLOCK)
                z, slope = _block(row_ptr, cols, vocabulary, SCALE, CAP)
                gradient = tl.exp(z - log_sum) - EVEN
                gradient = tl.where(cols == at, gradient - (1.0 - SMOOTHING), gradient) * slope
                stored = rounded_to(gradient, row_ptr.dtype.element_ty)
                tl.store(row_ptr + cols, stored, mask=cols < vocabulary)
