"""What each ``mixed_precision`` word means, and the forward that a prepared model runs in it."""

from __future__ import annotations

import torch

from acceler8.nn.prepared_forward import PreparedForward, unwrap_forward, wrap_forward

__all__ = ["PRECISIONS", "PreparedForward", "unwrap_forward", "wrap_forward"]

# word -> dtype that autocast computes in; None is full precision. FP8 layers sit in a BF16 model.
PRECISIONS: dict[str, torch.dtype | None] = {
    "no": None,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8": torch.bfloat16,
}
