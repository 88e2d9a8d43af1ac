"""Seeds of every generator that a training script draws from."""

from __future__ import annotations

import importlib
import importlib.util
import random

import torch

from acceler8.accelerator.processes import place_of_this_process


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed Python's, NumPy's and PyTorch's generators, on every device. The name is Hugging Face Accelerate's.

    ``device_specific`` adds the number of this process to ``seed``. ``deterministic`` has PyTorch use deterministic
    algorithms only. To resume bit for bit on a GPU give ``Accelerator(deterministic=True)`` too.
    """
    if device_specific:
        seed += place_of_this_process()[0]
    random.seed(seed)
    if importlib.util.find_spec("numpy") is not None:
        importlib.import_module("numpy").random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)
