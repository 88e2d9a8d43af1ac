"""Norms that hand FP8 codes on: found by the readers, never wrong, and nothing else depends on them."""

from __future__ import annotations

import copy
import io
import re
import threading

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import acceler8
from acceler8 import recipes
from acceler8.functional import call as calls_of_layers
from acceler8.functional.shared_input import SharedInput
from acceler8.kernels import compute_amax
from acceler8.nn import FusedNorm, NormState, fused_norms, state_of
from tests.conversion.test_norms import InFp32, Offset, Own
from tests.models import RECIPES, Mlp, assert_equal, batch, converted, differs, outcome, train

WITH_CODES = [name for name in RECIPES if name != "activations_only"]  # which casts nothing for fprop


class Block(Mlp):
    """An Mlp around any norm."""

    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.norm = norm or self.norm


class Parallel(Mlp):
    """Attention and MLP of one norm's result, as GPT-J and Falcon have them."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Linear(32, 32)
        with torch.no_grad():
            self.attention.weight.copy_(self.up.weight[:32].flip(0))
            self.attention.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.attention(h) + self.down(torch.nn.functional.gelu(self.up(h)))


class Edited(Mlp):
    """Changes the norm's result in place before the reader sees it."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        h.add_(1.0)
        return x + self.down(torch.nn.functional.gelu(self.up(h)))


def norm_state(model: nn.Module) -> NormState:
    state: NormState = model.norm._acceler8_norm
    return state


def unlearning(model: nn.Module) -> nn.Module:
    """The model with a norm that never learns who reads it: all layers cast for themselves."""
    for _, norm in fused_norms(model):
        norm._acceler8_norm.note_reader = lambda *args: None
    return model


def carried(y: Tensor) -> SharedInput | None:
    return y.__dict__.get("_acceler8_codes")


def has_codes(y: Tensor) -> bool:
    found = carried(y)
    return found is not None and bool(found._codes)


