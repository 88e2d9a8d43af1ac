"""One rank of the DeepSpeed tests: ``deepspeed_worker.py RANK RANKS FOLDER SCENARIO...`` writes FOLDER/SCENARIO.RANK.pt.

A scenario gives back what happened, as plain tensors and numbers; what should have happened is for the tests to say.
One thread, so that sums run in one order.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed_support import ROWS_ALONE, Facts, Training, loss_of, make_accelerator, make_data, message_of

import acceler8


def train(way: str, kind: str, recipe: object = "rowwise", **options: object) -> Facts:
    """Three steps of two micro-batches; then ``verify`` on a step more."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    training = Training(make_accelerator(way, recipe=recipe, **options), kind)
    facts = training.run(make_data(kind, ranks), rank)
    facts["weights"] = training.weights()
    facts["dtypes"] = sorted({str(p.dtype) for p in training.model.parameters()})
    data = iter(make_data(kind, ranks, seed=6))

    def step() -> None:
        for _ in range(2):
            training.micro_batch(*next(data)[rank])

    facts["verified"] = acceler8.verify(training.model, training.optimizer, step=step).checks
    return facts


def save(way: str, kind: str = "plain", **options: object) -> Facts:
    """Three steps, whole states, and three steps more."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    training = Training(make_accelerator(way, recipe=ROWS_ALONE, **options), kind)
    training.run(make_data(kind, ranks), rank)
    facts: Facts = {"saved": (training.weights(), training.states())}
    facts["scheduler"] = training.scheduler.state_dict()
    facts["after"] = training.run(make_data(kind, ranks, seed=8), rank)
    facts["weights"], facts["states"] = training.weights(), training.states()
    return facts


def resume(way: str, source: Path, kind: str = "plain", **options: object) -> Facts:
    """What ``save`` wrote, in a training that began otherwise, and three steps more."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    training = Training(make_accelerator(way, recipe=ROWS_ALONE, **options), kind)
    training.run(make_data(kind, ranks, seed=9), rank)
    saved = torch.load(source, weights_only=False)
    weights, states = saved["saved"] if rank == 0 else ({}, {})
    strategy = training.accelerator.strategy
    strategy.load_model_state(training.model, weights, lambda model, state: model.load_state_dict(state))
    strategy.load_optimizer_state(training.optimizer.optimizer, states)
    training.scheduler.load_state_dict(saved["scheduler"])
    facts: Facts = {"loaded": (training.weights(), training.states())}
    facts["after"] = training.run(make_data(kind, ranks, seed=8), rank)
    facts["weights"], facts["states"] = training.weights(), training.states()
    return facts


SCENARIOS = {
    **{
        f"save-{way}-{engine}": lambda way=way, engine=engine: save(way, engine=engine)
        for way in ("zero0", "zero1", "zero2", "zero3")
        for engine in ("fp32", "bf16")
    },
    **{
        f"resume-{way}-{engine}-from-{other}": lambda way=way, engine=engine, other=other: resume(
            way, Path(sys.argv[3]) / f"save-{other}-{engine}.0.pt", engine=engine
        )
        for way in ("zero0", "zero1", "zero2", "zero3")
        for engine in ("fp32", "bf16")
        for other in ("zero0", "zero1", "zero2", "zero3")
    },
    **{
        f"{way}-fused": lambda way=way: train(way, "llama", "rowwise", engine="bf16")
        for way in ("ddp", "zero0", "zero1", "zero2", "zero3")
    },
    **{
        f"{way}-bert": lambda way=way: train(way, "bert", "rowwise", engine="bf16")
        for way in ("ddp", "zero0", "zero1", "zero2", "zero3")
    },
    **{
        f"{way}-delayed": lambda way=way: train(way, "llama", "delayed")
        for way in ("ddp", "zero0", "zero1", "zero2", "zero3")
    },
    **{
        f"{way}-torchao-{r}": lambda way=way, r=r: train(way, "llama", r, backend="AO")
        for way in ("ddp", "zero0", "zero1", "zero2", "zero3")
        for r in ("tensorwise", "rowwise")
    },
    **{
        f"{way}-{kind}": lambda way=way, kind=kind: train(way, kind, ROWS_ALONE)
        for way in ("ddp", "zero0", "zero1", "zero2", "zero3")
        for kind in ("plain", "llama")
    },
}


def main(rank: int, ranks: int, folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder / 'rendezvous'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    for name in names:
        torch.save(SCENARIOS[name](), folder / f"{name}.{rank}.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
