"""What stays of inputs until backward: the same gradients, or the noise of one more cast; fewer bytes; no trace."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from acceler8 import recipes
from acceler8.functional import LinearSlots, WeightCodes, linear, norm
from acceler8.functional.gated_mlp import gated_mlp
from acceler8.functional.kept_input import compress, expand, is_kept_by_its_maker, saves_bytes
from acceler8.functional.linears import linears
from acceler8.functional.shared_input import shared_input
from acceler8.recipes import Recipe
from acceler8.scaling import AmaxSlot, AmaxState
from tests.functional.support import NAMES, quantized, sqnr_db

POLICIES = ("fp8", "fp8_compressed", "bf16")
each_name = pytest.mark.parametrize("name", NAMES)
each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
WIDTH, HIDDEN, TOKENS = 128, 256, 96


class Block:
    """A norm with a layer, merged layers, or a gated MLP behind it. ``amax`` is the state of a delayed recipe."""

    def __init__(
        self, kind: str, recipe: Recipe | str, dtype: torch.dtype = torch.bfloat16, *, seed: int = 0, shape=(TOKENS,)
    ) -> None:
        g = torch.Generator().manual_seed(seed)
        self.kind, self.recipe = kind, recipes.resolve(recipe)
        shapes = {"linear": [(HIDDEN, WIDTH)], "linears": [(HIDDEN, WIDTH)] * 3}.get(kind) or [
            (HIDDEN, WIDTH), (HIDDEN, WIDTH), (WIDTH, HIDDEN),
        ]  # fmt: skip
        self.x = torch.randn(*shape, WIDTH, generator=g).mul_(2.0).to(dtype).requires_grad_()
        self.gain = (1 + 0.1 * torch.randn(WIDTH, generator=g)).to(dtype).requires_grad_()
        self.weights = [torch.randn(s, generator=g).mul_(s[1] ** -0.5).to(dtype).requires_grad_() for s in shapes]
        out = shapes[-1][0] if kind == "gated" else HIDDEN
        self.dys = [
            torch.randn(*shape, out, generator=g).mul_(1e-2).to(dtype) for _ in range(1 + 2 * (kind == "linears"))
        ]
        self.options: dict[str, Any] = {}
        self.state = AmaxState([f"{i}.{r}" for i in range(2) for r in "xwdy"], 4, "max", 1, torch.device("cpu"))

    @property
    def leaves(self) -> list[Tensor]:
        return [self.x, self.gain, *self.weights]

    def slots(self) -> tuple[LinearSlots, LinearSlots] | None:
        if not self.recipe.is_delayed:
            return None
        places = [AmaxSlot(self.state, i) for i in range(6)]
        return LinearSlots(*places[:3]), LinearSlots(*places[3:])

    def normed(self, x: Tensor, *, codes: bool = False) -> Tensor:
        """The norm's result, carrying what a converted norm leaves on it; with ``codes`` as one that has learned."""
        slots = self.slots()
        slot = None if slots is None else slots[0].x
        options = {"eps": 1e-6, "compressed": self.recipe.save_for_backward == "fp8_compressed", **self.options}
        y, beside = norm(x, self.gain, recipe=self.recipe if codes else None, slot=slot, **options)
        shared = shared_input(y)
        if shared is not None and beside is not None:
            shared.source, shared.column_amax = beside.source, beside.column_amax
        return y

    def read(self, y: Tensor, **options: Any) -> list[Tensor]:
        slots = self.slots()
        if self.kind == "gated":
            up = self.weights[1]
            return [
                gated_mlp(y, self.weights[0], up, self.weights[2], activation="silu", recipe=self.recipe, slots=slots)
            ]
        first = None if slots is None else slots[0]
        if self.kind == "linears":
            return list(linears(y, self.weights, [None] * 3, recipe=self.recipe, slots=first, codes=WeightCodes()))
        return [linear(y, self.weights[0], recipe=self.recipe, slots=first, **options)]

    def forward(self, *, codes: bool = False, **options: Any) -> list[Tensor]:
        return self.read(self.normed(self.x, codes=codes), **options)

    def run(self, **options: Any) -> list[Tensor]:
        """Results, then gradients."""
        ys = self.forward(**options)
        return [*(y.detach() for y in ys), *torch.autograd.grad(ys, self.leaves, self.dys)]

    def exact(self, change: Callable[[str, Tensor], Tensor] = lambda what, t: t) -> list[Tensor]:
        """Results and gradients in float64. ``change`` may put noise on what is kept, in backward only."""
        x, gain, *weights = (t.detach().double() for t in self.leaves)
        dys = [dy.double() for dy in self.dys]

        def normal(x: Tensor) -> tuple[Tensor, Tensor]:
            inverse = (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
            return x * inverse, inverse

        y = normal(x)[0] * gain
        kept = normal(change("x", x))[0] * gain
        if self.kind == "gated":
            gate_up = y @ torch.cat(weights[:2]).t()
            g, u = gate_up.chunk(2, -1)
            out = [(F.silu(g) * u) @ weights[2].t()]
            g, u = change("gate_up", gate_up).chunk(2, -1)
            d_act = dys[0] @ weights[2]
            s = torch.sigmoid(g)
            d_gate_up = torch.cat([d_act * u * s * (1 + g * (1 - s)), d_act * F.silu(g)], -1)
            d_y = d_gate_up @ torch.cat(weights[:2])
            dws = [*(d_gate_up.t() @ kept).chunk(2), dys[0].t() @ (F.silu(g) * u)]
        else:
            out = [y @ w.t() for w in weights]
            d_y = torch.stack([dy @ w for dy, w in zip(dys, weights, strict=True)]).sum(0)
            dws = [dy.t() @ kept for dy in dys]
        n, _ = normal(change("x", x))
        _, inverse = normal(x)
        scaled = d_y * gain
        dx = (scaled - n * (scaled * n).mean(-1, keepdim=True)) * inverse
        return [*out, dx, (d_y * n).sum(0), *dws]


KINDS = ("linear", "linears", "gated")
each_kind = pytest.mark.parametrize("kind", KINDS)


def same(got: list[Tensor], want: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def with_policy(name: str, policy: str, **fields: Any) -> Recipe:
    return recipes.get(name, save_for_backward=policy, **fields)


# ------------------------------------------------------------------------------------------------------- the numbers


@each_dtype
@each_kind
@each_name
def test_inputs_as_they_are_give_the_gradients_of_codes(name, kind, dtype):
    want = Block(kind, name, dtype).run()
    assert same(Block(kind, with_policy(name, "bf16"), dtype).run(), want)


@pytest.mark.parametrize(
    "recipe",
    [
        recipes.get("rowwise", formats="E5M2"),
        recipes.get("tensorwise", formats="E5M2", pow2_scales=True),
        recipes.get("delayed", margin=2),
        *(recipes.get(name).with_gemms(fprop=False) for name in ("rowwise", "delayed")),
        *(recipes.get(name).with_gemms(dgrad=False) for name in ("rowwise", "delayed")),
        recipes.get("rowwise").with_gemms(wgrad=False),
    ],
    ids=lambda r: f"{r.name} {' '.join(r.fp8_gemms)} {r.fprop.a.format}",
)
def test_inputs_as_they_are_under_other_formats_and_gemms(recipe):
    blocks = [Block("linear", recipe), Block("linear", recipe.replace(save_for_backward="bf16"))]
    for _ in range(3):
        assert same(blocks[1].run(), blocks[0].run())
        assert torch.equal(blocks[0].state.data, blocks[1].state.data)
        for block in blocks:
            block.state.update()
            block.x.data.mul_(1.5)


@pytest.mark.parametrize("policy", POLICIES)
@each_kind
@each_name
def test_forward_is_the_same_with_each(name, kind, policy):
    want, block = Block(kind, name), Block(kind, with_policy(name, policy))
    for codes in (False, True):
        for y, plain in zip(block.forward(codes=codes), want.forward(codes=codes), strict=True):
            assert torch.equal(y, plain)


@each_dtype
@each_kind
@each_name
def test_compressed_adds_the_noise_of_one_cast(name, kind, dtype):
    """Noise of independent roundings adds in power: that of fp8, and what float64 makes of the input in FP8 alone."""
    shape = (512,)
    fp8 = Block(kind, name, dtype, shape=shape)
    block = Block(kind, with_policy(name, "fp8_compressed"), dtype, shape=shape)
    exact = fp8.exact()
    added = fp8.exact(lambda what, t: quantized(t.to(dtype), "E4M3", "1x128"))
    before, after = fp8.run(), block.run()
    results = len(fp8.dys)
    for i, (want, noisy, less, more) in enumerate(zip(exact, added, before, after, strict=True)):
        if i < results:
            assert torch.equal(less, more)
            continue
        signal = want.square().sum()
        of_fp8, of_cast, of_both = (((t.double() - want).square().sum() / signal).item() for t in (less, noisy, more))
        assert of_both <= 1.15 * (of_fp8 + of_cast) + 1e-9, i
        assert of_both >= 0.85 * of_fp8
        if i >= results + 2:  # the weights: the noise is there
            assert of_both >= of_fp8 + 0.5 * of_cast
            assert sqnr_db(more, want).item() > 19


def test_what_one_cast_costs_in_decibels():
    """A weight's gradient is a product of two E4M3 operands; a third cast of the same noise costs 10 log10(3/2)."""
    drops = {}
    for name in ("rowwise", "blockwise", "tensorwise"):
        fp8, less = (
            Block("linear", name, shape=(512,)),
            Block("linear", with_policy(name, "fp8_compressed"), shape=(512,)),
        )
        exact = fp8.exact()[-1]
        drops[name] = (sqnr_db(fp8.run()[-1], exact) - sqnr_db(less.run()[-1], exact)).item()
    assert 1.2 < drops["rowwise"] < 2.0, drops
    assert 1.2 < drops["blockwise"] < 2.0, drops
    assert 0.4 < drops["tensorwise"] < 1.2, drops  # E5M2 for dy, four times the noise of E4M3: 10 log10(6/5)


@pytest.mark.parametrize("policy", POLICIES)
@each_kind
@each_name
def test_the_first_step_and_later_ones_are_alike(name, kind, policy):
    """A norm that has learned hands codes on: no gradient knows."""
    recipe = with_policy(name, policy)
    assert same(Block(kind, recipe).run(codes=True), Block(kind, recipe).run(codes=False))


@each_name
@pytest.mark.parametrize("kind", ["linear", "linears"])
@pytest.mark.parametrize(
    "options",
    [
        {}, {"weight_offset": 1.0}, {"cast_before_weight": True}, {"kind": "layer"}, {"kind": "layer", "eps": 3e4},
        {"kind": "layer", "bias": True, "weight_offset": 2.0}, {"cast_before_weight": True, "dtype": torch.float32},
    ],
    ids=str,
)  # fmt: skip
def test_an_input_that_fp8_holds_exactly(options, kind, name):
    """Then what is made again is what was there, to the bit: by the very norm, in its dtype, cast by its own amaxes."""
    runs = []
    for policy in ("fp8", "fp8_compressed"):
        block = Block(kind, with_policy(name, policy))
        codes = torch.randint(0, 0x7F, block.x.shape, generator=torch.Generator().manual_seed(3), dtype=torch.uint8)
        codes[:, 0] = 0x7E  # 448 in each block: the scale is 1
        x = codes.view(torch.float8_e4m3fn).to(block.x.dtype)
        block.x = torch.where(codes % 2 == 0, x, -x).requires_grad_()
        block.options = {key: value for key, value in options.items() if key not in ("bias", "dtype")}
        if "bias" in options:
            block.options["bias"] = torch.linspace(-3, 3, WIDTH).to(x.dtype).requires_grad_()
        if "dtype" in options:  # the weights', to which the norm's result is promoted
            block.gain, *block.weights = (t.detach().to(options["dtype"]).requires_grad_() for t in block.leaves[1:])
            block.dys = [dy.to(options["dtype"]) for dy in block.dys]
        runs.append(block.run())
    assert same(*runs)


# ---------------------------------------------------------------------------------------------- shapes, dtypes, modes


@pytest.mark.parametrize("policy", POLICIES)
@each_kind
@pytest.mark.parametrize("shape", [(), (6,), (2, 3), (0,), (2, 0), (2, 3, 5)], ids=str)
def test_any_leading_dimensions(shape, kind, policy):
    block = Block(kind, with_policy("rowwise", policy), shape=shape)
    got = block.run()
    assert all(g.shape == leaf.shape for g, leaf in zip(got[len(block.dys) :], block.leaves, strict=True))
    flat = Block(kind, with_policy("rowwise", policy), shape=(max(0, block.x.numel() // WIDTH),))
    flat.x.data.copy_(block.x.data.view(flat.x.shape))
    flat.dys = [dy.reshape(-1, dy.shape[-1]) for dy in block.dys]
    for a, b in zip(got, flat.run(), strict=True):
        assert torch.equal(a.reshape(b.shape), b)


@pytest.mark.parametrize("policy", POLICIES)
@each_kind
def test_strides_change_nothing(kind, policy):
    recipe = with_policy("rowwise", policy)
    want = Block(kind, recipe).run()
    block = Block(kind, recipe)
    block.x = block.x.detach().t().contiguous().t().requires_grad_()
    block.dys = [dy.t().contiguous().t() for dy in block.dys]
    assert not block.x.is_contiguous()
    assert same(block.run(), want)


@pytest.mark.parametrize("policy", POLICIES)
def test_an_input_that_is_not_contiguous(policy):
    block = Block("linear", with_policy("rowwise", policy))
    x = block.x.detach().t().contiguous().t().requires_grad_()
    got = torch.autograd.grad(block.read(x), [x, block.weights[0]], block.dys)
    want = torch.autograd.grad(block.read(block.x), [block.x, block.weights[0]], block.dys)
    assert same(list(got), list(want))


@pytest.mark.parametrize("params", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("policy", POLICIES)
@each_kind
def test_under_autocast(kind, policy, params):
    """Parameters and residual stream in FP32, results in BF16; backward runs outside, as it should, and inside."""
    runs = []
    for inside in (False, True):
        block = Block(kind, with_policy("rowwise", policy), torch.float32)
        block.weights = [w.detach().to(params).requires_grad_() for w in block.weights]
        with torch.autocast("cpu", torch.bfloat16):
            ys = block.forward()
        assert {y.dtype for y in ys} == {torch.bfloat16}
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            grads = torch.autograd.grad(ys, block.leaves, [dy.bfloat16() for dy in block.dys])
        assert [g.dtype for g in grads] == [leaf.dtype for leaf in block.leaves]
        runs.append([*ys, *grads])
    assert same(*runs)
    if policy == "bf16":
        plain = Block(kind, "rowwise", torch.float32)
        plain.weights = [w.detach().to(params).requires_grad_() for w in plain.weights]
        with torch.autocast("cpu", torch.bfloat16):
            ys = plain.forward()
        assert same([*ys, *torch.autograd.grad(ys, plain.leaves, [dy.bfloat16() for dy in plain.dys])], runs[0])


@pytest.mark.parametrize("policy", POLICIES)
@each_kind
def test_two_backwards_of_one_graph(kind, policy):
    block = Block(kind, with_policy("delayed", policy))
    ys = block.forward()
    first = torch.autograd.grad(ys, block.leaves, block.dys, retain_graph=True)
    before = block.state.data.clone()
    assert same(list(torch.autograd.grad(ys, block.leaves, block.dys)), list(first))
    assert torch.equal(block.state.data, before)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
@each_kind
def test_activation_checkpointing(kind, policy, reentrant):
    recipe = with_policy("delayed", policy)
    block, want = Block(kind, recipe), Block(kind, recipe)
    ys = checkpoint(lambda x: tuple(block.read(block.normed(x))), block.x, use_reentrant=reentrant)
    torch.autograd.backward(ys, block.dys)
    assert same([*(y.detach() for y in ys), *(leaf.grad for leaf in block.leaves)], want.run())
    assert torch.equal(block.state.data, want.state.data)


@pytest.mark.parametrize("codes", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
@each_kind
def test_checkpointing_behind_the_norm(kind, policy, codes):
    """What the norm left on its result is read twice: recomputed layers keep what those before kept."""
    recipe = with_policy("rowwise", policy)
    block, want = Block(kind, recipe), Block(kind, recipe)
    ys = checkpoint(lambda y: tuple(block.read(y)), block.normed(block.x, codes=codes), use_reentrant=False)
    torch.autograd.backward(ys, block.dys)
    assert same([*(y.detach() for y in ys), *(leaf.grad for leaf in block.leaves)], want.run())
    # a reentrant one recomputes from a copy of its input, on which nothing lies: codes are kept there
    block = Block(kind, recipe)
    ys = checkpoint(lambda y: tuple(block.read(y)), block.normed(block.x, codes=codes), use_reentrant=True)
    torch.autograd.backward(ys, block.dys)
    if kind != "gated" or policy != "fp8_compressed":
        assert same([leaf.grad for leaf in block.weights], Block(kind, "rowwise").run()[-len(block.weights) :])


@pytest.mark.parametrize("policy", POLICIES)
@each_kind
def test_saved_tensors_may_be_packed_away(kind, policy):
    recipe = with_policy("rowwise", policy)
    block = Block(kind, recipe)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: t.clone().numpy(force=True) if t.dtype is torch.float32 else t.clone(), lambda t: torch.as_tensor(t)
    ):
        ys = block.forward()
    got = [*(y.detach() for y in ys), *torch.autograd.grad(ys, block.leaves, block.dys)]
    assert same(got, Block(kind, recipe).run())


@pytest.mark.parametrize("kind", ["linear", "linears", "gated"])
def test_an_edit_between_forward_and_backward(kind):
    """What is kept itself raises; codes of it do not care."""
    for policy in POLICIES:
        block = Block(kind, with_policy("rowwise", policy))
        x = block.x.detach().clone()
        ys = block.read(x)
        x.add_(1.0)
        if policy == "bf16":
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                torch.autograd.grad(ys, block.weights, block.dys)
        else:
            got = torch.autograd.grad(ys, block.weights, block.dys)
            want = torch.autograd.grad(block.read(block.x.detach()), block.weights, block.dys)
            assert same(list(got), list(want))


def test_an_edit_of_the_norms_result_or_weight():
    """The result edited is another tensor, which the norm cannot make again; its weight edited raises."""
    block = Block("linear", with_policy("rowwise", "fp8_compressed"))
    y = block.normed(block.x)
    y.add_(1.0)
    (dw,) = torch.autograd.grad(block.read(y), block.weights, block.dys)
    plain = Block("linear", "rowwise")
    y = plain.normed(plain.x)
    y.add_(1.0)
    assert torch.equal(dw, torch.autograd.grad(plain.read(y), plain.weights, plain.dys)[0])
    ys = block.forward()
    with torch.no_grad():
        block.gain.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(ys, block.weights, block.dys)


# -------------------------------------------------------------------------------------------------- what is not kept


def held(make: Callable[[], Any], known: list[Tensor]) -> tuple[Any, list[Tensor]]:
    """What ``make`` gives, and what autograd keeps for it beside ``known``: one tensor for each storage."""
    found: dict[int, Tensor] = {}

    def pack(t: Tensor) -> Tensor:
        found[t.untyped_storage().data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = make()
    own = {t.untyped_storage().data_ptr() for t in known}
    return out, [t for at, t in found.items() if at not in own and t.untyped_storage().nbytes()]


def sizes(tensors: list[Tensor]) -> list[tuple[int, int]]:
    return sorted((t.numel(), t.dtype.itemsize) for t in tensors)


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_kept_one_by_one(kind):
    """By hand: which tensors, of how many elements, of how many bytes each."""
    m, k, n = TOKENS, WIDTH, HIDDEN
    of_norm = [(m, 4)]  # inverse_std
    x_fp8 = [(m * k, 1), (m * k // 128, 4)]
    x_wgrad = [(k * m, 1), (k, 4)]
    gate_up = {"fp8": [(m * 2 * n, 2)], "bf16": [(m * 2 * n, 2)]}
    gate_up["fp8_compressed"] = [(m * 2 * n, 1), (m * 2 * n // 128, 4)]
    expected = {"fp8": x_wgrad, "bf16": [(m * k, 2)], "fp8_compressed": x_fp8}
    for policy in POLICIES:
        block = Block(kind, with_policy("rowwise", policy))
        for codes in (False, True):
            _, kept = held(lambda block=block, codes=codes: block.forward(codes=codes), block.leaves)
            want = of_norm + expected[policy] + (gate_up[policy] if kind == "gated" else [])
            assert sizes(kept) == sorted(want), policy


@pytest.mark.parametrize("policy", POLICIES)
@each_kind
def test_nothing_is_kept_for_a_gradient_that_nobody_wants(kind, policy):
    recipe = with_policy("rowwise", policy)
    block = Block(kind, recipe)
    for w in block.weights:
        w.requires_grad_(False)
    ys, kept = held(block.forward, block.leaves)
    layers = [t for t in kept if t.numel() == TOKENS * WIDTH]
    assert len(layers) <= (policy == "fp8_compressed")  # x of the norm; in the other cases it is a leaf
    assert (2 * HIDDEN * TOKENS in [t.numel() for t in kept]) == (kind == "gated")
    want = Block(kind, recipe).run()
    assert same(list(torch.autograd.grad(ys, block.leaves[:2], block.dys)), want[len(ys) : len(ys) + 2])

    frozen = Block(kind, recipe)
    for leaf in frozen.leaves[:2]:
        leaf.requires_grad_(False)
    ys, kept = held(frozen.forward, frozen.leaves)
    assert {t.dtype for t in kept if t.numel() == TOKENS * WIDTH} == {
        torch.bfloat16 if policy == "bf16" else torch.float8_e4m3fn
    }
    if policy != "fp8_compressed" or kind != "gated":  # nothing to make the result from is kept: codes are
        grads = torch.autograd.grad(ys, frozen.weights, frozen.dys)
        assert same(list(grads), Block(kind, "rowwise").run()[-len(grads) :])


@pytest.mark.parametrize("policy", POLICIES)
@each_kind
def test_without_gradients_nothing_is_kept_or_cast_for_them(kind, policy, monkeypatch):
    def refuse(x: Tensor) -> None:
        raise AssertionError("compressed for nothing")

    for module in ("mlp", "norm"):
        monkeypatch.setattr(sys.modules[f"acceler8.functional.{module}"], "compress", refuse)
    block = Block(kind, with_policy("rowwise", policy))
    want = Block(kind, "rowwise").run()
    with torch.no_grad():
        assert same(block.forward(), want[: len(block.dys)])
    for leaf in block.leaves:
        leaf.requires_grad_(False)
    assert same(block.forward(), want[: len(block.dys)])


def test_fp8_only_where_it_is_smaller():
    """Codes come in whole blocks of 128: a narrow row would grow."""
    for dtype in (torch.bfloat16, torch.float32):
        for cols in (1, 16, 48, 64, 65, 66, 67, 100, 128, 129, 130, 200, 576, 4096):
            x = torch.ones(2, cols, dtype=dtype)
            made = compress(x)
            assert saves_bytes(cols, dtype) == (made.codes.nbytes + made.scale_inv.nbytes < x.nbytes), (cols, dtype)
            assert torch.equal(expand(made.codes, made.scale_inv, cols, dtype), x)
    x = torch.randn(8, 48).bfloat16().requires_grad_()
    assert norm(x, None, compressed=True)[1] is None
    _, kept = held(lambda: norm(x, None, compressed=True), [x])
    assert sizes(kept) == [(8, 4)]


@pytest.mark.parametrize("policy", POLICIES)
@each_kind
def test_no_input_outlives_what_is_kept_of_it(kind, policy):
    """Not on the context, not on the model: x and the norm's result go when their last reader has them in codes."""
    block = Block(kind, with_policy("rowwise", policy))
    gc.collect()
    x = block.x * 1.0
    y = block.normed(x, codes=True)
    ys = block.read(y)
    alive = {"x": weakref.ref(x), "y": weakref.ref(y)}
    del x, y
    gc.collect()
    kept = {"fp8": {"x"}, "bf16": {"x", "y"}, "fp8_compressed": set()}[policy]
    assert {name for name, ref in alive.items() if ref() is not None} == kept
    inputs = {
        t.data_ptr() for t in objects_held([ys[0].grad_fn]) if (t.dtype, t.numel()) == (torch.bfloat16, TOKENS * WIDTH)
    }
    assert len(inputs) == len(kept)
    torch.autograd.grad(ys, block.leaves, block.dys)
    gc.collect()
    assert [name for name, ref in alive.items() if ref() is not None] == []


def objects_held(nodes: list[Any]) -> list[Tensor]:
    """Every tensor in a graph: saved ones, and those in any attribute of a context."""
    found, queue, known = [], list(nodes), set()
    while queue:
        node = queue.pop()
        if node is None or node in known or type(node).__name__ == "AccumulateGrad":
            continue
        known.add(node)
        queue += [parent for parent, _ in node.next_functions]
        found += [t for t in getattr(node, "saved_tensors", ()) if t is not None]
        for value in getattr(node, "__dict__", {}).values():
            found += tensors_in(value)
    return found


def tensors_in(value: Any, depth: int = 0) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if depth > 6:
        return []
    inner = value if isinstance(value, tuple | list) else value.values() if isinstance(value, dict) else ()
    if hasattr(value, "__dict__") and not isinstance(value, type):
        inner = [*inner, *value.__dict__.values()]
    return [t for part in inner for t in tensors_in(part, depth + 1)]


@pytest.mark.parametrize("policy", POLICIES)
@each_kind
def test_no_context_holds_a_tensor_of_its_own(kind, policy):
    block = Block(kind, with_policy("rowwise", policy))
    ys = block.forward(codes=True)
    node = ys[0].grad_fn
    while node is not None and type(node).__name__ != "AccumulateGrad":
        for name, value in getattr(node, "__dict__", {}).items():
            assert [t.shape for t in tensors_in(value) if t.numel() >= WIDTH] == [], (node, name)
        node = next((parent for parent, _ in node.next_functions if parent is not None), None)


# ------------------------------------------------------------------------------------------- traces of a second cast


@pytest.mark.parametrize("policy", POLICIES)
# merged and gated layers have all GEMMs in FP8
@pytest.mark.parametrize(("kind", "fprop"), [*((kind, True) for kind in KINDS), ("linear", False)])
def test_an_amax_is_recorded_once(kind, fprop, policy):
    """Under delayed scaling: forward and backward see the amaxes of ``fp8``, the cast made again leaves no other."""
    recipe = recipes.get("delayed").with_gemms(fprop=fprop)
    plain, block = Block(kind, recipe), Block(kind, recipe.replace(save_for_backward=policy))
    for b in (plain, block):
        b.x.data.mul_(4.0)
    for _ in range(3):
        ys = block.forward()
        plain_ys = plain.forward()
        if fprop or policy == "fp8":
            assert torch.equal(block.state.data, plain.state.data)
        after_forward = block.state.data.clone()
        torch.autograd.grad(ys, block.leaves, block.dys)
        torch.autograd.grad(plain_ys, plain.leaves, plain.dys)
        if fprop:
            for x in (0, 3):  # the inputs of the first and of the last layer
                assert torch.equal(block.state.data[:, x], after_forward[:, x])
        if policy != "fp8_compressed":
            assert torch.equal(block.state.data, plain.state.data)
        assert block.state.data[0, 0] > 0
        block.state.update()
        plain.state.update()
        for b in (plain, block):
            b.x.data.mul_(0.5)


@pytest.mark.parametrize("fprop", [True, False])
@pytest.mark.parametrize("policy", POLICIES)
def test_an_observer_sees_each_role_once(policy, fprop):
    seen: dict[str, list[tuple[str, Tensor]]] = {}
    for which in ("fp8", policy):
        seen[which] = []
        block = Block("linear", with_policy("rowwise", which).with_gemms(fprop=fprop))
        block.run(observer=lambda role, packed, n, which=which: seen[which].append((role, packed)))
    roles = sorted(role for role, _ in seen[policy])
    assert roles == sorted(role for role, _ in seen["fp8"])
    assert roles.count("x") == 1
    for (role, packed), (_, want) in zip(
        sorted(seen[policy], key=lambda s: s[0]), sorted(seen["fp8"], key=lambda s: s[0]), strict=True
    ):
        if role != "w":
            assert torch.equal(packed, want), role


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
@pytest.mark.parametrize("policy", POLICIES)
def test_compiles_whole(policy):
    block = Block("linear", with_policy("rowwise", policy))

    def run(x: Tensor, w: Tensor) -> Tensor:
        return linear(x, w, recipe=block.recipe)

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    leaves = [block.x, block.weights[0]]
    got, want = compiled(*leaves), run(*leaves)
    assert torch.equal(got, want)
    for a, b in zip(
        torch.autograd.grad(got, leaves, block.dys), torch.autograd.grad(want, leaves, block.dys), strict=True
    ):
        assert torch.equal(a, b)


MADE = {
    "its maker's result": (lambda t: torch.sigmoid(t.flatten(1)), True),
    "a view of it": (lambda t: torch.sigmoid(t.transpose(1, 2)).transpose(1, 2).flatten(1), True),
    "a copy of it": (lambda t: torch.sigmoid(t).transpose(1, 2).flatten(1), False),
    "half of it": (lambda t: torch.sigmoid(t).flatten(1)[:, : t.shape[1] * t.shape[2] // 2], False),
    "made by what keeps its input": (lambda t: F.gelu(t).flatten(1), False),
    "a leaf": (lambda t: t.detach().flatten(1).requires_grad_(), False),
}


@pytest.mark.parametrize("made", MADE)
@each_name
def test_an_input_that_its_maker_keeps_is_not_kept_twice(name, made):
    """As attention keeps its result: then that is what stays, not codes beside it, and the gradients are the same."""
    make, is_kept = MADE[made]
    recipe = recipes.get(name)
    g = torch.Generator().manual_seed(0)
    t = torch.randn(16, 8, 32, generator=g).bfloat16().requires_grad_()
    w = torch.randn(64, 256, generator=g).mul_(0.06).bfloat16().requires_grad_()
    if made == "half of it":
        w = w.detach()[:, :128].clone().requires_grad_()
    state = AmaxState(["x", "w", "dy"], 4, "max", 1, torch.device("cpu"))
    slots = LinearSlots(*(AmaxSlot(state, i) for i in range(3))) if recipe.is_delayed else None

    def run(policy: str) -> tuple[list[Tensor], list[Tensor]]:
        x = make(t)
        assert is_kept_by_its_maker(x) is is_kept
        state.data.zero_()
        y = linear(x, w, recipe=recipe.replace(save_for_backward=policy), slots=slots)
        saved = [s for s in y.grad_fn.saved_tensors if s is not None and s.data_ptr() != w.data_ptr()]
        inputs = [t, w] if made != "a leaf" else [x, w]
        return [y, *torch.autograd.grad(y, inputs, torch.ones_like(y) * 0.01), state.data.clone()], saved, x

    wants_codes = not (recipe.wgrad.b.is_fp8 and not recipe.wgrad.is_fp8)
    got, saved, x = run("fp8")
    assert (saved[0].data_ptr() == x.data_ptr()) is (is_kept and wants_codes)
    if wants_codes:
        want, _, _ = run("bf16")
        assert same(got, want)
