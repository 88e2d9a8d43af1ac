"""``ProfileKwargs``: what ``accelerator.profile()`` records. PyTorch is imported on use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from acceler8.config.handlers import KwargsHandler
from acceler8.errors import ConfigError, unknown_name

if TYPE_CHECKING:
    from torch.profiler import profile


@dataclass
class ProfileKwargs(KwargsHandler):
    """Arguments of ``torch.profiler.profile``; names are Hugging Face Accelerate's.

    activities: of ``cpu``, ``cuda``, ``xpu``, ``mtia``; None: all that this machine has.
    schedule_option: arguments of ``torch.profiler.schedule``: wait, warmup, active, repeat, skip_first.
    on_trace_ready: called with the profiler at the end of each cycle.
    output_trace_dir: where each process writes ``profile_<its number>.json``, which chrome://tracing and Perfetto read.
    """

    activities: list[str] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable[[Any], Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None

    def build(self) -> profile:
        """The profiler, not started. Raises: ConfigError for an unknown activity or a schedule that torch refuses."""
        from torch import profiler

        known = {name.lower(): kind for name, kind in profiler.ProfilerActivity.__members__.items()}
        for name in self.activities or ():
            if str(name).lower() not in known:
                raise ConfigError(unknown_name("ProfileKwargs(activities=)", name, known))
        schedule = None
        if self.schedule_option is not None:
            try:
                schedule = profiler.schedule(**self.schedule_option)
            except (TypeError, AssertionError) as error:
                raise ConfigError(
                    f"ProfileKwargs(schedule_option=): got {self.schedule_option!r}; allowed: wait, warmup and active,"
                    f" and repeat and skip_first beside them ({error})"
                ) from None
        return profiler.profile(
            activities=None if self.activities is None else [known[str(name).lower()] for name in self.activities],
            schedule=schedule,
            on_trace_ready=self.on_trace_ready,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
            with_modules=self.with_modules,
        )
