"""What a setting's value may be, how every route's spelling of it is read, and how it is written as text.

One kind serves the four routes: YAML gives typed values, flags and the environment give text, code gives Python
objects. ``parse`` takes them all, so that a value that one route accepts is accepted, and means the same, on each.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from acceler8.config.variables import objection
from acceler8.errors import RecipeError, unknown_name

TRUE = ("1", "true", "t", "yes", "y", "on")
FALSE = ("0", "false", "f", "no", "n", "off")
NOTHING = ("", "none", "null", "~")


class RefusedError(ValueError):
    """A value is refused for a reason of its own, which the message gives: got, allowed, do."""


class Kind(Protocol):
    """Reads, writes and describes the values of a setting."""

    @property
    def allowed(self) -> str:
        """What is allowed, in words, for errors and help."""
        ...

    def parse(self, raw: Any) -> Any:
        """The value that ``raw`` spells. Raises ValueError without a message of its own."""
        ...

    def text(self, value: Any) -> str:
        """A spelling that ``parse`` reads back as ``value``; for flags and the environment."""
        ...


def _checked_text(raw: Any) -> str:
    """Text without the characters that would end a line or an environment value early, which UTF-8 can hold."""
    if not isinstance(raw, str) or any(c in raw for c in "\n\r\0"):
        raise ValueError
    raw.encode()  # UnicodeEncodeError is a ValueError
    return raw


# A leading zero is octal to some readers and decimal to others: refused, so that every route means the same.
_DECIMAL = re.compile(r"[+-]?(0|[1-9][0-9]*(_[0-9]+)*)", re.ASCII)


@dataclass(frozen=True)
class Bool:
    """True or false."""

    allowed: str = "true, false"

    def parse(self, raw: Any) -> bool:
        """Booleans, and their usual words in any case."""
        if isinstance(raw, bool):
            return raw
        word = str(raw).strip().lower() if isinstance(raw, str | int) else ""
        if word not in TRUE + FALSE:
            raise ValueError
        return word in TRUE

    def text(self, value: bool) -> str:
        """``true`` or ``false``."""
        return "true" if value else "false"


@dataclass(frozen=True)
class Int:
    """A whole number within bounds."""

    least: int | None = None
    most: int | None = None

    @property
    def allowed(self) -> str:
        """The bounds, in words."""
        if self.least is not None and self.most is not None:
            return f"an integer from {self.least} to {self.most}"
        return "an integer" if self.least is None else f"an integer of {self.least} or more"

    def parse(self, raw: Any) -> int:
        """Integers and their decimal text; no booleans, no fractions."""
        if isinstance(raw, str):
            raw = int(raw) if _DECIMAL.fullmatch(raw.strip()) and len(raw) < 20 else None
        if type(raw) is not int:
            raise ValueError
        if (self.least is not None and raw < self.least) or (self.most is not None and raw > self.most):
            raise ValueError
        return raw

    def text(self, value: int) -> str:
        """Decimal."""
        return str(value)


@dataclass(frozen=True)
class Number:
    """A finite number of at least ``least``."""

    least: float = 0.0

    @property
    def allowed(self) -> str:
        """The bound, in words."""
        return f"a number of {self.least:g} or more"

    def parse(self, raw: Any) -> float:
        """Numbers and their text; no booleans."""
        if isinstance(raw, bool) or not isinstance(raw, int | float | str):
            raise ValueError
        if isinstance(raw, str) and not raw.isascii():
            raise ValueError
        value = float(raw)
        if not math.isfinite(value) or value < self.least:
            raise ValueError
        return value

    def text(self, value: float) -> str:
        """The shortest text that reads back equal."""
        return repr(value)


@dataclass(frozen=True)
class Choice:
    """One of several words, in any case; ``aliases`` maps other spellings (lower case) onto them."""

    words: tuple[str, ...]
    aliases: tuple[tuple[str, str], ...] = ()

    @property
    def allowed(self) -> str:
        """The words."""
        return ", ".join(self.words)

    def parse(self, raw: Any) -> str:
        """The word as it is listed. YAML's bare ``no`` is the boolean False and means the word."""
        if isinstance(raw, bool):
            raw = "yes" if raw else "no"
        word = str(getattr(raw, "value", raw)).strip().lower()
        table = {w.lower(): w for w in self.words} | dict(self.aliases)
        if word not in table:
            raise ValueError
        return table[word]

    def text(self, value: str) -> str:
        """The word."""
        return value


@dataclass(frozen=True)
class Text:
    """A line of text."""

    allowed: str = "one line of text"

    def parse(self, raw: Any) -> str:
        """Text, or a number that stands for itself, without line breaks."""
        if isinstance(raw, int) and not isinstance(raw, bool):
            raw = str(raw)
        return _checked_text(raw).strip()

    def text(self, value: str) -> str:
        """The text."""
        return value


