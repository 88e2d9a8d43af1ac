"""Training that two processes and one must agree on: each rank's half of a batch, or the whole batch at once."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from acceler8 import Accelerator, verify
from acceler8.nn import find_states, fp8_layers
from tests.models import operands

STEPS, MICRO, ROWS, WIDTH = 10, 2, 16, 64
RECIPES = ("tensorwise", "rowwise", "blockwise", "mxfp8", "delayed", "activations_only")
PRECISIONS = ("no", "bf16", *RECIPES)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.norm = nn.LayerNorm(2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 8)
        generator = torch.Generator().manual_seed(1)
        for p in self.parameters():
            nn.init.normal_(p, std=WIDTH**-0.5, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.down(F.gelu(self.norm(self.up(x)))))


def make_data() -> tuple[Tensor, Tensor]:
    """Rows of all processes; the second process's are larger, so that amaxes differ."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(STEPS, MICRO, 2, ROWS, WIDTH, generator=generator)
    x[:, :, 1] *= 3
    return x, torch.randint(0, 8, (STEPS, MICRO, 2, ROWS), generator=generator)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def train(precision: str) -> dict[str, Any]:
    """A step of learning rate 0, which fills amax histories, and ``STEPS`` of SGD with two micro-batches each."""
    is_fp8 = precision in RECIPES
    accelerator = Accelerator(
        "fp8" if is_fp8 else precision,
        recipe=precision if is_fp8 else None,
        cpu=True,
        gradient_accumulation_steps=MICRO,
    )
    model = Model()
    if accelerator.process_index:  # the strategy makes replicas of rank 0's
        with torch.no_grad():
            model.up.weight.add_(1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    start = flat(model).clone()
    x, y = make_data()
    mine = (
        slice(accelerator.process_index, accelerator.process_index + 1) if accelerator.num_processes > 1 else slice(2)
    )
    losses, norms, gradient, kept = [], [], None, set()
    for step in range(-1, STEPS):
        for micro in range(MICRO):
            with accelerator.accumulate(model):
                inputs, targets = x[max(step, 0), micro, mine].flatten(0, 1), y[max(step, 0), micro, mine].flatten()
                loss = F.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                kept |= {len(layer._acceler8_layer.codes.live()) for _, layer in fp8_layers(model)}
                if accelerator.sync_gradients:
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), 100.0))
                    if step == 0:
                        inner = accelerator.unwrap_model(model)
                        gradient = torch.cat([w.grad.flatten() for w in (inner.up.weight, inner.down.weight)])
                optimizer.step()
                optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean"))
        optimizer.param_groups[0]["lr"] = 0.1
    if is_fp8:
        verify(model, optimizer)
    states = find_states(model)
    return {
        "losses": torch.stack(losses),
        "norms": torch.stack(norms),
        "gradient": gradient,
        "start": start,
        "end": flat(model),
        "amax": [operands(state.amax) for state in states if state.amax is not None],
        "steps": [state.amax.steps for state in states if state.amax is not None],
        "kept": sorted(kept),
    }


SCENARIOS = {f"train-{precision}": partial(train, precision) for precision in PRECISIONS}
