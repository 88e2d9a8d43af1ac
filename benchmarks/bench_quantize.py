"""The quantise kernel against its floor: bytes read and written over the device's copy bandwidth.

    python benchmarks/bench_quantize.py

Results are compared with the CPU reference on a slice before anything is timed.
"""

from __future__ import annotations

import torch
from timing import device_ms, facts

from acceler8.formats import E4M3
from acceler8.kernels import quantize, quantize_ref
from acceler8.scaling import GRANULARITIES

SHAPES = ((16384, 4096), (16384, 14336), (4096, 4096))


def copy_bandwidth() -> float:
    """Bytes read plus written in a second by a large device-to-device copy."""
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * source.numel() / (device_ms(lambda: target.copy_(source))[1] * 1e-3)


def check() -> None:
    x = torch.randn(272, 384, device="cuda").bfloat16()
    for granularity in GRANULARITIES.values():
        rows, cols, _ = quantize(x, E4M3, E4M3, granularity)
        for got, source in ((rows, x.cpu()), (cols, x.cpu().t())):
            codes, scale_inv, _ = quantize_ref(source, E4M3, granularity)
            assert torch.equal(got.codes.cpu().view(torch.uint8), codes.view(torch.uint8)), granularity
            assert torch.equal(got.scale_inv.cpu(), scale_inv), granularity


def main() -> None:
    check()
    bandwidth = copy_bandwidth()
    print(f"copy {bandwidth / 1e12:.2f} TB/s; {facts()}")
    print("| shape | scale for | orientation | ms (20 / 50 / 80 %) | floor ms | share of floor |")
    print("|---|---|---|---|---|---|")
    for shape in SHAPES:
        x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        for granularity in GRANULARITIES.values():
            for name, rows, cols in (("rows", E4M3, None), ("cols", None, E4M3), ("both", E4M3, E4M3)):
                low, ms, high = device_ms(lambda x=x, r=rows, c=cols, g=granularity: quantize(x, r, c, g))
                written = (rows is not None) + (cols is not None)
                floor = x.numel() * (2 + written) / bandwidth * 1e3
                times = f"{low:.3f} / {ms:.3f} / {high:.3f}"
                print(f"| {shape} | {granularity} | {name} | {times} | {floor:.3f} | {floor / ms:.0%} |", flush=True)


if __name__ == "__main__":
    main()
