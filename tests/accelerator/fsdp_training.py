"""Training that a sharded model, replicas and one process must agree on."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from acceler8 import Accelerator, recipes
from acceler8.utils import AORecipeKwargs, NativeRecipeKwargs
from tests.accelerator.fsdp_support import Facts, Model, fp8, in_fp32, make_optimizer, plugin, train

RECIPES = ("rowwise", "tensorwise", "delayed", "blockwise", "mxfp8", "activations_only")
GW_HP = recipes.get("rowwise").with_gemms(wgrad=False)
"""x and dy are scaled by token and the weight by row: nothing depends on how a batch is divided. With SGD, for AdamW's
first updates are as large as the learning rate whatever the gradient is, and one near zero may turn its sign."""


def run(accelerator: Accelerator, *, micro: int = 1, **options: Any) -> Facts:
    model = Model(seed=1 + accelerator.process_index)  # the strategy begins with rank 0's
    make = partial(torch.optim.SGD, lr=0.01) if accelerator.recipe == GW_HP else make_optimizer
    model, optimizer = accelerator.prepare(model, make(model.parameters()))
    facts = train(accelerator, model, optimizer, micro=micro, **options)
    return facts | {"is_fsdp2": accelerator.is_fsdp2, "type": accelerator.distributed_type.value}


def native(recipe: Any, way: str) -> Facts:
    """Two micro-batches a step, in one of ``WAYS``."""
    return run(fp8(recipe, fsdp_plugin=WAYS[way](), gradient_accumulation_steps=2), micro=2)


WAYS = {"ddp": lambda: None, "fsdp": plugin, "fsdp in fp32": in_fp32}
"""Replicas; weights gathered in BF16; gathered in FP32, as replicas hold them."""


def torchao(recipe: str, way: str, **options: Any) -> Facts:
    own = AORecipeKwargs(recipe=recipe, **options)
    return run(Accelerator("fp8", kwargs_handlers=[own], cpu=True, fsdp_plugin=WAYS[way]()))


def gathering(recipe: str) -> Facts:
    """Weights of the native backend travel as FP8 codes."""
    own = NativeRecipeKwargs(recipe=recipe, enable_fsdp_float8_all_gather=True)
    return run(
        Accelerator("fp8", kwargs_handlers=[own], cpu=True, fsdp_plugin=in_fp32(), gradient_accumulation_steps=2),
        micro=2,
    )


def torchao_loaded_in_first() -> Facts:
    own = AORecipeKwargs(recipe="tensorwise", enable_fsdp_float8_all_gather=True)
    sharding = in_fp32(cpu_ram_efficient_loading=True)
    return run(Accelerator("fp8", kwargs_handlers=[own], cpu=True, fsdp_plugin=sharding))


def plain(precision: str, way: str) -> Facts:
    """Without FP8."""
    return run(Accelerator(precision, cpu=True, fsdp_plugin=WAYS[way]()))


SCENARIOS = {
    **{f"{way}-{recipe}": partial(native, recipe, way) for recipe in RECIPES for way in ("ddp", "fsdp in fp32")},
    **{f"{way}-gw_hp": partial(native, GW_HP, way) for way in WAYS},
    **{f"gathering-{recipe}": partial(gathering, recipe) for recipe in ("tensorwise", "rowwise")},
    **{f"{way}-torchao-{recipe}": partial(torchao, recipe, way) for recipe in ("tensorwise", "rowwise")
       for way in ("ddp", "fsdp in fp32")},
    "gathering-torchao": partial(torchao, "tensorwise", "fsdp in fp32", enable_fsdp_float8_all_gather=True),
    "loaded-torchao": torchao_loaded_in_first,
    **{f"{way}-{precision}": partial(plain, precision, way) for precision in ("no", "fp16")
       for way in ("ddp", "fsdp in fp32")},
}  # fmt: skip
ALONE = ("ddp-gw_hp",)
"""What one process also runs, on all parts of each batch at once."""
EQUAL = {
    **{f"fsdp in fp32-{name}": f"ddp-{name}" for name in (*RECIPES, "gw_hp", "torchao-tensorwise", "torchao-rowwise")},
    **{f"fsdp in fp32-{precision}": f"ddp-{precision}" for precision in ("no", "fp16")},
    **{f"gathering-{recipe}": f"fsdp in fp32-{recipe}" for recipe in ("tensorwise", "rowwise")},
    "gathering-torchao": "fsdp in fp32-torchao-tensorwise",
    "loaded-torchao": "fsdp in fp32-torchao-tensorwise",
}
"""A training -> one that does the same arithmetic."""

__all__ = ["ALONE", "EQUAL", "RECIPES", "SCENARIOS", "run"]
