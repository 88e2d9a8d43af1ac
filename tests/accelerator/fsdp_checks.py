"""Checks that sharding processes make together; a scenario that returns has passed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import acceler8
from acceler8 import Accelerator, backends, recipes, verify
from acceler8.errors import CheckpointError, ConfigError, PlanError, VerifyError
from acceler8.nn import find_states, fp8_layers
from acceler8.optim import AdamW
from acceler8.parallel import ShardedProcesses
from acceler8.parallel.activation_checkpoint import CheckpointedForward
from acceler8.parallel.fsdp2_gradients import average_plain
from acceler8.utils import AORecipeKwargs, FullyShardedDataParallelPlugin, NativeRecipeKwargs, TorchDynamoPlugin
from tests.accelerator.fsdp_support import (
    ROWS,
    Block,
    Model,
    fp8,
    full,
    in_fp32,
    make_data,
    make_optimizer,
    parameters,
    plugin,
)
from tests.accelerator.fsdp_training import run

Parameters = dict[str, Tensor]
BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]


def rank() -> int:
    return dist.get_rank()


def assert_same(got: Parameters, want: Parameters) -> None:
    """Bit for bit, name by name."""
    assert got.keys() == want.keys()
    for name in want:
        assert torch.equal(got[name], want[name]), name


def steps(accelerator: Accelerator, model: nn.Module, optimizer: Any, count: int = 2) -> None:
    x, y = make_data(2)
    for step in range(count):
        loss = F.cross_entropy(model(x[step, 0, accelerator.process_index]), y[step, 0, accelerator.process_index])
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


def trained(accelerator: Accelerator, model: nn.Module | None = None) -> Parameters:
    """Parameters behind two steps."""
    model = Model() if model is None else model
    model, optimizer = accelerator.prepare(model, make_optimizer(model.parameters()))
    steps(accelerator, model, optimizer)
    return parameters(model)


def units_of(model: nn.Module) -> list[str]:
    """Names of the modules that were sharded on their own."""
    return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]


_base: Parameters = {}


def base() -> Parameters:
    """What every way of sharding has to give."""
    if not _base:
        _base.update(trained(fp8(fsdp_plugin=in_fp32())))
    return _base


# -- what is sharded, and how


def units() -> None:
    for options, expected in (
        ({}, ["", *BLOCKS]),
        ({"auto_wrap_policy": "NO_WRAP"}, [""]),
        ({"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"]}, ["", *BLOCKS]),
        ({"transformer_cls_names_to_wrap": ["LayerNorm"]}, ["", *(f"{block}.norm" for block in BLOCKS)]),
        ({"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 10000}, ["", *BLOCKS]),
        ({"auto_wrap_policy": lambda module: isinstance(module, Block)}, ["", *BLOCKS]),
    ):
        model = Model()
        made = in_fp32(**options)
        assert_same(trained(fp8(fsdp_plugin=made), model), base())
        assert units_of(model) == expected, options
    with pytest.raises(ConfigError, match=r"got 'Blok', which this Model does not have; allowed: Block, LayerNorm"):
        trained(fp8(fsdp_plugin=in_fp32(transformer_cls_names_to_wrap=["Blok"])))


def ways() -> None:
    """Options that must not change a bit of the result."""
    for options in (
        {"reshard_after_forward": False},
        {"cpu_offload": True},
        {"activation_checkpointing": True},
        {"activation_checkpointing": True, "activation_checkpointing_offload": True},
        {"cpu_ram_efficient_loading": True},
    ):
        model = Model(seed=1 + rank())
        assert_same(trained(fp8(fsdp_plugin=in_fp32(**options)), model), base())
        is_checkpointed = [isinstance(b.__dict__.get("forward"), CheckpointedForward) for b in model.blocks]
        assert all(is_checkpointed) is any(is_checkpointed) is ("activation_checkpointing" in options)
    first = FullyShardedDataParallelPlugin(mixed_precision_policy=in_fp32().mixed_precision_policy)
    assert first.fsdp_version == 1
    accelerator = fp8(fsdp_plugin=first)
    assert accelerator.is_fsdp2
    assert_same(trained(accelerator), base())


def loaded_in_first() -> None:
    """The other processes hold nothing: delayed scaling keeps its amaxes on the device all the same."""
    for recipe in ("rowwise", "delayed"):
        want = trained(fp8(recipe, fsdp_plugin=in_fp32()))
        model = Model()
        if rank():
            model.to("meta")
        tied, reference = copy.copy(model), copy.deepcopy(model)
        accelerator = fp8(recipe, fsdp_plugin=in_fp32(cpu_ram_efficient_loading=True))
        assert_same(trained(accelerator, model), want)
        assert tied.head is model.head
        reference = accelerator.prepare_model(reference, evaluation_mode=True)  # whole everywhere
        assert_same(parameters(reference), dict(Model().named_parameters()))
        assert all(not t.is_meta for t in (*model.parameters(), *model.buffers()))
        assert all(not state.amax.data.is_meta for state in find_states(model) if state.amax is not None)
    for gathers in (False, True):  # torchao's subclass is around shards that were filled in
        own = AORecipeKwargs(recipe="tensorwise", enable_fsdp_float8_all_gather=gathers)
        sharding = in_fp32(cpu_ram_efficient_loading=True)
        accelerator = Accelerator("fp8", kwargs_handlers=[own], cpu=True, fsdp_plugin=sharding)
        model = Model(seed=1 + rank())
        optimizer = make_optimizer(model.parameters())
        model, optimizer = accelerator.prepare(model, optimizer)
        local = model.blocks[0].up.weight._local_tensor
        assert (type(local) is not Tensor) is gathers
        assert_same(parameters(model), dict(Model().named_parameters()))
        assert not accelerator.strategy._replaced.stale(optimizer.optimizer)


def recomputed() -> None:
    """Blocks run again in backward, and FP8 layers with the scales of forward."""
    calls: list[str] = []
    for recipe in ("rowwise", "delayed"):
        want = trained(fp8(recipe, fsdp_plugin=in_fp32()))
        model = Model()
        model.blocks[1].up.register_forward_hook(lambda *_: calls.append("up"))
        assert_same(trained(fp8(recipe, fsdp_plugin=in_fp32(activation_checkpointing=True)), model), want)
    assert len(calls) == 2 * 2 * 2  # twice a step, for two recipes
    with pytest.raises(ConfigError, match="fsdp_activation_checkpointing: Fp8Linear has no blocks"):
        fp8(fsdp_plugin=plugin(activation_checkpointing=True)).prepare(nn.Linear(16, 16))


def ignored() -> None:
    """Modules that are not sharded are trained all the same, and stay equal."""
    for pattern in (r"first|head", r"blocks\.1"):
        accelerator = fp8(fsdp_plugin=in_fp32(ignored_modules=pattern))
        model = Model(seed=1 + rank())
        model, optimizer = accelerator.prepare(model, make_optimizer(model.parameters()))
        whole = [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]
        assert whole == [
            n for n, _ in Model().named_parameters() if n.startswith(tuple(pattern.replace("\\", "").split("|")))
        ]
        report = verify(model, optimizer, step=lambda m=model, o=optimizer, a=accelerator: steps(a, m, o, 1))
        assert "19 parameters moved" in report.checks["moved and fresh"]
    with pytest.raises(ConfigError, match="'embed' fits no module of this Model"):
        trained(fp8(fsdp_plugin=in_fp32(ignored_modules="embed")))


def precision() -> None:
    """By default FP32 shards, BF16 gathers and FP32 reductions; a policy of the script's decides."""
    seen: dict[str, torch.dtype] = {}
    accelerator = fp8(fsdp_plugin=plugin())
    model = Model().bfloat16()
    model.blocks[0].up.weight.requires_grad_(False)
    model, optimizer = accelerator.prepare(model, make_optimizer(p for p in model.parameters() if p.requires_grad))
    model.blocks[1].up.register_forward_hook(lambda layer, *_: seen.update(gathered=layer.weight.dtype))
    steps(accelerator, model, optimizer, 1)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert model.blocks[0].up.weight.dtype is torch.bfloat16
    assert seen == {"gathered": torch.bfloat16}
    group = model.blocks[1]._get_fsdp_state()._fsdp_param_group
    assert group._reduce_dtype is torch.float32
    verify(model, optimizer, step=lambda: steps(accelerator, model, optimizer, 1))
    set_by_word = plugin()
    set_by_word.set_mixed_precision("bf16")
    accelerator = fp8(fsdp_plugin=set_by_word)
    assert isinstance(accelerator.strategy, ShardedProcesses)
    policy = accelerator.strategy.options.mixed_precision
    assert policy is not None
    assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.bfloat16)


