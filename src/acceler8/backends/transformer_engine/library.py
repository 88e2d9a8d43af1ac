"""TransformerEngine itself: imported once, on first use, and explained in one sentence where that fails.

It is three distributions that must be of one version: ``transformer-engine`` (Python), ``transformer-engine-cu12`` or
``-cu13`` (the core library, linked to CUDA's cuBLAS and cuDNN) and ``transformer-engine-torch`` (the extension, built
for one PyTorch). Each can be missing, of another version, or unable to load, and what TransformerEngine then raises is
an assertion, an OSError of the linker or a RuntimeError, at the end of a stack of imports. Metadata is read without an
import, so that a wrong version is named before anything is loaded.
"""

from __future__ import annotations

import functools
import importlib
import re
import warnings
from dataclasses import dataclass
from importlib import metadata, util
from typing import Any

import torch

LEAST = (2, 5)
"""The oldest version that is supported: the first with every recipe of the vocabulary and stable module internals."""
_CORES = ("transformer-engine-cu13", "transformer-engine-cu12")
_EXTENSION = "transformer-engine-torch"
_INSTALL = "pip install --no-build-isolation 'transformer_engine[pytorch]'"
_LONGEST = 200  # of a library's own message, in ours


@dataclass(frozen=True, kw_only=True)
class Versions:
    """What is installed, by metadata; None: not there."""

    package: str | None
    core: tuple[str, str] | None
    """Name and version of the distribution with the core library."""
    extension: str | None
    torch: str
    cuda: str | None
    """That torch was built for."""
    cublas: str | None
    cudnn: str | None

    def __str__(self) -> str:
        parts = [f"transformer-engine {self.package}"] if self.package else []
        parts += [" ".join(self.core)] if self.core else []
        parts += [f"{_EXTENSION} {self.extension}"] if self.extension else []
        built = f" for CUDA {self.cuda}" if self.cuda else ", a build without CUDA"
        parts.append(f"torch {self.torch}{built}")
        parts += [f"{name} {v}" for name, v in (("cuBLAS", self.cublas), ("cuDNN", self.cudnn)) if v]
        return ", ".join(parts)


def version_of(*names: str) -> str | None:
    """The version of the first of these distributions that is installed."""
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def found_versions() -> Versions:
    """Of the installed distributions. Imports nothing of TransformerEngine."""
    cores = [(name, found) for name in _CORES if (found := version_of(name)) is not None]
    return Versions(
        package=version_of("transformer-engine"),
        core=cores[0] if cores else None,
        extension=version_of(_EXTENSION),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        cublas=version_of("nvidia-cublas", "nvidia-cublas-cu13", "nvidia-cublas-cu12"),
        cudnn=version_of("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
    )


def numbers(version: str) -> tuple[int, ...]:
    """``(2, 20, 2)`` of ``"2.20.2+cu13"``."""
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])


def wrong_versions(found: Versions) -> str | None:
    """What is wrong with the installed versions before anything is loaded, and what to do; None if nothing is."""
    least = ".".join(map(str, LEAST))
    if found.package is None:
        return f"TransformerEngine is not installed; needed: {least} or newer; {_INSTALL}"
    if numbers(found.package) < LEAST:
        update = _INSTALL.replace("install", "install -U", 1)
        return f"TransformerEngine {found.package} is installed; needed: {least} or newer; {update}"
    others = [found.core[1] if found.core else None, found.extension]
    if any(version is not None and numbers(version) != numbers(found.package) for version in others):
        return (
            f"TransformerEngine's parts are of different versions (found: {found}); needed: one version of all;"
            f" {_INSTALL[:-1]}=={found.package}'"
        )
    return None


def explain(error: BaseException, found: Versions) -> str:
    """Why TransformerEngine did not load, in one sentence with the versions found, those needed, and what to do."""
    said = " ".join(str(error).split())
    reinstall = f"{_INSTALL[:-1]}=={found.package}'"
    if "undefined symbol" in said or "cannot open shared object" in said or "not found (required by" in said:
        what, needed = _of_linker(said)
    elif "cuDNN" in said or "cudnn" in said:
        what, needed = said, "the cuDNN that it names: pip install -U nvidia-cudnn-cu13 (or -cu12)"
    elif isinstance(error, FileNotFoundError) or "meta package" in said or "Could not find" in said:
        library = "core library" if "core" in said else "PyTorch extension"
        what, needed = f"its {library} is missing", f"all three parts of one version: {reinstall}"
    elif isinstance(error, ModuleNotFoundError):
        what, needed = f"the module {error.name} is missing", f"pip install {error.name}"
    else:
        what, needed = f"{type(error).__name__}: {said[:_LONGEST]}", reinstall
    return f"TransformerEngine does not load: {what[:_LONGEST]} (found: {found}); needed: {needed}"


def _of_linker(said: str) -> tuple[str, str]:
    """What a dynamic linker's message means, and what is needed."""
    symbol = next(iter(re.findall(r"undefined symbol: (\S+)", said)), "")
    library = next(iter(re.findall(r"(lib[\w-]+\.so[.\d]*)", said)), "")
    if symbol.startswith(("cublas", "cudnn", "nccl", "cuda", "nvrtc", "cu")):
        name = next(n for n in ("cublas", "cudnn", "nccl", "nvrtc", "cu") if symbol.startswith(n))
        name = {"cublas": "cuBLAS", "cudnn": "cuDNN", "nccl": "NCCL", "nvrtc": "NVRTC"}.get(name, "CUDA")
        return (
            f"its core library asks {name} for {symbol}, which the one installed does not have",
            f"a newer {name}, or an older TransformerEngine, of the CUDA that torch was built for",
        )
    if symbol:
        return (
            f"its extension asks for {symbol}, which this torch does not have, so it was built for another",
            f"an extension for this torch: NVTE_PYTORCH_FORCE_BUILD=TRUE {_INSTALL}",
        )
    if "not found (required by" in said:
        return said, "the versions of CUDA's libraries that TransformerEngine was built for"
    return f"{library or 'a library'} cannot be opened", f"{library or 'it'} on the linker's path, or {_INSTALL}"


@functools.cache
def load() -> Any:
    """``transformer_engine.pytorch``, imported once. Raises whatever it raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its optional parts: each says itself where it is used
        return importlib.import_module("transformer_engine.pytorch")


def cannot_load(found: Versions) -> str | None:
    """Why the import fails; None if it does not."""
    try:
        load()
    except Exception as error:  # a linker's OSError, an assertion, a RuntimeError: whatever it is, it cannot be used
        return explain(error, found)
    return None


@functools.cache
def unavailable() -> str | None:
    """Why TransformerEngine cannot be used here, in one sentence; None if it can. Tries the import, once."""
    found = found_versions()
    if reason := wrong_versions(found):
        return reason
    if util.find_spec("transformer_engine") is None:
        return f"TransformerEngine's metadata are installed and its package is not (found: {found}); {_INSTALL}"
    if not torch.cuda.is_available():
        return (
            f"TransformerEngine needs an NVIDIA GPU of compute capability 8.9 or newer, and torch finds none (found:"
            f" {found}); use backend 'native', which also runs on the CPU"
        )
    return cannot_load(found)
