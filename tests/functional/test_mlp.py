"""The MLP without a gate as one operation: numbers, biases, work, what is kept, and its place in autograd."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from acceler8 import recipes
from acceler8.errors import DoubleBackwardError
from acceler8.functional import WeightCodes, linear
from acceler8.functional.mlp import ACTIVATIONS, cannot_fuse, mlp
from acceler8.recipes import Recipe
from tests.functional.mlps import PLAIN, Work, assert_same, slots_for
from tests.functional.support import NAMES, sqnr_db

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LEAVES = ("x", "first", "first_bias", "second", "second_bias")
RESULTS = ("y", *(f"d{name}" for name in LEAVES))
KINK = 16.2  # dB, what is behind the step of relu's slope: 0.012 of the elements against a half


class Mlp:
    """Operands; ``leaves()`` are fresh copies that require grad, in the order of ``mlp``'s arguments."""

    def __init__(
        self, m: int = 40, k: int = 64, f: int = 128, n: int = 48, *,
        dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0,
    ) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        shapes = {"x": (m, k), "first": (f, k), "first_bias": (f,), "second": (n, f), "second_bias": (n,), "dy": (m, n)}
        values = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        factor = {"first": k**-0.5, "first_bias": 0.3, "second": f**-0.5, "second_bias": 0.3, "dy": 1e-2}
        self.of = {name: (t * factor.get(name, 1.0)).to(device, dtype) for name, t in values.items()}

    def leaves(self, requires_grad: str = " ".join(LEAVES)) -> list[Tensor]:
        wanted = requires_grad.split()
        return [self.of[name].detach().clone().requires_grad_(name in wanted) for name in LEAVES]


def run(name: str | Recipe, data: Mlp, activation: str = "gelu", **options: object) -> dict[str, Tensor]:
    """Output and gradients of one forward and backward."""
    recipe = recipes.resolve(name)
    leaves = data.leaves()
    options.setdefault("slots", slots_for(recipe, leaves[0].device.type))
    y = mlp(*leaves, activation=activation, recipe=recipe, **options)
    y.backward(data.of["dy"].to(y.dtype))
    return dict(zip(RESULTS, (y.detach(), *(leaf.grad for leaf in leaves)), strict=True))


def reference(data: Mlp, activation: str = "gelu") -> dict[str, Tensor]:
    x, first, first_bias, second, second_bias = leaves = [t.detach().double().requires_grad_() for t in data.leaves()]
    y = F.linear(PLAIN[activation](F.linear(x, first, first_bias)), second, second_bias)
    y.backward(data.of["dy"].double())
    return dict(zip(RESULTS, (y.detach(), *(leaf.grad for leaf in leaves)), strict=True))


def one_by_one(name: str, data: Mlp, activation: str = "gelu") -> dict[str, Tensor]:
    recipe = recipes.get(name)
    x, first, first_bias, second, second_bias = leaves = data.leaves()
    wide, narrow = slots_for(recipe) or (None, None)
    between = PLAIN[activation](linear(x, first, first_bias, recipe=recipe, slots=wide))
    y = linear(between, second, second_bias, recipe=recipe, slots=narrow)
    y.backward(data.of["dy"])
    return dict(zip(RESULTS, (y.detach(), *(leaf.grad for leaf in leaves)), strict=True))


# ------------------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", NAMES)
def test_against_float64(name, activation, dtype, device):
    """Near what formats give: a GEMM of two Gaussian operands has 28.5 dB in E4M3, 24.6 dB if one is in E5M2.

    y holds two GEMMs, of which the second reads what the first left of noise, gradients up to three. The slope of relu
    is a step: noise of 4 % in front of it puts 1 % of the elements on its other side, an error of 100 % in each.
    """
    data = Mlp(dtype=dtype, device=device)
    got, want = run(name, data, activation), reference(data, activation)
    e5m2 = recipes.get(name).dgrad.a.format.name == "E5M2"
    for result in RESULTS:
        expected = 23.5 if result == "y" else 22.5 - (3.0 if e5m2 else 0.0)
        if activation == "relu" and result in ("dx", "dfirst", "dfirst_bias"):
            expected = -10 * math.log10(10 ** (-expected / 10) + 10 ** (-KINK / 10))
        assert sqnr_db(got[result], want[result]) > expected - 2.0, result
        assert got[result].dtype == dtype
    exact = data.of["dy"].double().sum(0)  # no cast is in this sum
    assert sqnr_db(got["dsecond_bias"], exact) > {torch.float32: 120, torch.float16: 60, torch.bfloat16: 45}[dtype]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", NAMES)