# -- optimizers


def optimizers() -> None:
    """Prepared before, with or behind its model, by itself or of several groups, with a state or frozen parameters."""
    want = base()
    for order in ("optimizer first", "model first", "made behind", "wrapped first"):
        accelerator = fp8(fsdp_plugin=in_fp32())
        model = Model()
        optimizer = make_optimizer(model.parameters())
        if order == "optimizer first":
            optimizer = accelerator.prepare(optimizer)
            model = accelerator.prepare(model)
        elif order == "wrapped first":
            model, optimizer = accelerator.prepare(model, accelerator.prepare(optimizer))
        else:
            model = accelerator.prepare(model)
            optimizer = make_optimizer(model.parameters()) if order == "made behind" else optimizer
            optimizer = accelerator.prepare(optimizer)
        steps(accelerator, model, optimizer)
        assert_same(parameters(model), want)
        assert all(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"])
    groups()
    with_state()


def groups() -> None:
    accelerator = fp8(fsdp_plugin=in_fp32())
    model = Model()
    model.first.requires_grad_(False)
    model.head.weight = model.blocks[0].tied = nn.Parameter(model.head.weight.detach().clone())
    decayed = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    optimizer: Any = AdamW([{"params": decayed}, {"params": others, "lr": 0.0}], lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    assert model.head.weight is model.blocks[0].tied
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    assert sizes == [len(decayed), len(others)]
    before = parameters(model)
    report = verify(model, optimizer, step=lambda: steps(accelerator, model, optimizer, 1))
    assert report.checks["ties"] == "1 ties"
    after = parameters(model)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name, p in model.named_parameters() if p.ndim > 1 and not name.startswith("first")}


def with_state() -> None:
    """An optimizer that stepped before goes on as if it had not been sharded."""
    x, y = make_data(2)
    ends = []
    for sharding in (None, in_fp32()):
        model = Model()
        optimizer: Any = make_optimizer(model.parameters())
        F.cross_entropy(model(x[0, 0, 0]), y[0, 0, 0]).backward()
        optimizer.step()
        optimizer.zero_grad()
        accelerator = fp8(fsdp_plugin=sharding)
        model, optimizer = accelerator.prepare(model, optimizer)
        steps(accelerator, model, optimizer)
        ends.append(parameters(model))
    assert_same(ends[1], ends[0])
    model = Model()
    compressed = AdamW(model.parameters(), lr=1e-2, moments="fp8")
    F.cross_entropy(model(x[0, 0, 0]), y[0, 0, 0]).backward()
    compressed.step()
    held = [id(p) for p in compressed.param_groups[0]["params"]]
    with pytest.raises(ConfigError, match=r"stepped before prepare, and its state .* prepare it before its first step"):
        fp8(fsdp_plugin=in_fp32()).prepare(model, compressed)
    assert held == [id(p) for p in compressed.param_groups[0]["params"]]


def lost_optimizers() -> None:
    """One that still holds what was replaced, or another model's, never steps silently."""
    accelerator = fp8(fsdp_plugin=in_fp32())
    model = Model()
    forgotten = make_optimizer(model.parameters())
    model = accelerator.prepare(model)
    with pytest.raises(VerifyError, match=r"first.weight is in no group of the optimizer"):
        verify(model, forgotten)
    with pytest.raises(ConfigError, match=r"AdamW holds 19 Parameters that sharding replaced, such as first.weight"):
        forgotten.step()
    accelerator.prepare(forgotten)
    forgotten.step()
    other = accelerator.prepare(make_optimizer(Model().parameters()))
    with pytest.raises(ConfigError, match=r"19 Parameters of no prepared model, such as group 0 parameter 0 of shape"):
        other.step()


# -- gradients


def clipping() -> None:
    """Norms of DTensors beside plain tensors, with and without gradients, against those of whole gradients."""
    for norm_type in (1.0, 2.0, float("inf")):
        accelerator = fp8(fsdp_plugin=in_fp32(ignored_modules="head"))
        model = accelerator.prepare(Model())
        model.first.requires_grad_(False)
        x, y = make_data(2)
        accelerator.backward(F.cross_entropy(model(x[0, 0, rank()]), y[0, 0, rank()]))
        grads = [full(p.grad) for p in model.parameters() if p.grad is not None]
        assert len(grads) == 17
        want = torch.linalg.vector_norm(torch.cat([g.flatten().double() for g in grads]), norm_type)
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.5, norm_type=norm_type)
        assert not isinstance(norm, DTensor)
        torch.testing.assert_close(norm.double(), want, rtol=1e-5, atol=0)  # FP32 sums of 5e4 elements in another order
        every = [torch.empty_like(norm) for _ in range(dist.get_world_size())]
        dist.all_gather(every, norm)
        assert len({float(n) for n in every}) == 1
        clipped = [full(p.grad) for p in model.parameters() if p.grad is not None]
        for got, before in zip(clipped, grads, strict=True):
            torch.testing.assert_close(got, before * float(0.5 / want), rtol=1e-5, atol=0)
        accelerator.clip_grad_value_(model.parameters(), 1e-4)
        assert max(float(full(p.grad).abs().max()) for p in model.parameters() if p.grad is not None) == pytest.approx(
            1e-4
        )


