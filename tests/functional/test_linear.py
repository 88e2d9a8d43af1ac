"""The numbers of fprop, dgrad and wgrad, by recipe and format policy: rungs 3, 4 and 5 of the test ladder."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn import functional as F

from acceler8 import recipes
from acceler8.errors import DtypeError, RecipeError, ShapeError
from acceler8.formats import E4M3, E5M2
from acceler8.functional import linear
from acceler8.kernels import has_hardware_matmul
from acceler8.recipes import Gemm, Operand
from acceler8.scaling import ROWWISE
from tests.functional.support import (
    FORMAT,
    NAMES,
    POLICIES,
    Data,
    float64,
    make_data,
    operands,
    plain,
    quantized,
    run,
    slots_for,
    sqnr_db,
)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# GPUs multiply 1x128 blocks in E4M3 only
LEGAL = [pair for pair in itertools.product(NAMES, POLICIES) if pair[0] != "blockwise" or pair[1] == "E4M3"]
# Gaussian operands, round to nearest: SQNR of a GEMM in dB, by the formats of its operands (style guide, section 8)
THEORY = {("E4M3", "E4M3"): 28.5, ("E5M2", "E4M3"): 24.6}
GEMM_OF = {"y": "fprop", "dx": "dgrad", "dw": "wgrad"}


def rounding_dtype(dtype: torch.dtype, device: str, name: str) -> torch.dtype:
    """The dtype whose rounding bounds the error: tensor cores keep about 14 bits of a sum, less than FP16 and FP32."""
    granularity = recipes.get(name).granularity
    return torch.bfloat16 if has_hardware_matmul(torch.device(device), granularity) else dtype


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("widths", [(176, 96), (96, 96)], ids=["176 to 96", "square"])
@pytest.mark.parametrize(("name", "policy"), LEGAL)
def test_gemms_against_float64_on_quantised_operands(name, policy, widths, dtype, device):
    """Square too: there the wrong orientation of a weight fits."""
    data = make_data(33, *widths, dtype=dtype, device=device)
    got = run(recipes.get(name, formats=policy), data)
    for result, (a, b) in operands(name, policy, data).items():
        want = a @ b.t()
        if result == "y":
            want = want + data.bias.double()
        # what plain PyTorch loses on these operands: FP32 accumulation and one rounding to the same dtype
        own = a.float() @ b.float().t() + (data.bias.float() if result == "y" else 0.0)
        allowed = 2 * (own.to(rounding_dtype(dtype, device, name)).double() - want).abs()
        error = (got[result].double() - want).abs()
        assert got[result].dtype == dtype
        assert error.max() <= allowed.max()
        assert error.square().mean() <= allowed.square().mean()


@pytest.mark.parametrize("name", NAMES)
def test_scales_rounded_to_powers_of_two(name, device):
    data = make_data(33, 176, 96, device=device)
    got, free = (
        run(recipes.get(name, formats="E4M3", pow2_scales=True), data),
        run(recipes.get(name, formats="E4M3"), data),
    )
    for result, (a, b) in operands(name, "E4M3", data, pow2=True).items():
        want = (a @ b.t() + (data.bias.double() if result == "y" else 0.0)).float()
        # accumulation in FP32, or in the 14 bits that tensor cores keep
        assert sqnr_db(got[result], want) > (
            60 if has_hardware_matmul(data.x.device, recipes.get(name).granularity) else 100
        )
        assert torch.equal(got[result], free[result]) == (name == "mxfp8")  # whose scales are powers of two anyway


@pytest.mark.parametrize(("name", "policy"), LEGAL)
def test_sqnr_against_originals_is_what_the_formats_give(name, policy, device):
    data = make_data(144, 256, 192, device=device)
    got = run(recipes.get(name, formats=policy), data)
    got["y"] -= data.bias
    for result, want in float64(data).items():
        theory = THEORY[FORMAT[policy][GEMM_OF[result]]]
        assert sqnr_db(got[result], want) == pytest.approx(theory, abs=0.4)
        # a row of 144 and more has an SQNR that scatters by 0.7 dB; of 256 rows the worst is three of those away
        assert sqnr_db(got[result], want, dim=1).min() > theory - 3.0
        assert sqnr_db(got[result], want, dim=0).min() > theory - 3.0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [*NAMES, "activations_only"])
def test_bias_gradient_is_the_sum_of_dy(name, dtype, device):
    data = make_data(50, 32, 48, dtype=dtype, device=device)
    got = run(name, data)
    want = data.dy.double().sum(0)
    rounding = (want.to(dtype).double() - want).abs()
    # FP32 sums of 50 terms: each addition rounds the partial sum by at most half an ulp, 2**-24 of its size
    assert ((got["dbias"].double() - want).abs() <= rounding * 1.01 + 50 * 2**-24 * data.dy.abs().sum(0)).all()
    assert got["dbias"].dtype == dtype


def test_without_bias(device):
    data = make_data(8, 32, 16, device=device)
    x, w, _ = data.leaves()
    y = linear(x, w, recipe=recipes.get("rowwise"))
    assert torch.equal(y + data.bias, run("rowwise", data)["y"]) or torch.allclose(
        y + data.bias, run("rowwise", data)["y"], rtol=1e-6
    )


# ------------------------------------------------------------------------------ parts in high precision


@pytest.mark.parametrize("off", ["fprop", "dgrad", "wgrad"])
@pytest.mark.parametrize("name", NAMES)
def test_a_gemm_switched_off_equals_plain_and_leaves_the_others_alone(name, off, device):
    data = make_data(24, 48, 64, dtype=torch.bfloat16, device=device)
    recipe = recipes.get(name)
    got, whole, reference = run(recipe.with_gemms(**{off: False}), data), run(recipe, data), plain(data)
    for result, gemm in GEMM_OF.items():
        want = reference if gemm == off else whole
        assert torch.equal(got[result], want[result]), (result, off)
    assert not torch.equal(whole["y"], reference["y"])


@pytest.mark.parametrize("name", NAMES)
def test_all_gemms_switched_off_is_plain(name, device):
    data = make_data(24, 48, 64, dtype=torch.bfloat16, device=device)
    got = run(recipes.get(name).with_gemms(fprop=False, dgrad=False, wgrad=False), data)
    for result, want in plain(data).items():
        assert torch.equal(got[result], want)


@pytest.mark.parametrize("fmt", ["E4M3", "E5M2"])
@pytest.mark.parametrize(
    ("gemm", "side"), [(g, s) for g in ("fprop", "dgrad", "wgrad") for s in ("a", "b")], ids="-".join
)
def test_one_quantised_operand_is_multiplied_in_high_precision(gemm, side, fmt, device):
    data = make_data(24, 48, 64, device=device)
    only = Operand(format={"E4M3": E4M3, "E5M2": E5M2}[fmt], granularity=ROWWISE)
    parts = {"a": Operand(), "b": Operand(), side: only}
    off = recipes.get("rowwise").with_gemms(fprop=False, dgrad=False, wgrad=False)
    got = run(off.replace(**{gemm: Gemm(**parts)}), data)
    role = {"fprop": "xw", "dgrad": ("dy", "w"), "wgrad": ("dy", "x")}[gemm]["ab".index(side)]
    # the operand is read as dequantised rows, whichever dimension the GEMM contracts
    cast = Data(data.x, data.w, data.bias, data.dy)
    setattr(cast, role, quantized(getattr(data, role), fmt, "rowwise").float())
    want, reference = plain(cast), plain(data)
    for result, name in GEMM_OF.items():
        expected = want[result] if name == gemm else reference[result]
        assert torch.allclose(got[result], expected, rtol=1e-5, atol=1e-8), result
    assert not torch.allclose(want[{v: k for k, v in GEMM_OF.items()}[gemm]], reference["y"].new_zeros(()))


def test_backward_gemms_in_high_precision_may_read_dy_in_different_formats(device):
    """dgrad reads dy in one format, wgrad in another: neither gets the other's codes."""
    data = make_data(24, 48, 64, device=device)
    off = recipes.get("rowwise").with_gemms(fprop=False, dgrad=False, wgrad=False)
    fine, wide = Operand(format=E4M3, granularity=ROWWISE), Operand(format=E5M2, granularity=ROWWISE)
    got = run(off.replace(dgrad=Gemm(a=wide, b=Operand()), wgrad=Gemm(a=fine, b=Operand())), data)
    assert torch.allclose(got["dx"], quantized(data.dy, "E5M2", "rowwise").float() @ data.w, rtol=1e-5, atol=1e-8)
    want = quantized(data.dy, "E4M3", "rowwise").float().t() @ data.x
    assert torch.allclose(got["dw"], want, rtol=1e-5, atol=1e-7)


