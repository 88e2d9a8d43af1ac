"""A training step of a small Llama, eagerly and as a CUDA graph: BF16, and recipes of ours with ``GraphedStep``.

    python benchmarks/bench_cuda_graph.py [--size 512 ...] [--recipes rowwise ...] [--rounds 12] [--out result.json]
    python benchmarks/bench_cuda_graph.py --size tiny --device cpu        no graphs there: shows that it works

Layers this small wait for the host, so what a replay saves shows. BF16 is captured by the same ``CudaGraphs``. Before
anything is timed, the eager and the graphed training of a precision start from equal weights and take the same steps on
batches that change; every loss and then every weight must be equal bit for bit, or the precision is not timed and the
exit status is 1. So that two runs can be equal at all, PyTorch's deterministic algorithms are on, for the eager steps
and in the graphs alike, which costs attention's backward some speed in all of them. Then all variants take turns of a
few steps in one process; a sample is the mean step of a turn.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what deterministic algorithms ask of cuBLAS

import torch
from torch import Tensor, nn

import acceler8
from acceler8 import recipes
from acceler8.bench.facts import facts, facts_line, resolve_device
from acceler8.bench.presets import PRESETS, Preset
from acceler8.bench.timing import rounds_ms
from acceler8.bench.work import Work
from acceler8.conversion.graphed_step import CudaGraphs
from acceler8.errors import RunError

BATCHES = 4  # more than one: a graph that reads an old batch has other losses
CHECK_STEPS = 10
TURN = 4


def small(name: str, width: int, ffn: int) -> Preset:
    return Preset(
        name=name, about="eight small layers", loop="plain", layers=8, width=width, ffn=ffn, heads=width // 64,
        kv_heads=width // 128, vocabulary=32000, batch=8, length=512,
    )  # fmt: skip


SIZES = {"tiny": PRESETS["tiny"], "512": small("512", 512, 1408), "1024": small("1024", 1024, 2816)}


class GraphedBf16:
    """What ``GraphedStep`` does, for a model that is not converted: eager steps, one capture, replays."""

    def __init__(self, step: Callable[[Tensor], Tensor], device: torch.device, warmup: int = 3) -> None:
        self._step, self._capture, self._eager = step, CudaGraphs(device), warmup
        self._recorded: tuple[Callable[[], None], Tensor, Tensor] | None = None
        self.replays = 0

    def __call__(self, tokens: Tensor) -> Tensor:
        if self._eager > 0:
            self._eager -= 1
            return self._capture.warm_up(lambda: self._step(tokens)).detach().clone()
        if self._recorded is None:
            static = tokens.clone()
            replay, loss = self._capture.record(lambda: self._step(static))
            self._recorded = replay, static, loss
        replay, static, loss = self._recorded
        static.copy_(tokens)
        replay()
        self.replays += 1
        return loss.detach().clone()


class Variant:
    """One precision, eager or graphed: a model of its own, and what takes a step on the next batch."""

    def __init__(self, work: Work, recipe: str | None, *, graphed: bool) -> None:
        self.recipe, self.is_graphed = recipe, graphed
        self.model = work.make_model()
        device = work.device
        if recipe is not None:
            acceler8.convert(self.model, recipe)
        optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=work.preset.lr, fused=True, capturable=device.type == "cuda"
        )
        if recipe is not None:
            acceler8.attach(self.model, optimizer)

        def step(tokens: Tensor) -> Tensor:
            optimizer.zero_grad()
            logits = self.model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            return loss.detach()

        self.graphed: Any = None
        if graphed:
            new = GraphedBf16(step, device) if recipe is None else acceler8.GraphedStep(step, self.model, optimizer)
            self.graphed = step = new
        generator = torch.Generator(device).manual_seed(1)
        shape = (work.preset.batch, work.preset.length + 1)
        self._batches = [
            torch.randint(0, work.preset.vocabulary, shape, device=device, generator=generator) for _ in range(BATCHES)
        ]
        self._take, self._taken = step, 0

    @property
    def name(self) -> str:
        return f"{self.recipe or 'bf16'}{' graphed' if self.is_graphed else ''}"

    def step(self) -> Tensor:
        """One training step on the next batch; its loss."""
        tokens = self._batches[self._taken % BATCHES]
        self._taken += 1
        return self._take(tokens)


def what_differs(eager: Variant, graphed: Variant) -> str:
    """Train both; empty if every loss and every weight is equal and finite and the graph was replayed."""
    pairs = [(float(eager.step()), float(graphed.step())) for _ in range(CHECK_STEPS)]
    for number, (plain, replayed) in enumerate(pairs):
        if plain != replayed:  # so is NaN
            return f"loss {replayed} of step {number} is not the eager {plain}"
    for (name, p), q in zip(eager.model.named_parameters(), graphed.model.parameters(), strict=True):
        if not torch.equal(p, q):
            return f"{name} differs after {CHECK_STEPS} steps"
    if not graphed.graphed.replays:
        return f"no step of {CHECK_STEPS} was a replay"
    return ""


def measure(preset: Preset, wanted: Sequence[str | None], device: torch.device, rounds: int) -> list[dict[str, Any]]:
    """A row for each precision: what differed, and the times of both kinds of step."""
    work, rows, works = Work(preset, device), [], {}
    for recipe in wanted:
        eager = Variant(work, recipe, graphed=False)
        row: dict[str, Any] = {"size": preset.name, "precision": recipe or "bf16", "differs": None}
        rows.append(row)
        if device.type != "cuda":
            row["loss"] = [float(eager.step()) for _ in range(CHECK_STEPS)][-1]
            works[eager.name] = eager.step
            continue
        graphed = Variant(work, recipe, graphed=True)
        try:
            row["differs"] = what_differs(eager, graphed)
        except RunError as error:
            row["differs"] = str(error)
        if not row["differs"]:
            row["loss"] = float(eager.step())
            graphed.step()
            works[eager.name], works[graphed.name] = eager.step, graphed.step
    times = rounds_ms(works, device, rounds=rounds, calls=TURN) if works else {}
    for row in rows:
        for kind, suffix in (("eager", ""), ("graphed", " graphed")):
            spread = times.get(f"{row['precision']}{suffix}")
            row[f"{kind}_ms"] = None if spread is None else [spread.p20, spread.median, spread.p80]
    return rows


def line_of(row: dict[str, Any], baseline: dict[str, Any]) -> str:
    """A row of the table. Ratios are of medians."""

    def said(times: list[float] | None) -> str:
        return "-" if times is None else " / ".join(f"{t:.2f}" for t in times)

    def over(a: list[float] | None, b: list[float] | None) -> str:
        return "-" if a is None or b is None else f"{a[1] / b[1]:.2f}"

    eager, graphed = row["eager_ms"], row["graphed_ms"]
    loss = f"{row['loss']:.4f}" if "loss" in row else f"not timed: {row['differs']}"
    return (
        f"| {row['size']} | {row['precision']} | {said(eager)} | {said(graphed)} | {over(eager, graphed)} |"
        f" {over(baseline['eager_ms'], eager)} | {over(baseline['graphed_ms'], graphed)} | {loss} |"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--size", nargs="+", default=["512", "1024"], choices=list(SIZES), help="width of the layers")
    parser.add_argument("--recipes", nargs="*", default=["rowwise", "tensorwise", "delayed"], choices=recipes.names())
    parser.add_argument("--device", help="cpu, cuda, cuda:N; default: a GPU where there is one")
    parser.add_argument("--rounds", type=int, default=12, help="turns of each variant that are timed")
    parser.add_argument("--out", type=Path, help="write rows and facts as JSON")
    args = parser.parse_args(arguments)
    device = resolve_device(args.device)
    torch.use_deterministic_algorithms(True)  # attention has such kernels, and takes them unless told to warn only
    torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN's attention is not deterministic unless told so by itself
    torch.utils.deterministic.fill_uninitialized_memory = False  # a launch for every empty tensor
    about = facts(device)
    print(f"{facts_line(about)}; deterministic algorithms")
    if device.type != "cuda":
        print(f"{device} has no CUDA graphs: steps run eagerly, nothing is compared with a replay")
    print(
        "| width | precision | eager, ms (20 / 50 / 80 %) | graphed, ms (20 / 50 / 80 %) | eager / graphed |"
        " against BF16, eager | against BF16, graphed | loss |"
    )
    print("|---|---|---|---|---|---|---|---|")
    rows: list[dict[str, Any]] = []
    for size in args.size:
        made = measure(SIZES[size], [None, *args.recipes], device, args.rounds)
        print("\n".join(line_of(row, made[0]) for row in made), flush=True)
        rows += made
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if args.out is not None:
        settings = {size: SIZES[size].to_dict() for size in args.size}
        result = {"facts": about, "settings": settings, "rounds": args.rounds, "turn": TURN, "rows": rows}
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 1 if any(row["differs"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
