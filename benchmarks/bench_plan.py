"""What a user waits for before the first step: import, plan of a 1000-layer model, conversion of a 135 M Llama.

Prints a table; nothing is asserted. Models are on the meta device for plan, in memory for conversion. Each time is the
best of some repetitions (import: fresh interpreters), since only the least disturbed one says what the code costs.

    python benchmarks/bench_plan.py
"""

from __future__ import annotations

import platform
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import acceler8


class Block(nn.Module):
    """The matrices of a Llama block, without its mathematics."""

    def __init__(self, hidden: int, mlp: int, kv: int) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.q_proj, self.o_proj = (nn.Linear(hidden, hidden, bias=False) for _ in range(2))
        self.k_proj, self.v_proj = (nn.Linear(hidden, kv, bias=False) for _ in range(2))
        self.gate_proj, self.up_proj = (nn.Linear(hidden, mlp, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(mlp, hidden, bias=False)


class Llama(nn.Module):
    """Sizes of SmolLM-135M by default: 135 M parameters, head tied to the embedding."""

    def __init__(self, blocks: int = 30, hidden: int = 576, mlp: int = 1536, kv: int = 192, vocab: int = 49152) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList(Block(hidden, mlp, kv) for _ in range(blocks))
        self.norm = nn.RMSNorm(hidden)
        self.lm_head = nn.Linear(hidden, vocab, bias=False)
        self.lm_head.weight = self.embed_tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        raise NotImplementedError("only its layers are looked at")


def import_s(statement: str) -> float:
    """Seconds that ``statement`` takes in a fresh interpreter, the interpreter's start left out."""
    code = f"import time; t = time.perf_counter(); {statement}; print(time.perf_counter() - t)"
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def best_s(call: Callable[[], object], repeat: int = 3, reset: Callable[[], object] | None = None) -> float:
    """Least seconds of ``call``; ``reset`` runs after each, outside the time."""
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
        if reset is not None:
            reset()
    return min(times)


def main() -> None:
    rows: list[tuple[str, float]] = []
    bare = min(import_s("import torch") for _ in range(3))
    both = min(import_s("import torch; import acceler8") for _ in range(3))
    rows += [("import torch", bare), ("import acceler8, beyond torch", max(0.0, both - bare))]
    first_use = "import torch; import acceler8; acceler8.plan; acceler8.Accelerator"
    rows.append(("first use of plan and Accelerator, beyond torch", min(import_s(first_use) for _ in range(3)) - bare))

    with torch.device("meta"):
        deep = Llama(blocks=143)  # 143 x 7 + 1 = 1002 layers
    plan = acceler8.plan(deep)
    rows.append((f"plan, {plan.totals.layers} layers", best_s(lambda: acceler8.plan(deep))))
    rows.append(
        (f"plan with skip list, {plan.totals.layers} layers", best_s(lambda: acceler8.plan(deep, skip=["o_proj"])))
    )
    rows.append((f"its table, {plan.totals.layers} rows", best_s(lambda: str(plan))))

    model = Llama()
    count = sum(p.numel() for p in model.parameters())
    for recipe in ("rowwise", "delayed"):
        plan = acceler8.plan(model, recipe)
        seconds = best_s(lambda plan=plan: acceler8.convert(model, plan), reset=lambda: acceler8.restore(model))
        rows.append((f"convert, {recipe}, {count / 1e6:.0f} M parameters, {plan.totals.fp8_layers} layers", seconds))
    acceler8.convert(model, plan)
    rows.append((f"verify, {count / 1e6:.0f} M parameters", best_s(lambda: acceler8.verify(model))))

    print(
        f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}"
    )
    for what, seconds in rows:
        print(f"{what:60s} {seconds * 1e3:10.1f} ms")


if __name__ == "__main__":
    main()