def averages() -> None:
    """Gradients that FSDP2 does not manage: one collective a dtype; zeros for one that this process lacks; none for one
    that all lack; and not those of a model whose backward is still to come.
    """
    kinds = [torch.float32] * 3 + [torch.bfloat16]
    params = [nn.Parameter(torch.zeros(2, 3, dtype=dtype)) for dtype in kinds]
    params[0].grad = torch.full((3, 2), 1.0 + rank()).t()
    params[1].grad = torch.ones(2, 3) if rank() else None
    params[3].grad = torch.full((2, 3), 2.0 * rank(), dtype=torch.bfloat16)
    calls: list[int] = []
    real = dist.all_reduce

    def counted(t: Tensor, *args: Any, **options: Any) -> Any:
        calls.append(t.numel())
        return real(t, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", counted)
        average_plain(params)
        assert calls == [18 + 3, 6 + 1]
        for p, mean in zip(params, (1.5, 0.5, None, 1.0), strict=True):
            assert (p.grad is None) is (mean is None)
            assert p.grad is None or (p.grad == mean).all()
        accelerator = fp8(fsdp_plugin=in_fp32())
        one, other = accelerator.prepare(Model(), Model(seed=2))
        x = torch.randn(ROWS, 16)
        waiting = other(x).sum()
        calls.clear()
        accelerator.backward(one(x).sum())
        assert not calls
        accelerator.backward(waiting)


def overflow() -> None:
    """Under FP16 one process's overflow makes all skip the step."""
    accelerator = Accelerator("fp16", cpu=True, fsdp_plugin=in_fp32())
    model = Model()
    model, optimizer = accelerator.prepare(model, make_optimizer(model.parameters()))
    before = parameters(model)
    loss = model(torch.randn(4, 16)).sum() * (float("inf") if rank() else 1.0)
    accelerator.backward(loss)
    optimizer.step()
    assert optimizer.step_was_skipped
    assert_same(parameters(model), before)


def accumulated() -> None:
    """Codes of whole weights do not outlive a micro-batch, and gradients are exchanged once a step."""
    accelerator = fp8(fsdp_plugin=in_fp32(), gradient_accumulation_steps=2)
    model = Model()
    model, optimizer = accelerator.prepare(model, make_optimizer(model.parameters()))
    x, y = make_data(2, micro=2)
    reduced = []
    for micro in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(x[0, micro, rank()]), y[0, micro, rank()]))
            assert not any(layer._acceler8_layer.codes.is_open for _, layer in fp8_layers(model))
            reduced.append(model.head.weight.grad is not None)
            optimizer.step()
            optimizer.zero_grad()
    assert reduced == [False, True]
    with accelerator.no_sync(model):
        accelerator.backward(model(x[0, 0, rank()]).sum())
    assert model.head.weight.grad is None


