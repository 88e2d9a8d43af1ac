"""The configuration: one schema, and the four equal routes that are made from it.

Code, flags, environment and YAML each give ``RouteValues``, checked values; ``merge`` makes the effective values and
keeps who won (code > flag > environment > YAML > default). Nothing here imports torch, so that help is quick.
"""

from __future__ import annotations

from acceler8.config.backend_choice import choose_backend
from acceler8.config.code import gather, to_python, values_from_code
from acceler8.config.environment import current_environment, read_environment, write_environment
from acceler8.config.flags import parse_flags, to_flags
from acceler8.config.registry import ENTRIES
from acceler8.config.schema import Config
from acceler8.config.sources import Effective, Precedence, RouteValues, Source, Value, merge
from acceler8.config.yaml_file import read_yaml, to_yaml

__all__ = [
    "ENTRIES",
    "Config",
    "Effective",
    "Precedence",
    "RouteValues",
    "Source",
    "Value",
    "choose_backend",
    "current_environment",
    "gather",
    "merge",
    "parse_flags",
    "read_environment",
    "read_yaml",
    "to_flags",
    "to_python",
    "to_yaml",
    "values_from_code",
    "write_environment",
]