def test_forward_and_backward_may_read_w_in_different_formats(device):
    data = make_data(24, 48, 64, device=device)
    off = recipes.get("rowwise").with_gemms(fprop=False, dgrad=False, wgrad=False)
    fine, wide = Operand(format=E4M3, granularity=ROWWISE), Operand(format=E5M2, granularity=ROWWISE)
    recipe = off.replace(fprop=Gemm(a=Operand(), b=fine), dgrad=Gemm(a=Operand(), b=wide))
    from acceler8.functional import WeightCodes

    codes = WeightCodes()
    codes.open()
    for _ in range(2):  # the second time from kept codes
        got = run(recipe, data, codes=codes)
        want = data.x @ quantized(data.w, "E4M3", "rowwise").float().t() + data.bias
        assert torch.allclose(got["y"], want, rtol=1e-5, atol=1e-6)
        want = data.dy @ quantized(data.w, "E5M2", "rowwise").float()
        assert torch.allclose(got["dx"], want, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_activations_only(dtype, device):
    data = make_data(48, 64, 32, dtype=dtype, device=device)
    got, reference = run("activations_only", data), plain(data)
    assert torch.equal(got["y"], reference["y"])
    assert torch.equal(got["dx"], reference["dx"])
    kept = quantized(data.x, "E4M3", "rowwise")
    want = data.dy.double().t() @ kept
    assert not torch.equal(got["dw"], reference["dw"])
    own = ((data.dy.float().t() @ kept.to(dtype).float()).to(dtype).double() - want).abs()
    assert (got["dw"].double() - want).abs().max() <= 2 * own.max()


def test_activations_only_costs_one_cast_of_accuracy(device):
    data = make_data(144, 256, 192, device=device)
    got = run("activations_only", data)
    assert sqnr_db(got["dw"], float64(data)["dw"]) == pytest.approx(31.5, abs=0.4)  # E4M3 cast, Gaussian


# --------------------------------------------------------------------------------- scales of earlier steps


def test_delayed_scaling_uses_the_amax_of_earlier_steps(device):
    data = make_data(32, 64, 48, device=device)
    recipe = recipes.get("delayed", formats="E4M3")
    slots = slots_for(recipe, device)
    first = run(recipe, data, slots=slots)
    for name, slot in zip(("x", "w", "dy"), slots, strict=False):
        assert slot.staging.item() == getattr(data, name).abs().max().item()
    for result, want in run("tensorwise", data).items():  # no history: the tensor's own amax
        assert result != "y" or torch.equal(first[result], want)
    slots.x.state.update()
    larger = Data(data.x * 3, data.w, data.bias, data.dy)
    second = run(recipe, larger, slots=slots)
    # x is three times its recorded amax and saturates there; w and dy are as they were
    amax = data.x.abs().max()
    clipped = larger.x.clamp(-amax, amax)
    scale_inv = torch.ones(()) / (448.0 / amax.cpu())
    codes = (clipped.cpu().double() / scale_inv.double()).float().to(torch.float8_e4m3fn).float()
    want = (codes * scale_inv).to(device) @ quantized(data.w, "E4M3", "tensorwise").float().t() + data.bias
    assert sqnr_db(second["y"], want) > 60
    assert sqnr_db(second["y"], run("tensorwise", larger)["y"]) < 20
    assert torch.equal(second["dx"], first["dx"])
    assert slots.x.staging.item() == larger.x.abs().max().item()


# -------------------------------------------------------------------------------------------------- errors


def test_wrong_input_is_said_in_words():
    data = make_data(4, 32, 16)
    recipe = recipes.get("rowwise")
    with pytest.raises(ShapeError, match=r"x \(4, 16\) and weight \(16, 32\); allowed: x \[\.\.\., K\]"):
        linear(data.x[:, :16], data.w, recipe=recipe)
    with pytest.raises(ShapeError, match=r"out_features=10, in_features=32; allowed: multiples of 16.*skip"):
        linear(data.x, data.w[:10], recipe=recipe)
    with pytest.raises(ShapeError, match=r"bias \(1,\).*allowed: \(16,\)"):
        linear(data.x, data.w, data.bias[:1], recipe=recipe)
    with pytest.raises(DtypeError, match=r"x in torch\.float64; allowed: bfloat16, float16, float32"):
        linear(data.x.double(), data.w, recipe=recipe)
    with pytest.raises(DtypeError, match=r"x in torch\.bfloat16 and weight in torch\.float32.*x\.to\(weight"):
        linear(data.x.bfloat16(), data.w, recipe=recipe)
    with pytest.raises(RecipeError, match="'delayed' needs amax slots"):
        linear(data.x, data.w, recipe=recipes.get("delayed"))


def test_widths_are_free_where_no_gemm_is_in_fp8():
    data = make_data(4, 30, 10)
    assert torch.equal(run("activations_only", data)["y"], F.linear(data.x, data.w, data.bias))
