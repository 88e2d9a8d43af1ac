"""Loss of FP8 against BF16: a Llama of 135 M parameters trained on real text, paired by seed.

    python benchmarks/bench_loss_parity.py --out parity.json [--jobs 6] [--steps 2000] [--seeds 3] [VARIANT ...]
    python benchmarks/bench_loss_parity.py --tables parity.json [--png curves.png]

Every training of a seed starts from the same weights and sees the same windows of a text (``--text``, as the demo's; by
default the source of Python's standard library), so that all that differs is the precision; the loss is that of a
million bytes of files that no training saw, in high precision, as ``eval()`` gives it. What two trainings differ by
anyway is measured too: ``bf16-moved`` is BF16 with one weight moved by 1e-6. A variant passes if the 95 % interval of
its mean difference from BF16 (Student's t over the seeds) lies within 0.25 % of BF16's loss plus the half-width of
``bf16-moved``'s interval.

Trainings are processes of their own, ``--jobs`` at a time on each GPU. What is done is written as it ends; a run that
was cut short continues with the same ``--out``.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import math
import os
import queue
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from acceler8 import Accelerator, NativeRecipeKwargs
from acceler8.demo.model import build_model, next_byte_loss
from acceler8.demo.settings import STANDARD_LIBRARY, ModelSize
from acceler8.demo.text import held_out_windows, load_corpus, training_windows

SIZES = {
    "135m": ModelSize(dim=1024, layers=12, heads=16, kv_heads=4, ffn=2816, steps=2000, batch=8, seq=512, lr=6e-4),
    "tiny": ModelSize(dim=64, layers=2, heads=4, kv_heads=2, ffn=176, steps=60, batch=4, seq=64, lr=3e-3),
}
BASELINE, MOVED = "bf16", "bf16-moved"
VARIANTS = (BASELINE, MOVED, "tensorwise", "delayed", "rowwise", "blockwise")
COMPRESSED = "-compressed"
HELD_OUT_BYTES = {"135m": 2**20, "tiny": 2**15}
CURVE_EVERY = 20
ALLOWED = 0.0025
# quantiles 0.975 of Student's t by degrees of freedom
T = (math.inf, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)

Run = dict[str, Any]


# ------------------------------------------------------------------------------------------------ one training


def train(size_name: str, variant: str, seed: int, steps: int, text: str, lr: float) -> Run:
    """Train once; losses every ``CURVE_EVERY`` steps, held-out loss at quarters of the way."""
    size = SIZES[size_name]
    corpus = load_corpus(text, size.seq)
    held_out = held_out_windows(corpus.held_out, batch=64, seq=size.seq, tokens=HELD_OUT_BYTES[size_name])
    is_fp8 = not variant.startswith(BASELINE)
    handlers = []
    if is_fp8:
        kept = "fp8_compressed" if variant.endswith(COMPRESSED) else None
        handlers = [NativeRecipeKwargs(recipe=variant.removesuffix(COMPRESSED), save_for_backward=kept)]
    accelerator = Accelerator(mixed_precision="fp8" if is_fp8 else "bf16", kwargs_handlers=handlers)
    plain = build_model(size, seed)
    if variant == MOVED:
        with torch.no_grad():
            plain.get_submodule("layers.0.mlp.up_proj").weight[0, 0] += 1e-6
    groups = [
        {"params": [p for p in plain.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in plain.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _warm_up_and_cosine(step + 1, steps))
    model, optimizer, scheduler = accelerator.prepare(plain, optimizer, scheduler)
    curve: list[tuple[int, float]] = []
    held: list[tuple[int, float]] = []
    started, recent = time.monotonic(), []
    for step in range(1, steps + 1):
        windows = training_windows(corpus.train, seed=seed, step=step, batch=size.batch, seq=size.seq)
        loss = next_byte_loss(model, windows.to(accelerator.device))
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        recent.append(loss.detach())
        if step % CURVE_EVERY == 0:
            curve.append((step, torch.stack(recent).mean().item()))
            recent.clear()
        if step % max(1, steps // 4) == 0 or step == steps:
            held.append((step, held_out_loss(model, held_out, accelerator.device)))
    return {
        "variant": variant, "seed": seed, "steps": steps, "text": corpus.source, "lr": lr, "curve": curve,
        "held_out": held,
        "parameters": sum(p.numel() for p in model.parameters()), "seconds": round(time.monotonic() - started, 1),
        "fp8_layers": 0 if accelerator.plan is None else len(accelerator.plan.fp8_names),
        "train_bytes": len(corpus.train), "held_out_bytes": sum(windows[:, 1:].numel() for windows in held_out),
    }  # fmt: skip


def _warm_up_and_cosine(step: int, steps: int) -> float:
    warm_up = max(1, steps // 20)
    if step <= warm_up:
        return step / warm_up
    return 0.01 + 0.99 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up))) / 2


@torch.no_grad()
def held_out_loss(model: nn.Module, held_out: list[Tensor], device: torch.device) -> float:
    model.eval()
    total = torch.zeros((), dtype=torch.float64, device=device)
    count = 0
    for windows in held_out:
        predicted = windows[:, 1:].numel()
        total += next_byte_loss(model, windows.to(device)).double() * predicted
        count += predicted
    model.train()
    return (total / count).item()


# ---------------------------------------------------------------------------------------------- many trainings


def run_all(out: Path, options: list[str], seeds: int, variants: list[str], jobs: int) -> None:
    """Train what ``out`` does not have yet, seed by seed, each in a process of its own."""
    data: dict[str, Any] = {"options": options, "facts": facts(), "runs": []}
    if out.exists():
        data = json.loads(out.read_text())
        if data["options"] != options:
            raise SystemExit(f"{out} holds trainings of {data['options']}, not of {options}; name another --out")
    done = {(run["variant"], run["seed"]) for run in data["runs"]}
    todo = [(v, s) for s in range(seeds) for v in variants if (v, s) not in done]
    gpus: queue.Queue[int] = queue.Queue()
    for job in range(jobs * max(1, torch.cuda.device_count())):
        gpus.put(job % max(1, torch.cuda.device_count()))

    def work(variant: str, seed: int) -> Run:
        gpu = gpus.get()
        try:
            command = [sys.executable, __file__, "--one", variant, str(seed), *options]
            environment = os.environ | {"CUDA_VISIBLE_DEVICES": str(gpu)}
            ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        finally:
            gpus.put(gpu)
        if ended.returncode:
            raise RuntimeError(f"{variant}, seed {seed}: {ended.stderr[-2000:]}")
        run: Run = json.loads(ended.stdout.splitlines()[-1])
        return run

    with concurrent.futures.ThreadPoolExecutor(gpus.qsize()) as pool:
        for future in concurrent.futures.as_completed([pool.submit(work, *each) for each in todo]):
            if error := future.exception():
                print(error, flush=True)
                continue
            run = future.result()
            data["runs"].append(run)
            out.write_text(json.dumps(data))
            print(f"{run['variant']:22} seed {run['seed']} {run['held_out'][-1][1]:.5f} {run['seconds']} s", flush=True)


def facts() -> dict[str, str]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {"gpu": gpu, "torch": torch.__version__, "date": time.strftime("%Y-%m-%d"), "commit": commit.strip()}


# -------------------------------------------------------------------------------------------------- what it says


def difference(runs: list[Run], variant: str) -> tuple[float, float, int]:
    """Mean of the differences from BF16 by seed, as shares of its loss; the half-width of 95 %; how many seeds."""
    final = {(run["variant"], run["seed"]): run["held_out"][-1][1] for run in runs}
    seeds = sorted(seed for v, seed in final if v == variant and (BASELINE, seed) in final)
    off = [final[variant, seed] / final[BASELINE, seed] - 1 for seed in seeds]
    half = T[len(off) - 1] * statistics.stdev(off) / math.sqrt(len(off)) if 1 < len(off) <= len(T) else math.inf
    return (statistics.mean(off) if off else math.nan), half, len(off)


def table(data: dict[str, Any]) -> str:
    runs = data["runs"]
    noise_mean, noise, _ = difference(runs, MOVED)
    limit = ALLOWED + (noise if math.isfinite(noise) else 0.0)
    lines = [
        f"noise floor (BF16 with one weight moved): {100 * noise_mean:+.3f} % +- {100 * noise:.3f} %", "",
        "| variant | seeds | held-out loss | against BF16, % | 95 % interval | within |", "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for variant in dict.fromkeys(run["variant"] for run in runs):
        mean, half, seeds = difference(runs, variant)
        losses = [run["held_out"][-1][1] for run in runs if run["variant"] == variant]
        row = [variant, str(seeds), f"{statistics.mean(losses):.4f}"]
        if variant == BASELINE:
            row += ["0", "", ""]
        else:
            is_within = abs(mean) + half <= limit
            row += [f"{100 * mean:+.3f}", f"{100 * (mean - half):+.3f} to {100 * (mean + half):+.3f}"]
            row += ["yes" if is_within else f"no, of {100 * limit:.3f}"]
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def draw(data: dict[str, Any], path: Path) -> None:
    """Training loss of seed 0, and every variant's difference from BF16 on held-out text."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    baseline = {(run["seed"], step): loss for run in data["runs"] if run["variant"] == BASELINE
                for step, loss in run["held_out"]}  # fmt: skip
    for variant in dict.fromkeys(run["variant"] for run in data["runs"]):
        runs = [run for run in data["runs"] if run["variant"] == variant]
        first = min(runs, key=lambda run: run["seed"])
        left.plot(*zip(*first["curve"], strict=True), label=variant, linewidth=0.8)
        steps = [step for step, _ in runs[0]["held_out"]]
        off = [
            statistics.mean(100 * (dict(run["held_out"])[step] / baseline[run["seed"], step] - 1) for run in runs)
            for step in steps
        ]
        right.plot(steps, off, "o-", label=variant, linewidth=0.8, markersize=3)
    left.set(xlabel="step", ylabel=f"training loss, nats a byte, mean of {CURVE_EVERY} steps", yscale="log")
    right.set(xlabel="step", ylabel="held-out loss against BF16, %, mean over seeds")
    right.axhspan(-100 * ALLOWED, 100 * ALLOWED, alpha=0.1)
    left.legend(fontsize=8)
    figure.suptitle(", ".join(f"{value}" for value in data["facts"].values()), fontsize=9)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="*", default=list(VARIANTS), help="recipes, or RECIPE-compressed")
    parser.add_argument("--out", type=Path, help="JSON of all trainings; those it has are not done again")
    parser.add_argument("--size", choices=SIZES, default="135m")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--lr", type=float, help="peak learning rate")
    parser.add_argument("--text", default=STANDARD_LIBRARY, help="a file or folder to train on")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=6, help="trainings at a time on each GPU")
    parser.add_argument("--tables", type=Path, metavar="JSON", help="print what was measured and do nothing else")
    parser.add_argument("--png", type=Path, help="draw it")
    parser.add_argument("--one", nargs=2, metavar=("VARIANT", "SEED"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    steps, lr = args.steps or SIZES[args.size].steps, args.lr or SIZES[args.size].lr
    if args.one:
        print(json.dumps(train(args.size, args.one[0], int(args.one[1]), steps, args.text, lr)))
        return
    if args.tables is None:
        if args.out is None:
            parser.error("--out is needed")
        options = ["--size", args.size, "--steps", str(steps), "--lr", str(lr), "--text", args.text]
        run_all(args.out, options, args.seeds, args.variants, args.jobs)
    data = json.loads((args.tables or args.out).read_text())
    print(table(data))
    if args.png:
        draw(data, args.png)


if __name__ == "__main__":
    main()
