"""A small training that is spread in one of several ways, and all of its state as whole tensors, to compare."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from acceler8 import Accelerator, fp8_state_dict, optim
from acceler8.accelerator.unwrap import plain_model
from acceler8.config.run_handlers import InitProcessGroupKwargs
from acceler8.nn import find_states
from acceler8.optim.state import Moment, read_moment
from acceler8.parallel import fsdp2_whole
from acceler8.utils import AORecipeKwargs, DeepSpeedPlugin, FullyShardedDataParallelPlugin, NativeRecipeKwargs

FSDP = {"shards": "SHARDED_STATE_DICT", "whole": "FULL_STATE_DICT"}
GLOBAL_BATCH = 16  # of four processes' 4, two processes' 8


class Net(nn.Module):
    """Rows of 128, which blocks of an FP8 moment fit, rows of 100, a tie, one row for all, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 128)
        self.up = nn.Linear(128, 100)
        self.down = nn.Linear(100, 128)
        self.mid = nn.Linear(128, 128)  # in FP8: both sizes are multiples of 16
        self.one = nn.Linear(128, 1)
        self.head = nn.Linear(128, 10, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: Tensor) -> Tensor:
        self.seen += 1
        x = self.embed(tokens)
        x = x + self.down(self.up(x).relu())
        x = x + self.mid(x)
        return self.head(x) + self.one(x)


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "fp8": lambda p: optim.AdamW(p, lr=1e-2, moments="fp8", quantize="all"),
}


class Sharded:
    """One process of a training in ``form``: ``shards`` or ``whole`` (of FSDP2), ``ddp`` or ``single``."""

    def __init__(
        self, form: str, optimizer: str = "adamw", seed: int = 0, window: int = 1, gathers: str | None = None
    ) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        short = InitProcessGroupKwargs(timeout=timedelta(seconds=60))
        options: dict[str, Any] = {"kwargs_handlers": [short], "gradient_accumulation_steps": window}
        if form in FSDP:
            options["fsdp_plugin"] = FullyShardedDataParallelPlugin(
                fsdp_version=2, state_dict_type=FSDP[form], auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=10_000
            )
        if form.startswith("zero"):
            section = {"stage": int(form[4:]), "stage3_param_persistence_threshold": 0}
            config = {"zero_optimization": section, "bf16": {"enabled": False}}
            options["deepspeed_plugin"] = DeepSpeedPlugin(hf_ds_config=config)
        if gathers is None:
            options["recipe"] = "delayed"
        else:
            kind = NativeRecipeKwargs if gathers == "native" else AORecipeKwargs
            options["kwargs_handlers"].append(kind(recipe="tensorwise", enable_fsdp_float8_all_gather=True))
        self.accelerator = Accelerator("fp8", cpu=True, **options)
        here = self.accelerator.processes
        net = Net()
        optimizer = OPTIMIZERS[optimizer](net.parameters())
        self.model, self.optimizer = self.accelerator.prepare(net, optimizer)
        self.rank, self.count = here.process_index, here.num_processes

    def train(self, first: int, last: int) -> list[float]:
        """Steps ``first`` to ``last``; each process its part of the same batches."""
        losses = []
        for step in range(first, last):
            generator = torch.Generator().manual_seed(step)
            tokens = torch.randint(10, (GLOBAL_BATCH, 16), generator=generator).chunk(self.count)[self.rank]
            with self.accelerator.accumulate(self.model):
                loss = nn.functional.cross_entropy(self.model(tokens).flatten(0, 1), tokens.roll(1, -1).flatten())
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def everything(self) -> dict[str, Any]:
        """All state, whole, by name; the same in every process but for random numbers."""
        plain = plain_model(self.model)
        if self.accelerator.strategy.is_engine:
            return self._of_engine(plain)
        state = {name: whole(value) for name, value in plain.state_dict().items()}
        found = {
            name: {key: whole(value) for key, value in self.optimizer.optimizer.state[p].items()}
            for name, p in plain.named_parameters()
        }
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        return {
            "model": state,
            "optimizer": found,
            "groups": groups,
            "fp8": {k: v.clone() for k, v in fp8_state_dict(plain).items()} if find_states(plain) else {},
            "steps": self.accelerator.clock.ticks,
        }

    def _of_engine(self, plain: nn.Module) -> dict[str, Any]:
        """The same, of what the engine gives process 0; elsewhere without it."""
        packed = self.accelerator.strategy.optimizer_state(self.optimizer.optimizer)
        numbers = {id(p): n for n, p in enumerate(p for g in self.optimizer.param_groups for p in g["params"])}
        found = {name: packed["state"].get(numbers[id(p)], {}) for name, p in plain.named_parameters()}
        return {
            "model": self.accelerator.get_state_dict(self.model),
            "optimizer": found,
            "fp8": {k: v.clone() for k, v in fp8_state_dict(plain).items()},
            "steps": self.accelerator.clock.ticks,
        }

    def moments(self) -> dict[str, Any]:
        """Both moments in FP32, whole, by name, whatever they are stored in."""
        optimizer, found = self.optimizer.optimizer, {}
        known = optimizer.MOMENTS if isinstance(optimizer, optim.AdamW) else (Moment("exp_avg"), Moment("exp_avg_sq"))
        for name, p in plain_model(self.model).named_parameters():
            state = optimizer.state[p]
            found[name] = {moment.name: whole(read_moment(state, moment)) for moment in known}
        return found

    def save(self, folder: Path) -> str:
        return self.accelerator.save_state(folder)


def whole(value: Any) -> Any:
    """A copy of a tensor, gathered; anything else as it is."""
    return fsdp2_whole.whole(value).clone() if isinstance(value, Tensor) else value
