"""Record what every cast of a model did, by layer and operand: amax, saturation, underflow, NaN and inf, SQNR."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from acceler8.errors import NonFiniteError, PlanError
from acceler8.functional.call import Observer
from acceler8.kernels import CastStatistics, read_statistics
from acceler8.nn import fp8_layers, state_of

_OPERAND = {"x": "input", "w": "weight", "dy": "gradient of the output"}


class Statistics:
    """Statistics of the casts inside one ``record_statistics``. Reading them makes one copy from each device."""

    def __init__(self) -> None:
        self._packed: dict[tuple[str, str], tuple[Tensor, int]] = {}

    def add(self, layer: str, role: str, packed: Tensor, elements: int) -> None:
        """Add a cast. Stays on the device; no synchronisation."""
        known = self._packed.get((layer, role))
        if known is None:
            self._packed[layer, role] = packed, elements
            return
        before, count = known
        both = torch.stack([before, packed])
        total = both.sum(0)
        total[0] = both[:, 0].amax()
        self._packed[layer, role] = total, count + elements

    def casts(self) -> dict[tuple[str, str], CastStatistics]:
        """Statistics by ``(layer, role)``, role one of x, w, dy."""
        by_device: dict[torch.device, list[tuple[str, str]]] = {}
        for key, (packed, _) in self._packed.items():
            by_device.setdefault(packed.device, []).append(key)
        on_host: dict[tuple[str, str], Tensor] = {}
        for keys in by_device.values():
            on_host.update(zip(keys, torch.stack([self._packed[key][0] for key in keys]).cpu(), strict=True))
        return {key: read_statistics(on_host[key], elements) for key, (_, elements) in self._packed.items()}

    def rows(self) -> list[dict[str, Any]]:
        """One JSON-able row a layer and operand, in the order of the casts."""
        return [
            {
                "layer": layer,
                "role": role,
                "amax": s.amax,
                "elements": s.elements,
                "saturated": s.saturated,
                "underflowed": s.underflowed,
                "nonfinite": s.nonfinite,
                "squared_error": s.squared_error,
                "squared_sum": s.squared_sum,
                "sqnr_db": s.sqnr_db,
            }
            for (layer, role), s in self.casts().items()
        ]

    def problems(self) -> list[str]:
        """A sentence for each layer and operand with NaN or inf, in the order of their first casts."""
        return [
            f"{layer}: {s.nonfinite} of {s.elements} values of its {_OPERAND[role]} are NaN or inf"
            for (layer, role), s in self.casts().items()
            if s.nonfinite
        ]

    def check(self) -> None:
        """Raise NonFiniteError if any cast met NaN or inf; the message names layers and operands.

        Of one step the first one named is where it began. Of several, record each on its own to know.
        """
        if problems := self.problems():
            more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
            raise NonFiniteError(
                "; ".join(problems[:5])
                + more
                + ". In one step the first one named is where it began: look at what feeds it, or keep it in high"
                " precision with skip=[...]"
            )


@contextmanager
def record_statistics(model: nn.Module) -> Iterator[Statistics]:
    """Inside, every cast of every FP8 layer of ``model`` (forward and backward) reports its statistics.

    Costs a few reductions a cast and no host synchronisation until the result is read. Casts of weights whose
    codes an open window kept do not happen, so they are not recorded. A compiled model runs its FP8 layers
    eagerly inside; one compiled with ``fullgraph=True`` cannot, and PyTorch says so.
    Raises: PlanError if the model is not converted, or by another backend than the native one.
    """
    backend = state_of(model).backend
    if backend != "native":
        raise PlanError(
            f"record_statistics got a model of backend {backend!r}, which casts inside its library; allowed: native;"
            " plan the model with backend='native' to look at its casts"
        )
    statistics = Statistics()
    layers = [(name, layer._acceler8_layer) for name, layer in fp8_layers(model)]
    before = [state.observer for _, state in layers]
    for name, state in layers:
        state.observer = _Observer(statistics, name or "(root)", state.observer)
    try:
        yield statistics
    finally:
        for (_, state), observer in zip(layers, before, strict=True):
            state.observer = observer


class _Observer:
    """Adds a layer's casts to a record, and to the one around it, if there is one."""

    def __init__(self, statistics: Statistics, layer: str, outer: Observer | None) -> None:
        self.statistics, self.layer, self.outer = statistics, layer, outer

    def __call__(self, role: str, packed: Tensor, elements: int) -> None:
        self.statistics.add(self.layer, role, packed, elements)
        if self.outer is not None:
            self.outer(role, packed, elements)
