"""Several layers that read one activation, as one operation: against the layers one by one, and against float64."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from acceler8 import recipes
from acceler8.errors import DoubleBackwardError
from acceler8.functional import WeightCodes, linear
from acceler8.functional.linears import cannot_merge, linears, rows_of
from acceler8.kernels import quantize
from tests.functional.support import NAMES, slots_for, sqnr_db

WIDTHS = (256, 128, 128)


class Seen(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count[str(func).split(".")[1]] += 1
        return func(*args, **(kwargs or {}))


def data(
    tokens: int = 48, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> tuple[list[Tensor], list[Tensor]]:
    """``([x, w.., bias..], [dy..])``: leaves that want gradients, and gradients of unlike sizes."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, 128, generator=g)
    ws = [torch.randn(n, 128, generator=g) * 0.05 for n in WIDTHS]
    biases = [torch.randn(n, generator=g) for n in WIDTHS]
    dys = [torch.randn(tokens, n, generator=g) * 10.0**-i for i, n in enumerate(WIDTHS)]
    leaves = [t.to(device).requires_grad_() for t in (x, *ws, *biases)]
    return leaves, [dy.to(device) for dy in dys]


def merged(name: str, leaves: list[Tensor], dys: list[Tensor]) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    recipe = recipes.get(name)
    slots = slots_for(recipe, leaves[0].device.type)
    ys = list(linears(leaves[0], leaves[1:4], leaves[4:], recipe=recipe, slots=slots))
    return ys, torch.autograd.grad(ys, leaves, dys)


def apart(name: str, leaves: list[Tensor], dys: list[Tensor]) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    recipe = recipes.get(name)
    ys = [
        linear(leaves[0], w, b, recipe=recipe, slots=slots_for(recipe, leaves[0].device.type))
        for w, b in zip(leaves[1:4], leaves[4:], strict=True)
    ]
    return ys, torch.autograd.grad(ys, leaves, dys)


