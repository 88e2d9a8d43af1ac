"""Which 8-bit code an optimizer may keep its second moment in: each candidate through thousands of steps of Adam.

    python benchmarks/bench_moment_codecs.py [--elements 32768] [--write]

Gradients are normal with a standard deviation of each element's own, log-normal over the elements (``log-sigma``), in
some settings falling tenfold over the run. Every candidate keeps the second moment between steps in its code, the first
in E4M3 blocks of 128; the truth is FP32 with the same gradients. A table a setting: second moment over the truth
(median, 5 and 95 %), the share of zeros, the error of the last update relative to the true one (RMS), bytes an element.
The default is the code with the smallest largest error among those that are one byte and its scales, are the same on
every device (so without logarithms and powers, which differ by ulps), and in every setting are within 5 % of the truth
(median) and have no zeros. Elements are synthetic: this shows mechanisms, not trainings.

``--write`` keeps the result under benchmarks/results.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from acceler8.formats import (
    BLOCK,
    E4M3,
    E4M3_BLOCK,
    E5M2,
    FP16_UNSIGNED,
    UE5M3,
    UE5M3_BLOCK,
    decode_blocks,
    decode_ue5m3,
    encode,
    encode_blocks,
    encode_ue5m3,
    round_stochastic_bf16,
)

Codec = Callable[[Tensor, torch.Generator], Tensor]
"""What is left of a second moment [n] FP32 behind storing and loading it."""
BETA1, EPS = 0.9, 1e-8
ONE_BYTE = 1 + 8 / BLOCK  # a byte and up to two scales: what moments of 2.1 bytes leave for the second


@dataclass(frozen=True)
class Setting:
    beta2: float
    log_sigma: float
    fall: float  # gradients at the end over those at the start
    steps: int

    def __str__(self) -> str:
        kind = "steady" if self.fall == 1 else f"falling to {self.fall:.0%}"
        return f"beta2 {self.beta2}, log-sigma {self.log_sigma}, gradients {kind}, {self.steps} steps"


SETTINGS = (
    Setting(0.95, 0.5, 1.0, 500),
    Setting(0.95, 1.0, 0.1, 500),
    Setting(0.999, 0.5, 1.0, 2500),
    Setting(0.999, 1.0, 0.1, 2500),
    Setting(0.999, 2.0, 0.1, 2500),
)


def by_block(store: Callable[[Tensor], Tensor], largest: float, block: int = BLOCK) -> Codec:
    """Scale each block's amax to ``largest`` and store."""

    def codec(v: Tensor, _: torch.Generator) -> Tensor:
        blocks = v.view(-1, block)
        scale = blocks.amax(1, keepdim=True).clamp(min=1e-30) / largest
        return (store(blocks / scale) * scale).view(-1)

    return codec


def fp8(y: Tensor) -> Tensor:
    return encode(y, E4M3).float()


def at_least(store: Callable[[Tensor], Tensor], least: float) -> Callable[[Tensor], Tensor]:
    return lambda y: store(torch.where(y > 0, y.clamp(min=least), y))


def per_tensor(v: Tensor, _: torch.Generator) -> Tensor:
    scale = v.amax().clamp(min=1e-30) / E4M3.max
    return fp8(v / scale) * scale


def per_tensor_pow2(v: Tensor, _: torch.Generator) -> Tensor:
    """MS-AMP's rule, had it kept the second moment in FP8: the failure to stand beside."""
    scale = torch.exp2(torch.ceil(torch.log2(v.amax().clamp(min=1e-30) / E4M3.max)))
    return fp8(v / scale) * scale


def stochastic(largest: float, mantissa: int, least: float) -> Codec:
    """Block scales, rounded up or down by chance; nothing above zero becomes zero."""

    def codec(v: Tensor, generator: torch.Generator) -> Tensor:
        def store(y: Tensor) -> Tensor:
            ulp = torch.exp2(torch.floor(torch.log2(y.clamp(min=least * 2**mantissa))) - mantissa)
            noise = torch.rand(y.shape, generator=generator)
            return torch.where(y > 0, (torch.floor(y / ulp + noise) * ulp).clamp(min=least), y)

        return by_block(store, largest)(v, generator)

    return codec


def sqrt_e4m3(v: Tensor, generator: torch.Generator) -> Tensor:
    return by_block(at_least(fp8, E4M3.min_subnormal), E4M3.max)(v.sqrt(), generator).square()


