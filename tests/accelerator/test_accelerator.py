"""The object that a script holds: precisions, prepare in any order, accumulation, step boundaries, reports."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import acceler8
from acceler8 import recipes
from acceler8.accelerator import AcceleratedOptimizer, AcceleratedScheduler, Accelerator
from acceler8.errors import ConfigError, GradientError, PlanError, RecipeError, VerifyError
from acceler8.nn import Fp8Linear, state_of
from acceler8.utils import NativeRecipeKwargs
from tests.models import operands


class TinyModel(nn.Module):
    """Tokens -> two FP8-able linears around a GELU -> logits."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embed = nn.Embedding(48, 64)
            self.up = nn.Linear(64, 128)
            self.down = nn.Linear(128, 64)
            self.lm_head = nn.Linear(64, 48)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        x = self.embed(tokens)
        return {"logits": self.lm_head(x + self.down(F.gelu(self.up(x))))}


def make_loader(rows: int = 40, batch: int = 8) -> DataLoader:
    tokens = torch.randint(0, 48, (rows, 9), generator=torch.Generator().manual_seed(3))
    return DataLoader(TensorDataset(tokens), batch_size=batch)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1])["logits"].flatten(0, 1), tokens[:, 1:].flatten())


def train(
    accelerator: Accelerator, model: nn.Module, optimizer, loader, scheduler=None, epochs: int = 1
) -> list[float]:
    losses = []
    for _ in range(epochs):
        for (tokens,) in loader:
            with accelerator.accumulate(model):
                loss = loss_of(model, tokens)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                if scheduler is not None:
                    scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    return losses


@pytest.mark.parametrize("precision", ["no", "fp16", "bf16", "fp8"])
def test_each_precision_learns_and_returns_fp32(precision: str) -> None:
    accelerator = Accelerator(mixed_precision=precision, cpu=True)
    model = TinyModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, make_loader())
    assert prepared is model
    losses = train(accelerator, model, optimizer, loader, epochs=4)
    assert losses[-1] < losses[0] - 0.3
    tokens = next(iter(loader))[0]
    assert model(tokens)["logits"].dtype is torch.float32
    assert isinstance(model.up, Fp8Linear) == (precision == "fp8")


@pytest.mark.parametrize("order", ["together", "model first", "optimizer first", "reversed"])
def test_prepare_in_any_order_gives_the_same_training(order: str) -> None:
    accelerator = Accelerator("fp8", cpu=True)
    model = TinyModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = make_loader()
    before = {name: id(p) for name, p in model.named_parameters()}
    if order == "together":
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    elif order == "reversed":
        loader, optimizer, model = accelerator.prepare(loader, optimizer, model)
    elif order == "model first":
        model = accelerator.prepare(model)
        optimizer, loader = accelerator.prepare(optimizer, loader)
    else:
        optimizer, loader = accelerator.prepare(optimizer, loader)
        model = accelerator.prepare(model)
    assert {name: id(p) for name, p in model.named_parameters()} == before
    losses = train(accelerator, model, optimizer, loader)

    reference = Accelerator("fp8", cpu=True)
    other = TinyModel()
    plain = torch.optim.AdamW(other.parameters(), lr=1e-3)
    assert losses == train(reference, *reference.prepare(other, plain, make_loader()))
    acceler8.verify(model, optimizer)


def test_a_model_that_is_one_layer_verifies() -> None:
    model = Accelerator("fp8", cpu=True).prepare(nn.Linear(64, 64))
    acceler8.verify(model)
    model.forward = lambda x: x
    with pytest.raises(VerifyError, match="its forward was replaced"):
        acceler8.verify(model)


def test_optimizer_made_after_prepare_moves_fp8_weights() -> None:
    accelerator = Accelerator("fp8", cpu=True)
    model = accelerator.prepare(TinyModel())
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=1e-2))
    tokens = next(iter(make_loader()))[0]

    def step() -> None:
        optimizer.zero_grad()
        accelerator.backward(loss_of(model, tokens))
        optimizer.step()

    report = acceler8.verify(model, optimizer, step=step)
    assert "8 parameters moved" not in report.checks["moved and fresh"]  # embed, 3 weights, 3 biases
    assert report.checks["moved and fresh"].startswith("7 parameters moved, 2 layers")


