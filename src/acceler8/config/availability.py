"""What this machine has for FP8, found out without importing a vendor's package.

``import transformer_engine`` takes seconds, prints, and fails where its CUDA libraries do not fit; the metadata of an
installed distribution says the same at no cost. Whether it then works is asked of the backend that uses it.
"""

from __future__ import annotations

import re
from importlib import metadata, util

_TORCHAO_LEAST = (0, 6, 1)  # Accelerate's; what the backend needs, and finds, it says itself
_MXFP8_TE_LEAST = (2, 0)
_FP8_CAPABILITY, _MXFP8_CAPABILITY = (8, 9), (10, 0)

INSTALL = {
    "AO": "pip install 'torchao>=0.13'",
    "TE": "pip install --no-build-isolation 'transformer_engine[pytorch]'",
}
"""What to do where a backend's library is missing."""


def installed_version(module: str, *distributions: str) -> tuple[int, ...] | None:
    """The version of an installed package, its numbers only; None if module or metadata are missing.

    Both are looked at: a folder of that name in the current directory can be imported and is not the package.
    """
    try:
        if util.find_spec(module) is None:
            return None
    except (ImportError, ValueError):  # a half-removed package, or a stub without a spec
        return None
    for name in distributions or (module,):
        try:
            return tuple(int(part) for part in re.findall(r"\d+", metadata.version(name))[:3])
        except metadata.PackageNotFoundError:
            continue
    return None


def is_torchao_available() -> bool:
    """True with torchao 0.6.1 or newer."""
    version = installed_version("torchao")
    return version is not None and version >= _TORCHAO_LEAST


def is_transformer_engine_available() -> bool:
    """True if TransformerEngine is installed."""
    return _transformer_engine() is not None


def is_transformer_engine_mxfp8_available() -> bool:
    """True if TransformerEngine is installed, new enough, and the GPU multiplies MXFP8 (compute capability 10.0)."""
    version = _transformer_engine()
    return version is not None and version >= _MXFP8_TE_LEAST and _has_capability(_MXFP8_CAPABILITY)


def is_msamp_available() -> bool:
    """Always true: MS-AMP's levels are acceler8's own, no package of that name is used."""
    return True


def is_fp8_available() -> bool:
    """Always true: the native backend needs PyTorch only. Speed is a question of ``check_cuda_fp8_capability``."""
    return True


def check_cuda_fp8_capability() -> bool:
    """True if the current CUDA device multiplies FP8 (compute capability 8.9 or newer); False without one."""
    return _has_capability(_FP8_CAPABILITY)


def is_backend_available(backend: str) -> bool:
    """True if nothing needs to be installed to choose this backend."""
    found = {"AO": is_torchao_available, "TE": is_transformer_engine_available}
    return found[backend]() if backend in found else True


def _transformer_engine() -> tuple[int, ...] | None:
    names = ("transformer_engine", "transformer-engine-cu13", "transformer-engine-cu12", "intel_transformer_engine")
    return installed_version("transformer_engine", *names)


def _has_capability(least: tuple[int, int]) -> bool:
    import torch

    return torch.cuda.is_available() and torch.version.hip is None and torch.cuda.get_device_capability() >= least
