"""Weight codes: how long an FP8 copy of a weight may live.

One forward and its backward (or recompute), no longer. No key makes a longer cache safe: a weight's version
counter stands still under ``AdamW(fused=True)``, ``.data`` edits, adapter merges, EMA swaps and flat buffers,
and a layer that keeps codes then trains on frozen weights while the loss still falls. So forward makes the
codes that fprop contracts, backward makes the ones that dgrad contracts, each from the weight as it then is,
exactly as ``nn.Linear`` reads it.

Only inside a *window*, which an owner opens and closes around micro-batches that see one weight, are codes
reused.
"""

from __future__ import annotations

import torch
from torch import Tensor

from acceler8.kernels import Quantized


class PersistentCodes:
    """Codes of one weight that stay beside it from step to step (level O3), for those who send or read weights in FP8.

    No forward reads them: nothing tells for sure that a weight is still the one they were made of (the module's
    docstring), and whatever would, a checksum of all elements, reads as much memory as casting anew. ``get`` gives them
    unless PyTorch counted a change of the weight, or it is another; ``acceler8.verify`` compares the numbers.
    A copy or pickle has none, and no state_dict does.
    """

    def __init__(self) -> None:
        self._rows: Quantized | None = None
        self._weight: Tensor | None = None
        self._seen: tuple[int, bool] = (0, False)

    def put(self, weight: Tensor, rows: Quantized) -> None:
        """Keep codes that were just made of ``weight``."""
        self._rows, self._weight = rows, weight.detach()
        self._seen = (weight._version, weight.requires_grad)

    def get(self, weight: Tensor) -> Quantized | None:
        """The codes of ``weight``, contracted along its rows; None, and dropped, if it is known to have changed."""
        known = self._weight
        if known is not None and (
            known.data_ptr() != weight.data_ptr()
            or known.dtype is not weight.dtype
            or self._seen != (weight._version, weight.requires_grad)
        ):
            self.drop()
        return self._rows

    def drop(self) -> None:
        """Keep none until the next step."""
        self._rows = self._weight = None

    def __deepcopy__(self, memo: dict[int, object]) -> PersistentCodes:
        return PersistentCodes()

    def __reduce__(self) -> tuple[type[PersistentCodes], tuple[()]]:
        return PersistentCodes, ()


class WeightCodes:
    """Codes of one weight, or of several that are one operand, kept while a window is open."""

    def __init__(self) -> None:
        self.is_open = False
        self._kept: dict[str, Quantized] = {}
        # aliases, so that a weight's memory is not given to another, with their versions
        self._weights: list[tuple[Tensor, int]] = []

    def open(self) -> None:
        """Keep codes from now on."""
        self.is_open = True

    def pause(self) -> None:
        """Neither use nor keep codes until the window is opened again; those that are kept stay for then."""
        self.is_open = False

    def close(self) -> None:
        """Drop codes and keep none."""
        self.is_open = False
        self.drop()

    def drop(self) -> None:
        """Drop codes (the weight changed); an open window stays open."""
        self._kept.clear()
        self._weights.clear()

    def follow(self, *weights: Tensor) -> None:
        """Drop codes that were made of other tensors, or of these before PyTorch counted a change of them.

        Catches assignment, swaps and counted in-place changes inside a window for the price of two comparisons. No
        substitute for closing it: edits through ``.data`` and fused optimizers are not counted.
        """
        if not self.is_open or torch.compiler.is_compiling():
            return
        versions = [0 if weight.is_inference() else weight._version for weight in weights]
        if len(self._weights) == len(weights) and all(
            known.data_ptr() == weight.data_ptr() and then == now
            for (known, then), weight, now in zip(self._weights, weights, versions, strict=True)
        ):
            return
        self._kept.clear()
        self._weights = [(weight.detach(), now) for weight, now in zip(weights, versions, strict=True)]

    def get(self, orientation: str) -> Quantized | None:
        """Kept codes in this orientation (``rows`` or ``cols``), if there are any."""
        return self._kept.get(orientation) if self.is_open else None

    def put(self, orientation: str, codes: Quantized) -> None:
        """Keep codes if a window is open. Never inside a compiled region or inference mode, whose tensors
        must not outlive them.
        """
        if self.is_open and not torch.compiler.is_compiling() and not torch.is_inference_mode_enabled():
            self._kept[orientation] = codes

    def dtype_of(self, weight: Tensor) -> torch.dtype:
        """The high-precision dtype that ``weight`` stands for and its gradient has; here its own.

        A sharding engine may put codes in a weight's place; then this is the dtype of what was cast.
        """
        return weight.dtype

    def in_high_precision(self, weight: Tensor) -> Tensor:
        """What a layer reads that computes in high precision; here the weight itself."""
        return weight

    def source(self, weight: Tensor) -> Tensor:
        """The whole weight that codes are cast from; here itself. Of a sharding engine, every process calls this."""
        return weight.detach()

    def live(self) -> dict[str, Quantized]:
        """Codes that the next forward would reuse, by orientation."""
        return dict(self._kept) if self.is_open else {}

    def __deepcopy__(self, memo: dict[int, object]) -> WeightCodes:
        """A copied layer starts without codes, its window closed."""
        return WeightCodes()

    def __reduce__(self) -> tuple[type[WeightCodes], tuple[()]]:
        return WeightCodes, ()
