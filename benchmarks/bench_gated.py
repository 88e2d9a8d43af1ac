"""The gated activation into FP8, forward and backward, against its floor: bytes over the device's copy bandwidth.

    python benchmarks/bench_gated.py

The floor reads every input once and writes every result once. Codes are compared with the cast of the kernel's own FP32
values before anything is timed. For comparison: PyTorch's activation and product in BF16, then a cast.
"""

from __future__ import annotations

import torch
from bench_quantize import copy_bandwidth
from timing import device_ms, facts
from torch.nn import functional as F

from acceler8.formats import E4M3
from acceler8.kernels import ACTIVATIONS, gated, gated_backward, quantize, quantize_ref
from acceler8.scaling import ROWWISE, TENSORWISE, BLOCK_1x128

SHAPE = (16384, 14336)


def check() -> None:
    x, d = torch.randn(272, 768, device="cuda"), torch.randn(272, 384, device="cuda")
    for activation in ACTIVATIONS:
        *_, own = gated_backward(d, x, activation, None, None, None, ROWWISE, high_precision=True)
        act = gated(x, activation, None, None, ROWWISE, high_precision=True)[2]
        assert act is not None
        assert own is not None
        for granularity in (ROWWISE, TENSORWISE, BLOCK_1x128):
            rows = gated(x, activation, E4M3, None, granularity)[0]
            got = gated_backward(d, x, activation, E4M3, E4M3, E4M3, granularity)
            for q, source in ((rows, act), (got[0], own), (got[1], own.t()), (got[2], act.t())):
                codes, scale_inv, _ = quantize_ref(source.cpu(), E4M3, granularity)
                assert torch.equal(q.codes.cpu().view(torch.uint8), codes.view(torch.uint8)), (activation, granularity)
                assert torch.equal(q.scale_inv.cpu(), scale_inv), (activation, granularity)


def main() -> None:
    check()
    bandwidth = copy_bandwidth()
    print(f"copy {bandwidth / 1e12:.2f} TB/s; {facts()}")
    print("| what | activation | scales | ms (20 / 50 / 80 %) | floor ms | share of floor |")
    print("|---|---|---|---|---|---|")
    rows, features = SHAPE
    elements = rows * features
    x = torch.randn(rows, 2 * features, device="cuda", dtype=torch.bfloat16)
    d = torch.randn(rows, features, device="cuda", dtype=torch.bfloat16)
    known = {name: torch.ones(1, device="cuda") for name in ("amax", "staging", "act_amax", "act_staging")}

    def line(what: str, activation: str, scales: str, work: object, bytes_each: int) -> None:
        low, ms, high = device_ms(work)  # type: ignore[arg-type]
        floor = elements * bytes_each / bandwidth * 1e3
        times = f"{low:.3f} / {ms:.3f} / {high:.3f}"
        print(f"| {what} | {activation} | {scales} | {times} | {floor:.3f} | {floor / ms:.0%} |", flush=True)

    for activation in ACTIVATIONS:
        for name, granularity in (("rowwise", ROWWISE), ("tensorwise", TENSORWISE), ("delayed", TENSORWISE),
                                  ("1x128", BLOCK_1x128)):  # fmt: skip
            of_act = {k: known[k] for k in ("amax", "staging")} if name == "delayed" else {}
            of_all = known if name == "delayed" else {}
            line("forward, rows", activation, name,
                 lambda a=activation, g=granularity, o=of_act: gated(x, a, E4M3, None, g, **o), 5)  # fmt: skip
            line("forward, both", activation, name,
                 lambda a=activation, g=granularity, o=of_act: gated(x, a, E4M3, E4M3, g, **o), 6)  # fmt: skip
            line("backward", activation, name,
                 lambda a=activation, g=granularity, o=of_all: gated_backward(d, x, a, E4M3, E4M3, E4M3, g, **o),
                 11)  # fmt: skip
    line("PyTorch BF16, then cast of rows", "silu", "rowwise",
         lambda: quantize(F.silu(x[:, :features]) * x[:, features:], E4M3, None, ROWWISE), 5)  # fmt: skip


if __name__ == "__main__":
    main()
