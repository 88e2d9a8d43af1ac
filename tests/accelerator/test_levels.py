"""``Accelerator`` at levels O1, O2 and O3: orders of ``prepare``, backends, files, accumulation, checkpoints."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR

import acceler8
from acceler8 import Accelerator, levels
from acceler8.backends.torchao import library
from acceler8.errors import CheckpointError, ConfigError, NotInThisVersionError
from acceler8.nn.gradients import stored_gradient
from acceler8.parallel import Strategy
from acceler8.utils import AORecipeKwargs, DeepSpeedPlugin, MSAMPRecipeKwargs, NativeRecipeKwargs
from tests.models import Mlp, batch
from tests.optim.support import same

MOST = {"O1": 11.1, "O2": 6.2, "O3": 7.2}


def accelerator(*handlers: Any, precision: str = "fp8", **options: Any) -> Accelerator:
    return Accelerator(mixed_precision=precision, kwargs_handlers=handlers, cpu=True, **options)


def mlp(seed: int = 0) -> Mlp:
    return Mlp(seed, width=128, hidden=256)


def run(own: Accelerator, model: nn.Module, optimizer: Any, micro_batches: range, scheduler: Any = None) -> list[float]:
    losses = []
    for number in micro_batches:
        with own.accumulate(model):
            x = batch(32, 128, seed=number)
            loss = (model(x) - x.flip(-1)).square().mean()
            own.backward(loss)
            if own.sync_gradients:
                own.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def prepared(own: Accelerator, lr: float = 1e-2) -> tuple[nn.Module, Any]:
    model = mlp()
    model, optimizer = own.prepare(model, AdamW(model.parameters(), lr=lr))
    return model, optimizer


@pytest.mark.parametrize("name", MOST)
def test_one_line_trains_at_a_level_in_the_promised_bytes(name, caplog):
    caplog.set_level(logging.INFO, logger="acceler8")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the upstream integration warned that it goes away
        own = accelerator(MSAMPRecipeKwargs(opt_level=name))
        model, optimizer = prepared(own)
        losses = run(own, model, optimizer, range(6))
    assert (own.fp8_backend, own.backend, own.level) == ("MSAMP", "native", levels.LEVELS[name])
    assert caplog.text.count("no package msamp is used") == 1
    assert losses[-1] < 0.7 * losses[0]
    x = batch(32, 128)
    own.backward(model(x).square().mean())
    assert levels.stored_bytes(model, optimizer).per_element <= MOST[name]
    assert model.up.weight.grad is None
    assert levels.gradient_of(model.up.weight) is not None
    report = str(own.fp8_report())
    assert f"opt_level = {name}" in report
    acceler8.verify(model, optimizer.optimizer)


def test_without_an_opt_level_there_is_none():
    own = accelerator()
    model, optimizer = prepared(own)
    assert own.level is None
    assert stored_gradient(model.up.weight) is None
    assert type(optimizer.optimizer) is AdamW
    assert "opt_level" not in str(own.fp8_report())


def test_gemms_are_another_recipes():
    own = accelerator(NativeRecipeKwargs(recipe="delayed"), MSAMPRecipeKwargs("O2", exp_avg_sq="fp8"))
    model, optimizer = prepared(own)
    run(own, model, optimizer, range(2))
    assert own.fp8_backend == "NATIVE"
    assert model.up._acceler8_layer.recipe.name == "delayed"
    assert optimizer.state[model.up.weight]["exp_avg_sq"].dtype is torch.uint8


@pytest.mark.skipif(library.unavailable() is not None, reason=str(library.unavailable()))
def test_gemms_are_torchaos():
    own = accelerator(AORecipeKwargs(skip_first_and_last=False), MSAMPRecipeKwargs("O2"))
    model, optimizer = prepared(own)
    losses = run(own, model, optimizer, range(6))
    assert (own.backend, losses[-1] < 0.7 * losses[0]) == ("ao", True)
    assert len(levels.level_weights(model)) == 2
    own.backward(model(batch(32, 128)).square().mean())
    assert levels.stored_bytes(model, optimizer).per_element <= MOST["O2"]
    third = accelerator(AORecipeKwargs(skip_first_and_last=False), MSAMPRecipeKwargs("O3"))
    with pytest.raises(
        acceler8.errors.PlanError, match=r"keeps FP8 codes of weights, which backend .* casts for itself"
    ):
        third.prepare(mlp())


def test_formats_that_were_asked_for_before_the_model_came_are_found_anew():
    own = accelerator(MSAMPRecipeKwargs("O2"))
    model = mlp().bfloat16()
    optimizer = own.prepare(AdamW(model.parameters(), lr=1e-2))
    assert "no weight of its level" in str(optimizer.summary())
    model = own.prepare(model)
    assert "E4M3 / 128" in str(optimizer.summary())
    own.backward(model(batch(32, 128).bfloat16()).float().square().mean())
    optimizer.step()
    assert optimizer.state[model.up.weight]["exp_avg"].dtype is torch.float8_e4m3fn


@pytest.mark.parametrize("order", ["model first", "optimizer first", "together", "optimizer before in one call"])
def test_prepare_takes_any_order(order):
    """Bit for bit the same training."""
    own = accelerator(MSAMPRecipeKwargs("O2"))
    model = mlp()
    given = AdamW(model.parameters(), lr=1e-2)
    if order == "together":
        model, optimizer = own.prepare(model, given)
    elif order == "optimizer before in one call":
        optimizer, model = own.prepare(given, model)
    elif order == "model first":
        model = own.prepare(model)
        optimizer = own.prepare(given)
    else:
        optimizer = own.prepare(given)
        model = own.prepare(model)
    assert own.prepare(given) is optimizer
    run(own, model, optimizer, range(3))
    reference = accelerator(MSAMPRecipeKwargs("O2"))
    other, stepped = prepared(reference)
    run(reference, other, stepped, range(3))
    assert same(dict(model.state_dict()), dict(other.state_dict()))
    assert same(optimizer.state_dict()["state"], stepped.state_dict()["state"])


def test_a_scheduler_made_before_goes_on():
    own = accelerator(MSAMPRecipeKwargs("O1"))
    model = mlp()
    given = AdamW(model.parameters(), lr=1e-2)
    model, optimizer, scheduler = own.prepare(model, given, LambdaLR(given, lambda step: 1 / (1 + step)))
    run(own, model, optimizer, range(2), scheduler)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 / 3)


@pytest.mark.parametrize("order", ["together", "optimizer first", "model first"])
def test_another_optimizer_of_these_weights_is_refused(order):
    own = accelerator(MSAMPRecipeKwargs("O1"))
    model = mlp()
    given = SGD(model.parameters(), lr=0.1)
    calls = {"together": [(model, given)], "optimizer first": [(given,), (model,)], "model first": [(model,), (given,)]}
    *before, last = calls[order]
    for objects in before:
        own.prepare(*objects)
    with pytest.raises(ConfigError, match=r"level O1 got a torch.optim.sgd.SGD; allowed: Adam and AdamW"):
        own.prepare(*last)


def test_several_models_each_have_their_level_and_other_optimizers_theirs():
    own = accelerator(MSAMPRecipeKwargs("O2"))
    first, second, plain = mlp(), mlp(1), nn.Linear(3, 3)
    given = AdamW(first.parameters(), lr=1e-2), AdamW(second.parameters(), lr=1e-2), SGD(plain.parameters(), lr=0.1)
    first, second, *optimizers = own.prepare(first, second, *given)
    for model, optimizer in zip((first, second), optimizers, strict=False):
        run(own, model, optimizer, range(2))
        assert len(levels.level_weights(model)) == 2
        assert optimizer.state[model.up.weight]["exp_avg"].dtype is torch.float8_e4m3fn
    assert optimizers[2].optimizer is given[2]
    plain(torch.ones(1, 3)).sum().backward()
    optimizers[2].step()
    assert optimizers[2].state == {}


def test_micro_batches_add_up_before_they_are_rounded():
    """In accumulate() and in no_sync(); the codes are those of PyTorch's own sum."""
    sums = []
    for way in ("accumulate", "no_sync", "plain"):
        own = accelerator(MSAMPRecipeKwargs("O1", gradient="weight" if way == "plain" else None))
        own.gradient_accumulation_steps = 1 if way == "no_sync" else 3
        model, _ = prepared(own)
        for number in range(3):
            x = batch(32, 128, seed=number)
            if way == "no_sync" and number < 2:
                with own.no_sync(model):
                    own.backward(model(x).square().mean() / 3)
            elif way == "no_sync":
                own.backward(model(x).square().mean() / 3)
            else:
                with own.accumulate(model):
                    own.backward(model(x).square().mean())
            assert (model.up.weight.grad is None) == (way != "plain" and number == 2)
        sums.append(levels.gradient_of(model.up.weight))
    assert torch.equal(sums[0], sums[1])
    codes = acceler8.formats.encode_blocks(sums[2].float(), acceler8.formats.E4M3_BLOCK)
    assert torch.equal(sums[0], acceler8.formats.decode_blocks(*codes, acceler8.formats.E4M3_BLOCK))