class Casts:
    """What layers cast of the norm's result: ``(rows, cols, column_amax, the tensor)`` of each call."""

    def __init__(self, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
        self.y: Tensor | None = None
        self.made: list[tuple[bool, bool, Tensor | None, Tensor]] = []
        real = calls_of_layers.quantize
        model.norm.register_forward_hook(self.note)

        def quantize(t, rows, cols, *args, column_amax=None, **kwargs):
            if self.y is not None and isinstance(t, Tensor) and t.data_ptr() == self.y.data_ptr():
                self.made.append((rows is not None, cols is not None, column_amax, t))
            return real(t, rows, cols, *args, column_amax=column_amax, **kwargs)

        monkeypatch.setattr(calls_of_layers, "quantize", quantize)

    def note(self, module: nn.Module, args: object, y: Tensor) -> None:
        self.y = y

    def of(self, run) -> list[tuple[bool, bool, Tensor | None, Tensor]]:
        self.made.clear()
        run()
        return list(self.made)


@pytest.mark.parametrize("recipe", WITH_CODES)
def test_rows_are_cast_once_by_a_layer_and_then_by_the_norm(recipe, device, monkeypatch):
    model = converted(recipe, device=device)
    casts = Casts(model, monkeypatch)
    first = casts.of(lambda: outcome(model, batch(device=device)))
    assert [made[:2] for made in first] == [(True, True)]
    for seed in (2, 3, 4, 5, 6, 7):
        ((rows, cols, column_amax, y),) = casts.of(lambda seed=seed: outcome(model, batch(seed=seed, device=device)))
        assert (rows, cols) == (False, True)
        if recipe == "rowwise":
            assert torch.equal(column_amax, compute_amax(y.detach(), 0).view(torch.int32))
        else:
            assert column_amax is None
    assert norm_state(model).unread == 0


def test_the_readers_take_the_codes_away():
    model, seen = converted(), []
    model.norm.register_forward_hook(lambda module, args, y: seen.append(y))
    for _ in range(3):
        outcome(model, batch())
        assert not has_codes(seen[-1])
        assert carried(seen[-1]).column_amax is None


@pytest.mark.parametrize("recipe", [*RECIPES, recipes.get("delayed").with_gemms(wgrad=False), "hybrid"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_training_is_that_without_codes(recipe, dtype, device):
    if recipe == "hybrid":
        recipe = recipes.get("rowwise", formats="HYBRID")
    models = [acceler8.convert(Mlp().to(device, dtype), recipe) for _ in range(2)]
    unlearning(models[1])
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for seed in range(5):
        x = batch(seed=seed, device=device).to(dtype)
        got, want = (outcome(model, x) for model in models)
        assert_equal(got, want)
        for model, optimizer in zip(models, optimizers, strict=True):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            acceler8.step(model)
    states = [acceler8.fp8_state_dict(model) for model in models]
    assert_equal(*states)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [32, 48, 256])
def test_y_does_not_depend_on_what_was_learned(recipe, dtype, width, device):
    model = acceler8.convert(Mlp(width=width).to(device, dtype), recipe)
    x = batch(width=width, device=device).to(dtype)
    first = model.norm(x).detach()
    outcome(model, x)
    learned = model.norm(x)
    assert has_codes(learned) == (recipe != "activations_only")
    assert torch.equal(learned, first)
    with torch.no_grad():
        assert torch.equal(model.norm(x), first)


@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_resumed_bit_for_bit(recipe):
    """A model that goes on knows its readers, one that resumes does not."""
    model = converted(recipe)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    acceler8.attach(model, optimizer)
    train(model, 3, optimizer=optimizer)
    other = converted(recipe)
    other.load_state_dict(model.state_dict())
    acceler8.load_fp8_state_dict(other, copy.deepcopy(acceler8.fp8_state_dict(model)))
    resumed = torch.optim.SGD(other.parameters(), lr=0.1)
    acceler8.attach(other, resumed)
    for _ in range(3):
        assert train(model, 2, optimizer=optimizer) == train(other, 2, optimizer=resumed)
    assert_equal(outcome(model, batch()), outcome(other, batch()))


@pytest.mark.parametrize("make", [lambda: nn.LayerNorm(32), lambda: nn.RMSNorm(32, eps=1e-6), Own, InFp32, Offset])
def test_gradients_against_float64(make):
    """Of the norm exactly, from the gradient that reaches its result; of all within what FP8 loses."""
    plain = Block(make())
    with torch.no_grad():
        plain.norm.weight.add_(torch.randn(32, generator=torch.Generator().manual_seed(4)) * 0.3)
    model, exact = acceler8.convert(copy.deepcopy(plain), "rowwise"), copy.deepcopy(plain).double()
    if isinstance(plain.norm, Own):  # its FP32 inside
        exact.norm.normal = lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + plain.norm.eps)
        own, offset = exact.norm, float(isinstance(plain.norm, Offset))
        own.forward = lambda x: (own.weight + offset) * own.normal(x)
    reached: list[Tensor] = []
    model.norm.register_forward_hook(lambda module, args, y: y.register_hook(reached.append) and None)
    for _ in range(2):
        got = outcome(model, batch())
        want = outcome(exact, batch().double())
        for name in want:
            error = (got[name].double() - want[name]).norm() / want[name].norm()
            assert error < 0.08, name
        x = batch().double().requires_grad_()
        names = [name for name, _ in exact.norm.named_parameters()]
        of_norm = torch.autograd.grad(exact.norm(x), [x, *exact.norm.parameters()], reached[-1].double())
        residual = torch.randn(24, 32, generator=torch.Generator().manual_seed(2)) * 0.01
        torch.testing.assert_close(got["dx"] - residual, of_norm[0].float(), rtol=1e-4, atol=1e-7)
        for name, gradient in zip(names, of_norm[1:], strict=True):
            torch.testing.assert_close(got[f"dnorm.{name}"], gradient.float(), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("make", [lambda: nn.LayerNorm(32, eps=0.05), lambda: Own(eps=0.05), lambda: Offset(eps=0.02)])
def test_eps_is_the_modules(make):
    model, plain = acceler8.convert(Block(make()), "rowwise"), make()
    torch.testing.assert_close(model.norm(batch()), plain(batch()), atol=2e-6, rtol=2e-6)
    assert norm_state(model).why_not is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("autocast", [False, True])
def test_without_eps_it_is_pytorchs_own(dtype, autocast, device):
    """Rows so small that eps decides: FP32's for each dtype, also where autocast has PyTorch compute in FP32."""
    model, plain = (
        acceler8.convert(Block(nn.RMSNorm(32)).to(device, dtype), "rowwise"),
        nn.RMSNorm(32).to(device, dtype),
    )
    x = (batch(device=device) * 2.0**-12).to(dtype)  # squares of 2^-24, eps is 2^-23
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        got, want = model.norm(x), plain(x)
    assert norm_state(model).why_not is None
    assert got.dtype == want.dtype
    assert 0.3 < want.detach().float().square().mean() < 0.36  # 2^-24 / (2^-24 + 2^-23)
    torch.testing.assert_close(got, want)
    model.norm.eps = 1e-6
    assert model.norm(x) is not None
    assert norm_state(model).why_not == "eps is not what it was at conversion"


def test_codes_that_nobody_reads_stop_and_come_back():
    model, x = converted(), batch()
    outcome(model, x)
    assert [has_codes(model.norm(x)) for _ in range(8)] == [True] * 4 + [False] * 4
    outcome(model, x)
    assert has_codes(model.norm(x))


@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_a_result_that_no_layer_reads_leaves_no_trace(recipe):
    """The amax of what a layer did not read must not scale what it does."""
    model, alone = converted(recipe), converted(recipe)
    for seed in range(3):
        assert_equal(outcome(model, batch(seed=seed)), outcome(alone, batch(seed=seed)))
        with torch.no_grad():
            model.norm.weight.mul_(64)
        model.norm(batch(seed=seed))
        with torch.no_grad():
            model.norm.weight.div_(64)
        acceler8.step(model)
        acceler8.step(alone)
    assert_equal(acceler8.fp8_state_dict(model), acceler8.fp8_state_dict(alone))


def test_an_evaluating_reader_does_not_move_the_scales():
    model = converted(recipes.get("delayed", eval="fp8"))
    unread = converted(recipes.get("delayed", eval="fp8"))
    model.up.eval(), model.down.eval()
    for seed in range(3):
        outcome(model, batch(seed=seed))
    assert not state_of(model).amax.data.any()
    assert norm_state(model).reader is None
    model.train()
    for seed in range(2):
        assert_equal(outcome(model, batch(seed=seed)), outcome(unread, batch(seed=seed)))


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("make", [Own, lambda: nn.LayerNorm(32), lambda: nn.RMSNorm(32, eps=1e-6)])
@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_autocast_with_fp32_parameters(make, recipe, monkeypatch):
    model, other = (acceler8.convert(Block(make()), recipe) for _ in range(2))
    unlearning(other)
    casts = Casts(model, monkeypatch)
    for seed in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            x = batch(seed=seed).bfloat16()
            made = casts.of(lambda x=x: assert_equal(outcome(model, x), outcome(other, x)))
            assert casts.y.dtype is Block(make()).norm(x).dtype
            if norm_state(model).why_not is None:
                assert made[0][:2] == (seed == 0, True)
        acceler8.step(model)
        acceler8.step(other)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("recipe", ["rowwise", "delayed", "blockwise"])
def test_gradient_checkpointing(recipe, reentrant):
    model, plain = converted(recipe), converted(recipe)
    for seed in range(4):
        x = batch(seed=seed)
        got = outcome(model, x, lambda x: checkpoint(model, x, use_reentrant=reentrant)) if not reentrant else None
        if reentrant:  # autograd.grad is not for it
            x = x.requires_grad_()
            y = checkpoint(model, x, use_reentrant=True)
            y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)) * 0.01)
            got = {"y": y.detach(), "dx": x.grad, **{f"d{name}": p.grad for name, p in model.named_parameters()}}
            model.zero_grad()
        assert_equal(got, outcome(plain, x))
        acceler8.step(model)
        acceler8.step(plain)
    assert norm_state(model).reader is not None
    assert_equal(acceler8.fp8_state_dict(model), acceler8.fp8_state_dict(plain))


