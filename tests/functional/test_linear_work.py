"""What one call of the layer does and keeps: saved tensors, skipped casts and GEMMs, any number of tokens."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from acceler8 import recipes
from acceler8.formats import E4M3, E5M2
from acceler8.functional import linear
from acceler8.recipes import Gemm, Operand
from acceler8.scaling import ROWWISE
from tests.functional.support import NAMES, Data, float64, make_data, plain, run, slots_for

BOTH_SCALES = ("rowwise", "blockwise", "mxfp8")  # scales that a row's neighbours do not move


class Work(TorchDispatchMode):
    """Counts the package's own operations and plain matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func).split(".")
        if name[0] == "acceler8":
            self.count["cast" if "quantize" in name[1] else "fp8 gemm"] += 1
        elif name[1] in ("mm", "addmm", "linear"):
            self.count["plain gemm"] += 1
        return func(*args, **(kwargs or {}))


def saved_by(recipe, data: Data, *, requires_grad: str = "x w bias", enabled: bool = True) -> list[Tensor]:
    """The tensors that one forward keeps for backward, a tensor that is kept twice once."""
    kept: dict[tuple[int, torch.dtype], Tensor] = {}

    def pack(t: Tensor) -> Tensor:
        kept[t.data_ptr(), t.dtype] = t
        return t

    x, w, bias = (t.detach().clone() for t in (data.x, data.w, data.bias))
    for name, leaf in (("x", x), ("w", w), ("bias", bias)):
        leaf.requires_grad_(name in requires_grad.split())
    with torch.set_grad_enabled(enabled), saved_tensors_hooks(pack, lambda t: t):
        linear(x, w, bias, recipe=recipe, slots=slots_for(recipe, data.x.device.type))
    return [t for t in kept.values() if t.data_ptr() != w.data_ptr()]  # the weight is there anyway


