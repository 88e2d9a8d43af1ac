"""A residual and a norm in one: against addition and norm apart, gradients of both results, codes that layers find."""

from __future__ import annotations

import doctest
import itertools
import sys
from collections import Counter

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from acceler8 import recipes
from acceler8.errors import DoubleBackwardError, DtypeError, ShapeError
from acceler8.functional import LinearSlots, add_norm, hand_on, linear, norm
from acceler8.functional.shared_input import shared_input
from acceler8.kernels import norm_backward_ref, norm_ref
from acceler8.scaling import AmaxSlot, AmaxState
from tests.functional.support import sqnr_db
from tests.kernels.support import assert_same

kinds = pytest.mark.parametrize("kind", ["rms", "layer"])
each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.requires(sm=90))])
NAMES = ["tensorwise", "rowwise", "blockwise", "mxfp8", "delayed"]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def leaves(device: str, *shape: int, dtypes: tuple[torch.dtype, torch.dtype] = (BF16, BF16)) -> list[Tensor]:
    """x, residual, weight, bias."""
    g = torch.Generator().manual_seed(0)
    shapes = (shape, shape, shape[-1:], shape[-1:])
    kinds = (*dtypes, dtypes[0], dtypes[0])
    return [torch.randn(s, generator=g).to(device, t).requires_grad_() for s, t in zip(shapes, kinds, strict=True)]


def slot_for(recipe: recipes.Recipe | None, device: str) -> AmaxSlot | None:
    if recipe is None or not recipe.is_delayed:
        return None
    return AmaxSlot(AmaxState(["x"], 4, "max", 1, torch.device(device)), 0)


def like(t: Tensor, seed: int) -> Tensor:
    return torch.randn(t.shape, generator=torch.Generator().manual_seed(seed)).to(t.device, t.dtype)


@each_device
@kinds
@pytest.mark.parametrize("dtypes", [(BF16, BF16), (BF16, FP32), (FP32, FP16)], ids=str)
@pytest.mark.parametrize("name", [*NAMES, None])
def test_results_are_those_of_addition_and_norm(name, dtypes, kind, device):
    recipe = None if name is None else recipes.get(name)
    x, r, w, b = leaves(device, 2, 5, 48, dtypes=dtypes)
    slots = [slot_for(recipe, device) for _ in range(2)]
    h, y, codes = add_norm(x, r, w, b, 1e-5, kind=kind, recipe=recipe, slot=slots[0])
    sum_apart = x + r
    want, want_codes = norm(sum_apart, w, b, 1e-5, kind=kind, recipe=recipe, slot=slots[1])
    assert (h.dtype, h.shape, y.dtype) == (sum_apart.dtype, x.shape, want.dtype)
    assert torch.equal(h, sum_apart)
    assert torch.equal(y, want)
    if recipe is None:
        assert codes is want_codes is None
    else:
        assert_same(codes.rows, want_codes.rows.codes.cpu(), want_codes.rows.scale_inv.cpu(), name)
        assert (codes.column_amax is None) == (want_codes.column_amax is None)
        assert codes.column_amax is None or torch.equal(codes.column_amax, want_codes.column_amax)
    if slots[0] is not None:
        assert slots[0].staging.item() == slots[1].staging.item() > 0


@each_device
@kinds
@pytest.mark.parametrize("dtypes", [(BF16, BF16), (BF16, FP32), (FP32, FP32)], ids=str)
@pytest.mark.parametrize("used", ["both", "y", "h"])
def test_gradients_against_float64(used, dtypes, kind, device):
    tensors = leaves(device, 2, 5, 48, dtypes=dtypes)
    x, r, w, b = tensors
    h, y, _ = add_norm(*tensors, 1e-5, kind=kind)
    dh, dy = like(h, 1), like(y, 2)
    which = {"both": ([h, y], [dh, dy]), "y": ([y], [dy]), "h": ([h], [dh])}[used]
    torch.autograd.backward(*which)
    wide, ww, wb = h.detach().double().view(-1, 48), w.detach().double(), b.detach().double()
    _, inv, mean = norm_ref(wide, ww, wb, 1e-5, kind=kind)
    exact, dw, db = norm_backward_ref(dy.double().view(-1, 48), wide, ww, inv, mean)
    exact = {"both": exact + dh.double().view(-1, 48), "y": exact, "h": dh.double().view(-1, 48)}[used]
    for leaf in (x, r):
        assert leaf.grad.dtype == leaf.dtype
        tolerance = 2**-8 if BF16 in (h.dtype, leaf.dtype) else 1e-5
        torch.testing.assert_close(leaf.grad.double().view(-1, 48), exact, rtol=tolerance, atol=2e-5)
    for leaf, want in ((w, dw), (b, db)):
        if used == "h":
            assert leaf.grad is None
        else:
            torch.testing.assert_close(leaf.grad.double(), want, rtol=2**-8, atol=2e-5)