@dataclass(frozen=True)
class Names:
    """A list of names, which hold no comma."""

    allowed: str = "a list of names, or names with commas between them"

    def parse(self, raw: Any) -> tuple[str, ...]:
        """A list or tuple of names, or one text with commas (and brackets, if you like)."""
        if isinstance(raw, str):
            raw = _split(raw.strip())
        if not isinstance(raw, list | tuple):
            raise ValueError
        names = [_checked_text(name).strip() for name in raw]
        if any("," in name for name in names):
            raise ValueError
        return tuple(name for name in names if name)

    def text(self, value: tuple[str, ...]) -> str:
        """Names with commas; as a JSON list where commas alone would read back as something else."""
        plain = ",".join(value)
        is_safe = plain.lower() not in NOTHING and self.parse(plain) == value
        return plain if is_safe else json.dumps(list(value))


def _split(text: str) -> Any:
    """The names in ``text``: a JSON list, or parts between commas, in brackets or not."""
    if text.startswith("["):
        with contextlib.suppress(ValueError):
            return json.loads(text)
    inner = text[1:-1]
    if text[:1] + text[-1:] in ("()", "[]") and not set("()[]") & set(inner):
        text = inner  # the brackets are not those of a glob, such as [ab]*,*[cd]
    return [part.strip().strip("'\"") for part in text.split(",")]


@dataclass(frozen=True)
class LayerPatterns:
    """Patterns of layer names with a recipe each, in order; ``none`` is high precision."""

    words: tuple[str, ...]
    """The recipes."""

    @property
    def allowed(self) -> str:
        """The form."""
        return f"a list of pattern=recipe, or a mapping, the first that fits decides; recipe: {', '.join(self.recipes)}"

    @property
    def recipes(self) -> tuple[str, ...]:
        """What may stand behind a pattern."""
        return (*self.words, "none")

    def parse(self, raw: Any) -> tuple[str, ...]:
        """A list of ``pattern=recipe``, one text with commas, or a mapping (in a text as JSON)."""
        if isinstance(raw, str) and raw.strip().startswith("{"):
            with contextlib.suppress(ValueError):
                raw = json.loads(raw)
        if isinstance(raw, Mapping):
            raw = [f"{_checked_text(p)}={'none' if recipe is None else recipe}" for p, recipe in raw.items()]
        found: dict[str, str] = {}
        for text in Names().parse(raw):
            pattern, sign, word = (part.strip() for part in text.rpartition("="))
            if not pattern or not sign:
                raise RefusedError(f"got {text!r:.80}; allowed: pattern=recipe, such as *.mlp.*=tensorwise")
            if word.lower() not in self.recipes:
                raise RefusedError(f"pattern {pattern!r:.60}: {unknown_name('recipe', word, self.recipes)}")
            if pattern in found:
                raise RefusedError(f"got the pattern {pattern!r:.60} twice; the first would decide: leave one out")
            found[pattern] = word.lower()
        return tuple(f"{pattern}={word}" for pattern, word in found.items())

    def text(self, value: tuple[str, ...]) -> str:
        """As ``Names``."""
        return Names().text(value)


def layer_patterns(value: tuple[str, ...] | None) -> list[tuple[str, str]]:
    """``(pattern, recipe)`` of a value of ``LayerPatterns``, in order."""
    return [(pattern, word) for pattern, _, word in (text.rpartition("=") for text in value or ())]


@dataclass(frozen=True)
class Steps:
    """A window of steps."""

    allowed: str = "START:STOP, steps from 0, STOP not in it, either end open, such as 100: or :10"

    def parse(self, raw: Any) -> str:
        """The window, as it is written shortest."""
        if not isinstance(raw, str):
            raise ValueError
        from acceler8.scaling import StepWindow  # here, for it brings torch, which other settings do without

        try:
            return str(StepWindow.of(raw))
        except RecipeError as error:
            raise RefusedError(str(error)) from None

    def text(self, value: str) -> str:
        """The window."""
        return value


@dataclass(frozen=True)
class Stages:
    """A schedule by depth: how many of the last layers, from which step on."""

    allowed: str = (
        "STEP:K with commas between them, or a mapping of steps to K, the number of the last layers that are on, or all"
    )

    def parse(self, raw: Any) -> str:
        """A text, or a mapping (in a text as JSON); the stages, as they are written shortest."""
        if isinstance(raw, str) and raw.strip().startswith("{"):
            raw = json.loads(raw)  # JSONDecodeError is a ValueError
        if not isinstance(raw, str | Mapping):
            raise ValueError
        from acceler8.scaling import LastLayers  # here, for it brings torch, which other settings do without

        try:
            return str(LastLayers.of(raw))
        except RecipeError as error:
            raise RefusedError(str(error)) from None

    def text(self, value: str) -> str:
        """The stages."""
        return value


