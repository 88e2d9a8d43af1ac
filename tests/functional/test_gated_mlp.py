"""The gated MLP as one operation: numbers, work, what is kept, and its place in autograd."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from acceler8 import recipes
from acceler8.errors import DoubleBackwardError
from acceler8.functional import WeightCodes, linear
from acceler8.functional.gated_mlp import ACTIVATIONS, cannot_fuse, gated_mlp
from acceler8.recipes import Recipe
from tests.functional.mlps import PLAIN, Work, assert_same, slots_for
from tests.functional.support import NAMES, sqnr_db

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
KINK = {"dgate": 16.2, "dx": 19.2}  # dB: 0.012 of the elements against a half; dx has as much of dup, which has none
RESULTS = ("y", "dx", "dgate", "dup", "ddown")


class Mlp:
    """Operands; ``leaves()`` are fresh copies that require grad."""

    def __init__(
        self, m: int = 40, k: int = 64, f: int = 128, n: int = 48, *,
        dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0,
    ) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        shapes = {"x": (m, k), "gate": (f, k), "up": (f, k), "down": (n, f), "dy": (m, n)}
        values = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        factor = {"x": 1.0, "gate": k**-0.5, "up": k**-0.5, "down": f**-0.5, "dy": 1e-2}
        self.of = {name: (t * factor[name]).to(device, dtype) for name, t in values.items()}

    def leaves(self, requires_grad: str = "x gate up down") -> list[Tensor]:
        wanted = requires_grad.split()
        return [self.of[name].detach().clone().requires_grad_(name in wanted) for name in ("x", "gate", "up", "down")]


def run(name: str | Recipe, mlp: Mlp, activation: str = "silu", **options: object) -> dict[str, Tensor]:
    """Output and gradients of one forward and backward."""
    recipe = recipes.resolve(name)
    leaves = mlp.leaves()
    options.setdefault("slots", slots_for(recipe, leaves[0].device.type))
    y = gated_mlp(*leaves, activation=activation, recipe=recipe, **options)
    y.backward(mlp.of["dy"].to(y.dtype))
    return dict(zip(RESULTS, (y.detach(), *(leaf.grad for leaf in leaves)), strict=True))


def reference(mlp: Mlp, activation: str = "silu") -> dict[str, Tensor]:
    x, gate, up, down = leaves = [t.detach().double().requires_grad_() for t in mlp.leaves()]
    y = F.linear(PLAIN[activation](F.linear(x, gate)) * F.linear(x, up), down)
    y.backward(mlp.of["dy"].double())
    return dict(zip(RESULTS, (y.detach(), *(leaf.grad for leaf in leaves)), strict=True))


def one_by_one(name: str, mlp: Mlp, activation: str = "silu") -> dict[str, Tensor]:
    recipe = recipes.get(name)
    x, gate, up, down = leaves = mlp.leaves()
    wide, narrow = slots_for(recipe) or (None, None)
    a, b = (linear(x, w, recipe=recipe, slots=wide) for w in (gate, up))
    y = linear(PLAIN[activation](a) * b, down, recipe=recipe, slots=narrow)
    y.backward(mlp.of["dy"])
    return dict(zip(RESULTS, (y.detach(), *(leaf.grad for leaf in leaves)), strict=True))


# ------------------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", NAMES)
def test_against_float64(name, activation, dtype, device):
    """No noisier than the layers one by one, which the ladder of the linear layer covers, and near what formats give.

    A GEMM of two Gaussian operands has 28.5 dB in E4M3, 24.6 dB if one is in E5M2. y holds gate and up (their product
    adds the noise of both) and one GEMM more; gradients hold up to two more, one of them with E5M2 by policy. The slope
    of relu is a step: noise of 4 % in the gate puts 1 % of the elements on its other side, an error of 100 % in each,
    where half of the elements are zero.
    """
    mlp = Mlp(dtype=dtype, device=device)
    got, want = run(name, mlp, activation), reference(mlp, activation)
    e5m2 = recipes.get(name).dgrad.a.format.name == "E5M2"
    for result in RESULTS:
        expected = 23.5 if result == "y" else 22.5 - (3.0 if e5m2 else 0.0)
        has_kink = activation == "relu" and result in KINK
        if has_kink:
            expected = -10 * math.log10(10 ** (-expected / 10) + 10 ** (-KINK[result] / 10))
        assert sqnr_db(got[result], want[result]) > expected - 2.0, result
        if not has_kink:  # one element on the other side may be most of a row
            assert sqnr_db(got[result], want[result], dim=1).min() > expected - 7.5, result
        assert got[result].dtype == dtype


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", NAMES)
def test_near_the_layers_one_by_one(name, activation):
    mlp = Mlp()
    got, want, exact = run(name, mlp, activation), one_by_one(name, mlp, activation), reference(mlp, activation)
    for result in RESULTS:
        assert sqnr_db(got[result], exact[result]) > sqnr_db(want[result], exact[result]) - 0.7, result
    if name == "rowwise":  # FP32: the activation differs by ulps, so codes hardly ever
        assert sqnr_db(got["y"], want["y"]) > 45
        assert sqnr_db(got["ddown"], want["ddown"]) > 45


@pytest.mark.parametrize("name", ["rowwise", "blockwise", "mxfp8"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gate_and_up_are_bit_equal_to_two_layers(name, dtype, device):
    """Seen in what is saved for backward."""
    saved: list[Tensor] = []
    x, gate, up, down = Mlp(dtype=dtype, device=device).leaves()
    with saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        gated_mlp(x, gate, up, down, activation="silu", recipe=recipes.get(name))
    (gate_up,) = [t for t in saved if t.shape == (40, 256)]
    apart = [linear(x, w, recipe=recipes.get(name)) for w in (gate, up)]
    if device == "cuda" and name == "mxfp8" and dtype is torch.float32:  # emulated by GEMMs that sum in other orders
        torch.testing.assert_close(gate_up, torch.cat(apart, 1))
    else:
        assert torch.equal(gate_up, torch.cat(apart, 1))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", NAMES)
def test_gate_and_up_in_one_tensor(name, activation):
    mlp = Mlp()
    recipe = recipes.get(name)
    x, gate, up, down = mlp.leaves()
    both = torch.cat([gate, up]).detach().requires_grad_()
    y = gated_mlp(x, both, None, down, activation=activation, recipe=recipe, slots=slots_for(recipe))
    y.backward(mlp.of["dy"])
    want = run(name, mlp, activation)
    got = dict(zip(RESULTS, (y.detach(), x.grad, *both.grad.chunk(2), down.grad), strict=True))
    assert_same(got, want)


def test_what_cannot_be_one_operation():
    assert cannot_fuse(recipes.get("rowwise"), 48) is None
    assert (
        cannot_fuse(recipes.get("mxfp8"), 48) == "48 features are not a multiple of 32: a block would span gate and up"
    )
    assert cannot_fuse(recipes.get("blockwise"), 192).startswith("192 features are not a multiple of 128")
    for part in ("fprop", "dgrad", "wgrad"):
        assert cannot_fuse(recipes.get("rowwise").with_gemms(**{part: False}), 128) == "a GEMM in high precision"


@pytest.mark.parametrize("shape", [(0,), (1,), (7,), (2, 3, 5), (3, 0, 2), ()], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_any_number_of_tokens(name, shape, device):
    mlp = Mlp(torch.Size(shape).numel(), device=device)
    recipe = recipes.get(name)
    x, gate, up, down = mlp.leaves()
    x = mlp.of["x"].reshape(*shape, 64).clone().requires_grad_()
    y = gated_mlp(x, gate, up, down, activation="silu", recipe=recipe, slots=slots_for(recipe, device))
    assert y.shape == (*shape, 48)
    y.backward(mlp.of["dy"].reshape(y.shape))
    assert x.grad.shape == x.shape
    want = reference(mlp)
    results = (y.reshape(-1, 48), x.grad.reshape(-1, 64), gate.grad, up.grad, down.grad)
    for got, result in zip(results, RESULTS, strict=True):
        assert (got.double() - want[result]).norm() <= 0.2 * want[result].norm()


@pytest.mark.parametrize("w_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["rowwise", "delayed"])
def test_autocast(name, w_dtype, device):
    mlp = Mlp(device=device)
    recipe = recipes.get(name)
    leaves = mlp.leaves()
    x, weights = leaves[0], [w.detach().to(w_dtype).requires_grad_() for w in leaves[1:]]
    with torch.autocast(device, torch.bfloat16):
        y = gated_mlp(x, *weights, activation="silu", recipe=recipe, slots=slots_for(recipe, device))
        assert y.dtype == torch.bfloat16
        loss = (y * mlp.of["dy"]).float().sum()
    loss.backward()
    want = reference(mlp)
    for t, result in zip((x, *weights), RESULTS[1:], strict=True):
        assert t.grad.dtype == t.dtype
        assert sqnr_db(t.grad, want[result]) > 16


@pytest.mark.parametrize("name", NAMES)
def test_deterministic(name):
    assert_same(run(name, Mlp()), run(name, Mlp()))


def test_delayed_scaling_stages_what_the_layers_do():
    """One slot for gate and up, in FP32, where the activation is rounded by neither."""
    mlp, recipe = Mlp(), recipes.get("delayed")
    slots = slots_for(recipe)
    run(recipe, mlp, slots=slots)
    state = slots[0].x.state
    gate, up, x = (mlp.of[name].abs().max() for name in ("gate", "up", "x"))
    assert state.data[0, 0] == x
    assert state.data[0, 1] == max(gate, up)
    assert state.data[0, 4] == mlp.of["down"].abs().max()
    assert state.data[0, 5] == mlp.of["dy"].abs().max()
    assert (state.data[0] > 0).all()
    first = state.data.clone()
    run(recipe, mlp, slots=slots)  # again in the same step, as a recompute does
    assert torch.equal(state.data, first)
    silent = tuple(s._replace(records=False) for s in slots)
    state.data.zero_()
    run(recipe, mlp, slots=silent)
    assert not state.data.any()


# ---------------------------------------------------------------------------------------------------------- work


COMBINATIONS = [
    " ".join(
        itertools.chain(*(part.split() for part, is_in in zip(("x", "gate up", "down"), chosen, strict=True) if is_in))
    )
    for chosen in itertools.product((True, False), repeat=3)
]


@pytest.mark.parametrize("requires_grad", COMBINATIONS)
@pytest.mark.parametrize("name", NAMES)
def test_what_nobody_needs_is_skipped(name, requires_grad):
    m, k, f, n = 128, 128, 128, 128
    mlp, recipe = Mlp(m, k, f, n), recipes.get(name)
    want = run(name, mlp)
    leaves = mlp.leaves(requires_grad)
    dx, dw, ddown = "x" in requires_grad.split(), "gate" in requires_grad, "down" in requires_grad
    with Work() as work:
        y = gated_mlp(*leaves, activation="silu", recipe=recipe, slots=slots_for(recipe))
    assert work.gemms == 2
    assert work.codes == m * k * (1 + dw) + 2 * f * k + m * f + n * f
    if not requires_grad:
        assert y.grad_fn is None
        return
    with Work() as work:
        y.backward(mlp.of["dy"])
    d_act = dx or dw
    assert work.gemms == d_act + dx + 2 * dw + ddown
    of_dy = m * n * (d_act + ddown)
    assert work.codes == of_dy + n * f * d_act + m * 2 * f * (dx + dw) + m * f * ddown + 2 * f * k * dx
    for leaf, letter, result in zip(leaves, ("x", "gate", "up", "down"), RESULTS[1:], strict=True):
        if letter in requires_grad.split():
            assert torch.equal(leaf.grad, want[result])
        else:
            assert leaf.grad is None


@pytest.mark.parametrize("requires_grad", COMBINATIONS)
@pytest.mark.parametrize("name", NAMES)
def test_what_is_kept_for_backward(name, requires_grad):
    m, k, f, n = 128, 128, 256, 64
    mlp, recipe = Mlp(m, k, f, n, dtype=torch.bfloat16), recipes.get(name)
    leaves = mlp.leaves(requires_grad)
    kept: dict[int, Tensor] = {}
    with saved_tensors_hooks(lambda t: kept.setdefault(t.data_ptr(), t), lambda t: t):
        gated_mlp(*leaves, activation="silu", recipe=recipe, slots=slots_for(recipe))
    for leaf in leaves:
        kept.pop(leaf.data_ptr(), None)
    scales = {"tensorwise": 1, "delayed": 1, "rowwise": k, "blockwise": k, "mxfp8": k * m // 32}[name]
    codes_of_x = m * k + 4 * scales if "gate" in requires_grad else 0
    gate_up = m * 2 * f * 2 if requires_grad else 0
    assert sum(t.nbytes for t in kept.values()) == codes_of_x + gate_up


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", ["rowwise", "delayed"])
def test_without_grad_nothing_is_kept(name, mode):
    mlp, recipe = Mlp(), recipes.get(name)
    with saved_tensors_hooks(lambda t: pytest.fail("saved a tensor"), lambda t: t), mode(), Work() as work:
        y = gated_mlp(*mlp.leaves(), activation="silu", recipe=recipe, slots=slots_for(recipe))
    assert work.gemms == 2
    assert torch.equal(y, run(name, mlp)["y"])


def test_a_weight_changed_before_backward_is_an_error():
    for which in (1, 2, 3):
        mlp = Mlp()
        leaves = mlp.leaves()
        y = gated_mlp(*leaves, activation="silu", recipe=recipes.get("rowwise"))
        with torch.no_grad():
            leaves[which].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward(mlp.of["dy"])


# ------------------------------------------------------------------------------------------------------- windows


@pytest.mark.parametrize("name", NAMES)
def test_weight_codes_are_reused_inside_a_window(name):
    mlp, recipe = Mlp(128, 128, 128, 128), recipes.get(name)
    codes, slots = (WeightCodes(), WeightCodes()), slots_for(recipe)
    for one in codes:
        one.open()
    with Work() as first:
        want = run(name, mlp, codes=codes, slots=slots)
    with Work() as second:
        assert_same(run(name, mlp, codes=codes, slots=slots), want)  # other tensors: leaves() copies
    assert second.codes == first.codes
    leaves = mlp.leaves()
    for expected in (first.codes, first.codes - 2 * 3 * 128 * 128):
        for leaf in leaves:
            leaf.grad = None
        with Work() as work:
            y = gated_mlp(*leaves, activation="silu", recipe=recipe, slots=slots, codes=codes)
            y.backward(mlp.of["dy"])
        assert work.codes == expected
        assert torch.equal(y, want["y"])
        assert torch.equal(leaves[0].grad, want["dx"])


@pytest.mark.parametrize("which", [1, 2, 3])
def test_a_changed_weight_drops_kept_codes(which):
    mlp, recipe = Mlp(), recipes.get("rowwise")
    codes = WeightCodes(), WeightCodes()
    for one in codes:
        one.open()
    leaves = mlp.leaves()

    def call() -> Tensor:
        return gated_mlp(*leaves, activation="silu", recipe=recipe, codes=codes)

    call()
    with torch.no_grad():
        leaves[which].mul_(-1)
    got = call()
    assert torch.equal(got, gated_mlp(*leaves, activation="silu", recipe=recipe))
    leaves[which] = torch.randn_like(leaves[which]).requires_grad_()
    assert torch.equal(call(), gated_mlp(*leaves, activation="silu", recipe=recipe))


# ------------------------------------------------------------------------------------------------------ autograd


@pytest.mark.parametrize("name", NAMES)
def test_retain_graph_gives_the_same_again_and_gradients_add_up(name):
    mlp, recipe = Mlp(), recipes.get(name)
    want = run(name, mlp)
    leaves = mlp.leaves()
    y = gated_mlp(*leaves, activation="silu", recipe=recipe, slots=slots_for(recipe))
    for retain in (True, False):
        grads = torch.autograd.grad(y, leaves, mlp.of["dy"], retain_graph=retain)
        assert_same(dict(zip(RESULTS[1:], grads, strict=True)), {n: want[n] for n in RESULTS[1:]})
    for _ in range(2):
        gated_mlp(*leaves, activation="silu", recipe=recipe, slots=slots_for(recipe)).backward(mlp.of["dy"])
    for leaf, result in zip(leaves, RESULTS[1:], strict=True):
        assert torch.equal(leaf.grad, want[result] * 2)


@pytest.mark.parametrize("of", range(4))
def test_a_second_derivative_raises(of):
    mlp = Mlp()
    leaves = mlp.leaves()
    y = gated_mlp(*leaves, activation="silu", recipe=recipes.get("rowwise"))
    (gradient,) = torch.autograd.grad(y.sum(), leaves[of], create_graph=True)
    with pytest.raises(DoubleBackwardError):
        (y.sum() + gradient.square().sum()).backward()


def test_expanded_and_strided_gradients_and_changes_in_place():
    mlp, recipe = Mlp(), recipes.get("rowwise")
    results = []
    for dy in (torch.ones(()).expand(40, 48), torch.ones(40, 48), torch.ones(48, 40).t()):
        leaves = mlp.leaves()
        y = gated_mlp(leaves[0].reshape(4, 10, 64), *leaves[1:], activation="silu", recipe=recipe)
        y += 1.0  # as nn.Linear's result it may be
        y.backward(dy.reshape(4, 10, 48))
        results.append({str(i): leaf.grad for i, leaf in enumerate(leaves)})
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])


# ------------------------------------------------------------------------------------------------ data that bites


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", NAMES)
def test_a_bad_token_is_confined(name, bad):
    mlp = Mlp()
    clean = run(name, mlp)
    mlp.of["x"][5, 7] = bad
    got = run(name, mlp)
    others = torch.arange(40) != 5
    assert got["y"][5].isnan().all()
    assert got["y"][others].isfinite().all()
    assert got["dx"][5].isnan().all()
    assert got["dx"][others].isfinite().all()
    for result in ("dgate", "dup", "ddown"):  # a sum over tokens
        assert got[result].isnan().any()
    if name in ("rowwise", "mxfp8", "blockwise"):
        assert torch.equal(got["y"][others], clean["y"][others])
        assert torch.equal(got["dx"][others], clean["dx"][others])


@pytest.mark.parametrize("zero", ["x", "gate", "up", "down", "dy"])
@pytest.mark.parametrize("name", NAMES)
def test_an_operand_of_zeros(name, zero):
    mlp = Mlp()
    mlp.of[zero].zero_()
    got, want = run(name, mlp), reference(mlp)
    for result in RESULTS:
        assert got[result].isfinite().all()
        assert got[result].any() == want[result].any()