@pytest.mark.parametrize("name", [*NAMES, "activations_only"])
def test_x_is_saved_in_fp8(name, device):
    data = make_data(64, 128, 32, dtype=torch.bfloat16, device=device)
    recipe = recipes.get(name)
    kept = saved_by(recipe, data)
    assert {t.dtype for t in kept} == {recipe.wgrad.b.format.torch_dtype, torch.float32}
    codes, scales = (sum(t.nbytes for t in kept if (t.dtype == torch.float32) == wide) for wide in (0, 1))
    filled = -(-64 // recipe.granularity.contraction_multiple) * recipe.granularity.contraction_multiple
    assert codes == (64 if name == "activations_only" else filled) * 128  # a byte an element
    groups = {"tensorwise": 1, "delayed": 1, "rowwise": 128, "blockwise": 128, "mxfp8": 256, "activations_only": 64}
    assert scales == 4 * groups[name]


def test_a_high_precision_wgrad_saves_x_itself(device):
    data = make_data(64, 128, 32, dtype=torch.bfloat16, device=device)
    kept = saved_by(recipes.get("rowwise").with_gemms(wgrad=False), data)
    assert [(t.dtype, t.shape) for t in kept] == [(torch.bfloat16, data.x.shape)]


@pytest.mark.parametrize("name", [*NAMES, "activations_only"])
def test_nothing_of_x_is_saved_for_a_frozen_weight(name, device):
    data = make_data(16, 32, 48, dtype=torch.bfloat16, device=device)
    assert saved_by(recipes.get(name), data, requires_grad="x bias") == []


def test_the_weight_is_not_saved_where_no_dgrad_reads_it(device):
    """As in nn.Linear: a weight may then change in place between forward and backward."""
    data = make_data(16, 32, 48, device=device)
    _, w, _ = data.leaves()
    y = linear(data.x, w, recipe=recipes.get("rowwise"))
    with torch.no_grad():
        w.mul_(2)
    y.backward(data.dy)
    assert torch.equal(w.grad, run("rowwise", data)["dw"])


def test_a_weight_changed_in_place_before_dgrad_is_an_error(device):
    """As in nn.Linear: the gradient would be one of other weights."""
    data = make_data(16, 32, 48, device=device)
    x, w, _ = data.leaves()
    y = linear(x, w, recipe=recipes.get("rowwise"))
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(data.dy)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", ["rowwise", "delayed", "activations_only"])
def test_without_grad_nothing_is_saved_and_only_fprop_runs(name, mode, device):
    data = make_data(16, 32, 48, device=device)
    recipe = recipes.get(name)
    x, w, bias = data.leaves()
    with saved_tensors_hooks(lambda t: pytest.fail("saved a tensor"), lambda t: t), Work() as work, mode():
        y = linear(x, w, bias, recipe=recipe, slots=slots_for(recipe, device))
    assert work.count["cast"] == (0 if name == "activations_only" else 2)
    assert y.grad_fn is None
    assert torch.equal(y, run(recipe, data)["y"])


# requires_grad -> casts and FP8 GEMMs of a forward and backward in which all three GEMMs are FP8
WORK = {
    "x w bias": (2 + 2, 3),  # x and w; dy and w again
    "x bias": (2 + 2, 2),  # no wgrad; x and dy are cast in one orientation only
    "w bias": (2 + 1, 2),  # no dgrad and no cast of w for it
    "bias": (2 + 0, 1),
}


@pytest.mark.parametrize("requires_grad", WORK)
@pytest.mark.parametrize("name", NAMES)
def test_a_gemm_that_nobody_needs_is_skipped_with_its_casts(name, requires_grad, device):
    data = make_data(16, 32, 48, device=device)
    recipe = recipes.get(name)
    want = run(recipe, data)
    leaves = dict(zip(("x", "w", "bias"), (t.detach() for t in data.leaves()), strict=True))
    for leaf in requires_grad.split():
        leaves[leaf].requires_grad_()
    slots = slots_for(recipe, device)
    with Work() as work:
        linear(leaves["x"], leaves["w"], leaves["bias"], recipe=recipe, slots=slots).backward(data.dy)
    assert (work.count["cast"], work.count["fp8 gemm"]) == WORK[requires_grad]
    for leaf, result in (("x", "dx"), ("w", "dw"), ("bias", "dbias")):
        if leaf in requires_grad.split():
            got = leaves[leaf].grad
            if leaf == "bias":  # another cast's tile may add up in another order: 16 terms, each sum within 16 u
                assert ((got - want[result]).abs() <= 2 * 16 * 2.0**-24 * data.dy.abs().sum(0)).all()
            else:
                assert torch.equal(got, want[result])
        else:
            assert leaves[leaf].grad is None


def sums_of_dy(recipe: recipes.Recipe, requires_grad: str, data: Data) -> tuple[int, int, Tensor]:
    """Casts of dy that add it up, PyTorch's sums, and the gradient of the bias."""
    leaves = dict(zip(("x", "w", "bias"), (t.detach() for t in data.leaves()), strict=True))
    for leaf in requires_grad.split():
        leaves[leaf].requires_grad_()
    y = linear(*leaves.values(), recipe=recipe, slots=slots_for(recipe, data.x.device.type))
    seen: Counter[str] = Counter()

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen[str(func).split(".")[1]] += 1
            return func(*args, **(kwargs or {}))

    with Seen():
        y.backward(data.dy)
    beside = seen["quantize_and_sum"] + seen["quantize_and_sum_delayed"]
    return beside, seen["sum"], leaves["bias"].grad


@pytest.mark.parametrize("requires_grad", WORK)
@pytest.mark.parametrize("name", [*NAMES, "rowwise, dgrad high", "rowwise, wgrad high", "activations_only"])
def test_the_bias_gradient_comes_with_the_cast_of_dy(name, requires_grad, device):
    """One read for both; PyTorch's sum only where dy is not cast. It is the sum of dy, not of what the codes say."""
    data = make_data(40, 64, 48, device=device)
    recipe = recipes.get(name.split(",")[0])
    if "high" in name:
        recipe = recipe.with_gemms(**{name.split()[1]: False})
    casts_dy = ("x" in requires_grad.split() and recipe.dgrad.a.is_fp8) or (
        "w" in requires_grad.split() and recipe.wgrad.a.is_fp8
    )
    beside, apart, got = sums_of_dy(recipe, requires_grad, data)
    assert (beside, apart) == (int(casts_dy), int(not casts_dy))
    want = data.dy.double().sum(0)
    assert ((got.double() - want).abs() <= 40 * 2.0**-24 * data.dy.abs().sum(0)).all()


@pytest.mark.parametrize(
    ("dgrad", "wgrad", "casts"),
    [(E4M3, None, 1), (None, E4M3, 1), (E4M3, E4M3, 1), (E5M2, E4M3, 2)],
    ids=["dgrad", "wgrad", "one for both", "unlike"],
)
def test_sums_come_with_a_cast_of_rows_that_gemms_in_high_precision_read(dgrad, wgrad, casts, device):
    """The first of the casts of dy sums; each GEMM reads the codes that it would without a bias."""
    data = make_data(40, 64, 48, device=device)
    of = [
        Gemm(a=Operand() if f is None else Operand(format=f, granularity=ROWWISE), b=Operand()) for f in (dgrad, wgrad)
    ]
    recipe = recipes.get("rowwise").with_gemms(fprop=False, dgrad=False, wgrad=False).replace(dgrad=of[0], wgrad=of[1])
    beside, apart, got = sums_of_dy(recipe, "x w bias", data)
    assert (beside, apart) == (1, 0)
    assert ((got.double() - data.dy.double().sum(0)).abs() <= 40 * 2.0**-24 * data.dy.abs().sum(0)).all()
    x, w, bias = data.leaves()
    with Work() as work:
        linear(x, w, bias, recipe=recipe).backward(data.dy)
    assert work.count["cast"] == casts
    alone_x, alone_w, _ = data.leaves()
    linear(alone_x, alone_w, recipe=recipe).backward(data.dy)
    for mine, its in ((x, alone_x), (w, alone_w)):
        torch.testing.assert_close(mine.grad, its.grad, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", ["rowwise", "delayed"])
def test_an_observer_sees_each_cast_of_dy_once(name, bias, device):
    data = make_data(40, 64, 48, device=device)
    seen: list[tuple[str, int]] = []

    def observe(role: str, packed: Tensor, elements: int) -> None:
        seen.append((role, elements))

    recipe = recipes.get(name)
    x, w, b = data.leaves()
    y = linear(x, w, b if bias else None, recipe=recipe, slots=slots_for(recipe, device), observer=observe)
    y.backward(data.dy)
    assert seen.count(("dy", 40 * 48)) == 1


def test_a_frozen_weight_casts_each_operand_in_one_orientation(device):
    """Counted by the bytes that casts write: x rows, w rows and cols, dy rows."""
    data = make_data(16, 32, 48, device=device)
    sizes: list[int] = []

    class Written(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if str(func).startswith("acceler8.quantize"):
                sizes.append(sum(t.numel() for t in out if t.element_size() == 1))
            return out

    x = data.x.clone().requires_grad_()
    with Written():
        linear(x, data.w, recipe=recipes.get("rowwise")).backward(data.dy)
    assert sizes == [16 * 32, 48 * 32, 16 * 48, 48 * 32]


@pytest.mark.parametrize("name", ["rowwise", "blockwise"])
def test_fast_accumulation_is_asked_for_in_fprop_only_and_not_with_blocks(name, device):
    data = make_data(16, 32, 48, device=device)
    asked: list[bool] = []

    class Asked(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if str(func).startswith("acceler8.scaled_matmul"):
                asked.append(args[-1])
            return func(*args, **(kwargs or {}))

    with Asked():
        run(name, data)
    assert asked == [name == "rowwise", False, False]


# ------------------------------------------------------------------------------------------------- tokens


@pytest.mark.parametrize("shape", [(0,), (1,), (7,), (17,), (2, 3, 5), (3, 0, 2), ()], ids=str)
@pytest.mark.parametrize("name", [*NAMES, "activations_only"])
def test_any_number_of_tokens(name, shape, device):
    tokens = 1
    for n in shape:
        tokens *= n
    data = make_data(tokens, 32, 48, device=device)
    recipe = recipes.get(name)
    x, w, bias = (t.reshape(*shape, t.shape[-1]) if t.ndim == 2 and i == 0 else t for i, t in enumerate(data.leaves()))
    x = x.detach().requires_grad_()
    y = linear(x, w, bias, recipe=recipe, slots=slots_for(recipe, device))
    assert y.shape == (*shape, 48)
    y.backward(data.dy.reshape(y.shape))
    assert x.grad.shape == x.shape
    for got, result in ((y, "y"), (x.grad, "dx"), (w.grad, "dw")):
        want = float64(data)[result] + (data.bias.double() if result == "y" else 0)
        assert (got.reshape(want.shape).double() - want).norm() <= 0.12 * want.norm()
    assert bias.grad.shape == bias.shape
    if tokens == 0:
        assert not w.grad.any()
        assert not bias.grad.any()


@pytest.mark.parametrize("name", BOTH_SCALES)
def test_filler_is_invisible(name, device):
    """17 rows alone, 17 rows of 32 whose rest is zero, and the first 17 of 32 real ones."""
    many = make_data(32, 128, 48, device=device)
    few = Data(many.x[:17], many.w, many.bias, many.dy[:17])
    row = torch.arange(32, device=device)[:, None]
    zeros = Data(torch.where(row < 17, many.x, 0), many.w, many.bias, torch.where(row < 17, many.dy, 0))
    got, padded, whole = run(name, few), run(name, zeros), run(name, many)
    # codes and scales are the same; sums of another M may be taken in another order
    for result in ("y", "dx"):
        torch.testing.assert_close(got[result], whole[result][:17], rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(got[result], padded[result][:17], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(got["dw"], padded["dw"], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["tensorwise", "delayed"])
def test_filler_does_not_move_a_tensor_wide_scale(name, device):
    data = make_data(17, 32, 48, device=device)
    recipe = recipes.get(name)
    slots = slots_for(recipe, device)
    data.x[:] = data.x.abs() + 100.0  # an amax far from a filler of 0
    data.dy[:] = -data.dy.abs() - 100.0
    run(recipe, data, slots=slots)
    if slots is not None:
        assert slots.x.staging.item() == data.x.max().item()
        assert slots.dy.staging.item() == -data.dy.min().item()


# ------------------------------------------------------------------------------------------------- layouts


def layouts(t: Tensor) -> dict[str, Tensor]:
    """The same values under other strides and offsets."""
    wide = torch.full((t.shape[0], 2 * t.shape[1] + 3), torch.nan, dtype=t.dtype, device=t.device)
    wide[:, 3::2] = t
    return {"transposed": t.t().contiguous().t(), "strided": wide[:, 3::2], "flipped": t.flip(0).flip(0)}


@pytest.mark.parametrize("layout", ["transposed", "strided"])
@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "blockwise", "activations_only"])
def test_strides_do_not_matter(name, layout, device):
    data = make_data(18, 48, 32, device=device)
    want = run(name, data)
    x, w, bias = data.leaves()
    odd = {key: layouts(t)[layout] for key, t in (("x", x), ("w", w), ("dy", data.dy))}
    y = linear(odd["x"], odd["w"], bias, recipe=recipes.get(name))
    y.backward(odd["dy"])
    for got, result in ((y, "y"), (x.grad, "dx"), (w.grad, "dw"), (bias.grad, "dbias")):
        torch.testing.assert_close(got, want[result], rtol=1e-5, atol=1e-6)  # cuBLAS may sum in another order


@pytest.mark.parametrize("name", [*NAMES, "activations_only"])
def test_expanded_dy(name, device):
    """y.sum() gives backward a dy of stride 0."""
    data = make_data(18, 48, 32, device=device)
    recipe = recipes.get(name)
    x, w, bias = data.leaves()
    linear(x, w, bias, recipe=recipe, slots=slots_for(recipe, device)).sum().backward()
    want = run(recipe, Data(data.x, data.w, data.bias, torch.ones(18, 32, device=device)))
    for got, result in ((x.grad, "dx"), (w.grad, "dw"), (bias.grad, "dbias")):
        if name == "activations_only" and device == "cuda":  # high-precision GEMMs: cuBLAS may sum in another order
            torch.testing.assert_close(got, want[result], rtol=1e-5, atol=1e-5)
        else:
            assert torch.equal(got, want[result])


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "mxfp8"])
def test_stride_zero_in_x(name, device):
    data = make_data(18, 48, 32, device=device)
    recipe = recipes.get(name)
    one = data.x[:1].clone().requires_grad_()
    y = linear(one.expand(18, 48), data.w, data.bias, recipe=recipe)
    y.backward(data.dy)
    want = run(recipe, Data(data.x[:1].repeat(18, 1), data.w, data.bias, data.dy))
    assert torch.equal(y, want["y"])
    torch.testing.assert_close(one.grad, want["dx"].sum(0, keepdim=True))


# ------------------------------------------------------------------------------------------------ data that bites


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("zero", ["x", "w", "dy"])
def test_an_operand_of_zeros_gives_zeros(name, zero, device):
    """A LoRA B matrix at its start, a dead unit, a masked loss."""
    data = make_data(18, 48, 32, device=device)
    getattr(data, zero).zero_()
    data.bias.zero_()
    got, want = run(name, data), plain(data)
    for result in ("y", "dx", "dw"):
        assert got[result].isfinite().all()
        assert got[result].any() == want[result].any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("factor", [2.0**-100, 2.0**100])
def test_tiny_and_huge_operands_keep_their_accuracy(name, factor, device):
    data = make_data(32, 64, 48, device=device)
    want = run(name, data)
    scaled = Data(data.x * factor, data.w, data.bias * factor, data.dy)
    got = run(name, scaled)
    floor = data.x.abs().max() * factor < 1e-12
    if floor:  # below the floor of amax everything underflows, without a NaN
        assert not (got["y"] - scaled.bias).any()
        assert not got["dw"].any()
    else:
        torch.testing.assert_close(got["y"] / factor, want["y"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", NAMES)
def test_a_bad_element_of_x_is_confined(name, bad, device):
    """y: its row. dw: its column (where scales are shared by a row's tokens). dx does not read x."""
    data = make_data(40, 160, 48, device=device)
    clean = run(name, data)
    data.x[5, 7] = bad
    got = run(name, data)
    assert got["y"][5].isnan().all()
    assert got["y"][torch.arange(40) != 5].isfinite().all()
    assert got["dw"][:, 7].isnan().all()
    assert got["dw"][:, torch.arange(160) != 7].isfinite().all()
    assert torch.equal(got["dx"], clean["dx"])
    if name in BOTH_SCALES:  # other rows share no scale with it, and are what they were
        other = torch.arange(40) != 5
        assert torch.equal(got["y"][other], clean["y"][other])


@pytest.mark.parametrize("name", NAMES)
def test_a_bad_element_of_w_is_confined(name, device):
    data = make_data(40, 160, 48, device=device)
    clean = run(name, data)
    data.w[3, 150] = torch.nan
    got = run(name, data)
    assert got["y"][:, 3].isnan().all()
    assert got["y"][:, torch.arange(48) != 3].isfinite().all()
    assert got["dx"][:, 150].isnan().all()
    assert got["dx"][:, torch.arange(160) != 150].isfinite().all()
    assert torch.equal(got["dw"], clean["dw"])


@pytest.mark.parametrize("name", NAMES)
def test_a_bad_element_of_dy_is_visible_in_every_gradient_it_reaches(name, device):
    data = make_data(40, 160, 48, device=device)
    data.dy[4, 2] = torch.inf
    got = run(name, data)
    assert got["dx"][4].isnan().all()
    assert got["dx"][torch.arange(40) != 4].isfinite().all()
    assert got["dw"][2].isnan().all()
    assert got["dw"][torch.arange(48) != 2].isfinite().all()
    assert not got["dbias"][2].isfinite()
