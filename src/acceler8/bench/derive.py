"""Cost tables of GPUs that were not measured, from one of the same chip with another memory.

An H100 SXM has the H200's chip, clocks and power, and HBM3 at 3.35 TB/s where the H200 has HBM3e at 4.8. So only the
time that bytes take changes, and of that a table does not say how much there was. The rule never flatters FP8:

- BF16: a time stays what it was, for GEMMs fetch their operands while they compute, unless the bytes alone take longer.
- FP8: the bytes are taken as fetched while nothing else runs, and counted high. That part of the time, at most all of
  it, grows by the quotient of the bandwidths, 1.43.

Bytes, for each element of x [M, K], w [N, K] and y [M, N], forward and backward:

- BF16: 6. Two GEMMs read it (y: its gradient) and one writes it (x and w: their gradient).
- FP8: 14. In each of two orientations a cast reads BF16 twice, for the amax and for the codes, and writes a byte: 10;
  two GEMMs read a byte each: 2; one writes BF16: 2. Recipes with fewer casts move less.

In the shipped table the gain is then nowhere above the measured one. Where BF16 is bound by its bytes it can be, in
principle, but FP8 has more of them, so that what is left in BF16 on the measured GPU is left on the derived one.

    python -m acceler8.bench.derive        # writes the shipped tables anew from those that they come from

Source of the bandwidths: NVIDIA's data sheets "H100 Tensor Core GPU" (SXM5, 80 GB) and "H200 Tensor Core GPU" (SXM).
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from acceler8.costs import BF16, SHIPPED, CostTable, Shape, file_name

BF16_BYTES, FP8_BYTES = 6, 14
"""Moved for each element of x, w and y."""


@dataclass(frozen=True, kw_only=True)
class Derived:
    """A GPU whose table comes from another's, with the bandwidth of both memories in bytes a second."""

    gpu: str
    bandwidth: float
    origin: str
    origin_bandwidth: float

    @property
    def derivation(self) -> str:
        """What the file says of itself."""
        slower = self.origin_bandwidth / self.bandwidth
        return (
            f"from the {self.origin} table, for {self.bandwidth / 1e12:.2f} TB/s of memory in place of"
            f" {self.origin_bandwidth / 1e12:.2f}; bf16: max(ms, {BF16_BYTES} e / {self.bandwidth / 1e12:.2f} TB/s);"
            f" recipes: ms + {slower - 1:.4f} min(ms, {FP8_BYTES} e / {self.origin_bandwidth / 1e12:.2f} TB/s);"
            " e = m k + n k + m n elements"
        )


DERIVED = (
    Derived(gpu="NVIDIA H100 80GB HBM3", bandwidth=3.35e12, origin="NVIDIA H200", origin_bandwidth=4.8e12),
)  # fmt: skip
"""Those that the package ships. The name is what ``torch.cuda.get_device_name()`` gives for an H100 SXM."""


def derived_ms(ms: float, shape: Shape, recipe: str, rule: Derived) -> float:
    """Milliseconds on the derived GPU of a layer that took ``ms`` on the measured one."""
    m, k, n = shape
    elements = m * k + n * k + m * n
    if recipe == BF16:
        return max(ms, BF16_BYTES * elements / rule.bandwidth * 1e3)
    bytes_ms = min(ms, FP8_BYTES * elements / rule.origin_bandwidth * 1e3)
    return ms + bytes_ms * (rule.origin_bandwidth / rule.bandwidth - 1)


def derive(table: CostTable, rule: Derived) -> CostTable:
    """The table of ``rule.gpu`` from that of ``rule.origin``; times rounded as a file has them."""
    entries = {
        recipe: {shape: round(derived_ms(ms, shape, recipe, rule), 5) for shape, ms in by_shape.items()}
        for recipe, by_shape in table.entries.items()
    }
    return dataclasses.replace(
        table, gpu=rule.gpu, source="derived", derivation=rule.derivation, entries=entries, path=None
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Write every shipped table that is derived."""
    argparse.ArgumentParser(prog="python -m acceler8.bench.derive", description=main.__doc__).parse_args(arguments)
    for rule in DERIVED:
        path = SHIPPED / file_name(rule.gpu)
        derive(CostTable.load(SHIPPED / file_name(rule.origin)), rule).save(path)
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
