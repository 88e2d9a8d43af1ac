"""MiniLM on MRPC by TransformerEngine itself and by acceler8's backend over it: metrics, step time, memory.

    python benchmarks/parity/te_raw_vs_acceler8.py [--recipe delayed|tensorwise|blockwise|mxfp8] [--json FILE]

Raw is what TransformerEngine's documentation writes: ``te.Linear`` and ``te.LayerNorm`` in the places of PyTorch's, one
``te.autocast`` around the model's forward in training.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import AbstractContextManager

import torch
from common import arguments, compare, raw_by, through_accelerator
from torch import nn

from acceler8 import backends
from acceler8.utils import TERecipeKwargs


def to_transformer_engine(module: nn.Module) -> None:
    """Replace what TransformerEngine takes, copying the values, as its users do by hand."""
    import transformer_engine.pytorch as te

    for name, child in module.named_children():
        if isinstance(child, nn.Linear) and all(size % 16 == 0 for size in child.weight.shape):
            has_bias = child.bias is not None
            made = te.Linear(child.in_features, child.out_features, bias=has_bias, params_dtype=torch.float32)
        elif isinstance(child, nn.LayerNorm):
            made = te.LayerNorm(child.normalized_shape, eps=child.eps, dtype=torch.float32)
        else:
            to_transformer_engine(child)
            continue
        with torch.no_grad():
            for own, value in made.named_parameters():
                value.copy_(getattr(child, own))
        setattr(module, name, made)


def raw_recipe(name: str) -> object:
    """The recipe object with the settings of acceler8's recipe of this name."""
    from transformer_engine.common import recipe as te

    if name == "delayed":
        return te.DelayedScaling(amax_history_len=1024, amax_compute_algo="most_recent")
    if name == "blockwise":
        return te.Float8BlockScaling(use_f32_scales=True)
    made: object = {"tensorwise": te.Float8CurrentScaling, "mxfp8": te.MXFP8BlockScaling}[name]()
    return made


def exchange(model: nn.Module, args: argparse.Namespace) -> None:
    to_transformer_engine(model)


def context(model: nn.Module, args: argparse.Namespace) -> AbstractContextManager[object]:
    import transformer_engine.pytorch as te

    around: AbstractContextManager[object] = te.autocast(enabled=model.training, recipe=raw_recipe(args.recipe))
    return around


raw = raw_by(exchange, context)


def main() -> int:
    args = arguments("TransformerEngine raw and through acceler8.", recipe="delayed")
    if reason := backends.find("transformer_engine").unavailable():
        print(reason, file=sys.stderr)
        return 2
    ours = through_accelerator(TERecipeKwargs(recipe=args.recipe))
    return compare("transformer_engine", raw, ours, args, ("transformer-engine",))


if __name__ == "__main__":
    sys.exit(main())
