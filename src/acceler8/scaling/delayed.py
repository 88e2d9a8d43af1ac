"""Delayed scaling: scale from the amax of earlier steps, so that one pass over the tensor is enough.

State of a model is one flat FP32 tensor ``[2 + amax_history_len, slots]``, a slot for each operand of
each layer:

    row 0    staging   amax seen in this step; casts only ever max into it
    row 1    in use    amax from which this step's scales are computed; constant between boundaries
    row 2..  history   oldest first, newest last

Because a cast reads only row 1 and only maxes into row 0, running a layer twice in a step, or recomputing it
in backward, changes nothing. At a boundary the staging row enters the history and row 1 becomes ``max`` or
``most_recent`` over it. Where this improves on TransformerEngine's rule (kept otherwise): a NaN or inf amax
is dropped at insertion instead of freezing the scale until it leaves the window, and a slot without history
takes the tensor's own amax (current scaling) instead of scale 1.

It is not a module buffer: ``model.bfloat16()`` would round it and DDP would overwrite it.

``torch.compile`` gets the first two rows of four slots at a time, those of a layer (``AmaxLine``): blocks of a model
that are alike then share one compiled graph, which they would not if a slot's number were a constant in it. And casts
max into staging without declaring it (see ``kernels/quantize.py``), so that no block's casts count as a change of what
another block saved for backward.

Source: Micikevicius et al. 2022, arXiv:2209.05433; TransformerEngine `delayed_scaling.cu` for names and order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from acceler8.scaling.schedule import Schedule

STAGING, IN_USE, HISTORY = 0, 1, 2
LINE = 4
"""Slots of a line, 16 bytes: where compiled code found one input aligned to so much it expects that of all, and copies
one that is not. What a cast stages into a copy would be lost.
"""


class AmaxLine:
    """``values`` [2, LINE]: staging and amax in use of neighbouring slots, in the memory of the state (narrower at its
    end). The same object for as long as the state lives, wherever that moves.
    """

    values: Tensor
    unread: Tensor
    """[1], where a cast that is to leave no trace stages: memory of its own, since a compiler may leave out a copy of
    ``values``, of which it cannot know that the cast writes to it.
    """

    def __getstate__(self) -> dict[str, object]:
        """Nothing: the state that is copied or unpickled says where its lines are."""
        return {}


class AmaxState:
    """Amax histories of all delayed-scaling operands of one model."""

    def __init__(self, names: list[str], history_len: int, algo: str, interval: int, device: torch.device) -> None:
        self.names = list(names)
        self.history_len, self.algo, self.interval = history_len, algo, interval
        self.steps = 0
        self.schedules: list[Schedule] = []
        self._followers: tuple[Tensor, Tensor] | None = None
        self.data = torch.zeros(HISTORY + history_len, len(names), dtype=torch.float32, device=device)
        self._lines = [AmaxLine() for _ in range(0, len(names), LINE)]
        self._find_lines()

    def _find_lines(self) -> None:
        unread = torch.zeros(1, device=self.data.device)
        for line, columns in zip(self._lines, self.data[:HISTORY].split(LINE, dim=1), strict=True):
            line.values = columns.data  # no view to autograd: a step boundary is no change of it
            line.unread = unread
            # what torch._dynamo.mark_static_address does, without importing a compiler: graphs that Inductor captures
            # on a GPU read and write it where it is, and not in a copy of their inputs
            for tensor in (line.values, line.unread):
                tensor._dynamo_static_input_type = "unguarded"  # type: ignore[attr-defined]

    def line(self, slot: int) -> AmaxLine:
        """The line that holds ``slot``, in column ``slot % LINE``."""
        return self._lines[slot // LINE]

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._find_lines()

    def to(self, device: torch.device) -> None:
        """Move the state. A meta device is ignored: there is nothing to keep there."""
        if device.type != "meta" and device != self.data.device:
            self.data = self.data.to(device)
            self._find_lines()
            if self._followers is not None:
                own, of = self._followers
                self._followers = own.to(device), of.to(device)

    def share(self, pairs: list[tuple[int, int]]) -> None:
        """For each ``(slot, other)``: nothing casts by ``slot``, whose tensor is that of ``other`` or casts with it; at
        each boundary it becomes a copy, so that what is saved says the same of all of them.
        """
        if pairs:
            slots, others = (torch.tensor(column, device=self.data.device) for column in zip(*pairs, strict=True))
            self._followers = slots, others

    @torch.no_grad()
    def unite(self) -> None:
        """Behind a load: histories of slots that share one scale may come from a model where each had its own. All of
        them get the largest amax of each step; what is the same already stays.
        """
        if self._followers is not None:
            slots, others = self._followers
            self.data.scatter_reduce_(1, others.expand(len(self.data), -1), self.data[:, slots], "amax")
            self.data[:, slots] = self.data[:, others]

    @torch.no_grad()
    def update(self) -> None:
        """Step boundary: staging enters the history, the amax in use follows every ``interval`` steps.

        An operand without one takes its first amax at once, whichever step that is. A step in which no delayed layer
        is in FP8 by its schedule changes nothing. No host sync.
        """
        if self.schedules and not any(schedule.is_on for schedule in self.schedules):
            return
        staged, history = self.data[STAGING], self.data[HISTORY:]
        fresh = staged.isfinite() & (staged > 0)  # an operand that did not run, or saw NaN or inf, keeps its past
        rolled = torch.cat([history[1:], staged.unsqueeze(0)])
        history.copy_(torch.where(fresh, rolled, history))
        self.steps += 1
        in_use, now = self.data[IN_USE], history[-1] if self.algo == "most_recent" else history.amax(0)
        in_use.copy_(now if self.steps % self.interval == 0 else torch.where(in_use == 0, now, in_use))
        staged.zero_()
        if self._followers is not None:
            slots, others = self._followers
            self.data[:, slots] = self.data[:, others]


class AmaxSlot:
    """One operand's place in an AmaxState. Equal to every other slot of the same place."""

    def __init__(self, state: AmaxState, index: int) -> None:
        self.state, self.index = state, index
        self._line, self._column = state.line(index), index % LINE

    @property
    def staging(self) -> Tensor:
        """[1] FP32 view that casts max the tensor's amax into."""
        return self._line.values[STAGING, self._column : self._column + 1]

    def staging_for(self, *, records: bool) -> Tensor:
        """``staging``, or unless ``records`` memory that nobody reads."""
        return self.staging if records else self._line.unread

    @property
    def in_use(self) -> Tensor:
        """[1] FP32 view with the amax of earlier steps, 0 if there is none yet."""
        return self._line.values[IN_USE, self._column : self._column + 1]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AmaxSlot) and self.state is other.state and self.index == other.index

    def __hash__(self) -> int:
        return hash((id(self.state), self.index))
