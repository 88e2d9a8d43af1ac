"""What each route gives, and the effective values that come of it.

Precedence, highest first: code, flag, environment, YAML, default. Every effective value keeps the source that won.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import IntEnum
from types import MappingProxyType
from typing import Any

from acceler8.config.registry import ENTRIES
from acceler8.config.schema import Config


class Precedence(IntEnum):
    """Which source wins: the higher one."""

    DEFAULT = 0
    YAML = 1
    ENVIRONMENT = 2
    FLAG = 3
    CODE = 4


@dataclass(frozen=True)
class Source:
    """Where a value comes from: its precedence, and the place in words (``--fp8_margin``, ``run.yaml:7``)."""

    precedence: Precedence
    where: str

    def __str__(self) -> str:
        kind = self.precedence.name.lower()
        return kind if self.where == kind else f"{kind} {self.where}"


DEFAULT = Source(Precedence.DEFAULT, "default")
NOT_FP8 = "this run is not FP8"
"""End of the note that a program should show as a warning."""


@dataclass(frozen=True)
class Value:
    """A checked value and its source."""

    value: Any
    source: Source


@dataclass
class RouteValues:
    """What one route gives: checked values by path, and notes for the user."""

    values: dict[str, Value] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def put(self, path: str, raw: Any, source: Source) -> None:
        """Check and take a raw value. Raises ConfigError.

        One that is empty leaves the setting as it is. The word ``none``, in a flag or a variable, takes back what a
        lower source gave.
        """
        value = ENTRIES[path].parse(raw, source.where)
        if value is None:
            if source.precedence > Precedence.YAML and isinstance(raw, str) and raw.strip():
                self.values[path] = Value(None, source)
            return
        if path == "fp8_config.opt_level" and str(getattr(raw, "value", raw)).strip().upper() != value:
            self.notes.append(f"{source.where}: opt_level {raw!r} is read as {value}")
        self.values[path] = Value(value, source)


@dataclass(frozen=True)
class Effective:
    """The values that hold, each with its source, and what the user should know about them."""

    values: Mapping[str, Value]
    notes: tuple[str, ...] = ()

    def __getitem__(self, path: str) -> Any:
        """The value at ``path``; None if no source gave one."""
        found = self.values.get(path)
        return found.value if found else None

    def source(self, path: str) -> Source:
        """Who gave the value at ``path``."""
        found = self.values.get(path)
        return found.source if found else DEFAULT

    def given(self, section: str | None = None) -> dict[str, Any]:
        """Values that some source gave, by path; of one section (``""``: the top level) or of all."""
        return {
            path: value.value
            for path, value in self.values.items()
            if value.value is not None and (section is None or ENTRIES[path].section == section)
        }

    def of_one_route(self) -> Effective:
        """The same values as if one file gave them all, which is what they will be once written."""
        values = {p: Value(v.value, Source(Precedence.YAML, v.source.where)) for p, v in self.values.items()}
        return Effective(MappingProxyType(values), self.notes)

    @property
    def uses_cpu(self) -> bool:
        """True if training stays on the CPU."""
        return bool(self["use_cpu"]) or self["distributed_type"] == "MULTI_CPU"

    @property
    def config(self) -> Config:
        """The values as the schema's dataclass."""
        top = {ENTRIES[path].key: value for path, value in self.given("").items()}
        for section in fields(Config):
            if callable(section.default_factory):  # one of the sections, not a setting
                inside = self.given(section.name)
                top[section.name] = section.default_factory(**{ENTRIES[p].key: v for p, v in inside.items()})
        return Config(**top)


def merge(routes: Iterable[RouteValues]) -> Effective:
    """The effective values of several routes: for each setting that of highest precedence, the later at equal."""
    values: dict[str, Value] = {}
    notes: list[str] = []
    routes = list(routes)
    for route in routes:
        notes += [note for note in route.notes if note not in notes]
        for path, value in route.values.items():
            if path not in values or value.source.precedence >= values[path].source.precedence:
                values[path] = value
    notes += [note for note in _lost_fp8(values.get("mixed_precision"), routes) if note not in notes]
    ordered = {path: values[path] for path in ENTRIES if path in values}
    return Effective(MappingProxyType(ordered), tuple(notes))


def _lost_fp8(winner: Value | None, routes: Iterable[RouteValues]) -> Iterator[str]:
    """FP8 that was asked for and is not done deserves a word, whoever won."""
    for route in routes:
        asked = route.values.get("mixed_precision")
        if asked and asked.value == "fp8" and winner and winner.value != "fp8":
            yield (
                f"{asked.source} asks for mixed_precision fp8, which {winner.source} overrides with {winner.value}:"
                f" {NOT_FP8}"
            )