def test_accumulated_micro_batches_equal_one_batch() -> None:
    tokens = torch.randint(0, 48, (8, 9), generator=torch.Generator().manual_seed(5))
    weights = []
    for steps, rows in ((1, 8), (4, 2)):
        accelerator = Accelerator("no", cpu=True, gradient_accumulation_steps=steps)
        model = TinyModel()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        for part in tokens.split(rows):
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, part))
                optimizer.step()
                optimizer.zero_grad()
        weights.append(model.up.weight.detach().clone())
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-5, atol=1e-6)


def test_windows_close_with_the_step_and_codes_are_never_stale() -> None:
    accelerator = Accelerator("fp8", cpu=True, gradient_accumulation_steps=2)
    model = TinyModel()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True))
    parts = next(iter(make_loader()))[0].split(4)
    codes = model.up._acceler8_layer.codes
    kept = []
    for step in range(2):
        for i, part in enumerate(parts):
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, part))
                live = codes.live()["rows"]
                kept.append(live.codes.clone())
                acceler8.verify(model)
                optimizer.step()
                optimizer.zero_grad()
            assert not codes.is_open, (step, i)  # only inside the blocks
    assert torch.equal(kept[0].view(torch.uint8), kept[1].view(torch.uint8))
    assert not torch.equal(kept[1].view(torch.uint8), kept[2].view(torch.uint8))


def test_last_incomplete_window_of_a_loader_still_steps() -> None:
    accelerator = Accelerator("no", cpu=True, gradient_accumulation_steps=4)
    model = TinyModel()
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), make_loader(40))
    train(accelerator, model, optimizer, loader, epochs=2)  # 5 batches an epoch: 4, then the last alone
    assert accelerator.clock.ticks == 4


def test_scheduler_moves_once_a_step() -> None:
    accelerator = Accelerator("bf16", cpu=True, gradient_accumulation_steps=2)
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, make_loader(32), scheduler)
    assert isinstance(scheduler, AcceleratedScheduler)
    train(accelerator, model, optimizer, loader, scheduler)  # 4 batches, 2 steps
    assert scheduler.get_last_lr() == [0.25]


def test_fp16_skips_a_step_whose_gradients_overflow_and_the_scheduler_waits() -> None:
    accelerator = Accelerator("fp16", cpu=True)
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    before = model.up.weight.detach().clone()
    accelerator.backward(loss_of(model, next(iter(make_loader()))[0]))
    model.up.weight.grad[0, 0] = torch.inf
    optimizer.step()
    scheduler.step()
    assert optimizer.step_was_skipped
    assert torch.equal(model.up.weight, before)
    assert scheduler.get_last_lr() == [0.1]


def test_fp16_clips_unscaled_gradients() -> None:
    accelerator = Accelerator("fp16", cpu=True)
    model = TinyModel()
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    tokens = next(iter(make_loader()))[0]
    accelerator.backward(loss_of(model, tokens))
    norm = accelerator.clip_grad_norm_(model.parameters(), 1e-3)
    plain = TinyModel()
    loss_of(plain, tokens).backward()
    expected = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])
    torch.testing.assert_close(norm, expected, rtol=0.02, atol=0.0)
    clipped = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    torch.testing.assert_close(clipped, torch.tensor(1e-3), rtol=1e-2, atol=0.0)


@pytest.mark.parametrize("mixed_precision", ["no", "fp16"])
def test_one_tensor_is_clipped_as_torch_does(mixed_precision: str) -> None:
    accelerator = Accelerator(mixed_precision, cpu=True)
    model = TinyModel()
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(loss_of(model, next(iter(make_loader()))[0]))
    weight = next(p for p in model.parameters() if p.grad is not None)
    norm = accelerator.clip_grad_norm_(weight, 1e-3)
    assert norm > 1e-3
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad.norm(), torch.tensor(1e-3), rtol=1e-2, atol=0.0)


def test_delayed_scaling_follows_the_accelerators_steps() -> None:
    accelerator = Accelerator("fp8", recipe="delayed", cpu=True, gradient_accumulation_steps=2)
    model = TinyModel()
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), make_loader(32))
    train(accelerator, model, optimizer, loader)
    assert state_of(model).amax.steps == 2
    assert (operands(state_of(model).amax)[1] > 0).all()


def test_a_model_converted_by_hand_follows_the_accelerators_clock() -> None:
    model = acceler8.convert(TinyModel(), recipes.get("delayed"))
    accelerator = Accelerator("fp8", cpu=True)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), make_loader(16))
    train(accelerator, model, optimizer, loader)
    assert state_of(model).amax.steps == 2
    assert accelerator.plan.recipe.name == "delayed"


