"""What differs between the configuration of a saved run and the one at hand, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_ABSENT = "not set"


@dataclass(frozen=True)
class Difference:
    """One setting that is not as it was saved; ``str()`` is the line to show."""

    key: str
    """Dotted path of the setting."""
    saved: str
    """Its value in the checkpoint, as text."""
    current: str
    """Its value now, as text."""

    def __str__(self) -> str:
        return f"{self.key}: saved {self.saved}, now {self.current}"


def compare_config(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[Difference]:
    """Every setting that differs, in the order of ``saved``, then those that only ``current`` has.

    Nested mappings are compared key by key; lists and tuples with the same items are equal, as are 1 and 1.0
    but not 1 and True, and NaN equals NaN. Empty when nothing differs.
    """
    return list(_differences(saved, current, ()))


def _differences(saved: Mapping[str, Any], current: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[Difference]:
    for key in [*saved, *(key for key in current if key not in saved)]:
        inner = (*path, str(key))
        if key not in saved or key not in current:
            texts = (repr(_plain(side[key])) if key in side else _ABSENT for side in (saved, current))
            yield Difference(".".join(inner), *texts)
            continue
        before, now = saved[key], current[key]
        if isinstance(before, Mapping) and isinstance(now, Mapping):
            yield from _differences(before, now, inner)
        elif not _same(_plain(before), _plain(now)):
            yield Difference(".".join(inner), repr(_plain(before)), repr(_plain(now)))


def _plain(value: Any) -> Any:
    """``value`` with tuples as lists, so that a config that went through JSON equals one that did not."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return value


def _same(before: Any, now: Any) -> bool:
    if isinstance(before, bool) is not isinstance(now, bool):
        return False
    if isinstance(before, list) and isinstance(now, list):
        return len(before) == len(now) and all(map(_same, before, now))
    if isinstance(before, dict) and isinstance(now, dict):
        return before.keys() == now.keys() and all(_same(before[key], now[key]) for key in before)
    return bool(before == now) or (before != before and now != now)