def test_near_the_layers_one_by_one(name, activation):
    data = Mlp()
    got, want, exact = run(name, data, activation), one_by_one(name, data, activation), reference(data, activation)
    for result in RESULTS:
        assert sqnr_db(got[result], exact[result]) > sqnr_db(want[result], exact[result]) - 0.7, result
    if name == "rowwise":  # FP32: the activation differs by ulps, so codes hardly ever
        for result in ("y", "dsecond", "dfirst_bias"):
            assert sqnr_db(got[result], want[result]) > 45, result


@pytest.mark.parametrize("name", NAMES)
def test_without_biases(name):
    data, recipe = Mlp(), recipes.get(name)
    x, first, _, second, _ = leaves = data.leaves()
    y = mlp(x, first, None, second, None, activation="gelu", recipe=recipe, slots=slots_for(recipe))
    y.backward(data.of["dy"])
    data.of["first_bias"].zero_()
    data.of["second_bias"].zero_()
    want = run(name, data)
    assert torch.equal(y, want["y"])
    for leaf, key in ((x, "x"), (first, "first"), (second, "second")):
        assert torch.equal(leaf.grad, want[f"d{key}"]), key
    assert leaves[2].grad is leaves[4].grad is None


@pytest.mark.parametrize("name", NAMES)
def test_the_bias_is_added_in_front_of_the_activation(name):
    """A bias of -1000 shuts relu, so nothing but the second bias passes, and no gradient comes back."""
    data = Mlp()
    data.of["first_bias"].fill_(-1000.0)
    got = run(name, data, "relu")
    assert torch.equal(got["y"], data.of["second_bias"].expand(40, 48))
    for result in ("dx", "dfirst", "dfirst_bias", "dsecond"):
        assert not got[result].any(), result


def test_what_cannot_be_one_operation():
    assert cannot_fuse(recipes.get("blockwise")) is None
    for part in ("fprop", "dgrad", "wgrad"):
        assert cannot_fuse(recipes.get("rowwise").with_gemms(**{part: False})) == "a GEMM in high precision"


@pytest.mark.parametrize("features", [48, 96, 272])
@pytest.mark.parametrize("policy", ["fp8", "fp8_compressed"])
@pytest.mark.parametrize("name", NAMES)
def test_features_that_blocks_do_not_divide(name, policy, features):
    """The layers fill them, and so does the operation."""
    data = Mlp(f=features)
    got, want = run(replace(recipes.get(name), save_for_backward=policy), data), reference(data)
    for result in RESULTS:
        assert sqnr_db(got[result], want[result]) > 16, result