@pytest.mark.parametrize("name", MOST)
@pytest.mark.parametrize("at", [4, 3])
def test_a_resume_is_bit_for_bit(name, at, tmp_path: Path):
    """At a step boundary, and in the middle of a window, where gradients are not yet codes."""

    def made() -> tuple[Accelerator, nn.Module, Any]:
        own = accelerator(MSAMPRecipeKwargs(name), gradient_accumulation_steps=2)
        return own, *prepared(own)

    own, model, optimizer = made()
    run(own, model, optimizer, range(at))
    own.save_state(str(tmp_path / "saved"))
    expected = run(own, model, optimizer, range(at, 8))
    again, other, stepped = made()
    run(again, other, stepped, range(20, 21))  # something to be overwritten, with gradients
    again.load_state(str(tmp_path / "saved"))
    assert run(again, other, stepped, range(at, 8)) == expected
    assert same(dict(model.state_dict()), dict(other.state_dict()))
    assert same(optimizer.state_dict()["state"], stepped.state_dict()["state"])


def test_gradients_of_before_do_not_survive_a_load(tmp_path: Path):
    own = accelerator(MSAMPRecipeKwargs("O2"))
    model, optimizer = prepared(own)
    run(own, model, optimizer, range(2))
    own.save_state(str(tmp_path / "saved"))
    own.backward(model(batch(32, 128)).square().mean())
    assert levels.gradient_of(model.up.weight) is not None
    own.load_state(str(tmp_path / "saved"))
    assert levels.gradient_of(model.up.weight) is None


