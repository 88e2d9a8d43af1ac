"""What several processes must agree on while layers change: recipes by pattern, a window of steps, FP8 by depth.

Each process trains on data of its own, and looks at every layer in every step: its output is compared, bit for bit,
with what its recipe gives and with high precision, and so is told which it was.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from acceler8 import Accelerator
from acceler8.functional import linear
from acceler8.nn import fp8_layers, state_of
from acceler8.utils import NativeRecipeKwargs
from tests.accelerator.ddp_training import flat

STEPS, BLOCKS, WIDTH = 5, 3, 32
SETTINGS: dict[str, dict[str, Any]] = {
    "layer_recipes": {"layer_recipes": {"blocks.0": "delayed", "blocks.1": None, "*": "rowwise"}},
    "fp8_steps": {"recipe": "delayed", "fp8_steps": "1:3"},
    "fp8_last_layers": {"recipe": "delayed", "fp8_last_layers": {0: 1, 2: 2, 3: "all"}},
    "all of them": {
        "layer_recipes": {"blocks.0": "delayed", "blocks.2": "tensorwise", "*": "delayed"},
        "fp8_steps": "1:4",
        "fp8_last_layers": "0:1,2:2,3:all",
    },
}


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))
        generator = torch.Generator().manual_seed(1)
        for p in self.parameters():
            nn.init.normal_(p, std=WIDTH**-0.5, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + F.gelu(block(x))
        return x


class Told:
    """Forward hook: the name of the recipe by which the layer computed, or ``high``."""

    def __init__(self, name: str, seen: dict[str, str]) -> None:
        self.name, self.seen = name, seen

    def __call__(self, layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        state = layer._acceler8_layer
        slots = state.slots
        with torch.no_grad():
            high = F.linear(args[0], layer.weight, layer.bias)
            by_recipe = linear(
                args[0],
                layer.weight,
                layer.bias,
                recipe=state.recipe,
                slots=slots if slots is None else slots._replace(records=False),
            )
        assert not torch.equal(high, by_recipe)
        if torch.equal(output, by_recipe):
            self.seen[self.name] = state.recipe.name
        else:
            assert torch.equal(output, high), f"{self.name} computed as neither"
            self.seen[self.name] = "high"


def train(settings: dict[str, Any]) -> dict[str, Any]:
    """``STEPS`` steps on each process's own data."""
    accelerator = Accelerator("fp8", cpu=True, kwargs_handlers=[NativeRecipeKwargs(**settings)])
    model = Blocks()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    generator = torch.Generator().manual_seed(10 + accelerator.process_index)
    seen: list[dict[str, str]] = []
    for name, layer in fp8_layers(accelerator.unwrap_model(model)):
        layer.register_forward_hook(lambda *call, name=name: Told(name, seen[-1])(*call))
    ends, amaxes, filled = [], [], []
    amax = state_of(model).amax
    for _ in range(STEPS):
        seen.append({})
        x = torch.randn(24, WIDTH, generator=generator) * (1 + accelerator.process_index)
        accelerator.backward((model(x) - x.flip(-1)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        ends.append(flat(model))
        amaxes.append(amax.data.clone())
        filled.append(
            [name.rpartition(".")[0] for name, used in zip(amax.names, amax.data[1], strict=True) if used > 0]
        )
    return {
        "seen": seen,
        "ends": torch.stack(ends),
        "amaxes": torch.stack(amaxes),
        "filled": [sorted(set(names)) for names in filled],
    }


SCENARIOS = {f"schedule-{name}": partial(train, settings) for name, settings in SETTINGS.items()}
