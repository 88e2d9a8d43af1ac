"""The YAML route: every file that Accelerate writes or documents, and our own, read and written.

``yaml.safe_load``'s rules, and for each key the line on which it stands, so that an error can say where.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from acceler8.config.registry import ENTRIES, SECTIONS, find
from acceler8.config.sources import Effective, Layer, Rank, Source
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
_OFF: tuple[Any, ...] = (None, False, "no", "NO", "", [], {})
_LEGACY_DYNAMO = "dynamo_config.dynamo_backend"


def read_yaml(path: Path | str) -> Layer:
    """The settings that a YAML (or JSON) file gives. Raises ConfigError naming file, line and key."""
    path = Path(path)
    layer = Layer()
    for key, value, where in _pairs(_root(path), str(path)):
        if key in _UNSUPPORTED:
            if _plain(value) not in _OFF:
                raise ConfigError(f"{where}: {key} got {_plain(value)!r}; allowed: nothing; {_UNSUPPORTED[key]}")
        elif key == "compute_environment":
            if str(_plain(value)) != "LOCAL_MACHINE":
                raise ConfigError(f"{where}: {key} got {_plain(value)!r}; allowed: LOCAL_MACHINE")
        elif key == "fp16":  # before Accelerate had mixed_precision
            layer.put("mixed_precision", "fp16" if _plain(value) is True else "no", Source(Rank.YAML, where))
        elif key == "dynamo_backend":
            layer.put(_LEGACY_DYNAMO, _plain(value), Source(Rank.YAML, where))
        elif key in SECTIONS:
            _read_section(key, value, where, str(path), layer)
        else:
            _put(layer, "", key, value, where)
    return layer


def to_yaml(effective: Effective) -> str:
    """The file from which ``read_yaml`` makes the same values."""
    nested: dict[str, Any] = {}
    for path, value in effective.given().items():
        entry = ENTRIES[path]
        plain = list(value) if isinstance(value, tuple) else value
        (nested.setdefault(entry.section, {}) if entry.section else nested)[entry.key] = plain
    return yaml.safe_dump(nested, sort_keys=False, width=110) if nested else "{}\n"


def _read_section(section: str, node: yaml.Node, where: str, path: str, layer: Layer) -> None:
    if isinstance(node, yaml.ScalarNode) and _plain(node) in _OFF:
        return
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{where}: {section} got {_plain(node)!r}; allowed: a mapping of its keys")
    for key, value, inner in _pairs(node, path):
        _put(layer, section, key, value, inner)


def _put(layer: Layer, section: str, key: str, node: yaml.Node, where: str) -> None:
    entry, is_alias = find(section, key, where)
    if is_alias:
        if entry.path in layer.values:
            raise ConfigError(f"{where}: {key} is {entry.key}, which stands in the file too; keep one of them")
        layer.notes.append(f"{where}: {key} is read as {entry.key}")
    layer.put(entry.path, _plain(node), Source(Rank.YAML, where))


def _root(path: Path) -> yaml.MappingNode:
    try:
        if path.stat().st_size > _LARGEST:
            raise ConfigError(f"{path}: got {path.stat().st_size} bytes; allowed: {_LARGEST}; is it a configuration?")
        text = path.read_text(encoding="utf-8-sig")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); name a YAML file that exists") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text (byte {error.start}); name a YAML file") from None
    except yaml.YAMLError as error:
        raise ConfigError(_located(error, path)) from None
    except RecursionError:
        raise ConfigError(f"{path}: is nested too deeply; allowed: sections of settings") from None
    if root is None:
        return yaml.MappingNode("tag:yaml.org,2002:map", [])
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path}:1: got a {root.id}; allowed: keys and values, such as mixed_precision: fp8")
    return root


def _located(error: yaml.YAMLError, path: Path) -> str:
    mark = getattr(error, "problem_mark", None)
    where = f"{path}:{mark.line + 1}" if mark else str(path)
    problem = " ".join(str(getattr(error, "problem", None) or getattr(error, "reason", error)).split())
    return f"{where}: is not YAML ({problem}); write key: value"


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
            raise ConfigError(f"{where}: {key} stands on line {seen[key]} too; keep one of them")
        seen[key] = line
        yield key, value, where


def _plain(node: yaml.Node) -> Any:
    """The Python value of a node, by safe_load's rules; a tag of a Python object is an error."""
    loader = yaml.SafeLoader("")
    try:
        return loader.construct_document(node)
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError):
        return f"!{node.tag}" if not isinstance(node, yaml.ScalarNode) else str(node.value)
    finally:
        loader.dispose()
