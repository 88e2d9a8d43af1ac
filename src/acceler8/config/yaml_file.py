"""The YAML route: every file that Accelerate writes or documents, and our own, read and written.

YAML's own types decide between text, booleans and nothing; numbers and dates stay as they are written, so that the
setting reads them as it reads a flag (YAML alone takes 010 for 8, and 1:30 for 90). For each key the line on which it
stands is known, so that an error can say where.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from acceler8.config.registry import ENTRIES, SECTIONS, Entry, find
from acceler8.config.setting import shown, shown_name
from acceler8.config.sources import Effective, Precedence, RouteValues, Source
from acceler8.errors import ConfigError

_LARGEST = 1 << 20  # bytes; a configuration is a page
# Keys of Accelerate that mean nothing here unless they ask for something: key -> what to do instead
_UNSUPPORTED = {
    "megatron_lm_config": "leave it out; acceler8 trains with DDP, FSDP or DeepSpeed",
    "parallelism_config": "leave it out; acceler8 trains with DDP, FSDP or DeepSpeed",
    "mpirun_config": "leave it out; acceler8 launch starts CPU processes itself",
    "tpu_name": "leave it out; acceler8 has no TPU",
    "tpu_zone": "leave it out; acceler8 has no TPU",
    "tpu_use_cluster": "set it to false; acceler8 has no TPU",
    "tpu_use_sudo": "set it to false; acceler8 has no TPU",
    "tpu_vm": "leave it out; acceler8 has no TPU",
    "tpu_env": "leave it out; acceler8 has no TPU",
    "command_file": "leave it out; acceler8 has no TPU",
    "commands": "leave it out; acceler8 has no TPU",
    "downcast_bf16": "set it to 'no'; acceler8 has no TPU",
    "ipex_config": "leave it out; PyTorch has its own kernels for the CPU",
}
IGNORED: dict[str, str] = {
    **_UNSUPPORTED,
    "compute_environment": "LOCAL_MACHINE",
    "fp16": "an old spelling of mixed_precision",
    "dynamo_backend": "an old spelling of dynamo_config's dynamo_backend",
}
"""Keys of Accelerate's files that are no settings here, and what to do about each."""
_OFF: tuple[Any, ...] = (None, False, "no", "NO", "", [], {}, [""])
_TAG = "tag:yaml.org,2002:"
_MAPPING, _SEQUENCE, _BOOL, _NULL, _MERGE = (_TAG + name for name in ("map", "seq", "bool", "null", "merge"))
_TEXTS = tuple(_TAG + name for name in ("str", "int", "float", "timestamp", "value"))
_TRUE, _FALSE = ("yes", "true", "on"), ("no", "false", "off")  # YAML 1.1, which PyYAML reads
_LEGACY_DYNAMO = "dynamo_config.dynamo_backend"


def read_yaml(path: Path | str) -> RouteValues:
    """The settings that a YAML (or JSON) file gives. Raises ConfigError naming file, line and key."""
    path = Path(path)
    route = RouteValues()
    for key, value, where in _pairs(_root(path), str(path)):
        if key in _UNSUPPORTED:
            if _plain(value) not in _OFF:
                raise ConfigError(f"{where}: {key} got {shown(_plain(value))}; allowed: nothing; {_UNSUPPORTED[key]}")
        elif key == "compute_environment":
            if _plain(value) not in (None, "LOCAL_MACHINE"):
                raise ConfigError(f"{where}: {key} got {shown(_plain(value))}; allowed: LOCAL_MACHINE")
        elif key == "fp16":  # before Accelerate had mixed_precision
            precision = _plain(value)
            if precision in (True, False):
                precision = "fp16" if precision else "no"
            _put_other_name(ENTRIES["mixed_precision"], key, precision, where, route)
        elif key == "dynamo_backend":  # before Accelerate had dynamo_config
            _put_other_name(ENTRIES[_LEGACY_DYNAMO], key, _plain(value), where, route)
        elif key == "num_processes" and _plain(value) == "-1":
            route.notes.append(f"{where}: num_processes -1 is read as not given")
        elif key in SECTIONS:
            _read_section(key, value, where, str(path), route)
        else:
            _put(route, "", key, value, where)
    return route


