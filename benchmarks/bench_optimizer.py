"""The optimizer's step against its floor and its peers: bytes that it must move over the device's copy bandwidth.

    python benchmarks/bench_optimizer.py [--parameters 1e9] [--write]
    python benchmarks/bench_optimizer.py --sweep [--only "16-bit"]  # launch shapes of the kernel

A model's worth of BF16 matrices with norm gains between them. Each variant steps the same tensors with the same
gradients; ours are compared with the CPU reference on a small model before anything is timed. "moved" counts gradients,
states and weights read and written once each; "host" is how long a step keeps the Python thread; "over" is the memory
that a step takes beside what it keeps. Peers run if they are installed. Under 60 s on an H200.
"""

from __future__ import annotations

import argparse
import datetime
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench_quantize import copy_bandwidth
from timing import device_ms, facts
from torch import nn

from acceler8.kernels._adam_launch import SHAPE, AdamLaunches, Shape
from acceler8.optim import AdamW

HIDDEN = 4096
OURS = {
    "FP8 moments, BF16 + 16-bit remainder": {"moments": "fp8", "master": "bf16_remainder"},
    "FP8 moments, FP16 master": {"moments": "fp8", "master": "fp16"},
    "FP8 moments, stochastic BF16": {"moments": "fp8", "master": "stochastic"},
    "FP8 moments, no master": {"moments": "fp8"},
    "FP16 moments, no master": {"moments": "fp16"},
    "BF16 moments, no master": {"moments": "bf16"},
    "FP32 moments, FP32 master": {"moments": "fp32", "master": "fp32"},
    "FP32 moments, no master": {"moments": "fp32"},
}
SWEPT = ("FP8 moments, BF16 + 16-bit remainder", "FP8 moments, FP16 master", "FP16 moments, no master")
SWEPT += ("BF16 moments, no master",)
SHAPES = (SHAPE, Shape(16, 4), Shape(16, 4, 80), Shape(8, 2, 96), Shape(8, 4), Shape(8, 4, 56), Shape(16, 8))


def make_parameters(count: float, device: str) -> list[nn.Parameter]:
    """Square matrices with a vector behind each, BF16, with gradients."""
    number = max(1, round(count / HIDDEN**2))
    generator = torch.Generator(device=device).manual_seed(0)
    parameters = []
    for _ in range(number):
        for shape in ((HIDDEN, HIDDEN), (HIDDEN,)):
            p = nn.Parameter(torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16) * 0.02)
            p.grad = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16) * 1e-3
            parameters.append(p)
    return parameters


def check() -> None:
    """Codes of the GPU are those of the CPU."""
    for options in OURS.values():
        generator = torch.Generator().manual_seed(1)
        here = [nn.Parameter(torch.randn(shape, generator=generator).bfloat16()) for shape in ((48, 256), (77,))]
        there = [nn.Parameter(p.detach().cuda()) for p in here]
        one, other = AdamW(here, **options), AdamW(there, **options)
        for _ in range(2):
            for p, q in zip(here, there, strict=True):
                p.grad = torch.randn(p.shape, generator=generator).bfloat16()
                q.grad = p.grad.cuda()
            one.step()
            other.step()
        for p, q in zip(here, there, strict=True):
            for key, value in one.state[p].items():
                got = other.state[q][key].cpu()
                as_bytes = value.element_size() == 1
                same = torch.equal(*(t.view(torch.uint8) if as_bytes else t for t in (value, got)))
                assert same, (options, key)
            assert torch.equal(p, q.cpu()), options


def peers() -> dict[str, Callable[[list[nn.Parameter]], Any]]:
    """Other optimizers over the same BF16 parameters; those of packages that are installed."""
    found: dict[str, Callable[[list[nn.Parameter]], Any]] = {
        "torch AdamW fused, BF16 states": lambda ps: torch.optim.AdamW(ps, fused=True),
        "torch AdamW foreach, BF16 states": lambda ps: torch.optim.AdamW(ps, foreach=True),
    }
    try:
        import bitsandbytes

        found["bitsandbytes AdamW8bit"] = bitsandbytes.optim.AdamW8bit
    except ImportError:
        print("bitsandbytes is not installed")
    try:
        from torchao.optim import AdamWFp8

        found["torchao AdamWFp8, compiled"] = AdamWFp8
    except ImportError:
        print("torchao is not installed")
    return found


def moved_bytes(optimizer: Any, parameters: list[nn.Parameter]) -> int:
    """Gradients read; states and parameters read and written. A master that is whole is not read from the parameter."""
    total = 0
    for p in parameters:
        total += p.grad.numel() * p.grad.element_size()
        state = optimizer.state[p]
        kept = sum(t.numel() * t.element_size() for k, t in state.items() if torch.is_tensor(t) and k != "step")
        is_whole = "master" in state and state["master"].dtype is not torch.int16
        total += 2 * kept + p.numel() * p.element_size() * (1 if is_whole else 2)
    return total


