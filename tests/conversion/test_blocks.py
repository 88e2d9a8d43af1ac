"""Which modules of a model are its blocks."""

from __future__ import annotations

import pytest
from torch import nn

import acceler8
from acceler8.conversion.blocks import block_of, find_blocks
from tests.models import Mlp


class Other(Mlp):
    """A block of another class."""


class Experts(nn.Module):
    """A block that is wider than the model is deep."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.gate = nn.Linear(32, width)
        self.experts = nn.ModuleList(Mlp() for _ in range(width))


def named(prefix: str, *numbers: int) -> tuple[str, ...]:
    return tuple(f"{prefix}{i}" for i in numbers)


def tree(**children: nn.Module) -> nn.Module:
    module = nn.Module()
    for name, child in children.items():
        module.add_module(name, child)
    return module


def many(cls: type[nn.Module], count: int) -> list[nn.Module]:
    return [cls() for _ in range(count)]


def shared() -> nn.Module:
    one = Mlp()
    return tree(layers=nn.ModuleList([one] * 4))


MODELS = {
    "a list": (tree(layers=nn.ModuleList(many(Mlp, 3)), last=nn.Linear(32, 32)), named("layers.", 0, 1, 2)),
    "of two classes": (tree(layers=nn.ModuleList([Mlp(), Other(), Mlp()])), named("layers.", 0, 1, 2)),
    "the list itself": (nn.ModuleList(many(Mlp, 3)), named("", 0, 1, 2)),
    "a sequence with ends": (
        nn.Sequential(nn.Embedding(8, 32), *many(Mlp, 3), nn.LayerNorm(32), nn.Linear(32, 16)),
        named("", 1, 2, 3),
    ),
    "layers in a sequence": (
        nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32)),
        named("", 0, 2, 4),
    ),
    "blocks inside a sequence": (
        nn.Sequential(nn.Linear(32, 32), nn.Sequential(*many(Mlp, 2)), nn.LayerNorm(32)),
        named("1.", 0, 1),
    ),
    "experts in blocks": (tree(layers=nn.ModuleList(many(Experts, 3))), named("layers.", 0, 1, 2)),
    "the longest": (
        tree(encoder=nn.ModuleList(many(Mlp, 4)), decoder=nn.ModuleList(many(Mlp, 2))),
        named("encoder.", 0, 1, 2, 3),
    ),
    "the last of the longest": (
        tree(encoder=nn.ModuleList(many(Mlp, 2)), decoder=nn.ModuleList(many(Mlp, 2))),
        named("decoder.", 0, 1),
    ),
    "norms do not count": (tree(norms=nn.ModuleList(nn.LayerNorm(8) for _ in range(9)), m=Mlp()), ()),
    "one is no chain": (tree(layers=nn.ModuleList([Mlp()])), ()),
    "one block used again": (shared(), ()),
    "no container": (Mlp(), ()),
}


@pytest.mark.parametrize(("model", "expected"), MODELS.values(), ids=MODELS)
def test_blocks(model: nn.Module, expected: tuple[str, ...]):
    rows = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    assert find_blocks(model, rows, rows) == expected


def test_a_chain_without_fp8_is_none_and_a_block_without_fp8_is_one():
    model = tree(encoder=nn.ModuleList(many(Mlp, 4)), decoder=nn.ModuleList(many(Mlp, 2)))
    plan = acceler8.plan(model, skip=["encoder", "decoder.0"], fp8_last_layers="0:1,5:all")
    assert plan.blocks == named("decoder.", 0, 1)
    assert plan.in_fp8(0) == ("decoder.1.up", "decoder.1.down")
    plan = acceler8.plan(model, skip=["encoder.3"], fp8_last_layers="0:2,5:all")
    assert plan.blocks == named("encoder.", 0, 1, 2, 3)  # the skipped one is counted
    assert plan.in_fp8(0) == ("encoder.2.up", "encoder.2.down")


def test_the_block_of_a_layer_is_not_one_whose_name_begins_alike():
    blocks = named("layers.", *range(12))
    assert [block_of(name, blocks) for name in ("layers.1.up", "layers.11.up", "layers.11", "layers", "head")] == [
        1,
        11,
        11,
        None,
        None,
    ]