def test_no_grad_in_training_mode():
    model = converted()
    want = outcome(model, batch())["y"]
    before = norm_state(model).reader
    for _ in range(8):
        with torch.no_grad():
            assert torch.equal(model(batch()), want)
            assert carried(model.norm(batch())) is None
    assert norm_state(model).reader == before
    assert norm_state(model).unread == 0


@pytest.mark.parametrize("recipe", RECIPES)
def test_evaluation_is_the_restored_models(recipe):
    model = converted(recipe)
    train(model)
    assert_equal(outcome(model.eval(), batch()), outcome(acceler8.restore(copy.deepcopy(model)).eval(), batch()))
    assert type(acceler8.restore(model).norm) is nn.LayerNorm
    assert "_acceler8_norm" not in vars(model.norm)


# --------------------------------------------------------------------------------------- codes that are not y's


def doubled(module: nn.Module, args: object, y: Tensor) -> Tensor:
    return y * 2


def doubled_in_place(module: nn.Module, args: object, y: Tensor) -> None:
    y.mul_(2)


@pytest.mark.parametrize("hook", [doubled, doubled_in_place])
@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_readers_see_what_a_hook_made_of_it(recipe, hook):
    model, other = converted(recipe), unlearning(converted(recipe))
    outcome(model, batch()), outcome(other, batch())
    without = outcome(model, batch())
    outcome(other, batch())
    for each in (model, other):
        each.norm.register_forward_hook(hook)
    for seed in (1, 1, 2, 3):
        got = outcome(model, batch(seed=seed))
        assert_equal(got, outcome(other, batch(seed=seed)))
        assert differs(got, without)
    with torch.no_grad():
        other.norm._forward_hooks.clear()
        assert differs({"y": model(batch())}, {"y": other(batch())})


