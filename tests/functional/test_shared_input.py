"""Layers that read one activation: the same numbers as apart, one cast, one copy kept, nothing left behind."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from acceler8 import recipes
from acceler8.functional import LinearSlots, linear
from acceler8.functional.shared_input import Cast, SharedInput, can_carry, shared_input
from acceler8.kernels import Quantized
from acceler8.recipes import Recipe
from acceler8.scaling import AmaxSlot, AmaxState
from tests.functional.support import NAMES
from tests.functional.test_linear_work import Work

EVERY = (*NAMES, "activations_only")


class Readers:
    """Three layers over ``x = 2 * leaf``; under delayed scaling they share the slot of x, as converted ones do."""

    def __init__(self, name: str | Recipe, device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        self.recipe = recipes.resolve(name)
        generator = torch.Generator().manual_seed(3)
        self.leaf = torch.randn(20, 64, generator=generator).to(device, dtype).requires_grad_()
        shapes = ((48, 64), (32, 64), (32, 64))
        self.weights = [(torch.randn(s, generator=generator) * 0.1).to(device, dtype).requires_grad_() for s in shapes]
        self.dys = [(torch.randn(20, n, generator=generator) * 0.01).to(device, dtype) for n, _ in shapes]
        self.amax = AmaxState([f"{i}" for i in range(7)], 4, "max", 1, torch.device(device))

    def slots(self, i: int) -> LinearSlots | None:
        if not self.recipe.is_delayed:
            return None
        return LinearSlots(*(AmaxSlot(self.amax, place) for place in (0, 1 + 2 * i, 2 + 2 * i)))

    def call(self, x: Tensor, i: int, readers: int = 3, **options: object) -> Tensor:
        return linear(x, self.weights[i], recipe=self.recipe, slots=self.slots(i), readers=readers, **options)

    def forward(self, readers: int = 3) -> list[Tensor]:
        x = self.leaf * 2
        return [self.call(x, i, readers) for i in range(3)]

    def backward(self, ys: list[Tensor], **options: object) -> list[Tensor]:
        leaves = [t for t in (self.leaf, *self.weights) if t.requires_grad]
        return [*ys, *torch.autograd.grad(ys, leaves, self.dys, **options)]


def same(got: list[Tensor], want: list[Tensor]) -> bool:
    return len(got) == len(want) and all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def lying_on(x: Tensor) -> SharedInput | None:
    return x.__dict__.get("_acceler8_codes")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", EVERY)
def test_the_same_bits_as_apart(name, dtype, device):
    together, apart = Readers(name, device, dtype), Readers(name, device, dtype)
    for _ in range(3):  # under delayed scaling the second step has a history
        assert same(together.backward(together.forward()), apart.backward(apart.forward(readers=1)))
        assert torch.equal(together.amax.data, apart.amax.data)
        together.amax.update()
        apart.amax.update()


@pytest.mark.parametrize("name", EVERY)
def test_x_is_cast_once_and_kept_once(name, device):
    def work(readers: int) -> tuple[int, int]:
        layers = Readers(name, device)
        kept: dict[int, Tensor] = {}

        def pack(t: Tensor) -> Tensor:
            if t.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
                kept[t.data_ptr()] = t
            return t

        with Work() as work, saved_tensors_hooks(pack, lambda t: t):
            layers.forward(readers)
        return work.count["cast"], len(kept)

    weights = 0 if name == "activations_only" else 3
    assert work(readers=1) == (3 + weights, 3)
    assert work(readers=3) == (1 + weights, 1)


@pytest.mark.parametrize("name", NAMES)
def test_the_codes_of_fprop_are_freed_behind_the_last_reader(name, monkeypatch):
    made: list[weakref.ref[Tensor]] = []
    put = SharedInput.put

    def noted(self: SharedInput, cast: Cast, codes: Quantized) -> None:
        if cast.orientation == "rows":
            made.append(weakref.ref(codes.codes))
        put(self, cast, codes)

    monkeypatch.setattr(SharedInput, "put", noted)
    layers = Readers(name)
    x = layers.leaf * 2
    ys = [layers.call(x, i) for i in range(2)]
    (codes,) = made
    assert codes() is not None
    ys.append(layers.call(x, 2))
    assert codes() is None
    assert lying_on(x) is None
    layers.backward(ys)


def test_nothing_lies_where_a_change_might_go_unseen():
    layers = Readers("rowwise")
    layers.call(layers.leaf, 0)  # a leaf
    assert lying_on(layers.leaf) is None
    plain = layers.leaf.detach() * 2  # a result that autograd did not record
    layers.call(plain, 0)
    assert lying_on(plain) is None
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            x = layers.leaf * 2
            layers.call(x, 0)
            assert lying_on(x) is None
    held = nn.Parameter(torch.zeros(4, 64))
    assert shared_input(held) is None
    assert shared_input(layers.leaf * 2, make=False) is None


# Dynamo itself does this with every autograd.Function that it traces (torch 2.13)
@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be inst:DeprecationWarning")
def test_nothing_lies_in_a_compiled_region():
    torch.compiler.reset()
    layers, eager = Readers("rowwise"), Readers("rowwise")
    seen: list[bool] = []

    def forward(leaf: Tensor) -> list[Tensor]:
        x = leaf * 2
        seen.append(can_carry(x))
        return [layers.call(x, i) for i in range(3)]

    ys = torch.compile(forward, backend="eager")(layers.leaf)
    assert not any(seen)
    assert same(layers.backward(ys), eager.backward(eager.forward()))
    torch.compiler.reset()


@pytest.mark.parametrize("name", EVERY)
def test_a_change_in_place_between_two_readers_is_seen(name):
    def run(readers: int) -> list[Tensor]:
        layers = Readers(name)
        x = layers.leaf * 2
        ys = [layers.call(x, 0, readers)]
        with torch.no_grad():
            x.mul_(-3)
        ys += [layers.call(x, i, readers) for i in (1, 2)]
        return layers.backward(ys)

    assert same(run(3), run(1))


def test_other_formats_and_scales_are_other_codes():
    """One tensor read by recipes that differ in format, scales, rounding of scales or margin."""
    kinds = [
        recipes.get("rowwise"),
        recipes.get("rowwise", formats="HYBRID"),
        recipes.get("rowwise", formats="E5M2"),
        recipes.get("rowwise", pow2_scales=True),
        recipes.get("tensorwise"),
        recipes.get("mxfp8"),
        recipes.get("activations_only"),
    ]
    layers = Readers("rowwise")
    x = layers.leaf * 2
    for recipe in (*kinds, *kinds):
        layers.recipe = recipe
        assert torch.equal(layers.call(x, 0, readers=len(kinds) * 2 + 1), layers.call(x.detach(), 0))


@pytest.mark.parametrize("frozen", [0, 1, 2])
@pytest.mark.parametrize("name", EVERY)
def test_a_frozen_reader_takes_no_codes_from_the_others(name, frozen):
    results = []
    for readers in (3, 1):
        layers = Readers(name)
        layers.weights[frozen].requires_grad_(False)
        results.append(layers.backward(layers.forward(readers)))
    assert same(*results)


def test_a_lone_reader_and_one_too_many():
    """Fewer readers than expected leave codes until x dies; more cast again. Right for all."""
    layers = Readers("rowwise")
    x = layers.leaf * 2
    want = layers.call(x.detach(), 0)
    assert torch.equal(layers.call(x, 0), want)
    gone = weakref.ref(lying_on(x))
    assert gone() is not None
    for _ in range(4):
        assert torch.equal(layers.call(x, 0), want)
    del x
    layers.leaf.grad = None
    assert gone() is None


def test_each_layer_that_is_observed_still_observes():
    layers = Readers("rowwise")
    x = layers.leaf * 2
    seen: list[tuple[int, str]] = []
    ys = []
    for i in range(3):
        ys.append(layers.call(x, i, observer=lambda role, packed, n, i=i: seen.append((i, role))))
        assert lying_on(x) is None
    layers.backward(ys)
    assert {(i, role) for i in range(3) for role in ("x", "w", "dy")} <= set(seen)


@pytest.mark.parametrize("name", EVERY)
def test_retain_graph(name):
    layers = Readers(name)
    ys = layers.forward()
    first = layers.backward(ys, retain_graph=True)
    assert same(layers.backward(ys), first)


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_activation_checkpointing(name, early_stop):
    from torch.utils.checkpoint import set_checkpoint_early_stop

    layers, plain = Readers(name), Readers(name)
    left: list[weakref.ref[SharedInput]] = []

    def block(leaf: Tensor) -> tuple[Tensor, ...]:
        x = leaf * 2
        out = []
        for i in range(3):
            out.append(layers.call(x, i))
            if (lies := lying_on(x)) is not None:
                left.append(weakref.ref(lies))
        return tuple(out)

    with set_checkpoint_early_stop(early_stop):
        ys = checkpoint(block, layers.leaf, use_reentrant=False)
        got = layers.backward(list(ys))
    assert same(got, plain.backward(plain.forward()))
    assert torch.equal(layers.amax.data, plain.amax.data)
    assert left
    assert all(ref() is None for ref in left)


def test_delayed_scaling_records_as_one_layer_does():
    layers, one = Readers("delayed"), Readers("delayed")
    for factor in (1.0, 5.0, 0.1):
        for readers in (layers, one):
            with torch.no_grad():
                readers.leaf.mul_(factor)
        layers.forward()
        one.call(one.leaf * 2, 0, readers=1)
        assert torch.equal(layers.amax.data[:, 0], one.amax.data[:, 0])
        layers.amax.update()
        one.amax.update()


def test_an_evaluation_beside_training_takes_no_codes_that_were_not_recorded():
    """Codes made without recording are not handed to a reader that records: its amax would be lost."""
    layers = Readers("delayed")
    x = layers.leaf * 2
    slots = layers.slots(0)
    linear(x, layers.weights[0], recipe=layers.recipe, slots=slots._replace(records=False), readers=3)
    assert not layers.amax.data.any()
    layers.call(x, 1)
    assert layers.amax.data[0, 0] == x.abs().max()