def logarithm(v: Tensor, _: torch.Generator) -> Tensor:
    """255 equal steps of log2 over 32 octaves below the block's amax."""
    blocks = v.view(-1, BLOCK)
    most = torch.log2(blocks.amax(1, keepdim=True).clamp(min=1e-30))
    steps = torch.round((most - torch.log2(blocks.clamp(min=1e-38))) * (254 / 32)).clamp(0, 254)
    return torch.where(blocks > 0, torch.exp2(most - steps * (32 / 254)), 0.0).view(-1)


def coat(v: Tensor, _: torch.Generator) -> Tensor:
    """COAT's range expansion (arXiv:2410.19313), k in steps of 1/16, three FP32 a block."""
    blocks = v.view(-1, BLOCK)
    most = blocks.amax(1, keepdim=True).clamp(min=1e-30)
    least = torch.where(blocks > 0, blocks, torch.inf).amin(1, keepdim=True).minimum(most)
    span = torch.log2(most / least).clamp(min=1e-3)
    k = (torch.floor(16 * torch.log2(torch.tensor(E4M3.max**2 / 2)) / span) / 16).clamp(min=1 / 16, max=64)
    centre = (most * least).sqrt()
    y = torch.pow((blocks / centre).double(), k)
    scale = torch.pow((most / centre).double(), k) / E4M3.max
    return (torch.pow(fp8((y / scale).float()).double() * scale, 1 / k) * centre).float().view(-1)


def _dynamic_map() -> Tensor:
    """bitsandbytes' unsigned dynamic map of 256 numbers from 0 to 1."""
    numbers = [0.0, 1.0]
    for i in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (i + 1) + 1)
        numbers += ((edges[:-1] + edges[1:]) / 2 * 10.0 ** (i - 6)).tolist()
    return torch.tensor(sorted(numbers))


DYNAMIC = _dynamic_map()


def dynamic(v: Tensor, _: torch.Generator) -> Tensor:
    blocks = v.view(-1, 256)
    scale = blocks.amax(1, keepdim=True).clamp(min=1e-30)
    middles = (DYNAMIC[1:] + DYNAMIC[:-1]) / 2
    return (DYNAMIC[torch.bucketize(blocks / scale, middles)] * scale).view(-1)


def ours(v: Tensor, _: torch.Generator) -> Tensor:
    return decode_blocks(*encode_blocks(v, UE5M3_BLOCK), UE5M3_BLOCK)


def fp16(v: Tensor, _: torch.Generator) -> Tensor:
    return decode_blocks(*encode_blocks(v, FP16_UNSIGNED), FP16_UNSIGNED)


def bf16(v: Tensor, _: torch.Generator) -> Tensor:
    return v.bfloat16().float()


def bf16_stochastic(v: Tensor, generator: torch.Generator) -> Tensor:
    return round_stochastic_bf16(v, torch.randint(2**16, v.shape, generator=generator, dtype=torch.int32)).float()


CODECS: dict[str, tuple[Codec, float]] = {
    "FP16, block 128": (fp16, 2 + 4 / 128),
    "BF16, to nearest": (bf16, 2),
    "BF16, stochastic": (bf16_stochastic, 2),
    "E4M3, tensor, power of two": (per_tensor_pow2, 1),
    "E4M3, tensor": (per_tensor, 1),
    "E4M3, block 256": (by_block(fp8, E4M3.max, 256), 1 + 4 / 256),
    "E4M3, block 128": (by_block(fp8, E4M3.max), 1 + 4 / 128),
    "E4M3, block 128, no zeros": (by_block(at_least(fp8, E4M3.min_subnormal), E4M3.max), 1 + 4 / 128),
    "E4M3, block 128, no zeros, stochastic": (stochastic(E4M3.max, 3, E4M3.min_subnormal), 1 + 4 / 128),
    "E5M2, block 128": (by_block(lambda y: encode(y, E5M2).float(), E5M2.max), 1 + 4 / 128),
    "E4M3 of the root, block 128, no zeros": (sqrt_e4m3, 1 + 4 / 128),
    "logarithm, block 128": (logarithm, 1 + 4 / 128),
    "COAT, block 128": (coat, 1 + 12 / 128),
    "dynamic, block 256": (dynamic, 1 + 4 / 256),
    "UE5M3, block 128": (by_block(lambda y: decode_ue5m3(encode_ue5m3(y)), UE5M3.max), 1 + 4 / 128),
    "UE5M3, block 128, no zeros": (ours, 1 + 4 / 128),
    "UE5M3, block 128, no zeros, stochastic": (stochastic(UE5M3.max, 3, UE5M3.min_subnormal), 1 + 4 / 128),
}
DIFFERS_BY_DEVICE = ("logarithm, block 128", "COAT, block 128")