def fresh() -> None:
    """Forwards without a backward keep no weights: between backward and step, in front of the first step too, and
    behind an evaluation whose weights are edited.
    """
    for options in ({}, {"reshard_after_forward": False}):
        accelerator = fp8(fsdp_plugin=in_fp32(**options))
        model = Model()
        model, optimizer = accelerator.prepare(model, make_optimizer(model.parameters()))
        x, y = make_data(2)
        for step in range(2):
            mine, wanted = x[step, 0, rank()], y[step, 0, rank()]
            accelerator.backward(F.cross_entropy(model(mine), wanted))
            with torch.no_grad():
                model(mine)
            if step:  # before the first step the guard counts what the evaluation left
                assert model(mine).requires_grad
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            assert model(x[0, 0, 0]).any()
        assert_same(parameters(model), base())
        with torch.no_grad():
            for p in model.parameters():
                p._local_tensor.zero_()
            assert not model(x[0, 0, 0]).any()


def guarded() -> None:
    """A step behind a forward with gradients that no backward followed: the optimizer holds the model's Parameters."""
    accelerator = fp8(fsdp_plugin=in_fp32())
    model = Model()
    model, optimizer = accelerator.prepare(model, make_optimizer(model.parameters()))
    x, y = make_data(2)
    accelerator.backward(F.cross_entropy(model(x[0, 0, rank()]), y[0, 0, rank()]))
    model(x[0, 0, rank()])
    optimizer.step()
    assert all(isinstance(p, DTensor) for p in model.parameters())


