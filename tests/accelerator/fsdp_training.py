"""Training that a sharded model, replicas and one process must agree on."""

from __future__ import annotations

from functools import partial

from torch.distributed.fsdp import MixedPrecisionPolicy

from tests.accelerator.fsdp_support import Facts, Model, fp8, make_optimizer, plugin, train

RECIPES = ("rowwise", "tensorwise", "delayed", "blockwise", "mxfp8")


def native(recipe: str, way: str) -> Facts:
    """``ddp``; ``fsdp``, weights gathered in BF16; ``fsdp in fp32``, as DDP holds them; each with two micro-batches."""
    options = {"fsdp": {}, "fsdp in fp32": {"mixed_precision_policy": MixedPrecisionPolicy()}}.get(way)
    accelerator = fp8(recipe, fsdp_plugin=None if options is None else plugin(**options), gradient_accumulation_steps=2)
    model = Model(seed=1 + accelerator.process_index)  # the strategy begins with rank 0's
    model, optimizer = accelerator.prepare(model, make_optimizer(model.parameters()))
    facts = train(accelerator, model, optimizer, micro=2)
    return facts | {"is_fsdp2": accelerator.is_fsdp2, "type": str(accelerator.distributed_type.value)}


SCENARIOS = {
    f"{way}-{recipe}": partial(native, recipe, way) for recipe in RECIPES for way in ("ddp", "fsdp", "fsdp in fp32")
}
ALONE = tuple(f"ddp-{recipe}" for recipe in RECIPES)
"""What one process also runs, on all parts of each batch at once."""

__all__ = ["ALONE", "RECIPES", "SCENARIOS"]
