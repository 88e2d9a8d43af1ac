"""Output head and cross-entropy in BF16: one after the other, and ``head_loss``, which never holds all logits.

    python benchmarks/bench_head_loss.py [--tokens 16384] [--width 4096] [vocabulary ...]

Forward and backward of ``cross_entropy((hidden @ weight.T).float())`` against ``head_loss`` on the same tensors. Before
anything is timed, loss and gradients of both are compared with FP32 on a slice of the tokens. The floor is the three
GEMMs at the rate that PyTorch's own reach here; peak memory is what is added to hidden, weight and labels.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable

import torch
from timing import device_ms, facts
from torch import Tensor
from torch.nn import functional as F

import acceler8


def stock(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w).float(), labels)


def chunked(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    return acceler8.head_loss(x, w, labels)


def off(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def check(x: Tensor, w: Tensor, labels: Tensor) -> str:
    """Both against FP32 on 2048 tokens in chunks, and against each other on all; raises if they are apart."""

    def run(loss_of: Callable[[Tensor, Tensor, Tensor], Tensor], *leaves: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        own = [t.detach().requires_grad_() for t in leaves]
        n = len(leaves[0])
        loss = loss_of(*own, labels[:n])
        loss.backward()
        return loss.detach(), own[0].grad, own[1].grad

    few = x[:2048]
    exact = run(stock, few.float(), w.float())
    plain, ours = run(stock, few, w), run(lambda *a: acceler8.head_loss(*a, chunk_tokens=768), few, w)
    words = []
    for name, got, other, want in zip(("loss", "dx", "dw"), ours, plain, exact, strict=True):
        ours_off, plain_off = off(got, want), off(other, want)
        words.append(f"{name} {ours_off:.1e} ({plain_off:.1e})")
        assert ours_off <= 2 * plain_off + 2**-8, words
    del exact, plain, ours
    for got, other in zip(run(chunked, x, w), run(stock, x, w), strict=True):
        assert off(got, other) <= 2**-6, off(got, other)
    return ", ".join(words)


def peak_mib(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("vocabularies", nargs="*", type=int, default=[32000, 128256])
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--width", type=int, default=4096)
    args = parser.parse_args()
    print(f"{args.tokens} tokens, width {args.width}, BF16; {facts()}")
    print("| vocabulary | what | ms (20 / 50 / 80 %) | peak MiB beyond inputs | three GEMMs ms | share of floor |")
    print("|---|---|---|---|---|---|")
    notes = []
    for vocabulary in args.vocabularies:
        torch.manual_seed(0)
        x = torch.randn(args.tokens, args.width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        w = torch.randn(vocabulary, args.width, device="cuda", dtype=torch.bfloat16).mul_(0.02).requires_grad_()
        labels = torch.randint(0, vocabulary, (args.tokens,), device="cuda")
        labels[::50] = -100
        notes.append(f"{vocabulary}: off from FP32, ours (stock's): {check(x, w, labels)}")

        def step(loss_of: Callable[..., Tensor], x: Tensor = x, w: Tensor = w, labels: Tensor = labels) -> None:
            x.grad = w.grad = None
            loss_of(x, w, labels).backward()

        def loss_only(loss_of: Callable[..., Tensor], x: Tensor = x, w: Tensor = w, labels: Tensor = labels) -> None:
            with torch.no_grad():
                loss_of(x, w, labels)

        d = torch.randn(4096, vocabulary, device="cuda", dtype=torch.bfloat16)
        part, weight = x.detach()[:4096], w.detach()
        gemms = args.tokens / len(part) * device_ms(lambda p=part, v=weight, d=d: (p @ v.t(), d @ v, d.t() @ p))[1]
        del d
        for name, loss_of in (("head, then cross_entropy", stock), ("head_loss", chunked)):
            for kind, work, share in (("", step, 1.0), (", loss only", loss_only, 1 / 3)):
                peak = peak_mib(lambda work=work, f=loss_of: work(f))
                low, ms, high = device_ms(lambda work=work, f=loss_of: work(f))
                x.grad = w.grad = None
                floor = gemms * share
                print(
                    f"| {vocabulary} | {name}{kind} | {low:.2f} / {ms:.2f} / {high:.2f} | {peak:.0f} | {floor:.2f} |"
                    f" {floor / ms:.0%} |",
                    flush=True,
                )
        del x, w, labels
        gc.collect()
        torch.cuda.empty_cache()
    print("\n".join(notes))


if __name__ == "__main__":
    main()
