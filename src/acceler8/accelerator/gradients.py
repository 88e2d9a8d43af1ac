"""Where the loop stands in its accumulation window; optimizer, scheduler and loader read and write it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class GradientState:
    """One per Accelerator. ``sync_gradients`` is True in the micro-batch whose backward completes a step."""

    num_steps: int = 1
    sync_gradients: bool = True
    end_of_dataloader: bool = False
    micro_batch: int = 0

    def begin_micro_batch(self) -> None:
        """Advance, and decide whether this micro-batch completes a step: every ``num_steps``-th does, and the last."""
        if self.end_of_dataloader:
            self.micro_batch, self.sync_gradients = 0, True
        else:
            self.micro_batch += 1
            self.sync_gradients = self.micro_batch % self.num_steps == 0