def simulate(setting: Setting, names: list[str], elements: int, seed: int = 0) -> dict[str, dict[str, float]]:
    """One row of figures for each codec, and for the error that the first moment alone makes."""
    generator = torch.Generator().manual_seed(seed)
    sigma = torch.exp(setting.log_sigma * torch.randn(elements, generator=generator)) * 1e-4
    m_true, m, v_true = (torch.zeros(elements) for _ in range(3))
    stored = {name: torch.zeros(elements) for name in names}
    for step in range(setting.steps):
        g = sigma * setting.fall ** (step / setting.steps) * torch.randn(elements, generator=generator)
        square = g * g
        v_true = v_true + (square - v_true) * (1 - setting.beta2)
        m_true, m_new = (old + (g - old) * (1 - BETA1) for old in (m_true, m))
        for name, v in stored.items():
            v_new = v * setting.beta2 + square * (1 - setting.beta2)
            stored[name] = CODECS[name][0](v_new, generator)
        m = decode_blocks(*encode_blocks(m_new, E4M3_BLOCK), E4M3_BLOCK)
    correction = 1 - setting.beta2**setting.steps

    def update(first: Tensor, second: Tensor) -> Tensor:
        return first / ((second / correction).sqrt() + EPS)

    truth = update(m_true, v_true)

    def error(first: Tensor, second: Tensor) -> float:
        return float((update(first, second) - truth).norm() / truth.norm())

    rows = {"first moment alone": {"median": 1.0, "low": 1.0, "high": 1.0, "zeros": 0.0, "error": error(m, v_true)}}
    for name, v in stored.items():
        ratio = (v / v_true).double()
        low, median, high = torch.quantile(ratio, torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64)).tolist()
        # The update of the step to come reads what is stored, zeros among it.
        rows[name] = {
            "median": median, "low": low, "high": high, "zeros": float((v == 0).float().mean()), "error": error(m, v),
        }  # fmt: skip
    return rows


def choose(tables: dict[str, dict[str, dict[str, float]]]) -> str:
    """The rule of the module's docstring."""
    fit = [
        name
        for name, (_, size) in CODECS.items()
        if size <= ONE_BYTE
        and name not in DIFFERS_BY_DEVICE
        and all(abs(t[name]["median"] - 1) <= 0.05 and t[name]["zeros"] == 0 for t in tables.values())
    ]
    return min(fit, key=lambda name: max(table[name]["error"] for table in tables.values()))


def print_table(setting: str, rows: dict[str, dict[str, float]]) -> None:
    print(f"\n{setting}\n\n| second moment | over the truth: median | 5 % | 95 % | zeros | update error | bytes |")
    print("|---|---|---|---|---|---|---|")
    for name, row in rows.items():
        size = f"{CODECS[name][1]:.3f}" if name in CODECS else ""
        print(
            f"| {name} | {row['median']:.3f} | {row['low']:.2f} | {row['high']:.2f} | {row['zeros']:.3%}"
            f" | {row['error']:.3g} | {size} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=32768, help="a multiple of 256")
    parser.add_argument("--write", action="store_true", help="keep the result under benchmarks/results")
    arguments = parser.parse_args()
    tables = {}
    for setting in SETTINGS:
        tables[str(setting)] = simulate(setting, list(CODECS), arguments.elements)
        print_table(str(setting), tables[str(setting)])
    chosen = choose(tables)
    print(f"\nchosen: {chosen}")
    if arguments.write:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
        date = datetime.datetime.now(tz=datetime.UTC).date()
        facts = {
            "date": str(date), "commit": commit.stdout.strip(), "torch": torch.__version__, "device": "cpu",
            "cpu": platform.processor() or platform.machine(), "elements": arguments.elements, "chosen": chosen,
        }  # fmt: skip
        path = Path(__file__).parent / "results" / f"{date}-moment-codecs.json"
        path.write_text(json.dumps({"facts": facts, "settings": tables}, indent=1) + "\n")
        print(f"written: {path}")


if __name__ == "__main__":
    main()
