"""The configuration: one schema, and the four equal routes that are made from it.

Code, flags, environment and YAML each give a ``Layer`` of checked values; ``merge`` makes the effective values and
keeps who won (code > flag > environment > YAML > default). Nothing here imports torch, so that help is quick.
"""

from __future__ import annotations

from acceler8.config.backend_choice import choose_backend
from acceler8.config.code import gather, layer_from_code, to_python
from acceler8.config.environment import current_environment, read_environment, write_environment
from acceler8.config.flags import parse_flags, to_flags
from acceler8.config.registry import ENTRIES
from acceler8.config.schema import Config
from acceler8.config.sources import Effective, Layer, Rank, Source, Value, merge
from acceler8.config.yaml_file import read_yaml, to_yaml

__all__ = [
    "ENTRIES",
    "Config",
    "Effective",
    "Layer",
    "Rank",
    "Source",
    "Value",
    "choose_backend",
    "current_environment",
    "gather",
    "layer_from_code",
    "merge",
    "parse_flags",
    "read_environment",
    "read_yaml",
    "to_flags",
    "to_python",
    "to_yaml",
    "write_environment",
]
