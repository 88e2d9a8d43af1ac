"""Giving a module TransformerEngine's class without making a module: it stays the object that it is.

A donor of TransformerEngine's class is made on the meta device, and what it keeps beside its Parameters is laid on the
module, whose class is then changed. So Parameters with their values, ties, ``requires_grad``, device and place in an
optimizer, hooks, children, the training flag, attributes and names are the same objects as before: nothing is remapped.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from acceler8.nn.class_change import OF_EVERY_MODULE, swap_class

_TAKEN = "_acceler8_taken_over"
_OF_PARAMETERS = ("weight", "bias")
# what TransformerEngine's modules put on themselves in their first forward
_LATER = (
    *("fp8_parameters", "allow_different_data_and_param_types", "forwarded_at_least_once", "tp_group_initialized"),
    *("_is_fsdp2", "fp8_initialized", "fp8_meta_tensors_initialized"),
)


def attributes_of(donor: nn.Module) -> dict[str, Any]:
    """What a donor keeps beside its Parameters. A missing bias is no Parameter, so it is left out by name."""
    return {
        name: value
        for name, value in donor.__dict__.items()
        if name not in OF_EVERY_MODULE and name not in _OF_PARAMETERS
    }


def take_over(module: nn.Module, donor: nn.Module, old: type[nn.Module], new: type[nn.Module]) -> None:
    """Change ``module``'s class from ``old`` to ``new``, with the donor's attributes, none of which may
    ``clash`` with its own.
    """
    attributes = attributes_of(donor)
    added = [name for name in attributes if name not in module.__dict__]
    later = [name for name in _LATER if name not in module.__dict__]
    module.__dict__.update(attributes)
    module.__dict__[_TAKEN] = tuple(dict.fromkeys((*added, *later)))
    swap_class(module, old, new)


def give_back(module: nn.Module, new: type[nn.Module], old: type[nn.Module]) -> None:
    """Undo ``take_over``: the class of before, without what TransformerEngine added."""
    for name in module.__dict__.pop(_TAKEN):
        module.__dict__.pop(name, None)
    swap_class(module, new, old)