@pytest.mark.parametrize("recipe", WITH_CODES)
def test_a_change_in_place_is_seen(recipe):
    model, other = (acceler8.convert(Edited(), recipe) for _ in range(2))
    unlearning(other)
    model.norm._acceler8_norm.note_reader(model.up._acceler8_layer.recipe, first_slot(model), True)
    for seed in range(3):
        y = model.norm(batch(seed=seed))
        assert has_codes(y)  # codes there are, and they are of another y
        norm_state(model).unread = 0
        assert_equal(outcome(model, batch(seed=seed)), outcome(other, batch(seed=seed)))


def first_slot(model: nn.Module):
    slots = model.up._acceler8_layer.slots
    return None if slots is None else slots.x


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise", "delayed"])
def test_parallel_readers_of_one_norm(recipe):
    model, other = (acceler8.convert(Parallel(), recipe) for _ in range(2))
    unlearning(other)
    for seed in range(4):
        assert_equal(outcome(model, batch(seed=seed)), outcome(other, batch(seed=seed)))
        acceler8.step(model)
        acceler8.step(other)
    assert_equal(acceler8.fp8_state_dict(model), acceler8.fp8_state_dict(other))
    assert len([fusion for fusion in acceler8.plan(Parallel()).fusions if fusion.kind != "norm"]) == 0


def test_a_reader_of_another_recipe_takes_no_codes():
    mixed = {"attention": "rowwise", "up": recipes.get("rowwise", formats="E5M2"), "*": "tensorwise"}
    model, other = (acceler8.convert(Parallel(), mixed) for _ in range(2))
    unlearning(other)
    for seed in range(4):
        assert_equal(outcome(model, batch(seed=seed)), outcome(other, batch(seed=seed)))


def norm_weight(model: nn.Module) -> None:
    model.norm.requires_grad_(False)


def readers_weight(model: nn.Module) -> None:
    model.up.weight.requires_grad_(False)


