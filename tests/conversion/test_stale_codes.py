"""Stale codes can't happen: whatever changes a weight, the next forward and backward read the new one.

Each change is made to a model that has just run forward and backward, outside and inside a window. The reference is
a fresh model: plain, given the same weights, converted anew.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import acceler8
from acceler8.errors import VerifyError
from acceler8.nn import fp8_layers
from tests.models import Mlp, assert_equal, batch, converted, differs, outcome

RECIPES = ("tensorwise", "rowwise", "blockwise", "delayed")


def fresh(model: nn.Module, recipe: str) -> nn.Module:
    """A model that was never run, with these weights."""
    plain = Mlp(seed=99).to(next(model.parameters()).device)
    plain.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    return acceler8.convert(plain, recipe)


def noise(p: Tensor) -> Tensor:
    return torch.randn(p.shape, generator=torch.Generator().manual_seed(5)).to(p) * 0.3


# ------------------------------------------------------------------------------- the changes of issue and practice


def fused_adamw(model: nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    acceler8.attach(model, optimizer)
    for p in model.parameters():
        p.grad = noise(p)
    optimizer.step()


def ema_swap(model: nn.Module) -> None:
    """Evaluate or go on with averaged weights: the tensors change places."""
    for p in model.parameters():
        average = noise(p)
        p.data, average = average, p.data


def ema_copy(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(noise(p))


def clamp_after_step(model: nn.Module) -> None:
    fused_adamw(model)
    with torch.no_grad():
        for p in model.parameters():
            p.clamp_(-0.05, 0.05)


def load(model: nn.Module) -> None:
    model.load_state_dict({name: noise(value) for name, value in model.state_dict().items()})


def load_assign(model: nn.Module) -> None:
    model.load_state_dict({name: noise(value) for name, value in model.state_dict().items()}, assign=True)


def from_vector(model: nn.Module) -> None:
    vector = parameters_to_vector(model.parameters())
    vector_to_parameters(vector.detach() + noise(vector), model.parameters())


def new_parameter(model: nn.Module) -> None:
    for layer in (model.up, model.down):
        layer.weight = nn.Parameter(noise(layer.weight))


def data_assigned(model: nn.Module) -> None:
    for p in model.parameters():
        p.data = noise(p)


def data_edited(model: nn.Module) -> None:
    for p in model.parameters():
        p.data.add_(noise(p))


def fused_adamw_unmarked(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = noise(p)
    torch.optim.AdamW(model.parameters(), lr=0.1, fused=True).step()


def flat_buffer(model: nn.Module) -> None:
    """Flat optimizers make Parameters views of one buffer and write to that."""
    buffer = parameters_to_vector(model.parameters()).detach().clone()
    place = 0
    for p in model.parameters():
        p.data = buffer[place : place + p.numel()].view_as(p)
        place += p.numel()
    model(batch(device=str(buffer.device)))
    buffer.mul_(1.5)


SEEN: list[Callable[[nn.Module], None]] = [
    fused_adamw, ema_swap, ema_copy, clamp_after_step, load, load_assign, from_vector, new_parameter, data_assigned,
]  # fmt: skip
UNCOUNTED: list[Callable[[nn.Module], None]] = [data_edited, fused_adamw_unmarked, flat_buffer]


@pytest.mark.parametrize("change", [*SEEN, *UNCOUNTED], ids=lambda f: f.__name__)
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_next_forward_and_backward_read_the_new_weight(recipe, change, device):
    model, x = converted(recipe, device=device), batch(device=device)
    before = outcome(model, x)
    change(model)
    if recipe == "delayed":  # what a fresh model has not: a history. Compare codes, not scales
        acceler8.load_fp8_state_dict(model, acceler8.fp8_state_dict(converted(recipe, device=device)))
    after = outcome(model, x)
    assert_equal(after, outcome(fresh(model, recipe), x))
    assert differs(after, before)


@pytest.mark.parametrize("change", SEEN, ids=lambda f: f.__name__)
@pytest.mark.parametrize("recipe", RECIPES)
def test_inside_a_window_too(recipe, change, device):
    model, x = converted(recipe, device=device), batch(device=device)
    with acceler8.window(model):
        before = outcome(model, x)
        assert_equal(outcome(model, x), before)  # from kept codes
        change(model)
        if recipe == "delayed":
            acceler8.load_fp8_state_dict(model, acceler8.fp8_state_dict(converted(recipe, device=device)))
        acceler8.verify(model)
        after = outcome(model, x)
        assert_equal(after, outcome(fresh(model, recipe), x))
        assert differs(after, before)
        acceler8.verify(model)


@pytest.mark.parametrize("change", UNCOUNTED[:2], ids=lambda f: f.__name__)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_change_that_pytorch_does_not_count_is_found_in_a_window_and_gone_behind_it(recipe, change, device):
    model, x = converted(recipe, device=device), batch(device=device)
    with acceler8.window(model):
        before = outcome(model, x)
        change(model)
        with pytest.raises(VerifyError, match=r"up\.weight changed inside an open window and its kept codes \(rows\)"):
            acceler8.verify(model)
        acceler8.step(model)  # the advice of the message
        acceler8.verify(model)
        if recipe != "delayed":
            assert_equal(outcome(model, x), outcome(fresh(model, recipe), x))
            outcome(model, x)
        change(model)
    if recipe == "delayed":
        acceler8.load_fp8_state_dict(model, acceler8.fp8_state_dict(converted(recipe, device=device)))
    after = outcome(model, x)
    assert_equal(after, outcome(fresh(model, recipe), x))
    assert differs(after, before)


def test_memory_that_comes_back_is_not_mistaken_for_the_old_weight():
    """The same address and version count, another weight: the cache keeps the old memory from being given out again."""
    model, x = converted("tensorwise"), batch()
    with acceler8.window(model):
        outcome(model, x)
        for value in range(1, 12):
            model.up.weight.data = torch.zeros(1)  # frees the weight, if nobody holds it
            model.up.weight.data = torch.full((64, 32), 0.01 * value)
            assert_equal(outcome(model, x), outcome(fresh(model, "tensorwise"), x))


def test_functional_call_is_seen_in_a_window(device):
    model, x = converted("rowwise", device=device), batch(device=device)
    other = {name: noise(p) for name, p in model.named_parameters()}
    with acceler8.window(model):
        own = model(x)
        got = torch.func.functional_call(model, other, x)
        assert torch.equal(model(x), own)
    reference = converted("rowwise", device=device, fuse=False)  # tensors in the place of Parameters: the author's norm
    reference.load_state_dict(other)
    assert torch.equal(got, reference(x))
    parameters = {name: nn.Parameter(value) for name, value in other.items()}
    reference = converted("rowwise", device=device)
    reference.load_state_dict(other)
    with acceler8.window(model):
        assert torch.equal(torch.func.functional_call(model, parameters, x), reference(x))
        assert torch.equal(model(x), own)


@pytest.mark.parametrize("in_window", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_deep_copy_reads_its_own_weight(recipe, in_window, device):
    model, x = converted(recipe, device=device), batch(device=device)
    codes = [layer._acceler8_layer.codes for _, layer in fp8_layers(model)]
    for c in codes:
        c.open() if in_window else c.close()
    before = outcome(model, x)
    twin = copy.deepcopy(model)
    assert not any(layer._acceler8_layer.codes.is_open for _, layer in fp8_layers(twin))
    data_edited(twin)
    assert_equal(outcome(twin, x), outcome(fresh(twin, recipe), x))
    assert_equal(outcome(model, x), before)
    data_edited(model)
    for c in codes:
        c.close()
    assert_equal(outcome(model, x), outcome(twin, x))


# --------------------------------------------------------------------------------------------------------- adapters


def with_lora(recipe: str) -> nn.Module:
    """LoRA adapters, not zero, beside frozen FP8 layers."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = get_peft_model(Mlp(), LoraConfig(r=8, lora_alpha=16, target_modules=["up", "down"]))
        for name, p in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(p, std=0.3)
    plan = acceler8.plan(model, recipe)
    assert len(plan.fp8_names) == 2
    assert all(name.endswith("base_layer") for name in plan.fp8_names)
    return acceler8.convert(model, plan)


