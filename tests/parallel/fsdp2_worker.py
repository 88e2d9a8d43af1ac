"""One rank of the FSDP2 tests: ``fsdp2_worker.py RANK RANKS FOLDER SCENARIO...`` writes FOLDER/SCENARIO.RANK.pt.

A scenario gives back what happened, as plain tensors and numbers; what should have happened is for the tests to say.
One thread, so that a product over a shard's rows and one over all rows sum in the same order.
"""

from __future__ import annotations

import sys
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from fsdp2_support import (
    STEPS,
    Facts,
    RecordingAllGather,
    RecordingAllReduce,
    Watch,
    cast,
    full,
    make_data,
    make_model,
    message_of,
    optimizer_of,
    shard,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F

from acceler8 import recipes
from acceler8.conversion import convert, plan, restore
from acceler8.formats import E4M3
from acceler8.nn import state_of
from acceler8.parallel.fp8_all_gather import gather_in_fp8
from acceler8.recipes import Gemm, Operand, Recipe
from acceler8.scaling import GRANULARITIES


def train_sharded(mesh: DeviceMesh, recipe: Recipe, checkpointed: bool) -> Facts:
    """Five steps on two ranks, each with its own tokens."""
    rank = mesh.get_local_rank()
    model = shard(make_model(recipe, checkpointed), mesh)
    optimizer = optimizer_of(model)
    gather_in_fp8(model)
    block = model.blocks[0]
    all_gather = RecordingAllGather()
    block.set_custom_all_gather(all_gather)
    watch = Watch(block.up)
    x, target = make_data(mesh.size())
    losses, codes, grads, held, collectives = [], [], [], [], []
    for step in range(STEPS):
        with RecordingAllReduce() as all_reduce:
            watch.seen.clear()
            loss = F.mse_loss(model(x[rank, step]), target[rank, step])
            held.append((watch.seen[0]["bytes"], watch.held()))
            loss.backward()
        held[-1] += (watch.held(),)
        collectives.append(all_reduce.calls)
        codes.append(watch.seen[0])
        weight_grad = block.up.weight.grad
        grads.append((str(weight_grad.dtype), tuple(weight_grad.to_local().shape), full(weight_grad)))
        for parameter in model.skip.parameters():
            dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    params = {name: (full(p), tuple(p.to_local().shape) if isinstance(p, DTensor) else None, str(p.dtype))
              for name, p in model.named_parameters()}  # fmt: skip
    return {"losses": losses, "codes": codes, "grads": grads, "held": held, "params": params,
            "sent": all_gather.sent, "all_reduces": collectives}  # fmt: skip


def train_alone(ranks: int, recipe: Recipe, checkpointed: bool) -> Facts:
    """The same five steps in one process, a micro-batch for each rank and the mean of their gradients."""
    model = make_model(recipe, checkpointed)
    optimizer = optimizer_of(model)
    x, target = make_data(ranks)
    losses, codes, grads = [], [], []
    for step in range(STEPS):
        codes.append(cast(model.blocks[0].up.weight.detach(), recipe))
        losses.append([])
        for rank in range(ranks):
            loss = F.mse_loss(model(x[rank, step]), target[rank, step])
            loss.backward()
            losses[-1].append(loss.item())
        for parameter in model.parameters():
            parameter.grad.div_(ranks)
        grads.append(full(model.blocks[0].up.weight.grad))
        optimizer.step()
        optimizer.zero_grad()
    return {
        "losses": losses,
        "codes": codes,
        "grads": grads,
        "params": {n: full(p) for n, p in model.named_parameters()},
    }


def train_concatenated(ranks: int, recipe: Recipe) -> Facts:
    """The same five steps in one process on all ranks' tokens at once."""
    model = make_model(recipe)
    optimizer = optimizer_of(model)
    x, target = make_data(ranks)
    losses = []
    for step in range(STEPS):
        loss = F.mse_loss(model(x[:, step].flatten(0, 1)), target[:, step].flatten(0, 1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "params": {n: full(p) for n, p in model.named_parameters()}}


def train(mesh: DeviceMesh, name: str, checkpointed: bool) -> Facts:
    recipe = recipes.get(name)
    return {
        "sharded": train_sharded(mesh, recipe, checkpointed),
        "alone": train_alone(mesh.size(), recipe, checkpointed),
    }


def accumulated(mesh: DeviceMesh) -> Facts:
    """Two micro-batches, of which only the second exchanges gradients; codes are gathered for each, scales are not."""
    rank = mesh.get_local_rank()
    model, alone = shard(make_model("tensorwise"), mesh), make_model("tensorwise")
    gather_in_fp8(model)
    x, target = make_data(mesh.size())
    all_reduces = []
    for step, is_last in enumerate((False, True)):
        model.set_requires_gradient_sync(is_last)
        with RecordingAllReduce() as all_reduce:
            y = model(x[rank, step])
        all_reduces.append(all_reduce.calls)
        F.mse_loss(y, target[rank, step]).backward()
    of_ranks = []
    for other in range(mesh.size()):
        alone.zero_grad()
        for step in range(2):
            F.mse_loss(alone(x[other, step]), target[other, step]).backward()
        of_ranks.append({name: full(p.grad) for name, p in alone.named_parameters()})
    managed = [name for name, p in model.named_parameters() if isinstance(p, DTensor)]
    return {"grads": {name: full(model.get_parameter(name).grad) for name in managed},
            "alone": {name: torch.stack([g[name] for g in of_ranks]).mean(0) for name in managed},
            "all_reduces": all_reduces}  # fmt: skip


def scales(mesh: DeviceMesh) -> Facts:
    """How often scales are made, by what a forward is; weights are edited unnoticed in front of each but the second."""
    model = shard(make_model("tensorwise"), mesh)
    gather_in_fp8(model)
    weight = model.blocks[0].up.weight
    x, _ = make_data(mesh.size())
    facts: Facts = {"all_reduces": {}, "finite": {}, "sharded": {}}

    def look(name: str) -> None:
        with RecordingAllReduce() as all_reduce:
            y = model(x[0, 0])
        if y.requires_grad:
            y.sum().backward()
        facts["all_reduces"][name] = len(all_reduce.calls)
        facts["finite"][name] = bool(y.isfinite().all())
        facts["sharded"][name] = isinstance(model.head.weight, DTensor)
        weight.data.mul_(1.5)

    model.set_requires_gradient_sync(False)
    look("first micro-batch")
    weight.data.div_(1.5)
    look("later micro-batch")
    state_of(model).drop_codes()  # what steps and loading do
    look("behind loading")
    state_of(model).drop_codes()
    model.set_requires_gradient_sync(True)
    look("last micro-batch")
    look("next step")
    model.eval()
    with torch.no_grad():
        look("evaluation")
    model.train()
    with torch.no_grad():
        look("evaluation in FP8")
    look("behind evaluations")
    return facts


def compiled(mesh: DeviceMesh) -> Facts:
    """Blocks compiled one by one; AOTAutograd, which would round gradients of FP8 parameters, traces them.

    Not fused: compiled, a norm is its author's forward, whose sums run in another order.
    """
    rank = mesh.get_local_rank()
    x, target = make_data(mesh.size())
    facts: Facts = {}
    for name in ("eager", "aot_eager"):
        model = shard(make_model("tensorwise", fuse=False), mesh)
        gather_in_fp8(model)
        for block in model.blocks:
            if name != "eager":
                block.compile(backend=name)
        loss = F.mse_loss(model(x[rank, 0]), target[rank, 0])
        loss.backward()
        facts[name] = {"loss": loss.item(), "grads": {n: full(p.grad) for n, p in model.named_parameters()}}
    return facts


def concatenated(mesh: DeviceMesh) -> Facts:
    recipe = recipes.get("rowwise").with_gemms(wgrad=False)
    return {"sharded": train_sharded(mesh, recipe, False), "alone": train_concatenated(mesh.size(), recipe)}


class Branches(nn.Module):
    """Weights whose rows divide among two ranks, do not, and are too few for them."""

    ROWS = (48, 7, 1)

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(32, rows, bias=False) for rows in self.ROWS)
        generator = torch.Generator().manual_seed(3)
        for branch in self.branches:
            nn.init.normal_(branch.weight, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], -1)


