"""``DeferredLogits``: logits that are not computed until somebody reads them.

What an output head gives in a forward whose loss is computed without the logits. A model scales or caps its logits on
the way to the loss (``logits / scaling``, ``cap * tanh(logits / cap)``); those steps are noted, and the loss does them
in its kernel. Whatever else is done with them (indexed, compared, added, passed to a function of torch) computes them,
as the head would have, so code that does read logits gets the right ones and pays for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only


class LogitScale(NamedTuple):
    """``scale * logits``, or with a cap ``cap * tanh(scale * logits / cap)``."""

    scale: float
    cap: float | None


class DeferredLogits:
    """Stands for ``head(hidden)`` and the steps behind it; made by a fused forward, not constructed.

    Shape, dtype and device are known; anything else that a tensor has computes the logits, with the head's weights at
    that time and under the autocast of the forward, and keeps them. No subclass of Tensor: tools that look for tensors
    in a model's output (DDP, pytrees) pass it by.
    """

    def __init__(
        self,
        hidden: Tensor,
        head: nn.Linear,
        dtype: torch.dtype,
        steps: tuple[tuple[str, Any], ...] = (),
        on_read: Callable[[str], None] | None = None,
    ) -> None:
        self.hidden, self.head, self.dtype = hidden, head, dtype
        self._steps, self._on_read = steps, on_read
        self._autocast = _autocast_of(hidden.device.type)
        self._made: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """[..., vocabulary]."""
        return torch.Size((*self.hidden.shape[:-1], self.head.out_features))

    @property
    def device(self) -> torch.device:
        """Where they would be."""
        return self.hidden.device

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return self.hidden.ndim

    def size(self, dim: int | None = None) -> Any:
        """As ``Tensor.size``."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """As ``Tensor.dim``."""
        return self.ndim

    def scale(self) -> LogitScale | None:
        """What the steps do to logits, if it is what a loss kernel does: numbers around at most one tanh."""
        inside, outside, has_tanh = 1.0, 1.0, False
        for name, value in self._steps:
            if name == "tanh":
                if has_tanh:
                    return None
                has_tanh, inside, outside = True, outside, 1.0
            elif name != "to":
                outside = outside * value if name == "mul" else outside / value
        if not has_tanh:
            return LogitScale(outside, None)
        return LogitScale(inside * outside, outside) if outside else None

    def compute(self, why: str = "compute") -> Tensor:
        """The logits as a tensor, the same one each time."""
        if self._made is None:
            if self._on_read is not None:
                self._on_read(why)
            is_on, dtype = self._autocast
            with torch.autocast(self.device.type, dtype, enabled=is_on):
                made: Tensor = self.head(self.hidden)
                for name, value in self._steps:
                    made = getattr(made, name)(*() if name == "tanh" else (value,))
            self._made = made
        return self._made

    def _then(self, name: str, value: Any = None) -> DeferredLogits:
        dtype = value if name == "to" else self.dtype
        after = DeferredLogits(self.hidden, self.head, dtype, (*self._steps, (name, value)), self._on_read)
        after._autocast = self._autocast
        return after

    def mul(self, other: Any) -> Any:
        """Times a number: noted."""
        return self._then("mul", other) if _is_number(other) else self.compute("mul").mul(_made(other))

    def div(self, other: Any, **options: Any) -> Any:
        """Divided by a number: noted."""
        if _is_number(other) and other != 0 and not options:
            return self._then("div", other)
        return self.compute("div").div(_made(other), **options)

    def tanh(self) -> DeferredLogits:
        """Noted."""
        return self._then("tanh")

    def float(self) -> DeferredLogits:
        """In FP32: noted."""
        return self if self.dtype is torch.float32 else self._then("to", torch.float32)

    def contiguous(self) -> DeferredLogits:
        """Itself."""
        return self

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """To where they would be or in FP32: noted."""
        if len(args) + len(kwargs) == 1:
            (value,) = (*args, *kwargs.values())
            if value is torch.float32:
                return self.float()
            if value is self.dtype or (isinstance(value, torch.device | str) and torch.device(value) == self.device):
                return self
        return self.compute("to").to(*args, **kwargs)

    __mul__ = __rmul__ = mul
    __truediv__ = div

    def __repr__(self) -> str:
        return f"DeferredLogits(shape={tuple(self.shape)}, dtype={self.dtype}; computed when they are read)"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(Tensor, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.compute(name), name)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.compute("numpy").__array__(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copied and pickled as the logits, without their graph."""
        return _itself, (self.compute("copy").detach(),)

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = _NOTED.get(function)
        if name is not None and isinstance(args[0] if args else None, cls):
            return getattr(args[0], name)(*args[1:], **kwargs)
        if name == "mul" and len(args) == 2 and not kwargs:
            return args[1].mul(args[0])
        why = getattr(function, "__name__", str(function))
        args, kwargs = tree_map_only(cls, lambda logits: logits.compute(why), (args, dict(kwargs)))
        return function(*args, **kwargs)

    __hash__ = object.__hash__


_NOTED: dict[Any, str] = {
    torch.tanh: "tanh",
    torch.mul: "mul",
    torch.multiply: "mul",
    torch.div: "div",
    torch.divide: "div",
    torch.true_divide: "div",
}
_OPERATORS = (
    "add", "radd", "sub", "rsub", "rtruediv", "floordiv", "mod", "pow", "rpow", "matmul", "rmatmul", "neg", "abs",
    "invert", "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor", "getitem", "setitem", "len", "iter", "contains",
    "bool", "float", "int",
)  # fmt: skip


def _operator(name: str) -> Callable[..., Any]:
    def run(self: DeferredLogits, *args: Any) -> Any:
        return getattr(self.compute(name), f"__{name}__")(*map(_made, args))

    return run


for _name in _OPERATORS:
    setattr(DeferredLogits, f"__{_name}__", _operator(_name))


def _made(value: Any) -> Any:
    return value.compute("operand") if isinstance(value, DeferredLogits) else value


def _itself(logits: Tensor) -> Tensor:
    return logits


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _autocast_of(device: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