# -- FP8 all-gather


class _Counted:
    """FSDP2's all-gather of one unit, noting the bytes that each process sends."""

    def __init__(self) -> None:
        self.sent = 0
        self._gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        self.sent += input_tensor.numel() * input_tensor.element_size()
        return self._gather(output_tensor, input_tensor, group=group, async_op=async_op)


def gathered_bytes() -> None:
    """A block's weights in FP8 take half of BF16's bytes on the wire, and nothing of them stays behind a step.

    A block has 2 * 128 * 64 weights in FP8 and 128 + 128 numbers of norm and bias in BF16: 16896 of 33280 bytes.
    """
    sent = {}
    for gathers in (False, True):
        own = NativeRecipeKwargs(recipe="tensorwise", enable_fsdp_float8_all_gather=gathers)
        accelerator = Accelerator("fp8", kwargs_handlers=[own], cpu=True, fsdp_plugin=plugin())
        model = Model()
        model, optimizer = accelerator.prepare(model, make_optimizer(model.parameters()))
        counted = _Counted()
        model.blocks[0].set_custom_all_gather(counted)
        whole: list[Tensor] = []
        model.blocks[0].up.register_forward_hook(lambda layer, *_, seen=whole: seen.append(layer.weight))
        steps(accelerator, model, optimizer, 1)
        sent[gathers] = counted.sent
        assert whole[0].dtype is (torch.float8_e4m3fn if gathers else torch.bfloat16)
        assert whole[0].untyped_storage().size() == 0
    assert sent[False] == 2 * 2 * (2 * 128 * 64 + 256) // dist.get_world_size()
    assert sent[True] / sent[False] <= 0.52


def gathered_only_if_possible() -> None:
    for recipe, says in (("delayed", "with delayed scaling"), ("mxfp8", "allowed for FP8 all-gather")):
        own = NativeRecipeKwargs(recipe=recipe, enable_fsdp_float8_all_gather=True)
        with pytest.raises(PlanError, match=says):
            trained(Accelerator("fp8", kwargs_handlers=[own], cpu=True, fsdp_plugin=plugin()))


# -- states


