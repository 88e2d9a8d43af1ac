"""The ``torch.library`` namespace of the package's operations, and when an operation may go past it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

# Library.define costs 4 us a call where torch.library.custom_op costs 12, and each layer casts six times a
# step
library = torch.library.Library("acceler8", "FRAGMENT")

_PLAIN = (Tensor, torch.nn.Parameter)


def may_go_direct(x: Tensor) -> bool:
    """True if an operation on ``x`` may call its launcher without PyTorch's dispatcher, which costs 10 us a call.

    That is, if nobody would see the call there: no compiler, no dispatch mode (fake tensors, selective checkpointing, a
    counter of FLOPs), no transform of ``torch.func``, and ``x`` is no subclass.
    """
    return (
        not torch.compiler.is_compiling()
        and type(x) in _PLAIN
        and not is_in_torch_dispatch_mode()
        and not torch._C._are_functorch_transforms_active()
    )