@pytest.mark.parametrize(("saved", "loaded"), [("O1", "O2"), ("O2", "O1"), ("O2", "O3"), ("O3", "O1")])
def test_a_checkpoint_of_one_level_loads_into_another(saved, loaded, tmp_path: Path):
    """The same weights, moments in the formats of the level that loads, and training goes on."""
    own = accelerator(MSAMPRecipeKwargs(saved))
    model, optimizer = prepared(own)
    losses = run(own, model, optimizer, range(4))
    own.save_state(str(tmp_path / "saved"))
    again = accelerator(MSAMPRecipeKwargs(loaded))
    other, stepped = prepared(again)
    again.load_state(str(tmp_path / "saved"))
    assert same(dict(model.state_dict()), dict(other.state_dict()))
    level = levels.LEVELS[loaded]
    state = stepped.state[other.up.weight]
    assert state["exp_avg"].dtype is (torch.float32 if level.exp_avg == "fp32" else torch.float8_e4m3fn)
    assert float(state["step"]) == 4
    goes_on = run(again, other, stepped, range(4, 6))
    assert goes_on[-1] < losses[-1] * 1.2
    assert goes_on == pytest.approx(run(own, model, optimizer, range(4, 6)), rel=0.05)


def test_a_checkpoint_of_a_level_is_not_that_of_a_run_without(tmp_path: Path):
    own = accelerator(MSAMPRecipeKwargs("O2"))
    model, optimizer = prepared(own)
    run(own, model, optimizer, range(2))
    own.save_state(str(tmp_path / "saved"))
    plain = accelerator()
    prepared(plain)
    with pytest.raises(CheckpointError, match=r"up\.weight: saved torch\.bfloat16, model torch\.float32"):
        plain.load_state(str(tmp_path / "saved"))