def everything(model: nn.Module) -> None:
    model.requires_grad_(False)


@pytest.mark.parametrize("freeze", [norm_weight, readers_weight, everything])
@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_frozen_parameters(recipe, freeze):
    """Also frozen in between: a reader without wgrad makes no cast that records its amax."""
    model, other = converted(recipe), unlearning(converted(recipe))
    for step in range(6):
        if step == 2:
            freeze(model), freeze(other)
        if step == 4:
            model.requires_grad_(True), other.requires_grad_(True)
        assert_equal(outcome(model, batch(seed=step)), outcome(other, batch(seed=step)))
        acceler8.step(model)
        acceler8.step(other)
    assert_equal(acceler8.fp8_state_dict(model), acceler8.fp8_state_dict(other))


# ------------------------------------------------------------------------------------------- copies, other ways to run


@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_copies_and_pickles_learn_anew(recipe):
    model = converted(recipe)
    outcome(model, batch())
    acceler8.step(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert type(twin.norm) is type(model.norm)
        assert isinstance(twin.norm, FusedNorm)
        assert norm_state(twin).reader is None
        assert norm_state(model).reader is not None
        here = copy.deepcopy(model)
        for seed in range(3):
            assert_equal(outcome(twin, batch(seed=seed)), outcome(here, batch(seed=seed)))
            acceler8.step(twin)
            acceler8.step(here)
        assert norm_state(twin).why_not is None
        if recipe == "delayed":
            assert norm_state(twin).reader.slot.state is state_of(twin).amax
        assert type(acceler8.restore(twin).norm) is nn.LayerNorm


def test_delayed_amax_is_recorded_once_and_is_the_unfused_ones():
    model, plain = converted("delayed"), converted("delayed", fuse=False)
    for seed in range(4):
        outcome(model, batch(seed=seed)), outcome(plain, batch(seed=seed))
        acceler8.step(model), acceler8.step(plain)
    got, want = acceler8.fp8_state_dict(model), acceler8.fp8_state_dict(plain)
    torch.testing.assert_close(got["up.amax"][:, 0], want["up.amax"][:, 0], rtol=1e-6, atol=0)


class Sharded(Tensor):
    """Stands for a DTensor."""


def eps(model: nn.Module) -> None:
    model.norm.eps = 0.5


def subclass(model: nn.Module) -> None:
    model.norm._parameters["weight"] = nn.Parameter(model.norm.weight.detach().as_subclass(Sharded))


@pytest.mark.parametrize(("change", "why"), [(eps, "eps is not what it was"), (subclass, "no plain Parameter")])
def test_another_norm_than_at_conversion_is_the_authors(change, why):
    model, plain = converted(), converted(fuse=False)
    outcome(model, batch())
    change(model), change(plain)
    for _ in range(2):
        assert torch.equal(model(batch()).as_subclass(Tensor), plain(batch()).as_subclass(Tensor))
        assert why in norm_state(model).why_not


def test_inputs_that_the_kernel_is_not_for():
    model = converted()
    x = batch()
    for given, why in (
        (x.double(), "float64"),
        (x.bfloat16(), "dtypes differ"),
        (x.as_subclass(Sharded), "is a Sharded"),
    ):
        try:
            want = nn.LayerNorm(32)(given)
        except RuntimeError as error:
            with pytest.raises(RuntimeError, match=re.escape(str(error))):
                model.norm(given)
        else:
            assert torch.equal(model.norm(given).as_subclass(Tensor), want.as_subclass(Tensor))
        assert why in norm_state(model).why_not
    assert torch.equal(model.norm(input=x), nn.LayerNorm(32)(x))
    assert norm_state(model).why_not == "its arguments are not one tensor"


def test_two_models_in_two_threads():
    want = [train(converted("delayed", seed), 6) for seed in range(2)]
    models = [converted("delayed", seed) for seed in range(2)]  # planning traces, with torch.fx: not beside a forward
    got: list[list[float]] = [[], []]

    def work(seed: int) -> None:
        got[seed] = train(models[seed], 6)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == want