def to_yaml(effective: Effective) -> str:
    """The file from which ``read_yaml`` makes the same values."""
    nested = to_nested(effective)
    return str(yaml.dump(nested, Dumper=_Dumper, sort_keys=False, width=110)) if nested else "{}\n"


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Lists on one line, sections on one line a key."""


_Dumper.add_representer(list, lambda dumper, items: dumper.represent_sequence(_SEQUENCE, items, flow_style=True))


def to_nested(effective: Effective) -> dict[str, Any]:
    """The values as the file nests them, in lists, mappings and scalars."""
    nested: dict[str, Any] = {}
    for path, value in effective.given().items():
        entry = ENTRIES[path]
        plain = list(value) if isinstance(value, tuple) else value
        (nested.setdefault(entry.section, {}) if entry.section else nested)[entry.key] = plain
    return nested


def _read_section(section: str, node: yaml.Node, where: str, path: str, route: RouteValues) -> None:
    if isinstance(node, yaml.ScalarNode) and _plain(node) in (None, ""):
        return
    if not isinstance(node, yaml.MappingNode) or node.tag != _MAPPING:
        raise ConfigError(f"{where}: {section} got {shown(_plain(node))}; allowed: a mapping of its keys")
    for key, value, inner in _pairs(node, path):
        _put(route, section, key, value, inner)


def _put(route: RouteValues, section: str, key: str, node: yaml.Node, where: str) -> None:
    entry, is_alias = find(section, key, where)
    if is_alias:
        _put_other_name(entry, key, _plain(node), where, route)
        return
    _refuse_second(entry, key, where, route)
    route.put(entry.path, _plain(node), Source(Precedence.YAML, where))


def _put_other_name(entry: Entry, key: str, raw: Any, where: str, route: RouteValues) -> None:
    _refuse_second(entry, key, where, route)
    route.put(entry.path, raw, Source(Precedence.YAML, where))
    route.notes.append(f"{where}: {key} is read as {entry.key}")


def _refuse_second(entry: Entry, key: str, where: str, route: RouteValues) -> None:
    """A key and another spelling of it, in either order."""
    if entry.path in route.values:
        first = route.values[entry.path].source.where
        raise ConfigError(f"{where}: {key} gives {entry.path}, which {first} gives too; keep one of them")


def _root(path: Path) -> yaml.MappingNode:
    text = _text(path)
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise ConfigError(_located(error, path, text)) from None
    except RecursionError:
        raise ConfigError(f"{path}:1: is nested too deeply; allowed: sections of settings") from None
    except (ValueError, OverflowError):  # PyYAML itself, on an escape beyond Unicode or a version with too many digits
        raise ConfigError(f"{path}:1: is not YAML (a number or an escape is out of range); write key: value") from None
    is_empty = isinstance(root, yaml.ScalarNode) and root.tag == _NULL and root.value == ""
    if root is None or is_empty:
        return yaml.MappingNode(_MAPPING, [])
    if not isinstance(root, yaml.MappingNode) or root.tag != _MAPPING:
        line = root.start_mark.line + 1
        raise ConfigError(f"{path}:{line}: got {shown(_plain(root))}; allowed: keys and values (mixed_precision: fp8)")
    return root


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); name a YAML file that exists") from None
    except ValueError:  # a NUL in the name
        raise ConfigError(f"{shown_name(str(path))}: cannot be read; name a YAML file that exists") from None
    if len(data) > _LARGEST:
        raise ConfigError(f"{path}:1: got more than {_LARGEST} bytes; allowed: that many; is it a configuration?")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: is not UTF-8 text (byte {error.start}); name a YAML file") from None
    # JSON may be indented with tabs, YAML may not; inside a text of JSON there are none
    return text.replace("\t", " ") if path.suffix == ".json" else text


def _located(error: yaml.YAMLError, path: Path, text: str) -> str:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    line = mark.line if mark else text.count("\n", 0, getattr(error, "position", 0))
    problem = " ".join(str(getattr(error, "problem", None) or getattr(error, "reason", error)).split())
    return f"{path}:{line + 1}: is not YAML ({shown_name(problem)}); write key: value"


def _pairs(node: yaml.MappingNode, path: str) -> Iterator[tuple[str, yaml.Node, str]]:
    """Key, value and place of each line of a mapping; a key that stands twice is an error."""
    seen: dict[str, int] = {}
    for key_node, value in node.value:
        line = key_node.start_mark.line + 1
        where = f"{path}:{line}"
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError(f"{where}: got a {key_node.id} as a key; allowed: a name")
        key = str(key_node.value)
        if key in seen:
            raise ConfigError(f"{where}: {shown_name(key)} stands on line {seen[key]} too; keep one of them")
        seen[key] = line
        yield key, value, where


@dataclass(frozen=True)
class _Refused:
    """What no setting takes: a value with a tag of its own, or one nested deeper than any setting is."""

    what: str

    def __repr__(self) -> str:
        return self.what


def _plain(node: yaml.Node, depth: int = 0) -> Any:
    """The Python value of a node: texts, booleans, None, lists and mappings of them, at most two deep."""
    if depth and not isinstance(node, yaml.ScalarNode):
        return _Refused(f"a {node.id} in a value")
    if isinstance(node, yaml.SequenceNode) and node.tag == _SEQUENCE:
        return [_plain(part, depth + 1) for part in node.value]
    if isinstance(node, yaml.MappingNode) and node.tag == _MAPPING:
        return _table(node, depth)
    if isinstance(node, yaml.ScalarNode) and node.tag == _BOOL:
        word = node.value.lower()
        if word not in _TRUE + _FALSE:  # !!bool before another word
            return _Refused(shown(node.value))
        return str(node.value) if depth else word in _TRUE  # in a list or a table it stays as it is written
    if isinstance(node, yaml.ScalarNode) and node.tag == _NULL:
        return None
    if isinstance(node, yaml.ScalarNode) and node.tag in _TEXTS:
        return _joined(node.value)
    return _Refused(f"a value with the tag {shown_name(node.tag)}")


def _table(node: yaml.MappingNode, depth: int) -> Any:
    table: dict[str, Any] = {}
    for key_node, value in node.value:
        if not isinstance(key_node, yaml.ScalarNode) or key_node.tag == _MERGE or key_node.value in table:
            line = key_node.start_mark.line + 1
            return _Refused(f"a mapping whose key on line {line} is no name, a merge, or there twice")
        table[_joined(key_node.value)] = _plain(value, depth + 1)
    return table


def _joined(text: str) -> str:
    """Text with each pair of surrogates, as JSON writes a character beyond 16 bits, made one character again."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
