"""The flag route: command-line flags made from the schema, in dash and underscore spelling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from acceler8.config.kinds import Bool
from acceler8.config.registry import BY_FLAG, ENTRIES, Entry
from acceler8.config.setting import shown, shown_name
from acceler8.config.sources import Effective, Precedence, RouteValues, Source
from acceler8.errors import ConfigError, unknown_name

# engine switches of Accelerate: no value, and each a value of one setting here
_ENGINES = {"use_fsdp": "FSDP", "use_deepspeed": "DEEPSPEED", "multi_gpu": "MULTI_GPU"}


@dataclass
class ParsedFlags:
    """What a command line gave: settings, other known flags by name, and what follows the flags."""

    route: RouteValues = field(default_factory=RouteValues)
    others: dict[str, str | bool] = field(default_factory=dict)
    rest: list[str] = field(default_factory=list)


def parse_flags(arguments: Sequence[str], *, switches: Sequence[str] = (), options: Sequence[str] = ()) -> ParsedFlags:
    """Read flags up to the first argument that is none (or ``--``), which with all after it is ``rest``, untouched.

    ``switches`` and ``options`` are further flags that the caller knows, without and with a value.
    ``--name value``, ``--name=value`` and, in a name, ``-`` for ``_``. A boolean flag that may stand bare takes a value
    too if a boolean word follows. Raises ConfigError for an unknown flag, a missing value or a value not allowed.
    """
    parsed = ParsedFlags()
    words = list(arguments)
    while words and words[0].startswith("-") and words[0] != "-":
        word = words.pop(0)
        if word == "--":
            break
        _one_flag(word, words, parsed, switches, options)
    parsed.rest = words
    return parsed


def to_flags(effective: Effective) -> list[str]:
    """The command line from which ``parse_flags`` makes the same values."""
    return [word for path, value in effective.values.items() for word in _flag_of(ENTRIES[path], value.value)]


def _flag_of(entry: Entry, value: object) -> Iterator[str]:
    yield f"--{entry.setting.flags[0]}={entry.setting.text(value)}"


def _one_flag(
    word: str, words: list[str], parsed: ParsedFlags, switches: Sequence[str], options: Sequence[str]
) -> None:
    spelled, equals, inline = word.partition("=")
    name = spelled.lstrip("-").replace("-", "_")
    where = f"--{shown_name(name)}"
    if name in switches or name in _ENGINES:
        is_on = _is_on(inline, where) if equals else True
        if name in switches:
            parsed.others[name] = is_on
        elif is_on:
            _put_once(ENTRIES["distributed_type"], _ENGINES[name], where, parsed.route)
        return
    entry = BY_FLAG.get(name)
    if entry is None and name not in options:
        known = [*BY_FLAG, *_ENGINES, *switches, *options]
        raise ConfigError(f"command line: {unknown_name('flag', shown_name(spelled), [f'--{k}' for k in known])}")
    if not spelled.startswith("--"):
        raise ConfigError(f"command line: got {shown_name(spelled)}; allowed: two dashes before a name; write --{name}")
    value = inline if equals else _next_value(entry, words, where)
    if entry is None:
        parsed.others[name] = value
        return
    _put_once(entry, value, where, parsed.route)


def _put_once(entry: Entry, value: str, where: str, route: RouteValues) -> None:
    first = route.values.get(entry.path)
    if first and first.value != entry.parse(value, where):
        raise ConfigError(
            f"{where}: {entry.path} got a second, different value (first: {first.source.where}); give it once"
        )
    route.put(entry.path, value, Source(Precedence.FLAG, where))


def _is_on(text: str, where: str) -> bool:
    try:
        return Bool().parse(text)
    except ValueError:
        raise ConfigError(f"{where}: got {shown(text)}; allowed: {Bool().allowed}") from None


def _next_value(entry: Entry | None, words: list[str], where: str) -> str:
    if entry is not None and entry.setting.is_bare:
        return words.pop(0) if words and _is_bool_word(words[0]) else "true"
    if not words or words[0].startswith("--"):
        allowed = entry.setting.kind.allowed if entry else "a value"
        raise ConfigError(f"{where}: got no value; allowed: {allowed}")
    return words.pop(0)


def _is_bool_word(word: str) -> bool:
    return word.lower() in ("true", "false", "yes", "no", "on", "off", "1", "0")
