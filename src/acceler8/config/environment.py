"""The environment route: ``ACCELERATE_*`` and ``FSDP_*`` variables, read and written.

A launcher hands its effective configuration to its workers this way. So that a worker can still tell who won,
``ACCELER8_CONFIG_SOURCES`` (JSON) names the source of each value, for as long as its variable stays as it was written.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from acceler8.config.kinds import Bool
from acceler8.config.registry import BY_ENV, DEAD_ENV, ENTRIES, Entry
from acceler8.config.setting import shown
from acceler8.config.sources import Effective, Precedence, RouteValues, Source
from acceler8.errors import ConfigError

SOURCES = "ACCELER8_CONFIG_SOURCES"
CONFIG_FILE = "ACCELER8_CONFIG_FILE"
"""Names the YAML file where neither a flag nor code does."""
# Accelerate's switches for an engine; the engine itself is one setting here
ENGINE_SWITCHES = {"ACCELERATE_USE_FSDP": "FSDP", "ACCELERATE_USE_DEEPSPEED": "DEEPSPEED"}
_GEMMS = "fp8_config.override_linear_precision"


def current_environment() -> Mapping[str, str]:
    """The environment of this process; the only place that reads it for the configuration."""
    return os.environ


def set_if_missing(name: str, value: str) -> None:
    """Set a variable of this process that nobody set: for a library that reads its value there and nowhere else."""
    os.environ.setdefault(name, value)


@contextmanager
def set_meanwhile(name: str, value: str) -> Iterator[None]:
    """Have this process's variable ``name`` be ``value`` in the body, unless it is set; for libraries that read a
    variable once, when they are imported.
    """
    if name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)


def read_environment(environ: Mapping[str, str]) -> RouteValues:
    """The settings that variables give. Raises ConfigError naming the variable."""
    route = RouteValues()
    origins = _origins(environ)
    for name in sorted(set(environ) & set(DEAD_ENV)):
        entry = DEAD_ENV[name]
        if environ.get(entry.setting.env[0], "").strip():
            continue  # the launcher of Accelerate writes both; this one is the one that is read there too
        route.notes.append(f"{name} is read as {entry.setting.env[0]}, its name elsewhere")
        route.put(entry.path, environ[name], _source(entry, name, origins, environ))
    engines = {
        name: engine for name, engine in ENGINE_SWITCHES.items() if name in environ and _is_on(environ[name], name)
    }
    if len(engines) > 1:
        raise ConfigError(f"{' and '.join(engines)}: got true for both; allowed: one engine; unset one of them")
    said = environ.get("ACCELERATE_DISTRIBUTED_TYPE", "").strip().upper()
    for name, engine in engines.items():
        if said and said != engine:
            raise ConfigError(
                f"{name} is true and ACCELERATE_DISTRIBUTED_TYPE {shown(said)}; allowed: one engine; unset one of them"
            )
        route.put("distributed_type", engine, _source(ENTRIES["distributed_type"], name, origins, environ))
    for name, entry in BY_ENV.items():
        if name in environ and entry.path != _GEMMS:
            route.put(entry.path, environ[name], _source(entry, name, origins, environ))
    _read_gemms(environ, route, origins)
    route.notes += _unknown_names(environ)
    return route


def write_environment(effective: Effective) -> dict[str, str]:
    """The variables from which ``read_environment`` makes the same values, with their sources."""
    written: dict[str, str] = {}
    origins = {}
    for path, value in effective.values.items():
        setting = ENTRIES[path].setting
        if path == _GEMMS:
            parts = value.value or (False, False, False)
            written |= {name: Bool().text(part) for name, part in zip(setting.env, parts, strict=True)}
        else:
            written[setting.env[0]] = setting.text(value.value)
        origins[path] = [value.source.precedence.name, value.source.where, _text_of(setting.env, written)]
    if effective["distributed_type"] is not None:
        written |= {
            name: Bool().text(effective["distributed_type"] == engine) for name, engine in ENGINE_SWITCHES.items()
        }
    if origins:
        written[SOURCES] = json.dumps(origins)
    return written


def _unknown_names(environ: Mapping[str, str]) -> Iterator[str]:
    """Variables that look like settings of FP8 or like a setting misspelt. Accelerate has others, so no error."""
    known = {*BY_ENV, *DEAD_ENV, *ENGINE_SWITCHES, SOURCES, CONFIG_FILE}
    for name in sorted(environ):
        if name in known or not name.startswith(("ACCELERATE_", "ACCELER8_CONFIG")):
            continue
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.9)
        if near or name.startswith("ACCELERATE_FP8_"):
            yield f"{name} is no variable that is read{f'; did you mean {near[0]}?' if near else ''}"


def _read_gemms(environ: Mapping[str, str], route: RouteValues, origins: Mapping[str, tuple[Source, str]]) -> None:
    """Three variables make one value; those that are not there are false."""
    entry = ENTRIES[_GEMMS]
    names = [name for name in entry.setting.env if environ.get(name, "").strip()]
    if names:
        parts = [_is_on(environ[name], name) if name in names else False for name in entry.setting.env]
        route.put(_GEMMS, parts, _source(entry, ", ".join(names), origins, environ))


def _is_on(text: str, name: str) -> bool:
    try:
        return Bool().parse(text or "false")
    except ValueError:
        raise ConfigError(f"{name}: got {shown(text)}; allowed: {Bool().allowed}") from None


def _source(entry: Entry, name: str, origins: Mapping[str, tuple[Source, str]], environ: Mapping[str, str]) -> Source:
    """Who gave a variable: whoever the launcher named, unless it was changed since."""
    source, text = origins.get(entry.path, (None, ""))
    if source is not None and text == _text_of(entry.setting.env, environ):
        return source
    return Source(Precedence.ENVIRONMENT, name)


def _text_of(names: tuple[str, ...], environ: Mapping[str, str]) -> str:
    return ",".join(environ.get(name, "") for name in names)


def _origins(environ: Mapping[str, str]) -> dict[str, tuple[Source, str]]:
    """What the launcher said about each value. An unreadable message is an error: it would name the wrong winner."""
    text = environ.get(SOURCES, "")
    if not text:
        return {}
    try:
        return {
            str(path): (Source(Precedence[precedence], str(where)), str(was))
            for path, (precedence, where, was) in json.loads(text).items()
        }
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ConfigError(f"{SOURCES}: got {text[:80]!r}; allowed: what acceler8 launch writes; unset it") from None
