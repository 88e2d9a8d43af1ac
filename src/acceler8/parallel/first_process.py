"""What process 0 knows and the others need, before tensors travel between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from acceler8.errors import CheckpointError

_T = TypeVar("_T")


def from_process_0(make: Callable[[], _T], what: str) -> _T:
    """What ``make`` returns on process 0, on all; elsewhere it is not called. Sent as a pickle among the processes.

    Raises: CheckpointError on all, which begins with ``what``, if it raises: no process is left waiting.
    """
    told: list[_T | None] = [None]
    problem: list[str | None] = [None]
    cause: Exception | None = None
    if dist.get_rank() == 0:
        try:
            told[0] = make()
        except CheckpointError as error:
            cause, problem[0] = error, str(error)
        except Exception as error:
            cause, problem[0] = error, f"is damaged ({error!r}); load another one"
    sent = [*problem, *told]
    dist.broadcast_object_list(sent, 0)
    if sent[0] is not None:
        raise CheckpointError(f"{what}: {sent[0]}") from cause
    return sent[1]  # type: ignore[return-value]