def weights_only(granularity: str) -> Recipe:
    """Only weights in FP8, so that no GEMM asks for multiples of 16."""
    w = Operand(format=E4M3, granularity=GRANULARITIES[granularity])
    reads_w = Gemm(a=Operand(), b=w)
    return Recipe(name="weights_only", fprop=reads_w, dgrad=reads_w, wgrad=Gemm(a=Operand(), b=Operand()))


def gather(mesh: DeviceMesh, granularity: str) -> Facts:
    """Codes that arrive, whatever the shards' sizes and the data, beside codes of the whole weight."""
    recipe = weights_only(granularity)
    model = Branches()
    with torch.no_grad():  # of rank 1's shard; NaN there is all that rank 0 can know of it
        model.branches[0].weight[40, 3], model.branches[0].weight[41, 5] = torch.nan, torch.inf
        model.branches[1].weight[6] = 1000.0
        model.branches[1].weight[1] = 0.0
    convert(model, plan(model, recipe))
    fully_shard(model, mesh=mesh)
    gather_in_fp8(model)
    watches = [Watch(branch) for branch in model.branches]
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(5, 32, generator=generator)
    y = model(x)
    arrived = [watch.seen[0] for watch in watches]
    y.nan_to_num().sum().backward()
    weights = [full(branch.weight) for branch in model.branches]
    facts = {
        "arrived": arrived,
        "expected": [cast(weight, recipe) for weight in weights],
        "local": [tuple(branch.weight.to_local().shape) for branch in model.branches],
        "grads": [full(branch.weight.grad) for branch in model.branches],
        "x": x,
        "y": y.detach(),
    }
    with torch.no_grad():
        for branch in model.branches:
            branch.weight.to_local().mul_(2)
    return facts | {"doubled": model(x).detach()}