def states() -> None:
    """Whole tensors in process 0, the same as replicas have; loaded into shards they go on bit for bit."""
    for make in (make_optimizer, lambda params: AdamW(params, lr=1e-2, moments="fp8")):
        accelerator = fp8(fsdp_plugin=in_fp32())
        model = Model()
        model, optimizer = accelerator.prepare(model, make(model.parameters()))
        strategy = accelerator.strategy
        steps(accelerator, model, optimizer)
        saved, kept = strategy.model_state(model), strategy.optimizer_state(optimizer.optimizer)
        if rank():
            assert (saved, kept) == ({}, {})
        else:
            assert list(saved) == list(Model().state_dict())
            Model().load_state_dict(saved)
            assert all(type(t) is Tensor and t.device.type == "cpu" for t in saved.values())
            make(Model().parameters()).load_state_dict(kept)
        ends = []
        for resumed in (False, True):
            if resumed:
                accelerator = fp8(fsdp_plugin=in_fp32())
                model = Model(seed=9)
                model, optimizer = accelerator.prepare(model, make(model.parameters()))
                accelerator.strategy.load_model_state(model, saved, lambda *_: None)
                accelerator.strategy.load_optimizer_state(optimizer.optimizer, kept)
            steps(accelerator, model, optimizer, 1)
            ends.append(parameters(model))
        assert_same(ends[1], ends[0])
    wrong = {"first.weight": torch.zeros(2, 2)} if rank() == 0 else {}
    with pytest.raises(CheckpointError, match=r"18 names differ, such as 'blocks.0.down.weight', which is missing"):
        accelerator.strategy.load_model_state(model, wrong, lambda *_: None)


def evaluation() -> None:
    """In eval mode the shards give what the whole model gives."""
    accelerator = fp8(fsdp_plugin=in_fp32())
    model = accelerator.prepare(Model())
    whole = Model().eval()
    x = torch.randn(ROWS, 16, generator=torch.Generator().manual_seed(7))
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        want = whole(x).float()
    with torch.no_grad():
        assert torch.equal(model(x), want)
    assert accelerator.unwrap_model(model) is model
    own = NativeRecipeKwargs(recipe="tensorwise", enable_fsdp_float8_all_gather=True)
    gathered = Accelerator("fp8", kwargs_handlers=[own], cpu=True, fsdp_plugin=in_fp32()).prepare(Model()).eval()
    with torch.no_grad():
        assert torch.equal(gathered(x), want)


def different_models() -> None:
    accelerator = fp8(fsdp_plugin=in_fp32())
    model = Model()
    if rank():
        model.head = nn.Linear(64, 6)
    with pytest.raises(
        ConfigError, match=r"processes 0 and 1 have different models, such as in 'head.bias \(5,\) torch.float32 True'"
    ):
        accelerator.prepare(model)


def different_dtypes() -> None:
    """A model that one process loaded in BF16 is refused; if it alone holds weights, all have it in BF16."""

    def made() -> nn.Module:
        model = Model().requires_grad_(False)
        model.register_buffer("scale", torch.ones(3))
        return model if rank() else model.bfloat16()

    with pytest.raises(ConfigError, match=r"such as in 'blocks.0.down.weight \(64, 128\) torch.bfloat16 False'"):
        fp8(fsdp_plugin=in_fp32()).prepare(made())
    model = fp8(fsdp_plugin=in_fp32(cpu_ram_efficient_loading=True)).prepare(made())
    assert {t.dtype for t in (*model.parameters(), *model.buffers())} == {torch.bfloat16}
    assert_same(parameters(model), dict(Model().bfloat16().named_parameters()))
    assert torch.equal(model.scale, torch.ones(3, dtype=torch.bfloat16))


def broken() -> None:
    """What verify is for: a process that trains on its own, and codes that are not those of the weight."""
    accelerator = fp8(fsdp_plugin=in_fp32(ignored_modules="head"))
    model = Model()
    model, optimizer = accelerator.prepare(model, make_optimizer(model.parameters()))

    def alone() -> None:
        steps(accelerator, model, optimizer, 1)
        with torch.no_grad():
            model.head.bias.add_(rank())

    with pytest.raises(VerifyError, match=r"head.bias differs between processes 0 and 1"):
        verify(model, optimizer, step=alone)