def test_report_says_what_is_fp8() -> None:
    accelerator = Accelerator("fp8", cpu=True, skip=["down"])
    assert "no model prepared yet" in str(accelerator.fp8_report())
    model = accelerator.prepare(TinyModel())
    report = accelerator.fp8_report()
    assert report.is_fp8
    assert "1 of 3 layers FP8" in str(report)
    assert "emulated" in str(report)
    assert not isinstance(model.down, Fp8Linear)
    assert "not asked for" in str(Accelerator("bf16", cpu=True).fp8_report())


def test_near_zero_coverage_warns() -> None:
    model = nn.Sequential(nn.Embedding(48, 60), nn.Linear(60, 60), nn.Linear(60, 48))
    with pytest.warns(UserWarning, match="FP8 would cover 0% of the matrix FLOPs"):
        Accelerator("fp8", cpu=True).prepare(model)


def test_unwrap_keeps_training_intact_and_can_take_autocast_off() -> None:
    accelerator = Accelerator("fp8", cpu=True)
    model = accelerator.prepare(TinyModel())
    tokens = next(iter(make_loader()))[0]
    before = model(tokens)["logits"]
    assert accelerator.unwrap_model(model) is model
    assert torch.equal(model(tokens)["logits"], before)
    plain = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    assert "forward" not in plain.__dict__
    acceler8.restore(plain)
    assert type(plain.up) is nn.Linear


def test_prepared_objects_can_be_copied_and_prepared_again() -> None:
    accelerator = Accelerator("fp8", cpu=True)
    model = TinyModel()
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), make_loader())
    twin = copy.deepcopy(model)
    tokens = next(iter(loader))[0]
    assert torch.equal(twin(tokens)["logits"], model(tokens)["logits"])
    with torch.no_grad():
        twin.up.weight.zero_()
    assert not torch.equal(twin(tokens)["logits"], model(tokens)["logits"])
    assert accelerator.prepare(optimizer) is optimizer
    assert accelerator.prepare(model) is model
    assert isinstance(copy.deepcopy(optimizer), AcceleratedOptimizer)
    sentinel = object()
    assert accelerator.prepare(sentinel) is sentinel


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"mixed_precision": "fp9"}, RecipeError, "did you mean 'fp8'"),
        ({"mixed_precision": "bf16", "recipe": "rowwise"}, RecipeError, "a recipe only with 'fp8'"),
        ({"mixed_precision": "fp8", "recipe": "rowise"}, RecipeError, "did you mean 'rowwise'"),
        ({"mixed_precision": "no", "gradient_accumulation_steps": 0}, RecipeError, "an integer from 1"),
        ({"mixed_precision": "no", "gradient_accumulation_steps": 2.5}, RecipeError, "an integer from 1"),
    ],
)
def test_bad_arguments_say_what_is_allowed(arguments: dict, error: type, match: str) -> None:
    with pytest.raises(error, match=match):
        Accelerator(cpu=True, **arguments)


def test_bad_skip_and_backend_name_the_nearest() -> None:
    with pytest.raises(PlanError, match="did you mean 'down'"):
        Accelerator("fp8", cpu=True, skip=["dwn"]).prepare(TinyModel())
    with pytest.raises(PlanError, match="valid: native"):
        Accelerator("fp8", cpu=True, backend="natve").prepare(TinyModel())


def test_compute_dtype_and_autocast() -> None:
    expected = {"no": torch.float32, "bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp16": torch.float16}
    for precision, dtype in expected.items():
        accelerator = Accelerator(precision, cpu=True)
        assert accelerator.compute_dtype is dtype
        with accelerator.autocast():
            assert F.linear(torch.ones(2, 4), torch.ones(3, 4)).dtype is dtype


def test_print_and_process_facts(capsys: pytest.CaptureFixture[str]) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.print("hello", end="!")
    assert capsys.readouterr().out == "hello!"
    assert accelerator.num_processes == 1
    assert accelerator.is_main_process
    assert accelerator.device == torch.device("cpu")