@each_device
def test_one_rounding_is_closer_than_two(device):
    """The gradient of h and the norm's part are added in FP32: against float64, no noisier than autograd apart."""
    x, r, w, _ = leaves(device, 64, 256)
    h, y, _ = add_norm(x, r, w)
    dh, dy = like(h, 1), like(y, 2)
    fused = torch.autograd.grad([h, y], x, [dh, dy])[0]
    apart_h = x + r
    apart_y, _ = norm(apart_h, w)
    apart = torch.autograd.grad([apart_h, apart_y], x, [dh, dy])[0]
    wide = h.detach().double()
    _, inv, _ = norm_ref(wide, w.detach().double(), None, 1e-6, kind="rms")
    exact = norm_backward_ref(dy.double(), wide, w.detach().double(), inv, None)[0] + dh.double()
    assert sqnr_db(fused, exact) > sqnr_db(apart, exact)


@each_device
def test_whoever_wants_no_gradient_gets_none(device):
    tensors = leaves(device, 4, 32)
    for wanted in itertools.product((False, True), repeat=4):
        for t, wants in zip(tensors, wanted, strict=True):
            t.requires_grad_(wants)
            t.grad = None
        h, y, _ = add_norm(*tensors, 1e-5, kind="layer", recipe=recipes.get("rowwise"))
        assert h.requires_grad == any(wanted[:2])
        assert y.requires_grad == any(wanted)
        if any(wanted):
            (y.float().square().sum() + h.float().sum()).backward()
        assert [t.grad is not None for t in tensors] == list(wanted)


@each_device
def test_both_addends_have_gradients_of_their_own(device):
    x, r, w, _ = leaves(device, 4, 32)
    for _ in range(2):  # the second accumulates
        h, y, _ = add_norm(x, r, w)
        (y.float().square().sum() + h.float().square().sum()).backward()
    assert torch.equal(x.grad, r.grad)
    with torch.no_grad():
        x.grad.zero_()
    assert r.grad.any()


@each_device
def test_the_stream_goes_on(device):
    """Blocks one behind the other, as a model has them: like addition and norm apart, in FP32."""
    g = torch.Generator().manual_seed(0)
    ws = [(torch.randn(32, 32, generator=g) * 0.2).to(device).requires_grad_() for _ in range(3)]
    norms = [torch.ones(32, device=device, requires_grad=True) for _ in range(3)]
    start = torch.randn(2, 4, 32, generator=g).to(device).requires_grad_()
    grads = []
    for fused in (True, False):
        stream, branch = start, start * 0.5
        for w, weight in zip(ws, norms, strict=True):
            if fused:
                stream, y, _ = add_norm(branch, stream, weight)
            else:
                stream = branch + stream
                y, _ = norm(stream, weight)
            branch = y @ w.t()
        grads.append(torch.autograd.grad((stream + branch).square().sum(), [start, *ws, *norms]))
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