def properties() -> None:
    accelerator = fp8(fsdp_plugin=plugin())
    assert accelerator.is_fsdp2
    assert accelerator.is_composable_parallelism_enabled
    assert accelerator.distributed_type.value == "FSDP"
    model = accelerator.prepare(Model())
    assert isinstance(model, FSDPModule)
    assert accelerator.prepare(model) is model
    assert accelerator.unwrap_model(model) is model
    replicas = fp8(fsdp_plugin=FullyShardedDataParallelPlugin(sharding_strategy="NO_SHARD"))
    assert not replicas.is_fsdp2
    assert replicas.strategy.name == "ddp"
    engine = backends.find("transformer_engine")
    why = engine.lacks(recipes.get("tensorwise"), torch.device("meta"), "fsdp2")
    assert why is not None
    assert "does not run recipe tensorwise under fsdp2" in why


SCENARIOS: dict[str, Callable[[], Any]] = {
    check.__name__: check
    for check in (
        *(
            units,
            ways,
            loaded_in_first,
            recomputed,
            ignored,
            precision,
            optimizers,
            lost_optimizers,
            clipping,
            averages,
            overflow,
        ),
        *(
            accumulated,
            fresh,
            guarded,
            gathered_bytes,
            gathered_only_if_possible,
            states,
            evaluation,
            different_models,
            different_dtypes,
            broken,
        ),
        properties,
    )
}


def compiles() -> None:
    """Blocks compiled one by one, behind activation checkpointing and in front of sharding, give the same bits.

    Without fused norms: compiled, a norm is its author's forward, whose sums run in another order.
    """
    for options in ({}, {"activation_checkpointing": True}):
        ends = []
        for backend in ("NO", "aot_eager"):
            dynamo = TorchDynamoPlugin(backend=backend, use_regional_compilation=True, fullgraph=True)
            accelerator = fp8("rowwise", fsdp_plugin=in_fp32(**options), dynamo_plugin=dynamo)
            model = acceler8.convert(Model(), acceler8.plan(Model(), "rowwise", fuse=False))
            counters.clear()
            ends.append(trained(accelerator, model))
            assert bool(counters["stats"]["unique_graphs"]) is (backend != "NO")
        assert_same(ends[1], ends[0])


def hybrid() -> None:
    """Two copies of the model, each over two processes: of four, as on two machines of two."""
    for recipe, gathers in (("rowwise", False), ("tensorwise", True), ("delayed", False)):
        ends, losses = [], []
        for word in ("FULL_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"):
            own = NativeRecipeKwargs(recipe=recipe, enable_fsdp_float8_all_gather=gathers)
            sharding = FullyShardedDataParallelPlugin(
                sharding_strategy=word, mixed_precision_policy=MixedPrecisionPolicy(), cpu_ram_efficient_loading=gathers
            )
            accelerator = Accelerator("fp8", kwargs_handlers=[own], cpu=True, fsdp_plugin=sharding)
            facts = run(accelerator, parts=4)
            ends.append(facts["end"])
            losses.append(facts["losses"])
            assert facts["local"]["blocks.0.up.weight"] == ((32 if word == "FULL_SHARD" else 64), 64)
            assert "19 parameters moved, 7 layers used codes" in facts["verified"]["moved and fresh"]
        # sums of four gradients in another order: AdamW's first steps are as large as the learning rate whatever the
        # gradient is, so one that is nearly zero may turn its sign
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-3, atol=0)
        assert_same(ends[2], ends[1])


def uneven() -> None:
    """More processes than a parameter has rows: some hold nothing of it."""
    model = Model()
    model.head = nn.Linear(64, 3)
    accelerator = fp8(fsdp_plugin=plugin())
    model, optimizer = accelerator.prepare(model, make_optimizer(model.parameters()))

    def step() -> None:
        accelerator.backward(model(torch.randn(4, 16)).square().sum())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    report = verify(model, optimizer, step=step)
    assert "19 parameters moved" in report.checks["moved and fresh"]
    assert model.head.weight.to_local().shape[0] == (rank() < 3)
    saved = accelerator.strategy.model_state(model)
    before = parameters(model)
    accelerator.strategy.load_model_state(model, saved, lambda *_: None)
    assert_same(parameters(model), before)


COMPILED: dict[str, Callable[[], Any]] = {"compiles": compiles}
OF_FOUR: dict[str, Callable[[], Any]] = {check.__name__: check for check in (hybrid, uneven)}
"""Checks that four processes make, two on each of two machines."""