def test_an_evaluation_between_training_batches_leaves_accumulation_alone() -> None:
    accelerator = Accelerator("no", cpu=True, gradient_accumulation_steps=4)
    loader, held_out = accelerator.prepare(make_loader(96), make_loader(16))
    synced = []
    for i, _ in enumerate(loader):
        with accelerator.accumulate():
            synced.append(accelerator.sync_gradients)
        if i == 4:
            list(held_out)
    assert synced == [False, False, False, True] * 3
    with accelerator.accumulate():
        assert not accelerator.sync_gradients  # no loader runs any more


def test_fp16_keeps_one_scale_for_two_optimizers_of_a_step() -> None:
    accelerator = Accelerator("fp16", cpu=True)
    models = [accelerator.prepare(nn.Linear(4, 1, bias=False)) for _ in range(2)]
    optimizers = [accelerator.prepare(torch.optim.SGD(m.parameters(), lr=1.0)) for m in models]
    for m in models:
        with torch.no_grad():
            m.weight.zero_()
    for _ in range(3):
        accelerator.backward(sum(m(torch.ones(2, 4)).mean() / 64 for m in models))  # 2**16 / 64 fits FP16
        accelerator.clip_grad_norm_(models[0].parameters(), 1e9)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for m in models:
        torch.testing.assert_close(m.weight, torch.full((1, 4), -3 / 64))
    models[0](torch.ones(2, 4)).mean().backward()
    with pytest.raises(ConfigError, match="closure under fp16"):
        optimizers[0].step(lambda: None)


def test_fp16_refuses_gradients_on_top_of_unscaled_ones() -> None:
    accelerator = Accelerator("fp16", cpu=True)
    model = accelerator.prepare(nn.Linear(4, 1))
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=1.0))

    def backward() -> None:
        accelerator.backward(model(torch.ones(2, 4)).mean() / 64)

    backward()
    first = accelerator.clip_grad_norm_(model.parameters(), 1e9)
    assert torch.equal(accelerator.clip_grad_norm_(model.parameters(), 1e9), first)  # nothing came between
    backward()
    for act in (lambda: accelerator.clip_grad_norm_(model.parameters(), 1e9), optimizer.step):
        with pytest.raises(GradientError, match="clip only where"):
            act()
    for clear in (optimizer.zero_grad, model.zero_grad):  # then all is of one unit
        clear()
        backward()
        assert torch.equal(accelerator.clip_grad_norm_(model.parameters(), 1e9), first)
    optimizer.step()


def test_fp16_two_optimizers_that_step_behind_two_backwards() -> None:
    def run(precision: str) -> list[Tensor]:
        accelerator = Accelerator(precision, cpu=True)
        torch.manual_seed(0)
        one, two = accelerator.prepare(nn.Linear(4, 4), nn.Linear(4, 1))
        optimizers = accelerator.prepare(*(torch.optim.SGD(m.parameters(), lr=0.1) for m in (one, two)))
        x = torch.ones(2, 4)
        for _ in range(2):
            accelerator.backward(two(one(x)).mean() / 64)
            accelerator.clip_grad_norm_(one.parameters(), 1e9)  # unscales both
            optimizers[1].zero_grad()
            accelerator.backward(two(one(x).detach()).square().mean() / 64)
            accelerator.clip_grad_norm_(two.parameters(), 1e9)
            for optimizer in optimizers:
                optimizer.step()
                assert not optimizer.step_was_skipped
            for optimizer in optimizers:
                optimizer.zero_grad()
        return [p.detach() for m in (one, two) for p in m.parameters()]

    torch.testing.assert_close(run("fp16"), run("no"), rtol=0, atol=1e-5)