@pytest.mark.parametrize("name", NAMES)
def test_against_float64(name, device):
    """No noisier than layer by layer, though unlike gradients share a scale where it spans the tensor."""
    leaves, dys = data(device=device)
    exact_leaves = [t.detach().double().requires_grad_() for t in leaves]
    exact = [F.linear(exact_leaves[0], w, b) for w, b in zip(exact_leaves[1:4], exact_leaves[4:], strict=True)]
    want = [*exact, *torch.autograd.grad(exact, exact_leaves, [dy.double() for dy in dys])]
    ys, grads = merged(name, leaves, dys)
    single_ys, single_grads = apart(name, leaves, dys)
    for i, (got, single, true) in enumerate(zip([*ys, *grads], [*single_ys, *single_grads], want, strict=True)):
        assert sqnr_db(got, true) > sqnr_db(single, true) - 1.5, i
    if name in ("rowwise", "blockwise", "mxfp8"):  # scales that one layer's rows have to themselves
        assert all(torch.equal(a, b) for a, b in zip(ys, single_ys, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(grads[1:4], single_grads[1:4], strict=True))  # dw
    # 48 terms, each FP32 sum within 48 u: the tile of the transposed gradient may add up in another order
    for got, single, dy in zip(grads[4:], single_grads[4:], dys, strict=True):
        assert ((got - single).abs() <= 2 * 48 * 2.0**-24 * dy.abs().sum(0)).all()


def test_each_result_is_a_tensor_of_its_own_that_may_be_changed():
    leaves, _ = data()
    ys = linears(leaves[0].view(2, 24, 128), leaves[1:4], leaves[4:], recipe=recipes.get("rowwise"))
    assert [y.shape for y in ys] == [(2, 24, n) for n in WIDTHS]
    assert all(y.is_contiguous() for y in ys)
    before = ys[1].clone()
    ys[0].mul_(2)
    assert torch.equal(ys[1], before)
    ys[0].sum().backward()
    assert leaves[1].grad is not None


@pytest.mark.parametrize("used", [(0,), (2,), (0, 2)])
def test_results_that_nobody_uses_get_no_gradient(used):
    leaves, dys = data()
    ys = linears(leaves[0], leaves[1:4], leaves[4:], recipe=recipes.get("rowwise"))
    grads = torch.autograd.grad([ys[i] for i in used], leaves, [dys[i] for i in used], allow_unused=True)
    assert [i for i in range(3) if grads[1 + i] is not None] == list(used)
    assert [i for i in range(3) if grads[4 + i] is not None] == list(used)
    true = sum(dys[i].double() @ leaves[1 + i].detach().double() for i in used)
    assert sqnr_db(grads[0], true) > 22


def test_a_frozen_weight_gets_no_gradient_and_the_others_theirs():
    leaves, dys = data()
    _, want = merged("rowwise", leaves, dys)
    leaves[2].requires_grad_(False)
    ys = linears(leaves[0], leaves[1:4], leaves[4:], recipe=recipes.get("rowwise"))
    others = [leaf for leaf in leaves if leaf.requires_grad]
    grads = torch.autograd.grad(ys, others, dys)
    expected = [grad for i, grad in enumerate(want) if i != 2]
    assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("frozen", [(), (1, 2, 3), (0,), (0, 1, 2, 3), (5,), (4, 5, 6)], ids=str)
@pytest.mark.parametrize("used", [(0, 1, 2), (2,)], ids=str)
def test_bias_gradients_come_with_the_cast(name, frozen, used, device):
    """Whatever is frozen; each is the sum of its own gradient, in memory of its own."""
    leaves, dys = data(device=device)
    for i in frozen:
        leaves[i].requires_grad_(False)
    recipe = recipes.get(name)
    ys = linears(leaves[0], leaves[1:4], leaves[4:], recipe=recipe, slots=slots_for(recipe, device))
    with Seen() as seen:
        torch.autograd.backward([ys[i] for i in used], [dys[i] for i in used])
    wants = [i for i in used if 4 + i not in frozen]
    casts = any(0 not in frozen or 1 + i not in frozen for i in used)
    with_sums, without = (
        sum(seen.count[op + delayed] for delayed in ("", "_delayed"))
        for op in ("quantize_concatenated_and_sum", "quantize_concatenated")
    )
    assert with_sums == int(casts and bool(wants))
    assert without == int(casts and not wants) + (0 not in frozen)  # of the weights, for dgrad
    for i in range(3):
        got = leaves[4 + i].grad
        assert (got is not None) == (i in wants)
        if got is not None:
            assert got.untyped_storage().nbytes() == got.nbytes
            error = (got.double() - dys[i].double().sum(0)).abs()
            assert (error <= 48 * 2.0**-24 * dys[i].abs().sum(0)).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_any_number_of_tokens(name, tokens):
    leaves, dys = data(tokens)
    ys, grads = merged(name, leaves, dys)
    assert [y.shape for y in ys] == [(tokens, n) for n in WIDTHS]
    assert [g.shape for g in grads] == [leaf.shape for leaf in leaves]
    if tokens == 0:
        assert not any(g.any() for g in grads[1:])


def test_a_window_keeps_the_codes_and_a_changed_weight_drops_them():
    leaves, dys = data()
    codes = WeightCodes()
    codes.open()
    recipe = recipes.get("rowwise")

    def once() -> tuple[list[Tensor], tuple[Tensor, ...]]:
        ys = list(linears(leaves[0], leaves[1:4], leaves[4:], recipe=recipe, codes=codes))
        return ys, torch.autograd.grad(ys, leaves, dys)

    once()
    kept = codes.live()
    assert set(kept) == {"rows", "cols"}
    once()
    assert all(codes.live()[lies].codes is kept[lies].codes for lies in kept)
    with torch.no_grad():
        leaves[3].add_(1.0)
    ys, grads = once()
    fresh_ys, fresh = merged("rowwise", leaves, dys)
    assert all(torch.equal(a, b) for a, b in zip([*ys, *grads], [*fresh_ys, *fresh], strict=True))


def test_a_second_derivative_is_a_typed_error():
    leaves, dys = data()
    ys = linears(leaves[0], leaves[1:4], leaves[4:], recipe=recipes.get("rowwise"))
    (dx,) = torch.autograd.grad(ys, leaves[:1], dys, create_graph=True)
    with pytest.raises(DoubleBackwardError, match="second derivative"):
        dx.square().sum().backward()


def test_parts_of_an_operand_are_its_rows():
    recipe = recipes.get("rowwise")
    whole, _, _ = quantize(torch.randn(256, 64), recipe.fprop.b.format, None, recipe.fprop.b.granularity)
    first, second = rows_of(whole, [96, 160])
    assert torch.equal(torch.cat([first.dequantize(), second.dequantize()]), whole.dequantize())


def test_what_cannot_be_merged():
    assert cannot_merge(recipes.get("rowwise"), [48, 16]) is None
    assert "128" in cannot_merge(recipes.get("blockwise"), [128, 64])
    assert "32" in cannot_merge(recipes.get("mxfp8"), [64, 48])
    assert "high precision" in cannot_merge(recipes.get("rowwise").with_gemms(dgrad=False), [64, 64])
