"""A training step of a few Llama-3-8B layers: BF16, and each recipe, in one process on the same data.

    python benchmarks/bench_step.py [--layers 4] [--batch 4] [--length 4096] [--no-fuse] [--head-loss] [recipe ...]

BF16 parameters, fused AdamW, random tokens, output head in BF16. Prints step time, tokens a second, peak memory, memory
held between forward and backward, and the loss after the last step (so that a broken recipe is not timed unseen).

With ``--head-loss`` head and loss are one operation (``acceler8.head_loss``), for BF16 too. What is held then has the
gradients of head and of its input in it; without, the logits, but nothing yet of the loss.
"""

from __future__ import annotations

import argparse
import gc

import torch
from timing import facts
from torch import Tensor, nn
from torch.nn import functional as F

import acceler8
from acceler8 import recipes

VOCABULARY = 32000


class Attention(nn.Module):
    """Causal attention in the shape of Llama-3-8B."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, head = heads, kv_heads, width // heads
        self.q_proj, self.o_proj = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k_proj, self.v_proj = (nn.Linear(width, kv_heads * head, bias=False) for _ in range(2))

    def forward(self, h: Tensor) -> Tensor:
        q, k, v = (
            proj(h).unflatten(-1, (n, -1)).transpose(1, 2)
            for proj, n in ((self.q_proj, self.heads), (self.k_proj, self.kv_heads), (self.v_proj, self.kv_heads))
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Gated MLP."""

    def __init__(self, width: int, ffn: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(width, ffn, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(ffn, width, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))


class Layer(nn.Module):
    """Pre-norm attention and gated MLP in the shape of Llama-3-8B."""

    def __init__(self, width: int = 4096, ffn: int = 14336, heads: int = 32, kv_heads: int = 8) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.attention, self.mlp = Attention(width, heads, kv_heads), MLP(width, ffn)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Model(nn.Module):
    """Embedding, layers, norm, untied head. Gives logits, or with labels the loss without ever holding them."""

    def __init__(self, layers: int, width: int = 4096) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        return self.lm_head(x) if labels is None else acceler8.head_loss(x, self.lm_head.weight, labels)


def measure(
    recipe: str | None, layers: int, batch: int, length: int, fuse: bool, head_loss: bool, steps: int = 14,
    warmup: int = 4,
) -> str:  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Model(layers).bfloat16()
    if recipe is not None:
        acceler8.convert(model, acceler8.plan(model, recipe, fuse=fuse))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if recipe is not None:
        acceler8.attach(model, optimizer)
    tokens = torch.randint(0, VOCABULARY, (batch, length + 1), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    times, held, loss = [], 0, torch.zeros(())
    for _ in range(steps):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before = torch.cuda.memory_allocated()
        start.record()
        out = model(tokens[:, :-1], tokens[:, 1:] if head_loss else None)
        held = torch.cuda.memory_allocated() - before
        loss = out if head_loss else F.cross_entropy(out.float().flatten(0, 1), tokens[:, 1:].flatten())
        del out
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    timed = sorted(times[warmup:])
    ms = timed[len(timed) // 2]
    gib = 2**30
    return (
        f"{ms:.1f} | {batch * length / ms * 1e3:.0f} | {torch.cuda.max_memory_allocated() / gib:.2f} | {held / gib:.2f}"
        f" | {loss.item():.4f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("recipes", nargs="*", default=[n for n in recipes.names() if n != "mxfp8"])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--no-fuse", dest="fuse", action="store_false", help="run each layer by itself")
    parser.add_argument("--head-loss", action="store_true", help="head and loss as one operation")
    args = parser.parse_args()
    head = ", head and loss in one" if args.head_loss else ""
    print(f"{args.layers} layers, {args.batch} x {args.length} tokens{head}; {facts()}")
    print("| variant | ms/step | tokens/s | peak GiB | GiB held for backward | loss after 14 steps |")
    print("|---|---|---|---|---|---|")
    for recipe in [None, *args.recipes]:
        row = measure(recipe, args.layers, args.batch, args.length, args.fuse, args.head_loss)
        print(f"| {recipe or 'BF16'} | {row} |", flush=True)
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