def changes(mesh: DeviceMesh) -> Facts:
    """Edits that no optimizer made, each followed by a forward; and a gather that did not wait for one."""
    recipe = recipes.get("tensorwise")
    model = shard(make_model(recipe), mesh)
    handle = gather_in_fp8(model)
    up = model.blocks[0].up
    watch = Watch(up)
    x, _ = make_data(mesh.size())
    facts: Facts = {}

    def look(name: str) -> None:
        watch.seen.clear()
        y = model(x[0, 0])
        y.sum().backward()  # the root's own weights stay unsharded until backward
        facts[name] = {
            "seen": watch.seen[0],
            "expected": cast(full(up.weight), recipe),
            "finite": bool(y.isfinite().all()),
        }

    look("first")
    up.weight.data.mul_(3.0)
    look("data edit")
    up.weight.to_local().detach()[0, 0] = 7.0 + mesh.get_local_rank()
    look("local edit")
    generator = torch.Generator().manual_seed(5)
    whole = torch.randn(up.weight.shape, generator=generator)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    key = "blocks.0.up.weight"
    state[key] = DTensor.from_local(whole.chunk(2)[mesh.get_local_rank()].clone(), mesh, state[key].placements)
    model.load_state_dict(state, assign=True)
    look("load_state_dict(assign=True)")

    with torch.no_grad():
        up.weight.to_local().mul_(2.0)
    model.blocks[0].unshard()
    y = model(x[0, 0])
    y.sum().backward()
    facts["unsharded too early"] = {"finite": bool(y.isfinite().all())}
    with torch.no_grad():
        up.weight.to_local().mul_(0.5)
    handle.refresh()
    model.blocks[0].unshard()
    look("unsharded after a refresh")
    return facts