@pytest.mark.parametrize(
    "text", ["backend: MSAMP\n  opt_level: O3", "backend: NATIVE\n  opt_level: o3", "opt_level: 3"]
)
def test_a_file_asks_for_a_level(text, tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text(f"mixed_precision: fp8\nfp8_config:\n  {text}\n")
    own = Accelerator(config_file=file, cpu=True)
    model, optimizer = prepared(own)
    run(own, model, optimizer, range(1))
    assert own.level == levels.LEVELS["O3"]
    assert model.up._acceler8_layer.kept is not None


def test_the_environment_asks_for_a_level(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "MSAMP")
    monkeypatch.setenv("ACCELERATE_FP8_OPT_LEVEL", "O1")
    assert Accelerator(cpu=True).level == levels.LEVELS["O1"]
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "NATIVE")
    monkeypatch.setenv("ACCELERATE_FP8_OPT_LEVEL", "O2")  # as Accelerate's launcher writes for every backend
    assert Accelerator(cpu=True).level is None


def test_a_model_brought_to_a_level_before_keeps_it():
    model = mlp()
    model, optimizer = levels.initialize(model, AdamW(model.parameters(), lr=1e-2), opt_level="O1")
    own = accelerator(MSAMPRecipeKwargs("O2"))
    model, stepped = own.prepare(model, optimizer)
    run(own, model, stepped, range(2))
    assert stepped.optimizer is optimizer
    assert len(levels.level_weights(model)) == 2


def test_deepspeed_with_levels_is_refused():
    plugin = DeepSpeedPlugin(zero_stage=1, enable_msamp=True, gradient_accumulation_steps=1)
    with pytest.raises(NotInThisVersionError):
        accelerator(deepspeed_plugin=plugin).prepare(mlp())


class _Two(Strategy):
    """Two processes, as far as the constructor asks."""

    name, num_processes = "ddp", 2


def test_several_processes_are_refused_at_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("acceler8.accelerator.accelerator.make_strategy", lambda *_: _Two(torch.device("cpu")))
    with pytest.raises(NotInThisVersionError, match=r"opt_level O2 in 2 processes .*allowed: levels in one process"):
        accelerator(MSAMPRecipeKwargs("O2"))
    assert accelerator().level is None


def test_levels_need_fp8():
    with pytest.raises(ValueError, match="allowed: a recipe only with 'fp8'"):
        accelerator(MSAMPRecipeKwargs("O1"), precision="bf16")


def test_the_norm_is_clipped_over_codes():
    own = accelerator(MSAMPRecipeKwargs("O1"))
    model, _ = prepared(own)
    own.backward(model(batch(32, 128)).square().mean())
    norm = torch.nn.utils.get_total_norm([levels.gradient_of(p) for p in model.parameters()])
    got = own.clip_grad_norm_(model.parameters(), 0.5 * float(norm))
    torch.testing.assert_close(got, norm)
    after = torch.nn.utils.get_total_norm([levels.gradient_of(p) for p in model.parameters()])
    torch.testing.assert_close(after, 0.5 * norm)


def test_values_are_clipped_over_codes():
    own = accelerator(MSAMPRecipeKwargs("O1"))
    model, _ = prepared(own)
    own.backward(model(batch(32, 128)).square().mean())
    limit = 0.5 * float(levels.gradient_of(model.up.weight).abs().max())
    own.clip_grad_value_(model.parameters(), limit)
    assert float(levels.gradient_of(model.up.weight).abs().max()) <= limit * (1 + 1e-6)
