"""What a converted model keeps until backward, by name and in bytes, and that nothing else changes."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import acceler8
from acceler8 import Accelerator, recipes
from acceler8.nn import fp8_state_dict, fused_norms
from tests.functional.support import NAMES, sqnr_db

POLICIES = ("fp8", "fp8_compressed", "bf16")
each_name = pytest.mark.parametrize("name", NAMES)
each_policy = pytest.mark.parametrize("policy", POLICIES)
THIRD_CAST = 10 * math.log10(3 / 2)
"""Decibels that a cast costs beside two of the same noise, such as those of a weight's gradient."""
TOKENS, WIDTH, HIDDEN, LAYERS = 64, 128, 384, 2


def llama(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=WIDTH, intermediate_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype).train()


def converted(recipe: Any, policy: str, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    return acceler8.convert(llama(dtype), recipe, save_for_backward=policy)


IDS = torch.randint(0, 64, (2, TOKENS // 2), generator=torch.Generator().manual_seed(1))


def step(model: nn.Module) -> dict[str, Tensor]:
    """Loss and gradients."""
    model.zero_grad()
    loss = model(IDS, labels=IDS).loss
    loss.backward()
    return {"loss": loss.detach(), **{n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}}


def assert_equal(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    assert [name for name in want if not torch.equal(got[name], want[name])] == []


def kept(model: nn.Module) -> list[tuple[str, Tensor]]:
    """What autograd keeps for a step beside Parameters: the operation that keeps it, and a tensor for each storage.

    Found twice: by the hook that sees all, and by name in the graph. What a norm and its readers keep is the norm's.
    """
    seen: dict[int, Tensor] = {}

    def pack(t: Tensor) -> Tensor:
        seen[t.untyped_storage().data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = model(IDS, labels=IDS).loss
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    own |= {b.untyped_storage().data_ptr() for b in model.buffers()}
    named: dict[int, set[str]] = {}
    queue, known = [loss.grad_fn], set()
    while queue:
        node = queue.pop()
        if node is None or node in known:
            continue
        known.add(node)
        queue += [parent for parent, _ in node.next_functions]
        kind = type(node).__name__.rstrip("0123456789").removesuffix("Backward")
        tensors = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
        for t in (*tensors, *getattr(node, "saved_tensors", ())):
            if isinstance(t, Tensor):
                named.setdefault(t.untyped_storage().data_ptr(), set()).add(kind)
    loss.backward()
    found = {at: t for at, t in seen.items() if at not in own and t.untyped_storage().nbytes()}
    assert found.keys() <= named.keys()  # nothing without a name
    return [("_Norm" if "_Norm" in named[at] else min(named[at]), t) for at, t in found.items()]


def nbytes(tensors: list[tuple[str, Tensor]]) -> int:
    return sum(t.untyped_storage().nbytes() for _, t in tensors)


def of(tensors: list[tuple[str, Tensor]], *kinds: str) -> list[tuple[str, int]]:
    return sorted((str(t.dtype), t.numel()) for name, t in tensors if name in kinds)


# ------------------------------------------------------------------------------------------------------------- bytes


@each_name
def test_seven_tenths_of_the_bytes(name):
    held = {policy: kept(converted(name, policy)) for policy in POLICIES}
    plain = kept(llama())
    sizes = {policy: nbytes(tensors) for policy, tensors in held.items()}
    assert sizes["fp8_compressed"] <= 0.70 * sizes["fp8"], sizes
    assert sizes["fp8_compressed"] <= 0.45 * nbytes(plain), (sizes, nbytes(plain))
    assert sizes["bf16"] <= nbytes(plain)
    ours = {name for tensors in held.values() for name, _ in tensors if name.startswith("_")}
    assert ours == {"_Norm", "_Linears", "_Linear", "_MLP"}
    # of ours nothing is in high precision but a number for a row or a block
    of_ours = [t for name, t in held["fp8_compressed"] if name in ours]
    assert all(t.dtype.itemsize == 1 or t.numel() <= 2 * TOKENS * HIDDEN // 128 for t in of_ours)


def test_each_tensor_that_is_kept_of_a_block():
    """By hand for row scales: codes of one byte, and scales."""
    m, k, h = TOKENS, WIDTH, HIDDEN
    fp8, scales = "torch.float8_e4m3fn", "torch.float32"
    norms = 2 * LAYERS + 1
    held = {policy: kept(converted("rowwise", policy)) for policy in POLICIES}
    of_norm = [(scales, m)] * norms
    x_codes = [(fp8, k * m), (scales, k)]
    assert of(held["fp8_compressed"], "_Norm") == sorted([*of_norm, *[(fp8, m * k), (scales, m * k // 128)] * norms])
    for policy in ("fp8", "bf16"):
        assert of(held[policy], "_Norm") == sorted([*of_norm, *[("torch.bfloat16", m * k)] * norms])
    gate_up = {"fp8_compressed": [(fp8, 2 * m * h), (scales, 2 * m * h // 128)]}
    of_x = {"fp8": x_codes, "bf16": [("torch.bfloat16", m * k)], "fp8_compressed": []}
    for policy, tensors in held.items():
        of_gate_up = gate_up.get(policy, [("torch.bfloat16", 2 * m * h)])
        # what the norm keeps too is counted there: nothing is kept for q, k and v, or for gate and up
        assert of(tensors, "_Linears", "_MLP") == sorted([*of_gate_up, *of_x[policy] * 2] * LAYERS)
    assert of(held["fp8_compressed"], "_Linear") == sorted(x_codes * LAYERS)  # o_proj, behind no norm


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")  # its other name is newer
@each_name
def test_activation_checkpointing_and_this_multiply(name):
    """Between the blocks their inputs stay, in BF16, and while one block is computed again it keeps less of itself."""
    peaks = {}
    for policy in ("fp8", "fp8_compressed"):
        model = converted(name, policy)
        want = step(model)
        block = kept(model)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        assert_equal(step(model), want)
        outside = kept_by_hooks(model)
        peaks[policy] = nbytes(block) / LAYERS, outside
        if name in (
            "tensorwise",
            "delayed",
        ):  # without gradients, as it runs first, q, k and v have scales of their own
            continue
        other = converted(name, policy)
        other.gradient_checkpointing_enable({"use_reentrant": True})
        other.enable_input_require_grads()
        assert_equal(step(other), want)
    assert peaks["fp8_compressed"][0] <= 0.70 * peaks["fp8"][0]
    assert peaks["fp8_compressed"][1] <= peaks["fp8"][1]


def kept_by_hooks(model: nn.Module) -> int:
    """Bytes that autograd keeps outside of checkpoints."""
    seen: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        seen[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = model(IDS, labels=IDS).loss
    loss.backward()
    return sum(seen.values())


# ----------------------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@each_name
def test_one_forward_and_the_gradients_of_codes(name, dtype):
    steps = {policy: step(converted(name, policy, dtype)) for policy in POLICIES}
    assert_equal(steps["bf16"], steps["fp8"])
    assert torch.equal(steps["fp8_compressed"]["loss"], steps["fp8"]["loss"])
    exact = step(llama(torch.float64))
    drops = []
    for key, want in exact.items():
        less, more = (sqnr_db(steps[policy][key], want).item() for policy in ("fp8", "fp8_compressed"))
        drops.append(less - more)
        assert drops[-1] < 2 * THIRD_CAST, (key, less, more)
    assert sum(drops) / len(drops) < THIRD_CAST / 2, drops  # most of the noise comes from forward, which is the same


@each_policy
@each_name
def test_first_and_later_steps_are_alike(name, policy):
    """Norms learn in the first step; a copy of the model starts anew."""
    model = converted(name, policy)
    first = step(model)
    assert all(norm._acceler8_norm.reader is not None for n, norm in fused_norms(model) if "layers" in n)
    assert_equal(step(model), first)
    twin = copy.deepcopy(model)
    assert all(norm._acceler8_norm.reader is None for _, norm in fused_norms(twin))
    assert_equal(step(twin), first)
    assert_equal(step(model), first)


@each_policy
def test_mlps_alone_are_checkpointed(policy):
    """The norm outside, its readers inside: they are computed again from a result that has been read before."""
    want = step(converted("rowwise", policy))
    model = converted("rowwise", policy)

    def checkpointed(part: nn.Module) -> None:
        inner = type(part).forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            return checkpoint(inner, part, *args, use_reentrant=False, **kwargs)

        part.forward = forward

    for block in model.model.layers:
        checkpointed(block.mlp)
        checkpointed(block.self_attn)
    for _ in range(3):
        assert_equal(step(model), want)


@each_policy
def test_tensors_may_wait_elsewhere(policy):
    model = converted("rowwise", policy)
    want = step(model)
    model.zero_grad()
    with torch.autograd.graph.save_on_cpu():
        loss = model(IDS, labels=IDS).loss
    loss.backward()
    assert_equal({n: p.grad for n, p in model.named_parameters()}, {n: g for n, g in want.items() if n != "loss"})


def test_recipes_by_pattern_keep_what_each_says():
    fp8, less = (recipes.get("rowwise", save_for_backward=policy) for policy in ("fp8", "fp8_compressed"))
    model = acceler8.convert(llama(), {"*.mlp.*": less, "*": fp8})
    tensors = kept(model)
    assert of(tensors, "_Linears") == sorted(
        [("torch.float8_e4m3fn", TOKENS * WIDTH), ("torch.float32", WIDTH)] * LAYERS
    )
    assert ("torch.bfloat16", 2 * TOKENS * HIDDEN) not in of(tensors, "_MLP")
    step(model)
    nothing = acceler8.convert(llama(), {"*.mlp.*": less, "*": fp8}, save_for_backward="fp8")
    assert_equal(step(nothing), step(converted("rowwise", "fp8")))


@each_policy
def test_outside_its_steps_it_is_the_plain_model(policy):
    model = acceler8.convert(llama(), "rowwise", fp8_steps="1:", save_for_backward=policy)
    assert_equal(step(model), step(llama()))
    acceler8.step(model)
    assert_equal(step(model), step(converted("rowwise", policy)))


@each_policy
def test_verify_and_restore(policy):
    model = converted("delayed", policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    acceler8.attach(model, optimizer)

    def train() -> None:
        step(model)
        optimizer.step()

    report = acceler8.verify(model, optimizer, step=train)
    assert "2 of 2 gated MLPs ran as one operation, 5 of 5 norms ran in one kernel" in str(report)
    acceler8.restore(model)
    plain = llama()
    plain.load_state_dict(model.state_dict())
    assert_equal(step(model), step(plain))


@each_policy
def test_statistics_see_every_cast_once(policy):
    seen = {}
    for which in ("fp8", policy):
        model = converted("rowwise", which)
        with acceler8.record_statistics(model) as statistics:
            step(model)
        seen[which] = statistics.rows()
    if policy == "fp8_compressed":  # whose gradients are others
        seen = {which: [(row["layer"], row["role"]) for row in rows] for which, rows in seen.items()}
    assert seen[policy] == seen["fp8"]


@each_policy
def test_a_resume_goes_on_bit_for_bit(policy, tmp_path):
    def prepared() -> tuple[Accelerator, nn.Module, torch.optim.Optimizer]:
        accelerator = Accelerator(
            mixed_precision="fp8", cpu=True, recipe=recipes.get("delayed", save_for_backward=policy, amax_history_len=4)
        )
        model = llama(torch.float32)
        return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))

    def train(accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            optimizer.zero_grad()
            loss = model(input_ids=IDS, labels=IDS).loss
            accelerator.backward(loss)
            optimizer.step()
            losses.append(loss.item())
        return losses

    whole = prepared()
    expected = train(*whole, 5)
    first = prepared()
    losses = train(*first, 2)
    first[0].save_state(tmp_path / "c")
    second = prepared()
    train(*second, 1)
    assert second[0].load_state(tmp_path / "c").reset == ()
    assert losses + train(*second, 3) == expected
    assert_equal(second[1].state_dict(), whole[1].state_dict())
    assert_equal(fp8_state_dict(second[1]), fp8_state_dict(whole[1]))
