"""``torch.compile`` for prepared models: the whole forward, or each of the repeated blocks.

Both are in place (``nn.Module.compile``), so a model stays the same object with the same keys. Blocks of one class
share what was compiled for the first of them, so compile time does not grow with depth.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from acceler8.config.plugins import TorchDynamoPlugin
from acceler8.config.sources import Effective
from acceler8.conversion.blocks import find_blocks
from acceler8.conversion.layers import matrix_modules
from acceler8.errors import ConfigError

_SECTION = "dynamo_config.dynamo_"


def is_compiled(effective: Effective, plugin: TorchDynamoPlugin | None) -> bool:
    """True if ``prepare`` compiles models."""
    if plugin is not None and plugin.disable:
        return False
    return effective[_SECTION + "backend"] not in (None, "NO")


def compile_model(model: nn.Module, effective: Effective, plugin: TorchDynamoPlugin | None) -> None:
    """Compile ``model``, or its blocks, as ``dynamo_config`` says; nothing if it does not ask for it.

    Raises: ConfigError if blocks are asked for and the model has none.
    """
    if not is_compiled(effective, plugin):
        return
    options = _options(effective, plugin)
    if not effective[_SECTION + "use_regional_compilation"]:
        model.compile(**options)
        return
    rows = [name for name, _, _ in matrix_modules(model)]
    blocks = find_blocks(model, rows, rows)
    if not blocks:
        raise ConfigError(
            f"{effective.source(_SECTION + 'use_regional_compilation')}: use_regional_compilation compiles repeated"
            f" blocks, and {type(model).__name__} has none: no nn.ModuleList or nn.Sequential holds two or more like"
            " modules with weight matrices; leave it out to compile the whole model"
        )
    for name in blocks:
        model.get_submodule(name).compile(**options)


def _options(effective: Effective, plugin: TorchDynamoPlugin | None) -> dict[str, Any]:
    """What ``torch.compile`` is told."""
    options: dict[str, Any] = {"backend": effective[_SECTION + "backend"].lower()}
    mode = effective[_SECTION + "mode"]
    if mode not in (None, "default"):
        options["mode"] = mode
    if effective[_SECTION + "use_fullgraph"]:
        options["fullgraph"] = True
    if effective[_SECTION + "use_dynamic"] is not None:
        options["dynamic"] = effective[_SECTION + "use_dynamic"]
    if plugin is not None and plugin.options is not None:
        options["options"] = plugin.options
    return options
