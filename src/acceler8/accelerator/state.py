"""``accelerator.state``: what scripts log at their start."""

from __future__ import annotations

from typing import Any

from torch import distributed

NAMES = (
    *("distributed_type", "num_processes", "process_index", "local_process_index", "device", "mixed_precision"),
    *("use_distributed", "is_main_process", "is_local_main_process", "is_last_process", "is_fsdp2"),
    *("deepspeed_plugin", "fsdp_plugin", "dynamo_plugin", "wait_for_everyone", "split_between_processes"),
    *("on_main_process", "on_local_main_process", "on_last_process", "on_process", "on_local_process", "print"),
    *("main_process_first", "local_main_process_first"),
)


class State:
    """Attributes of one Accelerator under the names of Accelerate's ``AcceleratorState``; print it.

    It shows the Accelerator as it is now and belongs to it alone: two Accelerators have two states.
    """

    initialized = True
    debug = False

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def __getattr__(self, name: str) -> Any:
        if name in NAMES and "_accelerator" in self.__dict__:
            return getattr(self._accelerator, name)
        raise AttributeError(f"accelerator.state has no {name!r}; it offers: backend, {', '.join(NAMES)}")

    def __dir__(self) -> list[str]:
        return sorted([*super().__dir__(), *NAMES])

    @property
    def backend(self) -> str | None:
        """What carries tensors between processes: ``nccl`` or ``gloo``; None in one process."""
        if not (distributed.is_available() and distributed.is_initialized()):
            return None
        return str(distributed.get_backend())

    def __repr__(self) -> str:
        backend = "" if self.backend is None else f"  Backend: {self.backend}"
        return (
            f"Distributed environment: {self.distributed_type}{backend}\n"
            f"Num processes: {self.num_processes}\n"
            f"Process index: {self.process_index}\n"
            f"Local process index: {self.local_process_index}\n"
            f"Device: {self.device}\n"
            f"Mixed precision type: {self.mixed_precision}\n"
        )