def test_fp16_takes_an_optimizer_without_gradients() -> None:
    accelerator = Accelerator("fp16", cpu=True)
    one, idle = accelerator.prepare(nn.Linear(4, 1), nn.Linear(4, 1))
    optimizers = accelerator.prepare(*(torch.optim.SGD(m.parameters(), lr=0.1) for m in (one, idle)))
    before = idle.weight.detach().clone()
    for _ in range(2):
        accelerator.backward(one(torch.ones(2, 4)).mean() / 64)
        for _ in range(2):
            accelerator.clip_grad_norm_(one.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            assert not optimizer.step_was_skipped
            optimizer.zero_grad()
    assert torch.equal(idle.weight, before)


def test_fp16_an_optimizer_may_wait_unscaled_while_another_steps() -> None:
    accelerator = Accelerator("fp16", cpu=True)
    one, two = accelerator.prepare(nn.Linear(4, 1), nn.Linear(4, 1))
    first, second = accelerator.prepare(*(torch.optim.SGD(m.parameters(), lr=0.5) for m in (one, two)))
    before = two.weight.detach().clone()
    accelerator.backward((one(torch.ones(2, 4)) + two(torch.ones(2, 4))).mean() / 64)
    accelerator.clip_grad_norm_(one.parameters(), 1e9)
    first.step()
    first.zero_grad()
    accelerator.backward(one(torch.ones(2, 4)).mean() / 64)  # not of the second
    second.step()
    torch.testing.assert_close(two.weight, before - 0.5 / 64)


def test_fp16_skips_only_the_optimizer_whose_gradients_overflowed() -> None:
    accelerator = Accelerator("fp16", cpu=True)
    models = [accelerator.prepare(nn.Linear(4, 1, bias=False)) for _ in range(2)]
    optimizers = [accelerator.prepare(torch.optim.SGD(m.parameters(), lr=1.0)) for m in models]
    before = [m.weight.detach().clone() for m in models]
    accelerator.backward(sum(m(torch.ones(2, 4)).mean() / 64 for m in models))  # 2**16 / 64 fits FP16
    models[0].weight.grad.fill_(torch.inf)
    for optimizer in optimizers:
        optimizer.step()
    assert [o.step_was_skipped for o in optimizers] == [True, False]
    assert torch.equal(models[0].weight, before[0])
    assert not torch.equal(models[1].weight, before[1])


def test_a_stateful_loader_resumes_at_the_batch_that_is_due() -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    data = TensorDataset(torch.arange(8))
    loader = Accelerator(cpu=True).prepare(stateful(data, batch_size=1))
    batches = iter(loader)
    assert [next(batches)[0].item() for _ in range(3)] == [0, 1, 2]
    state = loader.state_dict()
    again = Accelerator(cpu=True).prepare(stateful(data, batch_size=1))
    again.load_state_dict(state)
    assert [batch[0].item() for batch in again] == [3, 4, 5, 6, 7]


def test_what_runs_between_micro_batches_sees_the_weights_as_they_are() -> None:
    accelerator = Accelerator("fp8", cpu=True, gradient_accumulation_steps=2)
    model = TinyModel()
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    tokens = next(iter(make_loader()))[0]
    with accelerator.accumulate(model):
        accelerator.backward(loss_of(model, tokens))
        kept = model.up.weight.detach().clone()
        model.up.weight.data.mul_(3)  # an average swapped in for an evaluation, inside the block
        model.eval()
        with acceler8.evaluate_in_fp8(model):
            inside = model(tokens)["logits"]
        model.train()
    between = model(tokens)["logits"]
    fresh = copy.deepcopy(model)
    assert torch.equal(between, fresh(tokens)["logits"])
    fresh.eval()
    with acceler8.evaluate_in_fp8(fresh):
        assert torch.equal(inside, fresh(tokens)["logits"])
    assert not torch.equal(kept, model.up.weight)


def test_parts_converted_on_their_own_all_follow_the_clock() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    for part in model:
        acceler8.convert(part, recipes.get("delayed"))
    accelerator = Accelerator("fp8", cpu=True, gradient_accumulation_steps=2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(4, 64)).mean())
            optimizer.step()
            optimizer.zero_grad()
    assert [state_of(part).amax.steps for part in model] == [2, 2]
    assert len(accelerator.fp8_report().plans) == 2


def test_a_scheduler_or_loader_prepared_twice_is_one() -> None:
    accelerator = Accelerator(cpu=True)
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.8)
    scheduler, loader = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5), make_loader()
    first = accelerator.prepare(model, optimizer, loader, scheduler)
    for again in ((model, optimizer, loader, scheduler), first, (*first[:2], first[2].loader, first[3].scheduler)):
        assert all(one is other for one, other in zip(accelerator.prepare(*again), first, strict=True))
    assert accelerator.prepare(loader) is accelerator.prepare(loader, loader)[1] is first[2]
    assert (len(accelerator._dataloaders), len(accelerator._schedulers)) == (1, 1)  # what a checkpoint holds
    assert accelerator.prepare(make_loader()) is not first[2]
    optimizer.step()
    accelerator.prepare(scheduler).step()
    assert scheduler.get_last_lr() == [0.4]
    accelerator.free_memory()
    assert accelerator.prepare(loader) is not first[2]


def test_the_same_optimizer_prepared_twice_is_one() -> None:
    accelerator = Accelerator("bf16", cpu=True)
    raw = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    assert accelerator.prepare(raw) is accelerator.prepare(raw)


