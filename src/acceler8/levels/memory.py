"""What a level's weights take, counted in the storages of the tensors that are there."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import Optimizer

from acceler8.levels.model import level_weights
from acceler8.nn import fp8_layers
from acceler8.nn.gradients import stored_gradient


@dataclass(frozen=True)
class StoredBytes:
    """Bytes of the weights that a level stores in few bits, by what holds them."""

    elements: int
    weight: int
    weight_codes: int
    gradient: int
    states: int
    """Moments, masters and their scales; not the step counters."""

    @property
    def per_element(self) -> float:
        """All of it over the elements."""
        return (self.weight + self.weight_codes + self.gradient + self.states) / max(self.elements, 1)


def stored_bytes(model: nn.Module, optimizer: Optimizer) -> StoredBytes:
    """Count: right behind a backward it is the most that is stored between two steps. Reads nothing from the device."""
    inner = optimizer.__dict__.get("optimizer", optimizer)
    weights = level_weights(model).values()
    gradients: list[Tensor | None] = []
    states: list[Tensor | None] = []
    for p in weights:
        store = stored_gradient(p)
        assert store is not None
        gradients += [p.grad, store.codes, store.scale_inv]
        states += [value for key, value in inner.state.get(p, {}).items() if key != "step"]
    ours = {id(p) for p in weights}
    codes: list[Tensor | None] = []
    for _, layer in fp8_layers(model):
        kept = layer._acceler8_layer.kept
        if id(layer.weight) in ours and kept is not None and (rows := kept.get(layer.weight)) is not None:
            codes += [rows.codes, rows.scale_inv]
    return StoredBytes(
        sum(p.numel() for p in weights), _bytes(list(weights)), _bytes(codes), _bytes(gradients), _bytes(states)
    )


def _bytes(tensors: list[Tensor | None] | list[nn.Parameter]) -> int:
    """Sizes of storages, each once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}
    return sum(storages.values())
