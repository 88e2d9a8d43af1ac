"""MiniLM on MRPC by torchao itself and by acceler8's backend over it: metrics, step time, memory.

    python benchmarks/parity/torchao_raw_vs_acceler8.py [--recipe tensorwise|rowwise] [--json FILE]

Raw is ``convert_to_float8_training`` on all but the first and last linear layer, with padding. Both run in eager mode;
on the CPU torchao emulates FP8.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys

from common import arguments, compare, raw_by, through_accelerator
from torch import nn

from acceler8 import backends
from acceler8.utils import AORecipeKwargs


def exchange(model: nn.Module, args: argparse.Namespace) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear

    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]

    def is_taken(module: nn.Module, name: str) -> bool:
        fits = isinstance(module, nn.Linear) and all(size % 16 == 0 for size in module.weight.shape)
        return fits and name not in (names[0], names[-1])

    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(args.recipe), pad_inner_dim=True)
    convert_to_float8_training(model, module_filter_fn=is_taken, config=config)
    if args.device == "cpu":  # there torchao's layers do not see autocast, which acceler8 applies for them
        for module in model.modules():
            if isinstance(module, Float8Linear):
                module.register_forward_pre_hook(lambda _, inputs: (inputs[0].bfloat16(),))


raw = raw_by(exchange)


def main() -> int:
    args = arguments("torchao raw and through acceler8.", recipe="tensorwise")
    if reason := backends.find("torchao").unavailable():
        print(reason, file=sys.stderr)
        return 2
    return compare("torchao", raw, through_accelerator(AORecipeKwargs(recipe=args.recipe)), args, ("torchao",))


if __name__ == "__main__":
    sys.exit(main())
