"""The small members: what scripts read, set and call now and then."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from acceler8 import Accelerator
from acceler8.accelerator.optimizer import AcceleratedOptimizer
from acceler8.accelerator.scheduler import AcceleratedScheduler
from acceler8.errors import ConfigError, NotInThisVersionError, RecipeError
from acceler8.nn import find_states
from acceler8.utils import GradScalerKwargs, ProfileKwargs


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))


def make(precision: str = "no", **kwargs: Any) -> Accelerator:
    return Accelerator(mixed_precision=precision, cpu=True, **kwargs)


# --- native_amp, mixed_precision, output dtype ---


@pytest.mark.parametrize("precision", ["no", "fp16", "bf16", "fp8"])
def test_native_amp_says_whether_models_run_under_autocast(precision: str):
    assert make(precision).native_amp is (precision != "no")


def test_native_amp_off_leaves_autocast_out():
    accelerator = make("bf16")
    accelerator.native_amp = False
    assert accelerator.native_amp is False
    x, model = torch.randn(4, 32), make_model()
    expected = model(x)
    assert torch.equal(accelerator.prepare(model)(x), expected)
    with accelerator.autocast():
        assert (x @ x.T).dtype is torch.float32
    on = make("bf16")
    assert not torch.equal(on.prepare(make_model())(x), expected)
    with on.autocast():
        assert (x @ x.T).dtype is torch.bfloat16


def test_native_amp_off_keeps_fp8():
    accelerator = make("fp8")
    accelerator.native_amp = False
    model = accelerator.prepare(make_model())
    assert accelerator.fp8_report().is_fp8
    assert model(torch.randn(16, 32)).dtype is torch.float32


def test_mixed_precision_may_be_set_before_prepare():
    accelerator = make("fp16")
    assert accelerator.scaler is not None
    accelerator.mixed_precision = "BF16"
    assert (accelerator.mixed_precision, accelerator.scaler) == ("bf16", None)
    accelerator.mixed_precision = "no"
    x, model = torch.randn(4, 32), make_model()
    expected = model(x)
    assert torch.equal(accelerator.prepare(model)(x), expected)
    accelerator.mixed_precision = "no"  # no change
    with pytest.raises(ConfigError, match="after prepare"):
        accelerator.mixed_precision = "bf16"
    with pytest.raises(RecipeError, match="did you mean 'bf16'"):
        accelerator.mixed_precision = "bf61"


def test_mixed_precision_set_away_from_fp8_leaves_no_fp8_behind():
    accelerator = make("fp8")
    accelerator.mixed_precision = "bf16"
    model = accelerator.prepare(make_model())
    assert not find_states(model)
    assert (str(accelerator.fp8_backend), accelerator.fp8_enabled, accelerator.backend) == ("NO", False, "no")
    assert "FP8 was not asked for" in str(accelerator.fp8_report())
    with pytest.raises(ConfigError, match=r"write Accelerator\(mixed_precision='fp8'\)"):
        make("bf16").mixed_precision = "fp8"


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_outputs_stay_in_compute_dtype_on_request(precision: str):
    x = torch.randn(16, 32)
    raised = make(precision).prepare(make_model())(x)
    left = make(precision, output_dtype="compute").prepare(make_model())(x)
    assert (raised.dtype, left.dtype) == (torch.float32, torch.bfloat16)
    assert torch.equal(raised, left.float())
    with pytest.raises(ConfigError, match="unknown output_dtype 'bf16'; valid: compute, fp32"):
        make(precision, output_dtype="bf16")


# --- state ---


def test_state_prints_what_scripts_log():
    accelerator = make("bf16")
    state = accelerator.state
    text = str(state)
    for line in ("Distributed environment: NO", "Num processes: 1", "Process index: 0", "Device: cpu", "type: bf16"):
        assert line in text
    assert (state.num_processes, state.mixed_precision, state.distributed_type) == (1, "bf16", "NO")
    assert state.is_main_process
    assert state.deepspeed_plugin is None
    assert state.backend is None
    assert "num_processes" in dir(state)
    accelerator.mixed_precision = "no"
    assert state.mixed_precision == "no"  # it looks, it does not copy
    with pytest.raises(AttributeError, match="has no 'num_process'; it offers: backend, distributed_type"):
        _ = state.num_process


def test_facts_of_one_process(tmp_path: Path):
    accelerator = make(project_dir=tmp_path)
    assert (accelerator.use_distributed, accelerator.is_last_process, accelerator.multi_device) == (False, True, False)
    assert accelerator.project_dir == accelerator.logging_dir == str(tmp_path)
    assert accelerator.project_configuration.project_dir == str(tmp_path)
    assert accelerator.should_save_model
    assert accelerator.is_fsdp2 is accelerator.is_composable_parallelism_enabled is False
    assert accelerator.parallelism_config is accelerator.torch_device_mesh is None
    assert accelerator.rng_types == ("generator",)
    config = accelerator.dataloader_config
    config.non_blocking = config.use_seedable_sampler = config.use_stateful_dataloader = True
    assert accelerator.non_blocking is accelerator.use_seedable_sampler is accelerator.use_stateful_dataloader is True


def test_settable_counts():
    accelerator = make(gradient_accumulation_steps=2)
    accelerator.gradient_accumulation_steps = 4
    model = accelerator.prepare(make_model())
    x, synced = torch.ones(1, 32), []
    for _ in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(x).sum())
            synced.append(accelerator.sync_gradients)
    assert synced == [False, False, False, True]
    assert accelerator.step == 4
    plain = make_model()
    plain(x).sum().backward()
    torch.testing.assert_close(model[0].weight.grad, plain[0].weight.grad)
    for wrong in (0, 1.5, True, "2"):
        with pytest.raises(ConfigError, match="an integer from 1"):
            accelerator.gradient_accumulation_steps = wrong
    accelerator.step = 0
    assert accelerator.gradient_state.micro_batch == 0
    accelerator.even_batches = False
    assert accelerator.dataloader_config.even_batches is False


# --- preparing one object ---


def test_one_of_each_kind_is_prepared():
    accelerator = make("fp8")
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    assert accelerator.prepare_model(model) is model
    assert find_states(model)
    prepared = accelerator.prepare_optimizer(optimizer)
    assert isinstance(prepared, AcceleratedOptimizer)
    assert isinstance(accelerator.prepare_scheduler(scheduler), AcceleratedScheduler)
    loader = DataLoader(TensorDataset(torch.zeros(8, 32)), batch_size=4)
    assert len(list(accelerator.prepare_data_loader(loader))) == 2
    with pytest.raises(NotInThisVersionError, match="slice_fn_for_dispatch"):
        accelerator.prepare_data_loader(loader, slice_fn_for_dispatch=len)


def test_a_model_for_evaluation_is_not_trained_in_fp8():
    accelerator = make("fp8")
    reference = accelerator.prepare_model(make_model(), evaluation_mode=True)
    assert not find_states(reference)
    out = reference(torch.randn(4, 32))
    with torch.autocast("cpu", torch.bfloat16):
        expected = make_model()(torch.randn(4, 32))
    assert (out.dtype, expected.dtype) == (torch.float32, torch.bfloat16)
    assert accelerator.fp8_report().plans == []


def test_placement_is_chosen_for_each_object():
    accelerator = Accelerator(device="meta")
    moved, left, also_left = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    accelerator.prepare(moved, left, device_placement=[True, False])
    accelerator.prepare_model(also_left, device_placement=False)
    assert [m.weight.device.type for m in (moved, left, also_left)] == ["meta", "cpu", "cpu"]
    loader = DataLoader(TensorDataset(torch.zeros(2, 2)))
    (batch,) = next(iter(accelerator.prepare_data_loader(loader, device_placement=False)))
    assert batch.device.type == "cpu"
    assert accelerator.device_placement is True
    with pytest.raises(ConfigError, match="got 1 objects and 2 of device_placement"):
        accelerator.prepare(nn.Linear(2, 2), device_placement=[True, False])


def test_a_model_that_a_device_map_spread_out_is_refused():
    accelerator = make()
    spread = make_model()
    assert accelerator.verify_device_map(spread) is False
    spread.hf_device_map = {"0": 0, "2": 0}
    assert accelerator.verify_device_map(spread) is False
    spread.hf_device_map = {"0": 0, "2": "cpu"}
    for refuse in (accelerator.verify_device_map, accelerator.prepare):
        with pytest.raises(NotInThisVersionError, match=r"over 0, cpu.*load it without device_map"):
            refuse(spread)


@pytest.mark.parametrize("name", ["megatron_lm_plugin", "torch_tp_plugin", "parallelism_config", "deepspeed_plugins"])
def test_arguments_that_are_not_offered_are_refused_and_none_is_fine(name: str):
    make(**{name: None})
    with pytest.raises(NotInThisVersionError, match=f"{name}, which this version cannot run; (use|give)"):
        make(**{name: SimpleNamespace()})


def test_unwrapping_takes_the_compiler_off():
    accelerator = make()
    model = make_model()
    compiled = torch.compile(model)
    assert accelerator.unwrap_model(compiled) is compiled
    assert accelerator.unwrap_model(compiled, keep_torch_compile=False) is model


# --- gradients ---


def _clipped_in_windows(precision, by_value):
    """Gradients of two windows of three micro-batches, each clipped after every micro-batch, and the norms found."""
    handlers = [GradScalerKwargs(init_scale=64.0)] if precision == "fp16" else None
    accelerator = make(precision, gradient_accumulation_steps=3, kwargs_handlers=handlers)
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    gradients, norms = [], []
    for i in range(6):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(2, 32) * (1 + i)).sum())
            if by_value:
                accelerator.clip_grad_value_(model.parameters(), 0.5)
            else:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 3.0))
            if accelerator.sync_gradients:
                gradients += [p.grad.clone() for p in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
            assert not accelerator.optimizer_step_was_skipped
    return [*gradients, *norms]


@pytest.mark.parametrize("by_value", [False, True])
def test_clipping_inside_a_window_is_the_same_under_fp16(by_value):
    got, expected = _clipped_in_windows("fp16", by_value), _clipped_in_windows("no", by_value)
    assert max(g.abs().max().item() for g in expected[:8]) > 0.1  # else the scale would be 64 times off unseen
    torch.testing.assert_close(got, expected, rtol=0.02, atol=2e-3)


def test_a_window_that_met_inf_is_skipped_although_it_was_clipped_inside():
    accelerator = make("fp16", gradient_accumulation_steps=2)
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(2, 32)).mean() / 64)
            if not accelerator.sync_gradients:
                model[0].weight.grad[0, 0] = torch.inf
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    assert accelerator.optimizer_step_was_skipped


def test_unscaled_gradients_are_those_of_the_loss():
    accelerator = make("fp16", kwargs_handlers=[GradScalerKwargs(init_scale=64.0)])
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(2, 32)).sum())
    assert torch.equal(model[2].bias.grad, torch.full((32,), 2.0 * 64))
    accelerator.unscale_gradients(optimizer.optimizer)
    accelerator.unscale_gradients()  # once a step, however often it is called
    assert torch.equal(model[2].bias.grad, torch.full((32,), 2.0))
    with pytest.raises(ConfigError, match="SGD that was not prepared"):
        accelerator.unscale_gradients([torch.optim.SGD(make_model().parameters(), lr=0.1)])


def test_clipping_values_without_a_scaler():
    accelerator = make()
    model = accelerator.prepare(make_model())
    accelerator.backward(model(torch.ones(2, 32)).sum())
    accelerator.clip_grad_value_(model.parameters(), 0.25)
    assert max(p.grad.abs().max().item() for p in model.parameters()) == 0.25


# --- memory ---


@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
@pytest.mark.parametrize("method", ["free_memory", "clear"])
def test_nothing_of_a_training_is_kept(recipe: str, method: str):
    accelerator = make("fp8", recipe=recipe)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    loader = DataLoader(TensorDataset(torch.zeros(16, 32)), batch_size=16)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for (x,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).sum())
            optimizer.step()
    watched = [weakref.ref(obj) for obj in (model, optimizer, loader, scheduler)]
    del x
    freed = getattr(accelerator, method)(model, optimizer, loader, scheduler)
    assert freed == [None] * 4
    model, optimizer, loader, scheduler = freed
    gc.collect()
    assert [ref() for ref in watched] == [None] * 4
    assert (accelerator.step, accelerator.clock.ticks) == (0, 1)
    second = accelerator.prepare(make_model())
    assert len(accelerator.fp8_report().plans) == 1
    assert find_states(second)[0].clock is accelerator.clock


# --- profile ---


def test_the_profile_shows_operators_and_is_written(tmp_path: Path):
    accelerator = make(kwargs_handlers=[ProfileKwargs(activities=["cpu"], output_trace_dir=str(tmp_path / "trace"))])
    assert isinstance(accelerator.profile_handler, ProfileKwargs)
    with accelerator.profile() as profiler:
        torch.ones(8, 8) @ torch.ones(8, 8)
    assert any(event.key == "aten::mm" for event in profiler.key_averages())
    trace = json.loads((tmp_path / "trace" / "profile_0.json").read_text())
    assert any(event.get("name") == "aten::mm" for event in trace["traceEvents"])


# torch says so at the second cycle; raised as an error there it would crash the interpreter
@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
def test_a_schedule_calls_the_script_for_each_cycle():
    cycles: list[Any] = []
    handler = ProfileKwargs(
        activities=["cpu"],
        schedule_option={"wait": 1, "warmup": 1, "active": 1, "repeat": 2},
        on_trace_ready=lambda profiler: cycles.append(profiler.step_num),
    )
    with make().profile(handler) as profiler:
        for _ in range(6):
            torch.ones(2) + 1
            profiler.step()
    assert len(cycles) == 2


def test_profile_settings_that_torch_would_refuse_are_named():
    with pytest.raises(ConfigError, match=r"ProfileKwargs\(activities=\) 'gpu'.*cpu, cuda"):
        ProfileKwargs(activities=["gpu"]).build()
    with pytest.raises(ConfigError, match=r"schedule_option=\): got {'wait': 1}; allowed: wait, warmup and active"):
        ProfileKwargs(schedule_option={"wait": 1}).build()
    assert ProfileKwargs(with_stack=True).to_kwargs() == {"with_stack": True}