@dataclass(frozen=True)
class Words:
    """A list of different words out of a few."""

    words: tuple[str, ...]

    @property
    def allowed(self) -> str:
        """The words."""
        return f"a list of different words out of {', '.join(self.words)}"

    def parse(self, raw: Any) -> tuple[str, ...]:
        """As ``Names``, each in any case."""
        table = {word.lower(): word for word in self.words}
        if not isinstance(raw, str):
            raw = [getattr(word, "value", word) for word in raw]
        names = [name.lower() for name in Names().parse(raw)]
        if not names or len(set(names)) != len(names) or not set(names) <= set(table):
            raise ValueError
        return tuple(table[name] for name in names)

    def text(self, value: tuple[str, ...]) -> str:
        """Words with commas."""
        return ",".join(value)


@dataclass(frozen=True)
class ThreeBools:
    """A boolean for each of fprop, dgrad and wgrad."""

    allowed: str = "three booleans for fprop, dgrad, wgrad, such as [false, false, true], or one for all three"

    def parse(self, raw: Any) -> tuple[bool, bool, bool]:
        """A list, ``"(false, false, true)"``, ``"false,false,true"``, or one boolean for all three."""
        if isinstance(raw, str):
            raw = raw.strip().strip("()[]").strip().removesuffix(",").split(",")
        parts = list(raw) if isinstance(raw, list | tuple) else [raw]
        values = [Bool().parse(part.strip() if isinstance(part, str) else part) for part in parts]
        if len(values) not in (1, 3):
            raise ValueError
        first, second, third = values if len(values) == 3 else values * 3
        return (first, second, third)

    def text(self, value: tuple[bool, bool, bool]) -> str:
        """Three words with commas."""
        return ",".join("true" if part else "false" for part in value)


@dataclass(frozen=True)
class Table:
    """Names with a text each."""

    allowed: str = "a mapping of names to texts, as JSON in a flag or a variable"

    def parse(self, raw: Any) -> dict[str, str]:
        """A mapping, or its JSON."""
        if isinstance(raw, str):
            raw = json.loads(raw) if raw.strip() else {}  # JSONDecodeError is a ValueError
        if not isinstance(raw, Mapping):
            raise ValueError
        table = {}
        for key, value in raw.items():
            if isinstance(value, bool | int | float):
                value = Bool().text(value) if isinstance(value, bool) else str(value)
            try:
                table[_checked_text(key)] = _checked_text(value)
            except ValueError:
                raise RefusedError(
                    f"environment {key!r:.60}: got {value!r:.60}; allowed: a text on one line, under a name"
                ) from None
        return table

    def text(self, value: dict[str, str]) -> str:
        """JSON."""
        return json.dumps(value, sort_keys=True)


@dataclass(frozen=True)
class Variables(Table):
    """Environment variables that a configuration may add; see ``config.variables``."""

    allowed: str = "a mapping of variables to texts, as JSON in a flag or a variable"

    def parse(self, raw: Any) -> dict[str, str]:
        """As ``Table``; a variable that may not be added is refused with the reason."""
        table = super().parse(raw)
        for name, value in table.items():
            reason = objection(name, value, ())
            if reason:
                raise RefusedError(reason)
        return table


_HOST = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9_-]{1,63}(?<!-))*\.?")


@dataclass(frozen=True)
class Host(Text):
    """A host name or an IP address, without scheme and port."""

    allowed: str = "a host name or an IP address alone, such as node0.cluster or 10.0.0.1"

    def parse(self, raw: Any) -> str:
        """The host."""
        host = super().parse(raw)
        try:
            ipaddress.ip_address(host)
        except ValueError:
            if re.fullmatch(r"[0-9.]+", host) or len(host) > 253 or not _HOST.fullmatch(host):
                raise ValueError from None
        return host


@dataclass(frozen=True)
class GpuIds(Text):
    """GPUs of a machine: ``all``, or different numbers with commas."""

    allowed: str = "all, or different numbers with commas, such as 0,1"

    def parse(self, raw: Any) -> str:
        """``all`` or ``0,1``."""
        text = super().parse(raw)
        if text.lower() == "all":
            return "all"
        parts = [part.strip() for part in text.split(",")]
        if not all(part.isascii() and part.isdigit() for part in parts):
            raise ValueError
        numbers = [str(int(part)) for part in parts]
        if len(set(numbers)) < len(numbers):
            raise ValueError
        return ",".join(numbers)
