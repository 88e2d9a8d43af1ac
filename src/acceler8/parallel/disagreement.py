"""Why the other processes did not come: the error of a collective that failed, in words that name what to change.

Processes that train together must run the same modules and the same number of steps, else one of them waits in a
collective for what the others never send, until the process group's timeout. torch's error then says how long it
waited. Only then, so at no cost before, each process writes what it has done in this step into the store of the
process group, which still works, reads what the others wrote, and names the differences.

With NCCL a timeout ends the process from another thread, and no such error is raised, unless
``TORCH_NCCL_BLOCKING_WAIT=1`` is set.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import DistError
from torch.distributed.distributed_c10d import _get_default_store

from acceler8.errors import ProcessesDisagreeError

ANSWER_S = 3.0
"""How long to wait for what the others write. A process that gives up closes its connections, at which those that wait
in a collective too fail at once."""
SHOWN = 6
"""Names that are shown of a longer list."""

Done = Mapping[str, list[str]]
"""What a process has done in this step: a kind of thing, such as "parameters with a gradient", and their names."""


@contextmanager
def explained(where: str, step: Callable[[], int], done: Callable[[], Done]) -> Iterator[None]:
    """Turn the failure of a collective in the body into ProcessesDisagreeError; ``where`` and ``step`` name it.

    step, done: called after a failure only.
    """
    try:
        yield
    except RuntimeError as error:
        if not (isinstance(error, DistError) or "gloo" in str(error)):
            raise
        raise ProcessesDisagreeError(_explain(where, step(), done())) from error


def _explain(where: str, step: int, done: Done) -> str:
    own = dist.get_rank()
    everyone = _exchange({"where": where, "step": step, **done})
    lines = [f"rank {own} waited in vain for the others in {where} of step {step}"]
    for rank, other in everyone.items():
        if other is None:
            lines.append(
                f"rank {rank} says nothing: it has ended, makes another number of steps, or is slower than the timeout "
                "of the process group"
            )
            continue
        if (other["where"], other["step"]) != (where, step):
            lines.append(f"rank {rank} is in {other['where']} of step {other['step']}")
        for kind, names in done.items():
            theirs = other.get(kind, [])
            lines += _only(kind, own, names, theirs) + _only(kind, rank, theirs, names)
    for kind, names in done.items() if len(lines) == 1 or None in everyone.values() else ():
        lines.append(f"{kind} on rank {own}: {_some(names)}")
    return (
        "; ".join(lines) + ". Have every process run the same modules and as many steps (join_uneven_inputs), or set "
        "find_unused_parameters=True"
    )


def _only(kind: str, rank: int, names: list[str], others: list[str]) -> list[str]:
    different = [name for name in names if name not in set(others)]
    return [f"{kind} only on rank {rank}: {_some(different)}"] if different else []


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return (", ".join(names[:SHOWN]) + more) if names else "none"


def _exchange(own: dict[str, Any]) -> dict[int, dict[str, Any] | None]:
    """What the other ranks wrote, by rank; None for one that wrote nothing in time."""
    store, rank, world = _get_default_store(), dist.get_rank(), dist.get_world_size()
    store.set(f"acceler8/disagreement/{rank}", json.dumps(own))
    found: dict[int, dict[str, Any] | None] = {other: None for other in range(world) if other != rank}
    deadline = time.monotonic() + ANSWER_S
    while None in found.values() and time.monotonic() < deadline:
        for other in found:
            if found[other] is None and store.check([key := f"acceler8/disagreement/{other}"]):
                found[other] = json.loads(store.get(key))
        time.sleep(0.02)
    return found
