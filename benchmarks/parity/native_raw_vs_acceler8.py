"""MiniLM on MRPC by acceler8's own kernels, by hand and through ``Accelerator``: metrics, step time, memory.

    python benchmarks/parity/native_raw_vs_acceler8.py [--recipe rowwise|...] [--json FILE]

There is no library under the native backend; raw is a loop that calls ``acceler8.plan``, ``convert`` and ``attach``.
"""

from __future__ import annotations

import argparse
import sys

from common import arguments, compare, raw_by, through_accelerator
from torch import nn

import acceler8
from acceler8 import NativeRecipeKwargs


def exchange(model: nn.Module, args: argparse.Namespace) -> None:
    acceler8.convert(model, acceler8.plan(model, args.recipe))


raw = raw_by(exchange, attach=acceler8.attach)


def main() -> int:
    args = arguments("The native backend by hand and through Accelerator.", recipe="rowwise")
    return compare("native", raw, through_accelerator(NativeRecipeKwargs(recipe=args.recipe)), args, ())


if __name__ == "__main__":
    sys.exit(main())
