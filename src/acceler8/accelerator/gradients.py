"""Where the loop stands in its accumulation window; optimizer, scheduler and loader read and write it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(eq=False)
class LoaderPlace:
    """Where one running loader stands."""

    is_last: bool = False


@dataclass
class GradientState:
    """One per Accelerator. ``sync_gradients`` is True in the micro-batch whose backward completes a step."""

    num_steps: int = 1
    sync_gradients: bool = True
    micro_batch: int = 0
    _loaders: list[LoaderPlace] = field(default_factory=list)

    @contextmanager
    def loader(self) -> Iterator[LoaderPlace]:
        """A loader runs inside. Of nested ones (an evaluation between training batches) the outermost counts."""
        place = LoaderPlace()
        self._loaders.append(place)
        try:
            yield place
        finally:
            self._loaders.remove(place)

    @property
    def end_of_dataloader(self) -> bool:
        """True while the last batch of the outermost running loader is used."""
        return bool(self._loaders) and self._loaders[0].is_last

    def begin_micro_batch(self) -> None:
        """Advance, and decide whether this micro-batch completes a step: every ``num_steps``-th does, and the last."""
        if self.end_of_dataloader:
            self.micro_batch, self.sync_gradients = 0, True
        else:
            self.micro_batch += 1
            self.sync_gradients = self.micro_batch % self.num_steps == 0
