"""A weight's FP8 codes across micro-batches: TransformerEngine's cache, which ``is_first_microbatch`` fills.

TransformerEngine believes the caller that the weight did not change. Here the owner of a window says when it may have
(``drop``: at each step boundary, when weights are loaded), and what PyTorch counts is watched besides.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class WeightCache:
    """The window of one layer: ``acceler8.backends.Window``."""

    def __init__(self) -> None:
        self.is_open = False
        self._made: tuple[Any, ...] | None = None
        """Of which weight, in which state, the codes are that the layer keeps; None: it keeps none."""

    def open(self) -> None:
        """Keep codes from now on."""
        self.is_open = True

    def pause(self) -> None:
        """Neither use nor keep codes until ``open``."""
        self.is_open = False

    def close(self) -> None:
        """Drop codes and keep none."""
        self.is_open = False
        self.drop()

    def drop(self) -> None:
        """Make codes anew in the next forward; an open window stays open."""
        self._made = None

    def is_first(self, weight: Tensor, kept: dict[str, Any]) -> bool | None:
        """What to pass as ``is_first_microbatch``: None makes codes for this forward alone, True also keeps them, False
        uses those of before. ``kept`` is where the layer has them; they go when they are made anew, so that an earlier
        forward's backward still has its own.
        """
        if not self.is_open or torch.is_inference_mode_enabled():
            if self._made is None and kept:
                kept.clear()
            return None
        # what a forward without gradients keeps lacks the orientation that backward multiplies
        now = weight, weight.data_ptr(), weight._version, weight.requires_grad, torch.is_grad_enabled()
        if self._made is not None and self._made[0] is weight and self._made[1:] == now[1:]:
            return False
        kept.clear()
        self._made = now
        return True

    def __deepcopy__(self, memo: dict[int, object]) -> WeightCache:
        return WeightCache()

    def __reduce__(self) -> tuple[type[WeightCache], tuple[()]]:
        return WeightCache, ()
