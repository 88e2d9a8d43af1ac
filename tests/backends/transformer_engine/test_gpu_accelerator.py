"""TransformerEngine behind ``Accelerator``: settings arrive, windows open, checkpoints keep what they are to keep."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn

import acceler8
from acceler8 import Accelerator, backends
from acceler8.backends.transformer_engine import library
from acceler8.errors import ConfigError
from acceler8.utils import TERecipeKwargs
from tests.backends.transformer_engine.gpu import MARKS, Pair, gaussian

pytestmark = MARKS
HANDLER = {"amax_history_len": 4, "margin": 1}


def prepared(model: nn.Module | None = None, **settings: object) -> tuple[Accelerator, nn.Module, object]:
    accelerator = Accelerator(
        mixed_precision="fp8",
        kwargs_handlers=[TERecipeKwargs(**{**HANDLER, **settings.pop("handler", {})})],
        **settings,
    )
    model = Pair(dtype=torch.float32) if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return accelerator, *accelerator.prepare(model, optimizer)


def train(accelerator: Accelerator, model: nn.Module, optimizer: object, steps: range) -> list[float]:
    losses = []
    for step in steps:
        with accelerator.accumulate(model):
            loss = model(gaussian(33, 256, seed=step, dtype=torch.float32)).float().square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def test_settings_arrive():
    accelerator, model, optimizer = prepared()
    assert str(accelerator.fp8_backend.value) == "TE"
    losses = train(accelerator, model, optimizer, range(6))
    assert losses[-1] < losses[0]
    assert isinstance(model.up, library.load().Linear)
    found = model.up.fp8_meta["recipe"]
    assert type(found).__name__ == "DelayedScaling"
    assert (found.amax_history_len, found.margin, found.amax_compute_algo) == (4, 1, "most_recent")
    assert not torch.equal(model.up.fp8_meta["scaling_bwd"].scale[:1], torch.ones(1, device=model.up.weight.device))
    acceler8.verify(model, optimizer)


@pytest.mark.parametrize("on", [None, True, False])
def test_norms_are_left_on_request(on: bool | None):
    norms = nn.Sequential(nn.LayerNorm(256, device="cuda"), nn.Linear(256, 256, device="cuda"))
    accelerator, model, _ = prepared(norms, handler={"convert_norms": on})
    assert (type(model[0]) is nn.LayerNorm) is (on is False)
    assert isinstance(model[1], library.load().Linear)
    assert ("convert_norms is off" in str(accelerator.plan)) is (on is False)


def test_weights_are_cast_once_a_step_across_micro_batches():
    accelerator, model, optimizer = prepared(gradient_accumulation_steps=2)
    kept = []
    for step in range(4):
        train(accelerator, model, optimizer, range(step, step + 1))
        kept.append(model.up._fp8_workspaces.get("weight"))
    assert kept[0] is not None
    assert model.up._acceler8_layer.histories.steps == 2


def test_a_checkpoint_goes_on_and_its_model_file_is_plain(tmp_path: Path):
    accelerator, model, optimizer = prepared()
    train(accelerator, model, optimizer, range(3))
    accelerator.save_state(str(tmp_path / "state"))
    expected = train(accelerator, model, optimizer, range(3, 6))
    state = backends.get("te").state(model)

    resumed = prepared()
    resumed[0].load_state(str(tmp_path / "state"))
    assert train(*resumed, range(3, 6)) == expected
    for name, tensor in backends.get("te").state(resumed[1]).items():
        assert torch.equal(tensor, state[name]), name
    files = list((tmp_path / "state").rglob("model*.safetensors"))
    assert files
    with safe_open(files[0], "pt") as file:
        assert set(file.keys()) == {"up.weight", "down.weight", "down.bias"}


def test_a_checkpoint_within_a_step_keeps_what_the_boundary_will_drop(tmp_path: Path):
    """An overflow of this step waits in the staging row; it was saved, and refused when it was loaded."""
    accelerator, model, optimizer = prepared()
    train(accelerator, model, optimizer, range(2))
    accelerator.backward(model(gaussian(32, 256, dtype=torch.float32)).sum() * float("inf"))
    optimizer.zero_grad()
    state = backends.get("te").state(model)
    assert not state["down.amax_history_bwd"][0].isfinite().all()
    accelerator.save_state(str(tmp_path / "state"))
    resumed = prepared()
    resumed[0].load_state(str(tmp_path / "state"))
    for name, tensor in backends.get("te").state(resumed[1]).items():
        assert torch.equal(tensor.nan_to_num(-1), state[name].nan_to_num(-1)), name
    acceler8.step(resumed[1])
    assert all(tensor.isfinite().all() for tensor in backends.get("te").state(resumed[1]).values())


def test_another_backend_takes_a_checkpoint_over(tmp_path: Path):
    accelerator, model, optimizer = prepared()
    train(accelerator, model, optimizer, range(3))
    accelerator.save_state(str(tmp_path / "state"))
    native = Accelerator(mixed_precision="fp8", recipe="tensorwise")
    other = Pair(dtype=torch.float32)
    other, other_optimizer = native.prepare(other, torch.optim.AdamW(other.parameters(), lr=1e-3))
    native.load_state(str(tmp_path / "state"))
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
    train(native, other, other_optimizer, range(3, 5))


def test_high_precision_gradients_and_evaluation_by_settings():
    handler = {"override_linear_precision": (False, False, True), "use_autocast_during_eval": True}
    accelerator, model, optimizer = prepared(handler=handler)
    layer = model.up._acceler8_layer
    assert (layer.dgrad, layer.wgrad) == (True, False)
    train(accelerator, model, optimizer, range(2))
    model.eval()
    with torch.no_grad():
        x = gaussian(33, 256, dtype=torch.float32)
        in_fp8 = model(x)
        for state in (model.up._acceler8_layer, model.down._acceler8_layer):
            state.recipe = state.recipe.replace(eval="high_precision")
        assert not torch.equal(model(x), in_fp8)


def test_e5m2_is_refused_by_name():
    with pytest.raises(ConfigError, match="HYBRID"):
        prepared(handler={"fp8_format": "E5M2"})