def measure(name: str, build: Callable[[list[nn.Parameter]], Any], count: float, bandwidth: float) -> dict[str, Any]:
    parameters = make_parameters(count, "cuda")
    held = torch.cuda.memory_allocated()
    optimizer = build(parameters)
    optimizer.step()
    torch.cuda.synchronize()
    kept = torch.cuda.memory_allocated() - held
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.step()
    torch.cuda.synchronize()
    over = torch.cuda.max_memory_allocated() - before
    low, ms, high = device_ms(optimizer.step, repeats=10, warmup=3)
    torch.cuda.synchronize()
    start = time.perf_counter()
    optimizer.step()
    host = time.perf_counter() - start
    elements = sum(p.numel() for p in parameters)
    known = hasattr(optimizer, "summary") or type(optimizer).__module__.startswith("torch.optim")
    moved = moved_bytes(optimizer, parameters) if known else None
    return {
        "name": name, "ms": ms, "ms_20": low, "ms_80": high, "host_ms": host * 1e3, "moved_bytes": moved,
        "gb_per_s": None if moved is None else moved / ms / 1e6,
        "share_of_copy": None if moved is None else moved / (ms * 1e-3) / bandwidth,
        "state_bytes_per_parameter": kept / elements, "over_mib": over / 2**20,
    }  # fmt: skip


def sweep(count: float, bandwidth: float, only: str) -> None:
    """Time each launch shape over the same matrices, which takes 2 to 3 s of compiling each: about 90 s on an H200."""
    parameters = [p for p in make_parameters(count, "cuda") if p.ndim == 2]
    print("| formats | blocks | warps | registers | ms (20 / 50 / 80 %) | of copy |")
    print("|---|---|---|---|---|---|")
    for name in (name for name in SWEPT if only in name):
        optimizer = AdamW(parameters, **OURS[name])  # type: ignore[arg-type]
        for shape in SHAPES:
            device = parameters[0].device
            optimizer._launches[device] = AdamLaunches(device, shape)
            low, ms, high = device_ms(optimizer.step, repeats=8, warmup=2)
            share = moved_bytes(optimizer, parameters) / (ms * 1e-3) / bandwidth
            limit = "" if shape.registers is None else shape.registers
            times = f"{low:.2f} / {ms:.2f} / {high:.2f}"
            print(f"| {name} | {shape.blocks} | {shape.warps} | {limit} | {times} | {share:.0%} |", flush=True)
        del optimizer
        torch.cuda.empty_cache()


def print_row(row: dict[str, Any]) -> None:
    speed = "" if row["gb_per_s"] is None else f"{row['gb_per_s']:.0f} | {row['share_of_copy']:.0%}"
    times = f"{row['ms_20']:.2f} / {row['ms']:.2f} / {row['ms_80']:.2f} | {row['host_ms']:.2f}"
    print(
        f"| {row['name']} | {times} | {speed or ' | '} | {row['state_bytes_per_parameter']:.2f}"
        f" | {row['over_mib']:.1f} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=1e9, help="how many, about")
    parser.add_argument("--write", action="store_true", help="keep the result under benchmarks/results")
    parser.add_argument("--sweep", action="store_true", help="compare launch shapes of the kernel instead")
    parser.add_argument("--only", default="", help="of the sweep, the formats whose name has this in it")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench_optimizer needs a CUDA GPU; on a CPU the reference runs, whose time says nothing")
    if not arguments.sweep:
        check()
    bandwidth = copy_bandwidth()
    if arguments.sweep:
        print(f"copy {bandwidth / 1e12:.2f} TB/s; {facts()}")
        sweep(arguments.parameters, bandwidth, arguments.only)
        return
    elements = sum(p.numel() for p in make_parameters(arguments.parameters, "cuda"))
    print(f"{elements / 1e9:.2f}e9 parameters, BF16; copy {bandwidth / 1e12:.2f} TB/s; {facts()}")
    print("| step | ms (20 / 50 / 80 %) | host ms | GB/s | of copy | state bytes a parameter | over MiB |")
    print("|---|---|---|---|---|---|---|")
    variants: dict[str, Callable[[list[nn.Parameter]], Any]] = {
        f"acceler8, {name}": lambda ps, options=options: AdamW(ps, **options) for name, options in OURS.items()
    }
    rows = []
    for name, build in {**variants, **peers()}.items():
        try:
            rows.append(measure(name, build, arguments.parameters, bandwidth))
            print_row(rows[-1])
        except Exception as error:  # a peer that cannot run here is a line, not the end
            if name.startswith("acceler8"):
                raise
            print(f"| {name} | {type(error).__name__}: {str(error)[:120]} |")
        torch.cuda.empty_cache()
    if arguments.write:
        date = datetime.datetime.now(tz=datetime.UTC).date()
        path = Path(__file__).parent / "results" / f"{date}-optimizer.json"
        about = {"facts": facts(), "copy_bytes_per_s": bandwidth, "parameters": elements}
        path.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
        print(f"written: {path}")


if __name__ == "__main__":
    main()
