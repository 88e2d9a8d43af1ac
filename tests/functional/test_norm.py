"""The norm inside autograd: gradients, codes that ride along, autocast, compile."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from acceler8 import recipes
from acceler8.errors import DoubleBackwardError, ShapeError
from acceler8.functional import norm
from acceler8.kernels import amax_ref, norm_backward_ref, norm_ref, quantize
from acceler8.scaling import AmaxSlot, AmaxState
from tests.kernels.support import assert_same

kinds = pytest.mark.parametrize("kind", ["rms", "layer"])
ON_GPU = pytest.param("cuda", marks=pytest.mark.requires(sm=90))
each_device = pytest.mark.parametrize("device", ["cpu", ON_GPU])


def leaves(device: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = (shape, shape[-1:], shape[-1:])
    return [torch.randn(s, generator=g).to(device, dtype).requires_grad_() for s in shapes]


def slot_for(recipe: recipes.Recipe, device: str) -> AmaxSlot | None:
    return AmaxSlot(AmaxState(["x"], 4, "max", 1, torch.device(device)), 0) if recipe.is_delayed else None


@each_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_without_eps(dtype, device):
    x, w, _ = leaves(device, 7, 48, dtype=dtype)
    x = (x.detach() * 2.0**-12).requires_grad_()
    got, _ = norm(x, w, None, None)
    want = torch.nn.functional.rms_norm(x, (48,), w, None)
    torch.testing.assert_close(got, want)
    dy = torch.randn(want.shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    for g, e in zip(*(torch.autograd.grad(y, (x, w), dy) for y in (got, want)), strict=True):
        torch.testing.assert_close(g, e)


@each_device
@kinds
@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "blockwise", "mxfp8", "delayed", None])
def test_codes_and_gradients(name, kind, device):
    recipe = None if name is None else recipes.get(name)
    x, w, b = leaves(device, 2, 5, 48)
    slot = None if recipe is None else slot_for(recipe, device)
    y, codes = norm(x, w, b, 1e-5, kind=kind, recipe=recipe, slot=slot)
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    flat = y.detach().reshape(-1, 48)
    if recipe is None:
        assert codes is None
    else:
        first = recipe.fprop.a
        want, _, _ = quantize(flat, first.format, None, first.granularity, pow2=recipe.pow2_scales)
        assert_same(codes.rows, want.codes.cpu(), want.scale_inv.cpu(), name)
        assert not codes.rows.codes.requires_grad
        if name == "rowwise":
            assert torch.equal(codes.column_amax.view(torch.float32), amax_ref(flat, 0))
        else:
            assert codes.column_amax is None
        if slot is not None:
            assert slot.staging.item() == flat.abs().max().item()
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(device, y.dtype)
    y.backward(dy)
    wide = x.detach().double().view(-1, 48)
    _, inv, mean = norm_ref(wide, w.detach().double(), b.detach().double(), 1e-5, kind=kind)
    exact = norm_backward_ref(dy.double().view(-1, 48), wide, w.detach().double(), inv, mean)
    for got, want in zip((x.grad, w.grad, b.grad), exact, strict=True):
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got.double().view(want.shape), want, rtol=2**-8, atol=2e-5)


@each_device
def test_no_column_amax_where_nobody_wants_it(device):
    x, w, _ = leaves(device, 4, 32)
    recipe = recipes.get("rowwise")
    assert norm(x, w, recipe=recipe, column_amax=False)[1].column_amax is None
    with torch.no_grad():
        assert norm(x, w, recipe=recipe)[1].column_amax is None
    assert norm(x, w, recipe=recipe.with_gemms(wgrad=False))[1].column_amax is None


def test_records_false_leaves_no_trace_and_a_slot_is_needed():
    x, w, _ = leaves("cpu", 4, 32)
    recipe = recipes.get("delayed")
    slot = slot_for(recipe, "cpu")
    norm(x, w, recipe=recipe, slot=slot, records=False)
    assert slot.staging.item() == 0
    with pytest.raises(ShapeError, match="needs an amax slot"):
        norm(x, w, recipe=recipe)


@each_device
def test_frozen_parameters_and_inputs(device):
    x, w, b = leaves(device, 4, 32)
    for chosen in ((x,), (w,), (b,), (x, b)):
        for t in (x, w, b):
            t.requires_grad_(any(t is c for c in chosen))
            t.grad = None
        norm(x, w, b, 1e-5, kind="layer", recipe=recipes.get("rowwise"))[0].float().square().sum().backward()
        assert [t.grad is not None for t in (x, w, b)] == [any(t is c for c in chosen) for t in (x, w, b)]


@each_device
@pytest.mark.parametrize("of", [0, 1, 2])
def test_a_second_derivative_is_a_typed_error(of, device):
    tensors = leaves(device, 4, 32, dtype=torch.float32)
    y, _ = norm(*tensors, 1e-5, recipe=recipes.get("rowwise"))
    (gradient,) = torch.autograd.grad(y.sum(), tensors[of], create_graph=True)
    with pytest.raises(DoubleBackwardError, match="second derivative"):
        (y.sum() + gradient.square().sum()).backward()


@each_device
def test_y_may_be_changed_in_place(device):
    for shape in ((4, 32), (2, 2, 32)):
        x, w, _ = leaves(device, *shape)
        y, _ = norm(x, w, recipe=recipes.get("rowwise"))
        y.mul_(2.0).sum().backward()
        assert x.grad is not None


@each_device
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("w_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_dtypes_are_the_plain_modules(autocast, w_dtype, x_dtype, device):
    x, w, b = leaves(device, 4, 32)
    x, w, b = x.detach().to(x_dtype).requires_grad_(), w.detach().to(w_dtype), b.detach().to(w_dtype)
    f = torch.nn.functional

    def llama(x: Tensor) -> Tensor:
        return w * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    def gemma(x: Tensor) -> Tensor:
        n = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
        return (n * (1.0 + w.float())).type_as(x)

    cases = [
        (lambda x: f.rms_norm(x, (32,), w, 1e-6), {}),
        (lambda x: f.layer_norm(x, (32,), w, b, 1e-6), {"bias": b, "kind": "layer"}),
        (llama, {"cast_before_weight": True}),
        (gemma, {"weight_offset": 1.0}),
    ]
    for plain, options in cases:
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            try:
                want = plain(x)
            except RuntimeError:  # layer_norm takes no mixed dtypes on most devices
                continue
            y, _ = norm(x, w, eps=1e-6, recipe=recipes.get("rowwise"), **options)
        assert y.dtype == want.dtype, options
        torch.testing.assert_close(y, want, rtol=2**-6 if x_dtype is torch.bfloat16 else 1e-5, atol=1e-5)
        x.grad = None
        y.float().square().sum().backward()
        assert x.grad.dtype == x_dtype


@each_device
@kinds
@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "mxfp8", "delayed"])
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, from Dynamo
def test_compiles_whole(name, kind, device):
    recipe = recipes.get(name)
    slots = [slot_for(recipe, device) for _ in range(2)]

    def step(x: Tensor, w: Tensor, b: Tensor, slot: AmaxSlot | None) -> tuple[Tensor, Tensor]:
        y, codes = norm(x, w, b, 1e-5, kind=kind, recipe=recipe, slot=slot)
        return y, codes.rows.dequantize(x.shape[-1])

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    results = []
    for function, slot in ((step, slots[0]), (compiled, slots[1])):
        tensors = leaves(device, 2, 5, 48)
        y, values = function(*tensors, slot)
        y.float().square().sum().backward()
        results.append([y.detach(), values, *(t.grad for t in tensors)])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
    if slots[0] is not None:
        assert slots[0].staging.item() == slots[1].staging.item() > 0


@each_device
def test_checkpointing_recomputes_the_same(device):
    x, w, _ = leaves(device, 4, 32)

    def run(x: Tensor) -> Tensor:
        return norm(x, w, recipe=recipes.get("rowwise"))[0].float().square().sum()

    run(x).backward()
    want, x.grad = x.grad, None
    torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False).backward()
    assert torch.equal(x.grad, want)
