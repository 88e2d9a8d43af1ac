"""Norms of a model, found by what they compute, whatever their class is called.

A module with one weight, perhaps a bias, and one number called eps (or None, for PyTorch's default) is run on random
rows, in each dtype that matters, in training and in evaluation; if the values and the gradients are those of RMSNorm or
LayerNorm and nothing else shows (a random number, a note on ``self``), it is one.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from acceler8.kernels.norm import DEFAULT_EPS, norm_backward_ref, norm_ref
from acceler8.nn.norm import NormKind
from acceler8.nn.twin import ONE_AT_A_TIME, contents, twin_of

WIDEST = 16384  # of rows that the kernels hold whole
_ELEMENTS = 8192
_MOST_EPS = 0.1
# kind, offset of the weight, rounding before the weight
_FORMULAS: tuple[tuple[Any, float, bool], ...] = (
    ("rms", 0.0, False),
    ("rms", 0.0, True),
    ("rms", 1.0, False),
    ("layer", 0.0, False),
)
_AUTOCAST_OPS = {F.layer_norm, torch.layer_norm, F.rms_norm, torch.rms_norm}


def find_norm(module: nn.Module) -> NormKind | None:
    """What ``module`` computes, if that is a norm along the last dimension. Runs a twin of it on a few rows."""
    eps = _eps_of(module)
    if eps is None or not _looks_like_one(module):
        return None
    value = getattr(module, eps)
    ONE_AT_A_TIME.acquire()
    dice = random.getstate()
    try:
        modes = torch.device("cpu"), torch.autocast("cpu", enabled=False)
        with torch.random.fork_rng(devices=[]), modes[0], modes[1], torch.enable_grad():
            for kind, offset, cast in _FORMULAS:
                autocasts = _computes(module, kind, offset, cast, DEFAULT_EPS if value is None else value)
                if autocasts is not None:
                    return NormKind(kind, offset, cast, autocasts, eps)
    except Exception:  # whatever it is that cannot run on such rows: it is no such norm
        return None
    finally:
        random.setstate(dice)
        ONE_AT_A_TIME.release()
    return None


def _eps_of(module: nn.Module) -> str | None:
    """Name of the attribute that holds eps, if there is one."""
    named = {name: value for name, value in module.__dict__.items() if "eps" in name}
    found = [name for name, value in named.items() if type(value) is float and 0 < value <= _MOST_EPS]
    if not found:
        found = [name for name, value in named.items() if value is None]
    return found[0] if len(found) == 1 else None


def _looks_like_one(module: nn.Module) -> bool:
    weight, parameters = module._parameters.get("weight"), module._parameters
    return (
        weight is not None
        and set(parameters) <= {"weight", "bias"}
        and all(type(p) is nn.Parameter and p.shape == weight.shape for p in parameters.values() if p is not None)
        and weight.ndim == 1
        and 0 < weight.shape[0] <= WIDEST
        and not module._modules
        and not module._buffers
        and "forward" not in module.__dict__
    )


class _Calls(TorchFunctionMode):
    """Notes calls of PyTorch's own norms: the dtype of what they got, and what they gave."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[torch.dtype, Any]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _AUTOCAST_OPS:
            x = args[0] if args else (kwargs or {})["input"]
            self.made.append((x.dtype, result))
        return result

    def autocasts(self, y: Tensor) -> bool | None:
        """True if the dtype of ``y`` is what autocast makes of PyTorch's own norm; False if autocast changes nothing;
        None if it would change something inside.
        """
        if any(result is y for _, result in self.made):
            return True
        return False if all(dtype is torch.float32 for dtype, _ in self.made) else None


def _computes(module: nn.Module, kind: Any, offset: float, cast: bool, eps: float) -> bool | None:
    """None unless the module computes this formula; else whether it calls PyTorch's own norm to do so."""
    autocasts: bool | None = None
    weights = {
        torch.float32: (torch.float32,),
        torch.bfloat16: (torch.bfloat16, *((torch.float32,) * (cast or bool(offset)))),
    }
    for training in (True, False):
        for x_dtype, w_dtypes in weights.items():
            for w_dtype in w_dtypes:
                twin, calls = _random_twin(module, w_dtype, training), _Calls()
                y = _formula_of(twin, calls, x_dtype, kind, offset, cast, eps)
                if y is None:
                    return None
                if x_dtype is not torch.float32:  # of FP32 autocast makes FP32
                    found = calls.autocasts(y)
                    if found is None or autocasts not in (None, found):
                        return None
                    autocasts = found
    return autocasts


def _random_twin(module: nn.Module, dtype: torch.dtype, training: bool) -> nn.Module:
    twin = twin_of(module, training=training)
    made = {
        name: None if p is None else nn.Parameter(((torch.rand(p.shape) + 0.5) * torch.randn(p.shape).sign()).to(dtype))
        for name, p in module._parameters.items()
    }
    twin.__dict__["_parameters"] = made
    return twin


def _formula_of(
    twin: nn.Module, calls: _Calls, dtype: torch.dtype, kind: Any, offset: float, cast: bool, eps: float
) -> Tensor | None:
    """What the twin gives, if that and its gradients are the formula's."""
    weight, bias = twin._parameters["weight"], twin._parameters.get("bias")
    assert weight is not None
    width = weight.shape[0]
    rows = max(8, _ELEMENTS // width)
    sizes = torch.tensor([*(eps**0.5 * size for size in (0.3, 1.0, 10.0)), 3e3])  # eps shows, and so does a clamp
    sizes = sizes.repeat(-(-rows // 4))[:rows]
    x = (torch.randn(rows, width) * sizes[:, None] + sizes[:, None] / 2).to(dtype).requires_grad_()
    dy = torch.randn(rows, width).to(dtype)
    before, seed, dice = contents(twin), torch.get_rng_state(), random.getstate()
    with calls:
        given = x.view(2 - rows % 2, -1, width)
        y = twin.forward(given)  # a hook is the class's to call, before and behind
    if contents(twin) != before or not torch.equal(seed, torch.get_rng_state()) or random.getstate() != dice:
        return None
    want, inverse_std, mean = norm_ref(
        x.detach(), weight.detach(), None if bias is None else bias.detach(), eps,
        kind=kind, weight_offset=offset, cast_before_weight=cast,
    )  # fmt: skip
    if type(y) is not Tensor or y.shape != given.shape or y.dtype != want.dtype or y is given:
        return None
    if not _is_near(y.detach().reshape(rows, width), want):
        return None
    if dtype is not torch.float32:
        return y
    leaves = [x, weight] + ([] if bias is None else [bias])
    got = torch.autograd.grad(y.reshape(rows, width), leaves, dy, allow_unused=True)
    expected = norm_backward_ref(
        dy, x.detach(), weight.detach(), inverse_std, mean, weight_offset=offset, cast_before_weight=cast
    )
    alike = all(
        g is not None and torch.allclose(g, e, 1e-3, 1e-3 * float(e.abs().max()))
        for g, e in zip(got, expected, strict=False)
        if e is not None
    )
    return y if alike else None


def _is_near(got: Tensor, want: Tensor) -> bool:
    """Equal up to what another order of sums does: in 16 bit hardly any element differs, and by little."""
    if want.dtype is torch.float32:
        return torch.allclose(got, want, 1e-5, 1e-5)
    differs = got != want
    return float(differs.float().mean()) <= 5e-3 and torch.allclose(got.float(), want.float(), 2**-6, 1e-5)