def test_a_prepared_layer_can_be_restored() -> None:
    layer = Accelerator("fp8", cpu=True).prepare(nn.Linear(64, 64))
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
    layer(x)
    acceler8.restore(layer)
    with torch.autocast("cpu", torch.bfloat16):
        expected = F.linear(x, layer.weight, layer.bias).float()
    assert torch.equal(layer(x), expected)


def test_checkpoints_see_the_optimizer_behind_the_prepared_one(tmp_path) -> None:
    from acceler8 import checkpoint
    from acceler8.errors import CheckpointError

    def build(kind):
        accelerator = Accelerator("no", cpu=True)
        model = nn.Linear(4, 4).bfloat16()
        return accelerator.prepare(model, kind(model.parameters(), lr=0.1))

    model, optimizer = build(torch.optim.RMSprop)
    model(torch.ones(2, 4).bfloat16()).sum().backward()
    optimizer.step()
    exact = torch.full((4, 4), 1.001)
    optimizer.state[model.weight]["square_avg"] = exact
    checkpoint.save(tmp_path / "c", model=model, optimizer=optimizer)
    model, optimizer = build(torch.optim.RMSprop)
    checkpoint.load(tmp_path / "c").restore(model=model, optimizer=optimizer)
    assert torch.equal(optimizer.state[model.weight]["square_avg"], exact)
    model, optimizer = build(torch.optim.Adagrad)
    with pytest.raises(CheckpointError, match="RMSprop"):
        checkpoint.load(tmp_path / "c").restore(model=model, optimizer=optimizer)


@pytest.mark.parametrize("order", ["together", "optimizer first", "model first"])
def test_an_attached_optimizer_that_is_prepared_marks_each_step_once(order: str) -> None:
    model = acceler8.convert(TinyModel(), recipes.get("delayed"))
    raw = torch.optim.SGD(model.parameters(), lr=0.1)
    acceler8.attach(model, raw)
    accelerator = Accelerator("fp8", cpu=True)
    if order == "together":
        model, optimizer = accelerator.prepare(model, raw)
    elif order == "optimizer first":
        optimizer, model = accelerator.prepare(raw), accelerator.prepare(model)
    else:
        model, optimizer = accelerator.prepare(model), accelerator.prepare(raw)
    accelerator.backward(loss_of(model, next(iter(make_loader()))[0]))
    optimizer.step()
    assert state_of(model).clock.ticks == 1


@pytest.mark.parametrize("options", [{"recipe": "delayed", "interval": 2}, {"recipe": "rowwise", "fp8_steps": "3:"}])
def test_two_optimizers_of_one_model_train_as_one_does(options: dict) -> None:
    def run(parts: int) -> tuple[list[float], int]:
        handler = NativeRecipeKwargs(**options)
        accelerator = Accelerator("fp8", cpu=True, kwargs_handlers=[handler], gradient_accumulation_steps=2)
        torch.manual_seed(0)
        model = TinyModel()
        parameters = list(model.parameters())
        optimizers = [torch.optim.SGD(parameters[i::parts], lr=0.1) for i in range(parts)]
        model, loader, *optimizers = accelerator.prepare(model, make_loader(), *optimizers)
        losses = []
        for _ in range(4):
            for (tokens,) in loader:
                with accelerator.accumulate(model):
                    loss = loss_of(model, tokens)
                    accelerator.backward(loss)
                    for optimizer in optimizers:
                        optimizer.step()
                    for optimizer in optimizers:
                        optimizer.zero_grad()
                losses.append(loss.item())
        return losses, accelerator.clock.ticks

    assert run(2) == run(1)


def test_weight_codes_go_with_the_step_of_each_optimizer() -> None:
    accelerator = Accelerator("fp8", cpu=True)
    model = TinyModel()
    parameters = list(model.parameters())
    model, *optimizers = accelerator.prepare(model, *(torch.optim.SGD(parameters[i::2], lr=0.1) for i in range(2)))
    state, dropped = state_of(model), []
    for codes in state.codes:
        codes.drop = lambda: dropped.append(1)
    for i, optimizer in enumerate(optimizers, 1):
        accelerator.backward(loss_of(model, next(iter(make_loader()))[0]))
        dropped.clear()
        optimizer.step()
        assert len(dropped) == len(state.codes) > 0, i
    assert accelerator.clock.ticks == 1
