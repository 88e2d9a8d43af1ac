"""record_statistics against NumPy, and NaN named by layer and operand."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from ml_dtypes import float8_e4m3fn, float8_e5m2
from torch import nn

import acceler8
from acceler8 import recipes
from acceler8.errors import NonFiniteError, PlanError
from tests.models import RECIPES, assert_equal, batch, converted, outcome

MAX = {"E4M3": 448.0, "E5M2": 57344.0}
HALFWAY = {"E4M3": 464.0, "E5M2": 61440.0}  # from there on it is clamping that makes the maximum, not rounding
CAST = {"E4M3": float8_e4m3fn, "E5M2": float8_e5m2}


def by_numpy(t: torch.Tensor, fmt: str, axis: int | None, amax: float | None = None) -> dict[str, float]:
    """Statistics of a cast with one scale a tensor (axis None) or a row, computed without the library."""
    x = t.detach().cpu().double().numpy()
    group = np.abs(x).max(axis=axis, keepdims=axis is not None) if amax is None else np.float64(amax)
    scale = np.float32(MAX[fmt]) / np.maximum(group.astype(np.float32), np.float32(1e-12))
    y = x.astype(np.float32) * scale
    codes = np.clip(y, -MAX[fmt], MAX[fmt]).astype(CAST[fmt]).astype(np.float32)
    error = x - codes * (np.float32(1) / scale)
    return {
        "amax": np.abs(x).max(),
        "elements": x.size,
        "saturated": int((np.abs(y) > HALFWAY[fmt]).sum()),
        "underflowed": int(((codes == 0) & (x != 0)).sum()),
        "nonfinite": 0,
        "sqnr_db": 10 * np.log10((x**2).sum() / (error**2).sum()),
    }


def wide_range(shape: tuple[int, ...], seed: int, device: str) -> torch.Tensor:
    """Log-normal magnitudes over many octaves, so that some underflow."""
    generator = torch.Generator().manual_seed(seed)
    magnitude = torch.randn(shape, generator=generator).mul(4).exp()
    return (magnitude * torch.randn(shape, generator=generator).sign()).to(device)


@pytest.mark.parametrize(("recipe", "axis"), [("tensorwise", None), ("rowwise", 1)])
def test_counts_equal_numpy(recipe, axis, device):
    layer = acceler8.convert(nn.Linear(64, 48, bias=False), recipe).to(device)
    x, dy = wide_range((40, 64), 1, device), wide_range((40, 48), 2, device)
    with torch.no_grad():
        layer.weight.copy_(wide_range((48, 64), 3, device))
    with acceler8.record_statistics(layer) as statistics:
        layer(x.requires_grad_()).backward(dy)
    rows = {row["role"]: row for row in statistics.rows()}
    assert [(row["layer"], row["role"]) for row in statistics.rows()] == [("(root)", r) for r in ("x", "w", "dy")]
    gradient = "E5M2" if recipe == "tensorwise" else "E4M3"
    want = {"x": by_numpy(x, "E4M3", axis), "dy": by_numpy(dy, gradient, axis)}
    rows_of_w = by_numpy(layer.weight, "E4M3", axis)
    cols_of_w = by_numpy(layer.weight.t(), "E4M3", axis)  # dgrad's cast: w counts twice
    want["w"] = {
        key: rows_of_w[key] + cols_of_w[key] for key in ("elements", "saturated", "underflowed", "nonfinite")
    } | {"amax": rows_of_w["amax"]}
    for role, expected in want.items():
        for key, value in expected.items():
            assert rows[role][key] == pytest.approx(value, rel=1e-4), (role, key)
    assert rows["x"]["underflowed"] > 0
    assert rows["x"]["saturated"] == 0


def test_saturation_under_delayed_scaling_equals_numpy(device):
    layer = acceler8.convert(nn.Linear(64, 48, bias=False), "delayed").to(device)
    x = batch(40, 64, device=device)
    layer(x).sum().backward()
    acceler8.step(layer)
    with acceler8.record_statistics(layer) as statistics, torch.no_grad():
        layer(3 * x)
    want = by_numpy(3 * x, "E4M3", None, amax=x.abs().max().item())
    got = statistics.casts()["(root)", "x"]
    assert got.saturated == want["saturated"] > 0
    assert got.underflowed == want["underflowed"]
    assert got.sqnr_db == pytest.approx(want["sqnr_db"], rel=1e-4)
    assert got.amax == want["amax"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_recording_changes_no_number_and_adds_up(recipe, device):
    model, reference = converted(recipe, device=device), converted(recipe, device=device)
    x = batch(device=device)
    with acceler8.record_statistics(model) as once:
        assert_equal(outcome(model, x), outcome(reference, x))
    with acceler8.record_statistics(model) as twice:
        outcome(model, x)
        outcome(model, 2 * x)
    assert_equal(outcome(model, x), outcome(reference, x))
    roles = ("x",) if recipe == "activations_only" else ("x", "w", "dy")
    assert set(once.casts()) == {(layer, role) for layer in ("up", "down") for role in roles}
    for key, cast in once.casts().items():
        assert twice.casts()[key].elements == 2 * cast.elements
        assert twice.casts()[key].amax >= cast.amax
        assert 20 < cast.sqnr_db < 35
    json.dumps(once.rows())
    once.check()


def test_records_nest_and_end(device):
    model = converted(device=device)
    with acceler8.record_statistics(model) as outer:
        model(batch(device=device))
        with acceler8.record_statistics(model) as inner:
            model(batch(device=device))
        model(batch(device=device))
    model(batch(device=device))
    assert outer.casts()["up", "x"].elements == 3 * inner.casts()["up", "x"].elements == 3 * 24 * 32
    assert model.up._acceler8_layer.observer is None
    with pytest.raises(RuntimeError, match="on purpose"), acceler8.record_statistics(model):
        raise RuntimeError("on purpose")
    assert model.up._acceler8_layer.observer is None


def test_without_casts_and_without_conversion():
    with acceler8.record_statistics(converted()) as statistics:
        pass
    assert statistics.rows() == []
    statistics.check()
    with pytest.raises(PlanError, match="not converted"), acceler8.record_statistics(nn.Linear(16, 16)):
        pass


# ---------------------------------------------------------------------------------------------------- NaN and infinity


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise", "mxfp8", "delayed"])
def test_a_bad_input_is_named_first(recipe, device):
    model = converted(recipe, device=device)
    x = batch(device=device)
    x[3, 4], x[3, 5] = torch.nan, torch.inf
    with acceler8.record_statistics(model) as statistics:
        model(x)
    assert statistics.casts()["up", "x"].nonfinite == 32  # the norm before it spreads it over the token
    with pytest.raises(NonFiniteError, match=r"^up: 32 of 768 values of its input are NaN or inf; down: .*its input"):
        statistics.check()


def test_a_bad_weight_is_named(device):
    model = converted(device=device)
    with torch.no_grad():
        model.down.weight[2, 3] = torch.inf
    with acceler8.record_statistics(model) as statistics:
        model(batch(device=device))
    assert statistics.problems() == ["down: 1 of 2048 values of its weight are NaN or inf"]
    with pytest.raises(NonFiniteError, match=r"keep it in high precision with skip=\[\.\.\.\]"):
        statistics.check()


def test_a_bad_gradient_is_named(device):
    model = converted(device=device)
    y = None
    with acceler8.record_statistics(model) as statistics:
        y = model(batch(device=device))
        dy = torch.ones_like(y)
        dy[7, 1] = torch.nan
        y.backward(dy)
    assert statistics.problems()[0] == "down: 1 of 768 values of its gradient of the output are NaN or inf"
    assert statistics.problems()[1].startswith("up: ")
    assert len(statistics.problems()) == 2


def test_many_problems_are_counted():
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(8)))
    acceler8.convert(model)
    with acceler8.record_statistics(model) as statistics:
        model(torch.full((2, 16), torch.nan))
    with pytest.raises(NonFiniteError, match=r"^0: 32 of 32 values of its input.*; and 3 more\. In one step the first"):
        statistics.check()


def test_statistics_do_not_wait_for_the_device():
    """Adding casts is arithmetic on the device; reading makes one copy."""
    model = converted()
    with acceler8.record_statistics(model) as statistics:
        outcome(model, batch())
        assert all(isinstance(packed, torch.Tensor) for packed, _ in statistics._packed.values())
    assert statistics.casts() == statistics.casts()


def test_both_casts_of_an_x_that_two_gemms_read_in_two_formats_count():
    model = converted(recipes.get("rowwise", formats="E5M2"))
    with acceler8.record_statistics(model) as statistics:
        outcome(model, batch())
    assert statistics.casts()["up", "x"].sqnr_db == pytest.approx(25.6, abs=1.0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Dynamo's own, at graph breaks
def test_a_compiled_model_records_what_an_eager_one_does(device):
    torch.compiler.reset()
    model, x = converted(device=device), batch(device=device)
    call = torch.compile(model, backend="aot_eager")
    want = outcome(model, x, call)
    with acceler8.record_statistics(model) as eager:
        outcome(model, x)
    with acceler8.record_statistics(model) as compiled:
        assert_equal(outcome(model, x, call), want)
    assert len(compiled.rows()) == len(eager.rows()) > 0
    for got, expected in zip(compiled.rows(), eager.rows(), strict=True):
        for key, value in expected.items():  # Dynamo's operations differ by ulps, which may move a code by one
            off = {"amax": 1e-6, "squared_sum": 1e-6, "squared_error": 1e-2, "sqnr_db": 1e-2}.get(key)
            assert got[key] == (value if off is None else pytest.approx(value, rel=off)), key
    torch.compiler.reset()
