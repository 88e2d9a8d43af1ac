"""Where the loop stands in its accumulation window; optimizer, scheduler and loader read and write it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(eq=False)
class LoaderPlace:
    """Where one running loader stands."""

    is_last: bool = False
    remainder: int = -1
    """Samples in the last round that are no copies; 0: all; -1: not known."""


@dataclass
class GradientState:
    """One per Accelerator. ``sync_gradients`` is True in the micro-batch whose backward completes a step."""

    num_steps: int = 1
    sync_with_dataloader: bool = True
    """The last batch of an epoch completes a step."""
    sync_each_batch: bool = False
    """Average gradients between processes in every micro-batch."""
    sync_gradients: bool = True
    micro_batch: int = 0
    _loaders: list[LoaderPlace] = field(default_factory=list)

    @contextmanager
    def loader(self, remainder: int = -1) -> Iterator[LoaderPlace]:
        """A loader runs inside.

        Of nested ones (an evaluation between training batches) the outermost counts for accumulation, and the innermost
        for metrics.
        """
        place = LoaderPlace(remainder=remainder)
        self._loaders.append(place)
        try:
            yield place
        finally:
            self._loaders.remove(place)

    @property
    def end_of_dataloader(self) -> bool:
        """True while the last batch of the outermost running loader is used."""
        return bool(self._loaders) and self._loaders[0].is_last

    @property
    def innermost(self) -> LoaderPlace | None:
        """Where the loader stands whose batch is used now."""
        return self._loaders[-1] if self._loaders else None

    @property
    def remainder(self) -> int:
        """Samples of the innermost loader's last round that are no copies; 0: all; -1: not known, or no loader runs."""
        return -1 if self.innermost is None else self.innermost.remainder

    def begin_micro_batch(self) -> None:
        """Advance, and decide whether this micro-batch completes a step: every ``num_steps``-th does, and the last."""
        if self.sync_with_dataloader and self.end_of_dataloader:
            self.micro_batch, self.sync_gradients = 0, True
        else:
            self.micro_batch += 1
            self.sync_gradients = self.micro_batch % self.num_steps == 0
