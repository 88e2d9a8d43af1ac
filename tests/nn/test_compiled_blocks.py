"""Delayed scaling under ``torch.compile``: block by block and whole, against eager, bit for bit."""

from __future__ import annotations

import copy
import io
import pickle
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import acceler8
from acceler8 import recipes
from acceler8.nn import state_of

WIDTH, BLOCKS = 32, 3
pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    # Dynamo itself does this with every autograd.Function that it traces (torch 2.13)
    pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be inst:DeprecationWarning"),
    # and this with every input that is the result of a block before
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


@pytest.fixture
def fresh_compiler():
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.o_proj = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        x = x + self.o_proj(F.scaled_dot_product_attention(self.q_proj(h), self.k_proj(h), self.v_proj(h)))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Stack(nn.Module):
    def __init__(self, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def pair(device: str, recipe: str = "delayed", backend: Any = "aot_eager") -> tuple[Stack, Stack]:
    """Two models alike, the blocks of the first compiled."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        plain = Stack().to(device)
    plan = acceler8.plan(plain, recipe, fuse=False)
    compiled, eager = (acceler8.convert(copy.deepcopy(plain), plan) for _ in range(2))
    for block in compiled.blocks:
        block.compile(backend=backend)
    return compiled, eager


def batch(seed: int, device: str) -> Tensor:
    return torch.randn(2, 16, WIDTH, generator=torch.Generator().manual_seed(seed)).to(device)


def gradients(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> list[Tensor]:
    model.zero_grad()
    loss(model).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def assert_alike(compiled: nn.Module, eager: nn.Module, loss: Callable[[nn.Module], Tensor]) -> None:
    """One step of each: gradients and amax states, before and behind the boundary."""
    got, want = gradients(compiled, loss), gradients(eager, loss)
    assert len(got) == len(want) > 0
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
    for _ in range(2):
        states = acceler8.fp8_state_dict(compiled), acceler8.fp8_state_dict(eager)
        assert all(torch.equal(states[0][name], value) for name, value in states[1].items())
        acceler8.step(compiled)
        acceler8.step(eager)


def square(x: Tensor) -> Callable[[nn.Module], Tensor]:
    return lambda model: model(x).square().mean()


@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
def test_block_by_block_equals_eager_and_blocks_share_graphs(recipe, device):
    compiled, eager = pair(device, recipe)
    graphs = []
    for seed in range(4):
        assert_alike(compiled, eager, square(batch(seed, device)))
        graphs.append(counters["stats"]["unique_graphs"])
    # one for a block whose input wants a gradient and one for the first, whose does not
    assert graphs == [2] * 4
    assert counters["graph_break"] == {}


@pytest.mark.slow
def test_more_blocks_than_the_compiler_recompiles_for_share_graphs():
    limit = torch._dynamo.config.recompile_limit
    model = Stack(limit + 2)
    acceler8.convert(model, acceler8.plan(model, "delayed", fuse=False))
    for block in model.blocks:
        block.compile(backend="aot_eager")
    gradients(model, square(batch(0, "cpu")))
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.slow
def test_the_whole_model_in_one_graph_is_compiled_once(device):
    compiled, eager = pair(device)
    whole = acceler8.convert(copy.deepcopy(acceler8.restore(copy.deepcopy(eager))), state_of(eager).plan)
    call = torch.compile(whole, backend="aot_eager", fullgraph=True)
    del compiled
    for seed in range(4):
        x = batch(seed, device)
        want = gradients(eager, square(x))
        whole.zero_grad()
        call(x).square().mean().backward()
        assert all(torch.equal(p.grad, w) for p, w in zip(whole.parameters(), want, strict=True))
        for model in (whole, eager):
            acceler8.step(model)
        assert counters["stats"]["unique_graphs"] == 1
    states = acceler8.fp8_state_dict(whole), acceler8.fp8_state_dict(eager)
    assert all(torch.equal(states[0][name], value) for name, value in states[1].items())


def test_two_forwards_before_one_backward(device):
    """The second forward stages into what the first saved; both backwards stage too, and none is lost."""
    compiled, eager = pair(device)
    for seed in range(3):
        one, two = batch(seed, device), 3 * batch(10 + seed, device)
        assert_alike(compiled, eager, lambda model, a=one, b=two: (model(a) * model(b)).mean())


@pytest.mark.slow
def test_micro_batches(device):
    compiled, eager = pair(device)
    for seed in range(3):
        parts = [batch(seed + 10 * i, device) * 2**i for i in range(3)]

        def loss(model: nn.Module, parts: list[Tensor] = parts) -> Tensor:
            for part in parts[:-1]:
                model(part).square().mean().backward()
            return model(parts[-1]).square().mean()

        assert_alike(compiled, eager, loss)


def test_a_block_that_runs_twice(device):
    """Layers that are tied across depth, as in ALBERT."""
    compiled, eager = pair(device)
    for seed in range(3):
        x = batch(seed, device)

        def loss(model: Any, x: Tensor = x) -> Tensor:
            block = model.blocks[0]
            return block(block(block(x))).square().mean()

        assert_alike(compiled, eager, loss)


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_recomputed_blocks(reentrant, device):
    compiled, eager = pair(device)
    for seed in range(3):
        x = batch(seed, device).requires_grad_()

        def loss(model: Any, x: Tensor = x) -> Tensor:
            for block in model.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return x.square().mean()

        assert_alike(compiled, eager, loss)


@pytest.mark.slow
@pytest.mark.parametrize("route", ["deepcopy", "pickle", "torch.save"])
def test_copies_compile_and_have_their_own_state(route, device):
    _, eager = pair(device)
    gradients(eager, square(batch(0, device)))
    acceler8.step(eager)
    if route == "deepcopy":
        twin = copy.deepcopy(eager)
    elif route == "pickle":
        twin = pickle.loads(pickle.dumps(eager))
    else:
        buffer = io.BytesIO()
        torch.save(eager, buffer)
        buffer.seek(0)
        twin = torch.load(buffer, weights_only=False)
    before = acceler8.fp8_state_dict(eager)
    amax = state_of(twin).amax
    assert amax is not None
    for layer in (twin.blocks[0].up, twin.blocks[2].down):
        slot = layer._acceler8_layer.slots.x
        assert slot.state is amax
        assert slot.staging.data_ptr() == amax.data[0, slot.index :].data_ptr()
    for block in twin.blocks:
        block.compile(backend="aot_eager")
    gradients(twin, square(5 * batch(1, device)))
    assert not torch.equal(amax.data, state_of(eager).amax.data)
    assert all(torch.equal(acceler8.fp8_state_dict(eager)[name], value) for name, value in before.items())
    gradients(eager, square(5 * batch(1, device)))
    assert torch.equal(amax.data, state_of(eager).amax.data)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_inductor(mode, device):
    """Amaxes are staged in place whatever the compiler does with its inputs: graphs on a GPU copy most of them."""
    if device == "cpu" and shutil.which("g++") is None:
        pytest.skip("needs g++, which torch.compile's default backend uses on a CPU; this machine has none")
    if device == "cpu" and mode != "default":
        pytest.skip("CUDA graphs need a GPU")
    compiled, eager = pair(device)
    for block in compiled.blocks:
        block.compile(mode=mode)
    for seed in range(5):
        x = batch(seed, device)
        if mode == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        got, want = gradients(compiled, square(x)), gradients(eager, square(x))
        for g, w in zip(got, want, strict=True):  # norm and GELU are fused: an input moves by an ulp, its code by one
            assert (g - w).norm() <= 0.02 * w.norm() + 1e-8  # the bias of k has no gradient but rounding
        states = acceler8.fp8_state_dict(compiled), acceler8.fp8_state_dict(eager)
        for name, value in states[1].items():
            assert torch.allclose(states[0][name], value, rtol=0.05), name
            assert value.ndim == 0 or bool((states[0][name][0] > 0).all()), name
        for model in (compiled, eager):
            acceler8.step(model)


@pytest.mark.slow
def test_inductor_evaluates_in_fp8_without_a_trace(device):
    """What an evaluation stages goes where nobody reads: a copy of staging a compiler would leave out."""
    if device == "cpu" and shutil.which("g++") is None:
        pytest.skip("needs g++, which torch.compile's default backend uses on a CPU; this machine has none")
    torch.manual_seed(0)
    model = Stack(1).to(device)
    acceler8.convert(model, recipes.get("delayed", eval="fp8"))
    model.blocks[0].compile()
    square(batch(0, device))(model).backward()
    acceler8.step(model)
    before = {name: value.clone() for name, value in acceler8.fp8_state_dict(model).items()}
    model.eval()
    with torch.no_grad():
        model(100 * batch(1, device))
    after = acceler8.fp8_state_dict(model)
    assert all(torch.equal(value, before[name]) for name, value in after.items())


@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_blocks_that_are_alike_are_compiled_once(recipe: str):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=64, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = acceler8.convert(transformers.LlamaForCausalLM(config), recipe)
    for block in model.model.layers:
        block.compile(backend="aot_eager", fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    acceler8.attach(model, optimizer)
    tokens = torch.randint(0, 64, (2, 16))
    for _ in range(3):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert counters["stats"]["unique_graphs"] == 1, counters
