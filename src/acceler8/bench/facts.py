"""What stands beside every figure: device, versions, date, commit."""

from __future__ import annotations

import datetime
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import torch

import acceler8
from acceler8.errors import HardwareError, RunError, unknown_name

PEERS = {"torchao": "torchao", "transformer_engine": "transformer-engine", "accelerate": "accelerate",
         "transformers": "transformers"}  # fmt: skip
"""Module and distribution of what is compared with."""


def resolve_device(asked: str | None) -> torch.device:
    """``cpu``, ``cuda``, ``cuda:N``, or ``auto`` (None): a GPU where there is one. Raises RunError, HardwareError."""
    name = asked or "auto"
    kind, _, index = name.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (index and not (kind == "cuda" and index.isdecimal())):
        raise RunError(unknown_name("device", name, ("auto", "cpu", "cuda", "cuda:N")))
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind == "cpu" or (kind == "auto" and not count):
        return torch.device("cpu")
    if int(index or 0) >= count:
        raise HardwareError(
            f"device {name!r} is not here: PyTorch {torch.__version__} sees {count} CUDA GPUs; use --device cpu with"
            " --preset tiny, or install a CUDA build of PyTorch and its driver"
        )
    device = torch.device("cuda", int(index or 0))
    torch.cuda.set_device(device)
    return device


def version_of(distribution: str) -> str | None:
    """Version of an installed distribution, None if it is not there."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def commit() -> str:
    """Short hash of the checkout that this package runs from, ``+`` behind it if files differ; else ``unknown``."""
    folder = Path(acceler8.__file__).parent

    def git(*arguments: str) -> str:
        try:
            done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)
        except OSError:
            return ""
        return done.stdout.strip() if done.returncode == 0 else ""

    if not git("ls-files", "__init__.py"):
        return "unknown"
    return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")


def device_name(device: torch.device) -> str:
    """The GPU's name, or the CPU's kind."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})"


def facts(device: torch.device) -> dict[str, str]:
    """Name -> value, JSON-able."""
    today = datetime.datetime.now(tz=datetime.UTC).date()
    said = {
        "device": device_name(device),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "triton": version_of("triton") or "none",
        "acceler8": acceler8.__version__,
        "commit": commit(),
        "date": str(today),
    }
    return said | {module: version_of(name) or "not installed" for module, name in PEERS.items()}


def facts_line(said: dict[str, str]) -> str:
    """One line of them."""
    peers = ", ".join(f"{module} {said[module]}" for module in PEERS if said.get(module, "not installed")[0].isdigit())
    return (
        f"{said['device']}, torch {said['torch']}, Triton {said['triton']}, {said['date']}, commit {said['commit']}"
        + (f"; {peers}" if peers else "")
    )
