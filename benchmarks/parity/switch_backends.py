"""One training that goes from backend to backend through checkpoints: is the loss continuous?

    python benchmarks/parity/switch_backends.py --backends transformer_engine,torchao,native --steps 100

Each backend trains ``--steps`` steps and saves. The next one loads that into a new model and a new optimizer. Where two
meet, both make the same ``--ahead`` steps from the checkpoint, the first as it is, the second as it loaded it:

- the loss of held-out tokens in high precision must be equal bit for bit, so weights are;
- losses of the steps may differ by ``--within``, which is what two backends' roundings do; moments that were lost or
  scaled wrongly move the first steps by far more, and ``--plant`` shows that: it drops them, and this must then fail.

Exit status 1 if a switch is not continuous.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import acceler8
from acceler8 import Accelerator
from acceler8.bench.llama import Llama
from acceler8.bench.presets import preset_named

NOISE = 0.1  # share of tokens that follow no rule


def tokens_of(step: int, batch: int, length: int, vocabulary: int) -> torch.Tensor:
    """[batch, length + 1]: each token is an affine function of the one before, but for some noise."""
    generator = torch.Generator().manual_seed(1000 + step)
    rows = [torch.randint(0, vocabulary, (batch,), generator=generator)]
    for _ in range(length):
        noise = torch.randint(0, vocabulary, (batch,), generator=generator)
        is_noise = torch.rand(batch, generator=generator) < NOISE
        rows.append(torch.where(is_noise, noise, (5 * rows[-1] + 3) % vocabulary))
    return torch.stack(rows, 1)


class Run:
    """A model under one backend."""

    def __init__(self, backend: str, asked: argparse.Namespace) -> None:
        self.preset, self.backend = preset_named(asked.preset), backend
        torch.manual_seed(0)
        model = Llama(self.preset)
        self.accelerator = Accelerator("fp8", backend=backend, recipe=asked.recipe, cpu=asked.device == "cpu")
        optimizer = torch.optim.AdamW(model.parameters(), lr=asked.lr)
        with warnings.catch_warnings():  # torchao's about speed without a compiler
            warnings.simplefilter("ignore", UserWarning)
            self.model, self.optimizer = self.accelerator.prepare(model, optimizer)

    def loss(self, step: int) -> torch.Tensor:
        """Of the batch of this step."""
        p = self.preset
        tokens = tokens_of(step, p.batch, p.length, p.vocabulary).to(self.accelerator.device)
        return F.cross_entropy(self.model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())

    def train(self, first: int, count: int) -> list[float]:
        """Steps ``first`` to ``first + count``; their losses."""
        losses = []
        for step in range(first, first + count):
            self.optimizer.zero_grad()
            loss = self.loss(step)
            self.accelerator.backward(loss)
            self.optimizer.step()
            losses.append(loss.detach())
        return [float(loss) for loss in losses]

    def held_out(self) -> float:
        """Loss in high precision of tokens that no step sees."""
        self.model.eval()
        with torch.no_grad():
            loss = float(self.loss(-1))
        self.model.train()
        return loss


def switch(before: Run, after: Run, folder: Path, step: int, asked: argparse.Namespace) -> dict[str, Any]:
    """What both make of one checkpoint. ``after`` ends where the checkpoint is, and has loaded it."""
    report = after.accelerator.load_state(folder)
    held_out = before.held_out(), after.held_out()
    if asked.plant:
        after.optimizer.optimizer.state.clear()
    losses = before.train(step, asked.ahead), after.train(step, asked.ahead)
    after.accelerator.load_state(folder)
    apart = max(abs(a - b) / abs(a) for a, b in zip(*losses, strict=True))
    return {
        "step": step,
        "from": before.backend,
        "to": after.backend,
        "said": list(report.reset),
        "held_out": held_out,
        "losses": losses,
        "apart": apart,
        "is_continuous": held_out[0] == held_out[1] and apart <= asked.within,
    }


def main(arguments: list[str] | None = None) -> int:
    """Train, switch, print; 1 if a switch is not continuous."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", default="transformer_engine,torchao,native", help="in this order")
    parser.add_argument("--recipe", default="tensorwise", help="one that all of them have")
    parser.add_argument("--steps", type=int, default=100, help="of each backend")
    parser.add_argument("--ahead", type=int, default=10, help="steps that both make where two meet")
    parser.add_argument("--within", type=float, default=0.01, help="greatest relative difference of their losses")
    parser.add_argument("--preset", default="tiny", help="shape, as of acceler8 bench step")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto")
    parser.add_argument("--plant", action="store_true", help="drop the optimizer's state: this must fail")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(arguments)
    names, switches, losses = asked.backends.split(","), [], []
    with tempfile.TemporaryDirectory() as folder:
        run = Run(names[0], asked)
        for place, name in enumerate(names):
            if place:
                before, run = run, Run(name, asked)
                at = place * asked.steps
                switches.append(switch(before, run, Path(folder) / str(place - 1), at, asked))
                found = switches[-1]
                said = "continuous" if found["is_continuous"] else "NOT CONTINUOUS"
                print(
                    f"step {at}, {before.backend} -> {name}: {said}; held-out {found['held_out'][0]:.6f} and"
                    f" {found['held_out'][1]:.6f}, {asked.ahead} steps apart by at most {found['apart']:.2%}"
                )
            losses += run.train(place * asked.steps, asked.steps)
            acceler8.verify(run.model, run.optimizer)
            run.accelerator.save_state(Path(folder) / str(place))
            print(f"{name}: loss {losses[-asked.steps]:.4f} -> {losses[-1]:.4f}")
    if asked.json:
        asked.json.write_text(json.dumps({"backends": names, "losses": losses, "switches": switches}, indent=2) + "\n")
    return int(not all(found["is_continuous"] for found in switches))


if __name__ == "__main__":
    sys.exit(main())
