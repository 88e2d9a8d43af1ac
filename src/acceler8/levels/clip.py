"""Clipping gradients of which some are stored in FP8: the functions of ``torch.nn.utils``, over codes too."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from acceler8.errors import GradientError
from acceler8.formats import E4M3_BLOCK, decode_blocks
from acceler8.nn.gradients import StoredGradient, clamp_gradient, settle_gradients, stored_gradient


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[Tensor] | Tensor,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale all gradients so that their global norm is at most ``max_norm``; the norm before, FP32 [].

    Codes are left as they are, the factor goes into their blocks' scales: nothing is rounded again, and nothing waits
    for the device. What still adds up in an open window becomes codes first. NaN and inf make the norm NaN, and so
    every gradient, as in ``torch.nn.utils.clip_grad_norm_``.
    Raises: GradientError, a RuntimeError, if ``error_if_nonfinite`` and the norm is not finite; nothing is scaled then.
    """
    plain, stores = _split(parameters)
    norms = [_norm(store, norm_type) for store in stores]
    if plain:
        grads = [p.grad for p in plain if p.grad is not None]
        norms.append(torch.nn.utils.get_total_norm(grads, norm_type, False, foreach))
    if not norms:
        return torch.tensor(0.0)
    total: Tensor = torch.linalg.vector_norm(
        torch.stack([norm.float().to(norms[0].device) for norm in norms]), norm_type
    )
    if error_if_nonfinite and not bool(total.isfinite()):
        raise GradientError(
            f"the norm of order {norm_type} of the gradients is {float(total)}; allowed: finite; drop this step"
            " (zero_grad), or pass error_if_nonfinite=False"
        )
    torch.nn.utils.clip_grads_with_norm_(plain, max_norm, total, foreach)
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for store in stores:
        assert store.scale_inv is not None
        store.scale_inv.mul_(factor.to(store.scale_inv.device))
    return total


@torch.no_grad()
def clip_grad_value_(parameters: Iterable[Tensor] | Tensor, clip_value: float, foreach: bool | None = None) -> None:
    """Clamp each element of the gradients to ±``clip_value``; blocks of codes that it changes are rounded again."""
    plain, stores = _split(parameters)
    torch.nn.utils.clip_grad_value_(plain, clip_value, foreach)
    for store in stores:
        clamp_gradient(store, float(clip_value))


def has_stored(parameters: Iterable[Tensor]) -> bool:
    """True if the gradient of any of them is stored in FP8."""
    return any((store := stored_gradient(p)) is not None and store.stores for p in parameters)


def _split(parameters: Iterable[Tensor] | Tensor) -> tuple[list[Tensor], list[StoredGradient]]:
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    settle_gradients(parameters)
    stores = [store for p in parameters if (store := stored_gradient(p)) is not None and store.codes is not None]
    return [p for p in parameters if p.grad is not None], stores


def _norm(store: StoredGradient, norm_type: float) -> Tensor:
    parts: list[Tensor] = [
        torch.linalg.vector_norm(decode_blocks(codes, scale_inv, E4M3_BLOCK), norm_type)
        for codes, scale_inv in store.slices()
    ]
    total: Tensor = torch.linalg.vector_norm(torch.stack(parts), norm_type) if parts else torch.zeros(())
    return total
