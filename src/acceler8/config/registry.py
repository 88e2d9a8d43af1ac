"""All settings of the schema, found by path, variable, flag or YAML key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_type_hints

from acceler8.config.kinds import RefusedError
from acceler8.config.schema import Config, Section
from acceler8.config.setting import Setting, shown_name
from acceler8.errors import ConfigError, unknown_name


@dataclass(frozen=True)
class Entry:
    """One setting and where it stands: ``path`` is ``num_processes`` or ``fp8_config.margin``."""

    path: str
    section: str
    key: str
    setting: Setting

    def parse(self, raw: Any, where: str) -> Any:
        """The value of ``raw``, which stands at ``where``. Raises ConfigError with got, allowed and do."""
        try:
            return self.setting.parse(raw)
        except RefusedError as error:
            raise ConfigError(f"{where}: {error}") from None
        except ValueError as error:
            raise ConfigError(f"{where}: {self.path} {error}") from None

    @property
    def is_fp8(self) -> bool:
        """True for settings of ``fp8_config``."""
        return self.section == "fp8_config"


def _walk(model: type[Section], section: str = "") -> list[Entry]:
    entries = []
    for key, kind in get_type_hints(model, include_extras=True).items():
        settings = [meta for meta in getattr(kind, "__metadata__", ()) if isinstance(meta, Setting)]
        if settings:
            entries.append(Entry(f"{section}.{key}" if section else key, section, key, settings[0]))
        else:
            assert isinstance(kind, type)
            assert issubclass(kind, Section)
            entries.extend(_walk(kind, key))
    return entries


ENTRIES: dict[str, Entry] = {entry.path: entry for entry in _walk(Config)}
SECTIONS: tuple[str, ...] = tuple(dict.fromkeys(e.section for e in ENTRIES.values() if e.section))
BY_ENV: dict[str, Entry] = {name: entry for entry in ENTRIES.values() for name in entry.setting.env}
BY_FLAG: dict[str, Entry] = {name: entry for entry in ENTRIES.values() for name in entry.setting.flags}
# variables that Accelerate's launcher writes from the wizard's spellings, and does not read
DEAD_ENV: dict[str, Entry] = {
    f"ACCELERATE_FP8_{alias.upper()}": entry
    for entry in ENTRIES.values()
    for alias in entry.setting.aliases
    if entry.is_fp8 and f"ACCELERATE_FP8_{alias.upper()}" not in BY_ENV
}


def find(section: str, key: str, where: str) -> tuple[Entry, bool]:
    """The setting that a key names inside a section (``""``: the top level), and whether by another spelling.

    Other spellings: the aliases of the setting and, in ``fp8_config``, each key with ``fp8_`` before it.
    Raises ConfigError for a key that is not there; the message names the nearest.
    """
    entries = {entry.key: entry for entry in ENTRIES.values() if entry.section == section}
    if key in entries:
        return entries[key], False
    for entry in entries.values():
        if key in entry.setting.aliases or (entry.is_fp8 and key == f"fp8_{entry.key}"):
            return entry, True
    known = [*entries, *(SECTIONS if not section else ())]
    raise ConfigError(f"{where}: {unknown_name(f'key of {section}' if section else 'key', shown_name(key), known)}")
