"""A setting: the one description from which its field, variable, YAML key, flag and question are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from acceler8.config.kinds import NOTHING, Kind, RefusedError


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Metadata of one field of the schema. Stands in the field's annotation."""

    kind: Kind
    help: str
    """One line: what it does, with its unit if it has one."""
    env: tuple[str, ...]
    """The variable; for three booleans three variables, one each."""
    flags: tuple[str, ...]
    """Names of the flag without dashes, the first the usual one; ``-`` and ``_`` are the same in them."""
    ask: str | None = None
    """The wizard's question; None: not asked."""
    backends: tuple[str, ...] = ()
    """FP8 backends that use it; empty: whichever."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Default of each backend where it differs from the field's own."""
    aliases: tuple[str, ...] = ()
    """Other YAML keys (and, after ACCELERATE_FP8_, variables) that Accelerate writes and then does not read."""
    unit: str | None = None
    is_bare: bool = False
    """True if the flag may stand without a value, which then is true."""
    is_idle: bool = False
    """True if nothing reads it here: it is kept so that files of Accelerate stay whole, and a note says so."""

    def parse(self, raw: Any) -> Any:
        """The value that any route's ``raw`` spells; None for nothing. Raises ValueError saying what is allowed."""
        if raw is None or (isinstance(raw, str) and raw.strip().lower() in NOTHING and not self._is_word(raw)):
            return None
        try:
            return self.kind.parse(raw)
        except RefusedError:
            raise
        except (ValueError, TypeError, OverflowError, RecursionError):
            raise ValueError(f"got {shown(raw)}; allowed: {self.kind.allowed}") from None

    def text(self, value: Any) -> str:
        """A spelling of a value (or of None, which takes back what a lower source gave) that ``parse`` reads back."""
        return "none" if value is None else self.kind.text(value)

    def _is_word(self, raw: str) -> bool:
        """True if ``raw`` spells nothing elsewhere and is a value here, as ``none`` is for an offload device."""
        return raw.strip().lower() in getattr(self.kind, "words", ())


def shown(raw: Any) -> str:
    """``raw`` for a message, on one line and not too long."""
    text = repr(raw)
    return text if len(text) <= 80 else f"{text[:76]}..."


def shown_name(name: str) -> str:
    """A name that a user wrote, for a message: itself, or its ``repr`` if it holds odd characters; not too long."""
    text = name if name.isprintable() else repr(name)
    return text if len(text) <= 80 else f"{text[:76]}..."
