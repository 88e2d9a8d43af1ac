"""Gradients that stay in FP8: a parameter whose ``grad`` becomes codes as soon as it is complete, and is then freed.

A hook behind PyTorch's own accumulation writes E4M3 codes in blocks of 128 and sets ``p.grad`` to None, so at the end
of a backward there are 1.03 bytes an element and never more than one gradient in 16 or 32 bits. While a
``GradientWindow`` is open the hook leaves gradients alone: micro-batches add up in ``p.grad``, in the dtype of the
parameter, and are rounded to FP8 once, when it closes. (Of 8 micro-batches of Gaussian numbers a BF16 sum is 0.4 % off,
RMS; one rounding to E4M3 2.6 %, one for each micro-batch 5.4 %. BF16 and one rounding are 2.6 % together, so FP32 sums
would take twice the memory for nothing.)

What a hook's owner is, is found through the parameter: no attribute is set on it, so a copy or a pickle of a model has
plain gradients, as PyTorch drops hooks there.

What reads ``p.grad`` sees None. ``gradient_of`` decodes; optimizers of ``acceler8.optim`` read codes themselves; any
other optimizer would step over such a parameter in silence, so its step raises.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from acceler8.errors import GradientError, ShapeError
from acceler8.formats import BLOCK, E4M3_BLOCK, block_count, decode_blocks, encode_blocks
from acceler8.kernels.stored_gradient import write_gradient

READS_CODES = "reads_stored_gradients"
"""Attribute of optimizers that read codes."""
_GRADIENTS = (torch.float32, torch.bfloat16, torch.float16)
_ZERO_GRAD = "zero_grad"


class GradientWindow:
    """Open while micro-batches add up; shared by the parameters of a model."""

    def __init__(self) -> None:
        self.is_open = False
        self.has_warned = False


class StoredGradient:
    """The hook of one parameter, and the gradient that it keeps.

    codes: E4M3, the parameter's shape; scale_inv: FP32 [ceil(n / 128)]; both None without a gradient. stores: False
    leaves gradients to PyTorch; then it only marks the parameter as one of a level.
    """

    __slots__ = ("codes", "handle", "is_used", "scale_inv", "stores", "window")

    def __init__(self, window: GradientWindow, stores: bool) -> None:
        self.window, self.stores = window, stores
        self.codes: Tensor | None = None
        self.scale_inv: Tensor | None = None
        self.is_used = False  # an optimizer stepped on it: the next backward starts anew, zero_grad or not
        self.handle: Any = None

    def __call__(self, p: Tensor) -> None:
        """Behind each accumulation of PyTorch's."""
        if not self.window.is_open:
            self.take(p)

    @torch.no_grad()
    def take(self, p: Tensor) -> None:
        """Turn ``p.grad``, if there is one, into codes, on top of those that wait for a step; frees it."""
        grad = p.grad
        if grad is None or not self.stores:
            return
        if grad.layout is not torch.strided or isinstance(grad, DTensor) or grad.dtype not in _GRADIENTS:
            raise GradientError(
                f"the gradient of a parameter of shape {list(p.shape)} is a {type(grad).__name__} of {grad.dtype},"
                f" {grad.layout}, and is to be stored in FP8; allowed: plain strided float32, bfloat16, float16;"
                " release_gradients(model) leaves gradients to PyTorch"
            )
        adds = self.codes is not None and not self.is_used
        if adds:
            self._say_rounded_again()
        elif self.codes is None or self.codes.shape != p.shape or self.codes.device != grad.device:
            self.codes = torch.empty(p.shape, dtype=E4M3_BLOCK.dtype, device=grad.device)
            self.scale_inv = torch.empty(block_count(p.numel()), device=grad.device)
        assert self.codes is not None
        assert self.scale_inv is not None
        write_gradient(grad.contiguous(), self.codes, self.scale_inv, adds=adds)
        self.is_used = False
        p.grad = None

    def drop(self) -> None:
        """Free the codes: the gradient is cleared."""
        self.codes = self.scale_inv = None
        self.is_used = False

    def decoded(self) -> Tensor | None:
        """The gradient in FP32, a new tensor; None without one."""
        if self.codes is None or self.scale_inv is None:
            return None
        return decode_blocks(self.codes, self.scale_inv, E4M3_BLOCK)

    def slices(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Codes and scales, flat, in parts whose FP32 copies are small beside the whole."""
        if self.codes is None or self.scale_inv is None:
            return
        size = 2**18 if self.codes.device.type == "cpu" else 2**24
        flat = self.codes.view(-1)
        for start in range(0, flat.numel(), size):
            yield flat[start : start + size], self.scale_inv[start // BLOCK :][: size // BLOCK]

    def _say_rounded_again(self) -> None:
        if not self.window.has_warned:
            self.window.has_warned = True
            warnings.warn(
                "a second backward adds to gradients that are FP8 already, and rounds the sums to FP8 again; put the"
                " micro-batches of a step into `with acceler8.window(model):` (or accelerator.accumulate(model)), which"
                " adds them up first, and call optimizer.zero_grad() between steps",
                stacklevel=2,
            )


def store_gradients(parameters: Iterable[nn.Parameter], *, stores: bool = True) -> GradientWindow:
    """Keep the gradients of these parameters as FP8 codes from now on; returns the window that they share.

    A gradient that is there is turned into codes. ``stores`` False only marks them.
    Raises: ShapeError for a parameter that is sharded or not contiguous, along whose memory blocks do not run.
    """
    window = GradientWindow()
    parameters = list(parameters)
    for p in parameters:
        if isinstance(p, DTensor) or not p.is_contiguous():
            what = "sharded" if isinstance(p, DTensor) else f"not contiguous (strides {list(p.stride())})"
            raise ShapeError(
                f"a parameter of shape {list(p.shape)} is {what}; FP8 gradients allow plain contiguous ones in this"
                " version; make it contiguous, or leave its layer out of FP8"
            )
    for p in parameters:
        known = stored_gradient(p)
        if known is not None:
            known.window, known.stores = window, stores
        else:
            store = StoredGradient(window, stores)
            store.handle = p.register_post_accumulate_grad_hook(store)
            known = store
        known.take(p)
    _watch_optimizers()
    return window


def release_gradients(parameters: Iterable[Tensor]) -> None:
    """Undo ``store_gradients``: gradients that are codes become plain, in the parameter's dtype."""
    for p in parameters:
        store = stored_gradient(p)
        if store is None:
            continue
        if store.codes is not None and not store.is_used and p.grad is None:
            decoded = store.decoded()
            assert decoded is not None
            p.grad = decoded.to(p.dtype)
        store.handle.remove()


def stored_gradient(p: Tensor) -> StoredGradient | None:
    """What keeps the gradient of ``p`` in FP8; None if it is an ordinary parameter."""
    hooks = p._post_accumulate_grad_hooks
    if not hooks:
        return None
    return next((hook for hook in hooks.values() if type(hook) is StoredGradient), None)


def gradient_of(p: Tensor) -> Tensor | None:
    """The gradient of ``p``: a decoded FP32 copy of its codes, with what waits in an open window added, or ``p.grad``.

    None if there is no gradient. Changing a copy changes no gradient: clip by ``acceler8.levels.clip_grad_norm_``.
    """
    store = stored_gradient(p)
    decoded = None if store is None or (store.is_used and p.grad is not None) else store.decoded()
    if decoded is None or p.grad is None:
        return p.grad if decoded is None else decoded
    return decoded + p.grad.float()


def set_gradient(p: Tensor, gradient: Tensor) -> None:
    """Replace the codes of ``p`` by those of ``gradient``, any float dtype of its shape.

    Raises: GradientError if gradients of ``p`` are not stored in FP8: set ``p.grad`` then.
    """
    store = stored_gradient(p)
    if store is None or not store.stores:
        raise GradientError("set_gradient got a parameter whose gradient is not stored in FP8; set p.grad instead")
    store.drop()
    p.grad = gradient.detach().to(p.device, p.dtype).reshape(p.shape)
    store.take(p)


def clamp_gradient(store: StoredGradient, limit: float) -> None:
    """Clamp each element of the codes to ±``limit``, which rounds those of a block again whose amax changes."""
    for codes, scale_inv in store.slices():
        value = decode_blocks(codes, scale_inv, E4M3_BLOCK).clamp_(-limit, limit)
        made, scales = encode_blocks(value, E4M3_BLOCK)
        codes.copy_(made)
        scale_inv.copy_(scales)


def settle_gradients(parameters: Iterable[Tensor]) -> None:
    """Turn what added up in a window into codes."""
    for p in parameters:
        if p.grad is not None and (store := stored_gradient(p)) is not None:
            store.take(p)


def open_windows(model: nn.Module) -> list[GradientWindow]:
    """Open the model's windows that are not open; those that were opened."""
    windows = {id(store.window): store.window for p in model.parameters() if (store := stored_gradient(p))}
    opened = [window for window in windows.values() if not window.is_open]
    for window in opened:
        window.is_open = True
    return opened


def set_windows(windows: Iterable[GradientWindow], *, is_open: bool) -> None:
    """Open or close these; what added up becomes codes in the next backward, or step."""
    for window in windows:
        window.is_open = is_open


def close_windows(model: nn.Module, opened: Iterable[GradientWindow], *, settles: bool = True) -> None:
    """Close them; ``settles``: what added up becomes codes."""
    for window in opened:
        window.is_open = False
    if settles:
        settle_gradients(model.parameters())


class ZeroGrad:
    """``model.zero_grad``, which also drops codes. An object, so that a model that has it can be copied and pickled."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, set_to_none: bool = True) -> None:
        """Clear all gradients."""
        type(self.model).zero_grad(self.model, set_to_none)
        drop_gradients(self.model.parameters())


def drop_gradients(parameters: Iterable[Tensor]) -> None:
    """Drop codes."""
    for p in parameters:
        if (store := stored_gradient(p)) is not None:
            store.drop()


def clear_with_model(model: nn.Module) -> None:
    """Let ``model.zero_grad()`` drop codes too."""
    model.__dict__.setdefault(_ZERO_GRAD, ZeroGrad(model))


def leave_zero_grad(model: nn.Module) -> None:
    """Undo ``clear_with_model``."""
    if isinstance(model.__dict__.get(_ZERO_GRAD), ZeroGrad):
        del model.__dict__[_ZERO_GRAD]


_watching: Callable[[], None] | None = None


def _watch_optimizers() -> None:
    """From the first stored gradient on, no optimizer of this process steps over one in silence."""
    global _watching
    if _watching is None:
        _watching = register_optimizer_step_pre_hook(_refuse_to_step_over).remove


def _refuse_to_step_over(optimizer: Optimizer, *_: Any) -> None:
    if getattr(optimizer, READS_CODES, False) or isinstance(optimizer.__dict__.get("optimizer"), Optimizer):
        return
    for group in optimizer.param_groups:
        for p in group["params"]:
            store = stored_gradient(p)
            if store is not None and store.codes is not None and not store.is_used:
                raise GradientError(
                    f"{type(optimizer).__name__}.step() would leave out a parameter of shape {list(p.shape)}: its"
                    " gradient is stored in FP8, and p.grad is None; allowed: acceler8.optim.Adam and AdamW; step the"
                    " optimizer that acceler8.levels.initialize or accelerator.prepare returned"
                )