@pytest.mark.parametrize("shape", [(0,), (1,), (7,), (2, 3, 5), (3, 0, 2), ()], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_any_number_of_tokens(name, shape, device):
    data = Mlp(torch.Size(shape).numel(), device=device)
    recipe = recipes.get(name)
    _, *weights = data.leaves()
    x = data.of["x"].reshape(*shape, 64).clone().requires_grad_()
    y = mlp(x, *weights, activation="gelu", recipe=recipe, slots=slots_for(recipe, device))
    assert y.shape == (*shape, 48)
    y.backward(data.of["dy"].reshape(y.shape))
    assert x.grad.shape == x.shape
    want = reference(data)
    results = (y.reshape(-1, 48), x.grad.reshape(-1, 64), *(w.grad for w in weights))
    for got, result in zip(results, RESULTS, strict=True):
        assert (got.double() - want[result]).norm() <= 0.2 * want[result].norm(), result


@pytest.mark.parametrize("w_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["rowwise", "delayed"])
def test_autocast(name, w_dtype, device):
    data = Mlp(device=device)
    recipe = recipes.get(name)
    x, *rest = data.leaves()
    weights = [w.detach().to(w_dtype).requires_grad_() for w in rest]
    with torch.autocast(device, torch.bfloat16):
        y = mlp(x, *weights, activation="gelu", recipe=recipe, slots=slots_for(recipe, device))
        assert y.dtype == torch.bfloat16
        loss = (y * data.of["dy"]).float().sum()
    loss.backward()
    want = reference(data)
    for t, result in zip((x, *weights), RESULTS[1:], strict=True):
        assert t.grad.dtype == t.dtype
        assert sqnr_db(t.grad, want[result]) > 16, result


@pytest.mark.parametrize("name", NAMES)
def test_deterministic(name, device):
    assert_same(run(name, Mlp(300, device=device)), run(name, Mlp(300, device=device)))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", NAMES)
def test_kept_in_fp8(name, activation):
    """Forward is as ever; gradients but that of the second bias carry the noise of one cast more, 31 dB."""
    data = Mlp(128, 128, 256, 64, dtype=torch.bfloat16)
    plain = run(name, data, activation)
    got = run(replace(recipes.get(name), save_for_backward="fp8_compressed"), data, activation)
    assert torch.equal(got["y"], plain["y"])
    assert torch.equal(got["dsecond_bias"], plain["dsecond_bias"])
    for result in ("dx", "dfirst", "dfirst_bias", "dsecond"):
        if activation == "relu" and result != "dsecond":  # a sign is all that its slope asks; few underflow
            assert sqnr_db(got[result], plain[result]) > 35, result
        else:
            assert 24 < sqnr_db(got[result], plain[result]) < 45, result


def test_delayed_scaling_stages_what_the_layers_do():
    data, recipe = Mlp(), recipes.get("delayed")
    slots = slots_for(recipe)
    run(recipe, data, slots=slots)
    state = slots[0].x.state
    layers = slots_for(recipe)
    leaves = data.leaves()
    between = F.gelu(linear(leaves[0], *leaves[1:3], recipe=recipe, slots=layers[0]))
    linear(between, *leaves[3:], recipe=recipe, slots=layers[1]).backward(data.of["dy"])
    torch.testing.assert_close(state.data[0], layers[0].x.state.data[0], rtol=1e-5, atol=0)
    assert (state.data[0] > 0).all()
    first = state.data.clone()
    run(recipe, data, slots=slots)  # again in the same step, as a recompute does
    assert torch.equal(state.data, first)
    silent = tuple(s._replace(records=False) for s in slots)
    state.data.zero_()
    run(recipe, data, slots=silent)
    assert not state.data.any()


# ---------------------------------------------------------------------------------------------------------- work

COMBINATIONS = [" ".join(itertools.compress(LEAVES, chosen)) for chosen in itertools.product((True, False), repeat=5)]


@pytest.mark.parametrize("requires_grad", COMBINATIONS)
@pytest.mark.parametrize("name", ["rowwise", "blockwise", "delayed"])
def test_what_nobody_needs_is_skipped(name, requires_grad):
    """Each of the five frozen or not: the gradients of the others have the same bits, from no more work."""
    m, k, f, n = 128, 128, 128, 128
    data, recipe = Mlp(m, k, f, n), recipes.get(name)
    want = run(name, data)
    leaves = data.leaves(requires_grad)
    dx, dfirst, dbias, dsecond = (leaf.requires_grad for leaf in leaves[:4])
    with Work() as work:
        y = mlp(*leaves, activation="gelu", recipe=recipe, slots=slots_for(recipe))
    assert work.gemms == 2
    assert work.codes == m * k * (1 + dfirst) + f * k + m * f + n * f
    if not requires_grad:
        assert y.grad_fn is None
        return
    with Work() as work:
        y.backward(data.of["dy"])
    d_act = dx or dfirst or dbias
    assert work.gemms == d_act + dx + dfirst + dsecond
    assert work.codes == m * n * (d_act + dsecond) + n * f * d_act + m * f * (dx + dfirst + dsecond) + f * k * dx
    for leaf, result in zip(leaves, RESULTS[1:], strict=True):
        if leaf.requires_grad:
            assert torch.equal(leaf.grad, want[result]), result
        else:
            assert leaf.grad is None


@pytest.mark.parametrize("policy", ["fp8", "fp8_compressed", "bf16"])
@pytest.mark.parametrize("requires_grad", COMBINATIONS)
def test_what_is_kept_for_backward(requires_grad, policy):
    m, k, f, n = 128, 128, 256, 64
    data, recipe = Mlp(m, k, f, n, dtype=torch.bfloat16), replace(recipes.get("rowwise"), save_for_backward=policy)
    leaves = data.leaves(requires_grad)
    kept: dict[int, Tensor] = {}
    with saved_tensors_hooks(lambda t: kept.setdefault(t.data_ptr(), t), lambda t: t):
        mlp(*leaves, activation="gelu", recipe=recipe)
    for leaf in leaves:
        kept.pop(leaf.data_ptr(), None)
    codes_of_x = m * k + 4 * k if "first" in requires_grad.split() and policy != "bf16" else 0
    wanted = set(requires_grad.split()) - {"second_bias"}
    between = (m * f + m * f // 32 if policy == "fp8_compressed" else m * f * 2) if wanted else 0
    assert sum(t.nbytes for t in kept.values()) == codes_of_x + between


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", ["rowwise", "delayed"])
def test_without_grad_nothing_is_kept(name, mode):
    data, recipe = Mlp(), recipes.get(name)
    with saved_tensors_hooks(lambda t: pytest.fail("saved a tensor"), lambda t: t), mode(), Work() as work:
        y = mlp(*data.leaves(), activation="gelu", recipe=recipe, slots=slots_for(recipe))
    assert work.gemms == 2
    assert torch.equal(y, run(name, data)["y"])


@pytest.mark.parametrize("name", NAMES)
def test_weight_codes_are_reused_inside_a_window(name):
    data, recipe = Mlp(128, 128, 128, 128), recipes.get(name)
    codes, slots = (WeightCodes(), WeightCodes()), slots_for(recipe)
    for one in codes:
        one.open()
    want, leaves, counts = run(name, data, slots=slots), data.leaves(), []
    for _ in range(2):
        for leaf in leaves:
            leaf.grad = None
        with Work() as work:
            y = mlp(*leaves, activation="gelu", recipe=recipe, slots=slots, codes=codes)
            y.backward(data.of["dy"])
        counts.append(work.codes)
        assert torch.equal(y, want["y"])
        assert torch.equal(leaves[0].grad, want["dx"])
    assert counts[1] == counts[0] - 2 * 2 * 128 * 128
    with torch.no_grad():
        leaves[3].mul_(-1)
    got = mlp(*leaves, activation="gelu", recipe=recipe, slots=slots, codes=codes)
    assert torch.equal(got, mlp(*leaves, activation="gelu", recipe=recipe, slots=slots))


# ------------------------------------------------------------------------------------------------------ autograd


@pytest.mark.parametrize("name", NAMES)
def test_retain_graph_gives_the_same_again_and_gradients_add_up(name):
    data, recipe = Mlp(), recipes.get(name)
    want = run(name, data)
    leaves = data.leaves()
    y = mlp(*leaves, activation="gelu", recipe=recipe, slots=slots_for(recipe))
    for retain in (True, False):
        grads = torch.autograd.grad(y, leaves, data.of["dy"], retain_graph=retain)
        assert_same(dict(zip(RESULTS[1:], grads, strict=True)), {n: want[n] for n in RESULTS[1:]})
    for _ in range(2):
        mlp(*leaves, activation="gelu", recipe=recipe, slots=slots_for(recipe)).backward(data.of["dy"])
    for leaf, result in zip(leaves, RESULTS[1:], strict=True):
        assert torch.equal(leaf.grad, want[result] * 2)


@pytest.mark.parametrize("of", range(5))
def test_a_second_derivative_raises(of):
    leaves = Mlp().leaves()
    y = mlp(*leaves, activation="gelu", recipe=recipes.get("rowwise"))
    (gradient,) = torch.autograd.grad(y.sum(), leaves[of], create_graph=True)
    with pytest.raises(DoubleBackwardError):
        (y.sum() + gradient.square().sum()).backward()


@pytest.mark.parametrize("which", [1, 3])
def test_a_weight_changed_before_backward_is_an_error(which):
    data = Mlp()
    leaves = data.leaves()
    y = mlp(*leaves, activation="gelu", recipe=recipes.get("rowwise"))
    with torch.no_grad():
        leaves[which].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(data.of["dy"])


def test_expanded_and_strided_gradients_and_changes_in_place():
    data, recipe = Mlp(), recipes.get("rowwise")
    results = []
    for dy in (torch.ones(()).expand(40, 48), torch.ones(40, 48), torch.ones(48, 40).t()):
        leaves = data.leaves()
        y = mlp(leaves[0].reshape(4, 10, 64), *leaves[1:], activation="gelu", recipe=recipe)
        y += 1.0  # as nn.Linear's result it may be
        y.backward(dy.reshape(4, 10, 48))
        results.append({str(i): leaf.grad for i, leaf in enumerate(leaves)})
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", NAMES)
def test_a_bad_token_is_confined(name, bad):
    data = Mlp()
    clean = run(name, data)
    data.of["x"][5, 7] = bad
    got = run(name, data)
    others = torch.arange(40) != 5
    for result in ("y", "dx"):
        assert got[result][5].isnan().all()
        assert got[result][others].isfinite().all()
        if name in ("rowwise", "mxfp8", "blockwise"):
            assert torch.equal(got[result][others], clean[result][others])
    for result in ("dfirst", "dfirst_bias", "dsecond"):  # a sum over tokens
        assert got[result].isnan().any()
    assert torch.equal(got["dsecond_bias"], clean["dsecond_bias"])