def assert_layers_read_their_weights(model: nn.Module) -> None:
    """Each FP8 layer's output and input gradient equal those of a layer that was just made with the same weight."""
    for _, layer in fp8_layers(model):
        x = batch(width=layer.in_features)
        new = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
        new.load_state_dict({name: value.clone() for name, value in layer.state_dict().items()})
        new.requires_grad_(False)
        assert_equal(outcome(layer, x), outcome(acceler8.convert(new, layer._acceler8_layer.recipe), x))


@pytest.mark.parametrize("safe", [False, True], ids=["in place", "safe"])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_peft_merge_and_unmerge_on_frozen_weights(recipe, safe):
    model, x = with_lora(recipe), batch()
    before = outcome(model, x)
    separate = model(x)
    model.merge_adapter(safe_merge=safe)
    merged = model(x)
    assert_layers_read_their_weights(model)
    assert not torch.equal(merged, separate)
    # the adapters' share now comes through FP8; without it the output would be far off
    assert (merged - separate).norm() < 0.1 * separate.norm()
    with torch.no_grad(), model.disable_adapter():  # unmerges
        assert (model(x) - separate).norm() > 0.1 * separate.norm()
    assert_layers_read_their_weights(model)
    unmerged = outcome(model, x)
    for name, value in before.items():  # merge and unmerge round the weight in FP32
        torch.testing.assert_close(unmerged[name], value, rtol=0.1, atol=0.02)


def test_an_uncounted_peft_merge_in_a_window_is_found():
    model, x = with_lora("rowwise"), batch()
    with acceler8.window(model):
        model(x)
        model.merge_adapter()
        with pytest.raises(VerifyError, match=r"up\.base_layer\.weight changed inside an open window"):
            acceler8.verify(model)
        acceler8.step(model)
        assert_layers_read_their_weights(model)
        acceler8.verify(model)
    model.unmerge_adapter()
    assert_layers_read_their_weights(model)


# ------------------------------------------------------------------------------------------------ steps and windows


def test_attached_fused_adamw_over_several_steps_and_micro_batches(device):
    """The failure that this design is about: fused steps that no version counter shows, in an accumulation window."""
    model = converted("rowwise", device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    acceler8.attach(model, optimizer)
    with acceler8.window(model):
        for step in range(3):
            optimizer.zero_grad()
            for micro in range(2):
                x = batch(seed=10 * step + micro, device=device)
                got = model(x)
                assert torch.equal(got, fresh(model, "rowwise")(x))
                (got - x.flip(-1)).square().mean().backward()
            optimizer.step()
