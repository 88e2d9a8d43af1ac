"""Weight codes: how long an FP8 copy of a weight may live.

One forward and its backward (or recompute), no longer. No key makes a longer cache safe: a weight's version counter
stands still under ``AdamW(fused=True)``, ``.data`` edits, adapter merges, EMA swaps and flat buffers, and a layer that
keeps codes then trains on frozen weights while the loss still falls. So forward makes the codes that fprop contracts,
backward makes the ones that dgrad contracts, each from the weight as it then is, exactly as ``nn.Linear`` reads it.

Only inside a *window*, which an owner opens and closes around micro-batches that see one weight, are codes reused.
"""

from __future__ import annotations

import torch
from torch import Tensor

from acceler8.kernels import Quantized


class WeightCodes:
    """Codes of one weight, kept while a window is open."""

    def __init__(self) -> None:
        self.is_open = False
        self._kept: dict[str, Quantized] = {}

    def open(self) -> None:
        """Keep codes from now on."""
        self.is_open = True

    def close(self) -> None:
        """Drop codes and keep none."""
        self.is_open = False
        self._kept.clear()

    def drop(self) -> None:
        """Drop codes (the weight changed); an open window stays open."""
        self._kept.clear()

    def get(self, orientation: str) -> Quantized | None:
        """Kept codes in this orientation (``rows`` or ``cols``), if there are any."""
        return self._kept.get(orientation) if self.is_open else None

    def put(self, orientation: str, codes: Quantized) -> None:
        """Keep codes if a window is open. Never inside a compiled region or inference mode, whose tensors must not
        outlive them."""
        if self.is_open and not torch.compiler.is_compiling() and not torch.is_inference_mode_enabled():
            self._kept[orientation] = codes

    def live(self) -> dict[str, Quantized]:
        """Codes that the next forward would reuse, by orientation."""
        return dict(self._kept) if self.is_open else {}

    def __deepcopy__(self, memo: dict[int, object]) -> WeightCodes:
        """A copied layer starts without codes, its window closed."""
        return WeightCodes()

    def __reduce__(self) -> tuple[type[WeightCodes], tuple[()]]:
        return WeightCodes, ()


def weight_operand(kept: Quantized | None, fresh: Tensor) -> Quantized | Tensor:
    """What a GEMM reads of a weight: its codes, or the weight itself."""
    return fresh if kept is None else kept
