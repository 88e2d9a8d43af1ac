"""Is the state still doing its work? Zeros and stuck codes of second moments, updates that masters lose.

    with watch_states(optimizer, every=100) as watch:
        ...                                   # train
        for row in watch.rows(): print(row)   # worst parameters first

Three numbers a parameter, each a share of its elements:

- ``zero_share``: the second moment is zero and the gradient is not. The next update divides by eps; above 0.0001
  something is wrong with the format.
- ``stuck_share``: the second moment has the very value that it had at the last look, ``every`` steps ago, though
  gradients came. Decay alone should have moved it; above 0.5 learning rates no longer adapt.
- ``lost_share``: one step had an update for the element and its weight, with its master, is as before. BF16 without a
  master loses nearly all of them late in training, and FP16 those below 2**-12 of a weight.

Up to ``sample`` elements of a parameter are looked at, in blocks spread evenly over it. Nothing waits for the device
until ``rows()``. The thresholds are this library's own; docs/optimizers.md says what they were seen at.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from acceler8.errors import ConfigError
from acceler8.formats import BLOCK, FP16_POW2, decode_blocks, join_bf16
from acceler8.nn.gradients import gradient_of, stored_gradient
from acceler8.optim.base import StateFormatsOptimizer
from acceler8.optim.state import Moment, local, moment_code


@dataclass(frozen=True)
class StateHealth:
    """What the last look at one parameter found. Shares are from 0 to 1; None: not seen yet, or nothing to see."""

    name: str
    step: int
    elements: int
    zero_share: float | None
    stuck_share: float | None
    lost_share: float | None


class StateWatch:
    """Looks at an optimizer's state every so many of its steps. Made by ``watch_states``."""

    def __init__(self, optimizer: StateFormatsOptimizer, every: int, sample: int) -> None:
        self.optimizer, self.every, self.sample = optimizer, every, sample
        self._steps = 0
        self._blocks: dict[Tensor, Tensor | None] = {}
        self._weights: dict[Tensor, Tensor] = {}
        self._last: dict[Tensor, Tensor] = {}
        self._found: dict[Tensor, tuple[int, int, Tensor]] = {}
        self._handles = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]

    def remove(self) -> None:
        """Look no more; what was found stays readable."""
        for handle in self._handles:
            handle.remove()

    def rows(self) -> list[StateHealth]:
        """The last look at each parameter, the largest share first. Waits for the device."""
        names = _names(self.optimizer)
        rows = []
        for p, (step, elements, counts) in self._found.items():
            part, of = counts[0::2].tolist(), counts[1::2].tolist()
            shares = [a / b if b else None for a, b in zip(part, of, strict=True)]
            rows.append(StateHealth(names[p], step, elements, *shares))
        return sorted(rows, key=lambda row: -max(row.zero_share or 0, row.stuck_share or 0, row.lost_share or 0))

    @torch.no_grad()
    def _before(self, *_: Any) -> None:
        self._steps += 1
        self._weights.clear()
        if self._steps % self.every:
            return
        for p in self._parameters():
            self._weights[p] = self._weight(p)

    @torch.no_grad()
    def _after(self, *_: Any) -> None:
        for p, before in self._weights.items():
            self._found[p] = self._steps, before.numel(), self._count(p, before)
        self._weights.clear()

    def _parameters(self) -> Iterator[Tensor]:
        for group in self.optimizer.param_groups:
            yield from (p for p in group["params"] if _has_gradient(p) and self.optimizer.state.get(p))

    def _count(self, p: Tensor, before: Tensor) -> Tensor:
        """Six counts of the sample: zeros of what, stuck of what, lost of what."""
        state = self.optimizer.state[p]
        gradient = self._pick(p, local(gradient_of(p))) != 0  # type: ignore[arg-type]
        none = gradient.new_zeros((), dtype=torch.int64)
        counts = [none] * 4
        for moment in self.optimizer.MOMENTS:
            if moment.is_unsigned:
                value = self._moment(p, moment)
                last = self._last.get(p)
                moving = gradient & (value != 0)
                stuck = moving & (value == last) if last is not None else None
                counts = [(gradient & (value == 0)).sum(), gradient.sum(), none, none]
                if stuck is not None:
                    counts[2:] = [stuck.sum(), moving.sum()]
                self._last[p] = value
        first = self.optimizer.MOMENTS[0]
        updated = self._moment(p, first) != 0 if first.name in state else gradient
        lost = updated & (self._weight(p) == before)
        return torch.stack([*counts, lost.sum(), updated.sum()])

    def _pick(self, p: Tensor, tensor: Tensor) -> Tensor:
        """The sampled elements of a tensor in the parameter's shape, flat."""
        flat, blocks = tensor.detach().reshape(-1), self._sampled(p)
        return flat if blocks is None else flat[: flat.numel() // BLOCK * BLOCK].view(-1, BLOCK)[blocks].view(-1)

    def _sampled(self, p: Tensor) -> Tensor | None:
        """Indices of the sampled blocks; None: all elements."""
        if p not in self._blocks:
            count, some = local(p).numel(), max(self.sample // BLOCK, 1)
            whole = count // BLOCK
            at = torch.linspace(0, whole - 1, some, device=local(p).device).long() if whole > some else None
            self._blocks[p] = at
        return self._blocks[p]

    def _moment(self, p: Tensor, moment: Moment) -> Tensor:
        state = self.optimizer.state[p]
        stored, scale = state[moment.name], state.get(moment.name + "_scale")
        code = moment_code(stored, scale, moment)
        picked = self._pick(p, local(stored))
        return (
            picked.to(torch.float32, copy=True) if code is None else decode_blocks(picked, self._scales(p, scale), code)
        )

    def _weight(self, p: Tensor) -> Tensor:
        state = self.optimizer.state[p]
        master, scale = state.get("master"), state.get("master_scale")
        picked = self._pick(p, local(p if master is None else master))
        if scale is not None:
            return decode_blocks(picked, self._scales(p, scale), FP16_POW2)
        return (
            join_bf16(self._pick(p, local(p)), picked)
            if picked.dtype is torch.int16
            else picked.to(torch.float32, copy=True)
        )

    def _scales(self, p: Tensor, scale: Tensor) -> Tensor:
        flat, blocks = local(scale).reshape(-1), self._sampled(p)
        return flat if blocks is None else flat[blocks]


@contextmanager
def watch_states(optimizer: Any, *, every: int = 100, sample: int = 2**16) -> Iterator[StateWatch]:
    """Look at ``optimizer``'s state every ``every`` steps, at up to ``sample`` elements of each parameter.

    ``optimizer`` may be what ``Accelerator.prepare`` returned. Shares of one look are those of one step, and "stuck" is
    since the look before. Raises: ConfigError for another kind of optimizer, or for numbers below 1.
    """
    inner = optimizer.__dict__.get("optimizer", optimizer)
    if not isinstance(inner, StateFormatsOptimizer):
        raise ConfigError(
            f"watch_states got a {type(inner).__name__}; allowed: an optimizer of acceler8.optim, such as AdamW"
        )
    if every < 1 or sample < 1:
        raise ConfigError(f"watch_states got every={every}, sample={sample}; allowed: 1 or more")
    watch = StateWatch(inner, every, sample)
    try:
        yield watch
    finally:
        watch.remove()


def _has_gradient(p: Tensor) -> bool:
    store = stored_gradient(p)
    return p.grad is not None or (store is not None and store.codes is not None)


def _names(optimizer: StateFormatsOptimizer) -> dict[Tensor, str]:
    names: dict[Tensor, str] = {}
    for index, group in enumerate(optimizer.param_groups):
        known = group.get("param_names") or [f"group {index}, parameter {n}" for n in range(len(group["params"]))]
        names |= dict(zip(group["params"], known, strict=True))
    return names
