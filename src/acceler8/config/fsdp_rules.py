"""Which settings of fully sharded data parallel contradict each other: one list for plugins and all other routes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

SECTION = "fsdp_config.fsdp_"
"""What stands before the keys here in a setting's path."""
RESHARD = "reshard_after_forward"
WORDS_OF_TWO = ("true", "false")
"""Of ``reshard_after_forward`` in version 2; version 1 has sharding strategies there."""


class Problem(NamedTuple):
    """The setting ``key`` does not fit that of ``against``."""

    key: str
    against: str
    allowed: str


def problems(value: Callable[[str], Any]) -> Iterator[Problem]:
    """Each contradiction among the values, of which ``value`` gives that of a key, None if it is not given.

    Words are as files spell them; a version that is not given is 1, as in Accelerate.
    """
    reshard, loading, sync = value(RESHARD), "cpu_ram_efficient_loading", "sync_module_states"
    if value("version") == 2:
        if reshard and reshard not in WORDS_OF_TWO:
            yield Problem(RESHARD, "version", "true, false under FSDP 2; a sharding strategy is FSDP 1's")
        if value("state_dict_type") == "LOCAL_STATE_DICT":
            yield Problem("state_dict_type", "version", "FULL_STATE_DICT, SHARDED_STATE_DICT under FSDP 2")
        if value("forward_prefetch"):
            yield Problem("forward_prefetch", "version", "false under FSDP 2; leave it out")
    else:
        if reshard in WORDS_OF_TWO:
            yield Problem(RESHARD, "version", "a sharding strategy under FSDP 1; or say fsdp_version 2")
        if value(loading) and value(sync) is False:
            yield Problem(sync, loading, "true: the other processes start empty")
    offload, checkpointing = "activation_checkpointing_offload", "activation_checkpointing"
    if value(offload) and not (value("version") == 2 and value(checkpointing)):
        yield Problem(offload, "version", "with activation_checkpointing and fsdp_version 2")