class Casts(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.asked: Counter[tuple[bool, bool]] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if str(func) == "acceler8.quantize.default":
            self.asked[bool(args[1]), bool(args[2])] += 1
        elif str(func) == "acceler8.quantize_delayed.default":
            self.asked[bool(args[3]), bool(args[4])] += 1
        return func(*args, **(kwargs or {}))


@each_device
@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_layers_find_the_codes(name, compressed, device):
    """And give what they give without: results and gradients, but for the noise of compression."""
    recipe = recipes.get(name)
    if compressed:
        recipe = recipe.replace(save_for_backward="fp8_compressed")
    x, r, w, _ = leaves(device, 2, 16, 128)
    up = (torch.randn(64, 128, generator=torch.Generator().manual_seed(5)) * 0.1).to(device, BF16).requires_grad_()
    results, casts = [], []
    for hands_on in (True, False):
        state = AmaxState(["x", "w", "dy"], 4, "max", 1, torch.device(device))
        slots = LinearSlots(*(AmaxSlot(state, i) for i in range(3))) if recipe.is_delayed else None
        slot = None if slots is None else slots.x
        h, y, codes = add_norm(
            x, r, w, recipe=recipe, slot=slot, records=False, compressed=compressed and hands_on
        )  # fmt: skip
        if hands_on:
            hand_on(y, codes, recipe, slot)
        with Casts() as seen:
            z = linear(y, up, recipe=recipe, slots=slots)
        casts.append(seen.asked)
        gradients = torch.autograd.grad((z.float().square() + h.float().sum()).sum(), (x, r, w, up))
        results.append([z, *gradients])
    of_weight = Counter({(True, False): 1})
    assert casts[1] == of_weight + Counter({(True, True): 1})
    if not compressed:
        assert casts[0] == of_weight + Counter({(False, True): 1})
    elif not recipe.is_delayed:  # under delayed scaling the layer's own cast records the amax
        assert casts[0] == of_weight
    assert torch.equal(results[0][0], results[1][0])
    for one, other in zip(results[0][1:], results[1][1:], strict=True):
        if compressed:
            assert sqnr_db(one, other) > 20
        else:
            assert torch.equal(one, other)


@each_device
def test_compression_keeps_the_sum_in_fp8(device):
    x, r, w, _ = leaves(device, 4, 256)
    for compressed in (False, True):
        kept: list[Tensor] = []
        with saved_tensors_hooks(lambda t, kept=kept: kept.append(t) or t, lambda t: t):
            h, y, codes = add_norm(x, r, w, recipe=recipes.get("rowwise"), compressed=compressed)
        assert any(t.data_ptr() == h.data_ptr() for t in kept) == (not compressed)
        assert not any(t.data_ptr() in (x.data_ptr(), r.data_ptr()) for t in kept)
        assert (codes.source is not None) == compressed
        assert torch.autograd.grad([h, y], x, [like(h, 1), like(y, 2)])[0].isfinite().all()


@each_device
def test_a_compressed_sum_comes_back_in_its_own_dtype(device):
    """FP32 where the residual is: the gradient of the residual is not rounded to the branch's BF16."""
    x, r, w, _ = leaves(device, 4, 256, dtypes=(BF16, FP32))
    h, y, _ = add_norm(x, r, w, recipe=recipes.get("rowwise"), compressed=True)
    torch.autograd.backward([h, y], [like(h, 1), like(y, 2)])
    assert (r.grad.bfloat16().float() != r.grad).any()
    assert torch.equal(x.grad, r.grad.bfloat16())


def test_the_example_runs():
    result = doctest.testmod(sys.modules[add_norm.__module__])  # the package has the function under its name
    assert result.attempted >= 9
    assert result.failed == 0


def test_codes_are_left_only_where_they_may_lie():
    recipe = recipes.get("rowwise")
    y = torch.ones(4, 32)
    _, of_y, codes = add_norm(y.clone().requires_grad_(), y, torch.ones(32), recipe=recipe)
    hand_on(y, codes, recipe)  # a leaf
    hand_on(of_y, None, recipe)
    assert not vars(y)
    assert not vars(of_y)
    hand_on(of_y, codes, recipe)
    left = shared_input(of_y, make=False)
    assert left is not None
    assert left.column_amax is codes.column_amax is not None


@each_device
@pytest.mark.parametrize("of", range(4))
@pytest.mark.parametrize("result", ["h", "y"])
def test_a_second_derivative_is_a_typed_error(result, of, device):
    tensors = leaves(device, 4, 32, dtypes=(FP32, FP32))
    h, y, _ = add_norm(*tensors, 1e-5, recipe=recipes.get("rowwise"))
    value = y.sum() + h.square().sum() if result == "h" else y.sum()
    (gradient,) = torch.autograd.grad(value, tensors[of], create_graph=True)
    with pytest.raises(DoubleBackwardError, match="second derivative"):
        (value + gradient.square().sum()).backward()


@each_device
def test_results_changed_in_place(device):
    """y may be; h is what backward reads, as the input of a norm is elsewhere."""
    for shape in ((4, 32), (2, 2, 32)):
        x, r, w, _ = leaves(device, *shape)
        h, y, _ = add_norm(x, r, w, recipe=recipes.get("rowwise"))
        y.mul_(2.0).sum().backward()
        assert x.grad is not None
        h, y, _ = add_norm(x, r, w)
        h.mul_(2.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@each_device
@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "delayed", None])
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, from Dynamo
def test_compiles_whole(name, device):
    recipe = None if name is None else recipes.get(name)
    slots = [slot_for(recipe, device) for _ in range(2)]

    def step(x: Tensor, r: Tensor, w: Tensor, b: Tensor, slot: AmaxSlot | None) -> tuple[Tensor, Tensor]:
        h, y, codes = add_norm(x, r, w, b, 1e-5, recipe=recipe, slot=slot)
        if recipe is not None:
            hand_on(y, codes, recipe, slot)
        return h, y * 2

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    results = []
    for function, slot in ((step, slots[0]), (compiled, slots[1])):
        tensors = leaves(device, 2, 5, 48)
        h, y = function(*tensors, slot)
        (y.float().square().sum() + h.float().square().sum()).backward()
        results.append([h.detach(), y.detach(), *(t.grad for t in tensors)])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@each_device
def test_checkpointing_and_retained_graphs_give_the_same(device):
    x, r, w, _ = leaves(device, 4, 32)

    def run(x: Tensor) -> Tensor:
        h, y, _ = add_norm(x, r, w, recipe=recipes.get("rowwise"))
        return y.float().square().sum() + h.float().square().sum()

    value = run(x)
    first = torch.autograd.grad(value, (x, r, w), retain_graph=True)
    second = torch.autograd.grad(value, (x, r, w))
    again = torch.autograd.grad(torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False), (x, r, w))
    for one, other, third in zip(first, second, again, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, third)


def test_what_is_refused():
    x, w = torch.ones(2, 4, 16), torch.ones(16)
    with pytest.raises(ShapeError, match=r"residual \(4, 16\); allowed: one shape"):
        add_norm(x, x[0], w)
    with pytest.raises(DtypeError, match="float64"):
        add_norm(x.double(), x.double(), w)
    with pytest.raises(ShapeError, match="needs an amax slot"):
        add_norm(x, x, w, recipe=recipes.get("delayed"))