def evaluation(mesh: DeviceMesh) -> Facts:
    """eval() in high precision; and that gradients are refused there."""
    model = shard(make_model("tensorwise"), mesh).eval()
    gather_in_fp8(model)
    x, _ = make_data(mesh.size())
    with torch.no_grad():
        y = model(x[0, 0])
        expected = restore(make_model("tensorwise")).eval()(x[0, 0])
        in_fp8 = make_model("tensorwise")(x[0, 0])
    return {"y": y, "expected": expected, "in_fp8": in_fp8, "error": message_of(lambda: model(x[0, 0]))}


def mixed_precision(mesh: DeviceMesh) -> Facts:
    """FSDP2's own mixed precision: BF16 activations and gradients, FP32 reduction and parameters."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = shard(make_model("tensorwise"), mesh, mp_policy=policy)
    model.skip.bfloat16()
    gather_in_fp8(model)
    watch = Watch(model.blocks[0].up)
    hp = shard(make_model("tensorwise"), mesh, mp_policy=policy)
    hp.skip.bfloat16()
    x, target = make_data(mesh.size())
    rank = mesh.get_local_rank()
    facts: Facts = {}
    for name, m in (("fp8", model), ("high precision", hp)):
        loss = F.mse_loss(m(x[rank, 0].bfloat16()).float(), target[rank, 0])
        loss.backward()
        weight = m.blocks[0].up.weight
        facts[name] = {"loss": loss.item(), "grad": full(weight.grad), "dtype": str(weight.grad.dtype)}
    facts["unsharded"] = {"dtype": str(watch.weight.dtype), "grad_dtype": str(watch.weight.grad_dtype)}
    return facts


def refusals(mesh: DeviceMesh) -> Facts:
    """Messages of what cannot be gathered in FP8."""
    unsharded = make_model("tensorwise")
    mx, delayed = shard(make_model("mxfp8"), mesh), shard(make_model("delayed"), mesh)
    weights_in_hp = shard(make_model(recipes.get("tensorwise").with_gemms(dgrad=False)), mesh)
    gathered, ran = shard(make_model("tensorwise"), mesh), shard(make_model("tensorwise"), mesh)
    gather_in_fp8(gathered)
    ran(make_data(mesh.size())[0][0, 0])
    columns = make_model("tensorwise")
    fully_shard(columns, mesh=mesh, shard_placement_fn=lambda p: Shard(1 if p.ndim == 2 and p.shape[0] != 13 else 0))
    return {
        "not sharded": message_of(lambda: gather_in_fp8(unsharded)),
        "twice": message_of(lambda: gather_in_fp8(gathered)),
        "too late": message_of(lambda: gather_in_fp8(ran)),
        "columns": message_of(lambda: gather_in_fp8(columns)),
        "mxfp8": message_of(lambda: gather_in_fp8(mx)),
        "delayed": message_of(lambda: gather_in_fp8(delayed)),
        "one GEMM": message_of(lambda: gather_in_fp8(weights_in_hp)),
        "before scales": message_of(lambda: gathered.blocks[0].unshard()),
        "restore": message_of(lambda: restore(gathered)),
    }


SCENARIOS = {
    "train-tensorwise": lambda mesh: train(mesh, "tensorwise", False),
    "train-tensorwise-checkpointed": lambda mesh: train(mesh, "tensorwise", True),
    "train-rowwise": lambda mesh: train(mesh, "rowwise", False),
    "train-rowwise-checkpointed": lambda mesh: train(mesh, "rowwise", True),
    "concatenated": concatenated,
    "accumulated": accumulated,
    "scales": scales,
    "compiled": compiled,
    "gather-tensorwise": lambda mesh: gather(mesh, "tensorwise"),
    "gather-rowwise": lambda mesh: gather(mesh, "rowwise"),
    "changes": changes,
    "evaluation": evaluation,
    "mixed_precision": mixed_precision,
    "refusals": refusals,
}


def main(rank: int, ranks: int, folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("error", module="acceler8|__main__")  # those of PyTorch about itself are not ours
    store = f"file://{folder / 'rendezvous'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    mesh = init_device_mesh("cpu", (ranks,))
    for name in names:
        torch.save(SCENARIOS[name](mesh), folder / f"{name}.{rank}.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
