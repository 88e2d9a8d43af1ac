"""FP8 by torchao's ``Float8Linear``: the same kernels and numbers, on the same modules and Parameters."""

from __future__ import annotations

from acceler8.backends.torchao.backend import TorchaoBackend
from acceler8.backends.torchao.options import TorchaoOptions

__all__ = ["TorchaoBackend", "TorchaoOptions"]
