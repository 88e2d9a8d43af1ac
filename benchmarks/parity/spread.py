"""The raw side of the parity scripts over several processes: what a user of PyTorch or DeepSpeed writes by hand.

``--strategy ddp|fsdp2|zero1|zero2|zero3``, started by ``acceler8 launch --num_processes N``. Each process takes its
share of every batch. Both sides are told the same: DDP's defaults; FSDP2's units and dtypes; DeepSpeed's JSON.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

STRATEGIES = ("single", "ddp", "fsdp2", "zero1", "zero2", "zero3")
State = dict[str, Tensor]


def join(args: argparse.Namespace) -> None:
    """Start the process group that ``acceler8 launch`` made variables for, and take this process's GPU."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if args.strategy == "single":
        if processes > 1:
            raise SystemExit(f"--strategy single in {processes} processes; allowed: one, or another strategy")
        return
    if processes < 2:
        raise SystemExit(
            f"--strategy {args.strategy} in one process; start it with: acceler8 launch --num_processes 2"
            f"{' --cpu' if args.device == 'cpu' else ''} SCRIPT --strategy {args.strategy}"
        )
    if args.device == "cuda":
        args.device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(args.device)
    dist.init_process_group("gloo" if args.device == "cpu" else "nccl")


def leave() -> None:
    """End the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def processes() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def of_first(value: Any) -> Any:
    """Process 0's value, on all."""
    if not dist.is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box, 0, device=torch.device("cuda") if torch.cuda.is_available() else None)
    return box[0]


def units(model: nn.Module) -> list[nn.Module]:
    """The encoder's layers, each a unit of FSDP2."""
    return [module for module in model.modules() if type(module).__name__ == "BertLayer"]


def policy() -> Any:
    """Weights gathered and gradients reduced in BF16, shards in FP32."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)


def deepspeed_json(args: argparse.Namespace) -> dict[str, Any]:
    """DeepSpeed's own configuration, for both sides."""
    return {
        "train_micro_batch_size_per_gpu": args.batch // processes(),
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": int(args.strategy[-1])},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }


class Spread:
    """A raw model spread by hand: ``loss(batch)``, ``step(loss)``, and its whole state."""

    def __init__(
        self,
        model: nn.Module,
        args: argparse.Namespace,
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.plain, self.args, self.context = model, args, context
        self.wrapped: Any = model
        if args.strategy == "fsdp2":
            from torch.distributed.fsdp import fully_shard

            for unit in units(model):
                fully_shard(unit, mp_policy=policy())
            fully_shard(model, mp_policy=policy())
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
        if args.strategy == "ddp":
            self.wrapped = nn.parallel.DistributedDataParallel(model)
        if args.strategy.startswith("zero"):
            import deepspeed

            if args.device == "cpu":  # of no use to a training, and compiled for minutes when a group starts
                deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
            made = deepspeed.initialize(model=model, optimizer=self.optimizer, config=deepspeed_json(args))
            self.wrapped, self.optimizer = made[0], made[1]

    def step(self, batch: State) -> Tensor:
        """Forward, backward, optimizer; returns the loss."""
        with self.context():
            loss: Tensor = self.wrapped(**batch).loss
        if self.args.strategy.startswith("zero"):
            self.wrapped.backward(loss)
            self.wrapped.step()
            return loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def state(self) -> State:
        """The whole state_dict, on process 0; every process calls it."""
        if self.args.strategy == "fsdp2":
            from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

            whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
            return dict(get_model_state_dict(self.plain, options=whole))
        if not self.args.strategy.startswith("zero"):
            return self.plain.state_dict()
        from deepspeed.utils import safe_get_full_fp32_param

        state = self.plain.state_dict(keep_vars=True)
        return {n: safe_get_full_fp32_param(v) if isinstance(v, nn.Parameter) else v for n, v in state.items()}
