"""Donors of TransformerEngine's attributes: its modules, made on the meta device.

Importing this file does not import TransformerEngine; its functions do.
"""

from __future__ import annotations

from typing import cast

from torch import nn

from acceler8.backends.transformer_engine import library
from acceler8.backends.transformer_engine.in_place import attributes_of
from acceler8.backends.transformer_engine.norms import Norm
from acceler8.nn.class_change import clash


def linear_donor(module: nn.Linear) -> nn.Module:
    """A ``te.Linear`` like ``module``, on the meta device."""
    donor: nn.Module = library.load().Linear(
        module.in_features,
        module.out_features,
        bias=module._parameters.get("bias") is not None,
        params_dtype=module.weight.dtype,
        device="meta",
    )
    return donor


def norm_donor(norm: Norm) -> nn.Module:
    """TransformerEngine's norm like ``norm``, on the meta device."""
    te, kind = library.load(), norm.kind
    assert kind is not None
    weight = norm.module._parameters["weight"]
    assert weight is not None
    donor: nn.Module = (te.RMSNorm if kind.kind == "rms" else te.LayerNorm)(
        weight.shape[0],
        eps=float(getattr(norm.module, kind.eps)),
        device="meta",
        dtype=weight.dtype,
        zero_centered_gamma=kind.weight_offset == 1.0,
    )
    return donor


def linear_clash(module: nn.Module) -> str | None:
    """Why a linear layer stays: an attribute of its owner's that TransformerEngine uses; None if there is none."""
    return clash(module, attributes_of(linear_donor(cast(nn.Linear, module))), "TransformerEngine's Linear")


def norm_clash(norm: Norm) -> str | None:
    """The same of a norm."""
    return clash(norm.module, attributes_of(norm_donor(norm)), "TransformerEngine's norm")
