"""``acceler8 env``: versions, hardware and the effective configuration, to paste into a bug report."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

_PACKAGES = (
    *(
        "acceler8",
        "torch",
        "triton",
        "torchao",
        "transformer-engine",
        "deepspeed",
        "transformers",
        "accelerate",
        "peft",
    ),
    *("lightning", "torchdata", "numpy", "safetensors", "typer", "rich", "PyYAML"),
)
_SHOWN = re.compile(
    r"^(ACCELERATE|ACCELER8|FSDP|NCCL|GLOO|TORCH|PYTORCH|CUDA|OMP|MKL|HF|TRANSFORMERS|TRITON)_|^(RANK|WORLD_SIZE)$"
)
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)
_LOGIN = re.compile(r"(?<=://)[^/@\s]+@")


def env(
    config_file: Annotated[Path | None, typer.Option("--config_file", "--config-file", help="YAML to read.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    matrix: Annotated[
        bool, typer.Option("--matrix", help="Print which backend runs which recipe under DDP, FSDP2 and ZeRO instead.")
    ] = False,
) -> None:
    """Print versions, hardware and the effective configuration; secrets are left out."""
    from acceler8.cli import matrix as table
    from acceler8.config import current_environment

    if matrix:
        typer.echo(json.dumps(table.rows(), indent=2) if as_json else table.text(table.rows()))
        return
    report = describe(current_environment(), config_file)
    if as_json:
        typer.echo(json.dumps(report, indent=2))
        return
    for title, rows in report.items():
        typer.echo(f"\n{title}")
        for name, value in rows.items():
            typer.echo(f"  {name}: {value}")


def describe(environ: Mapping[str, str], config_file: Path | None = None) -> dict[str, dict[str, str]]:
    """The report: title -> name -> text. An unusable configuration is reported, not raised."""
    return {
        "Versions": _versions(),
        "Hardware": _hardware(),
        "Environment variables": {name: redact(name, environ[name]) for name in sorted(environ) if _SHOWN.match(name)},
        "Effective configuration": _configuration(environ, config_file),
    }


def redact(name: str, text: str) -> str:
    """``text`` without secrets: all of it if ``name`` sounds like one, else logins in addresses, and in JSON by key."""
    if _SECRET.search(name):
        return "<redacted>"
    try:
        table = json.loads(text)
    except ValueError:
        table = None
    if isinstance(table, dict):
        return json.dumps(
            {key: redact(str(key), value) if isinstance(value, str) else value for key, value in table.items()}
        )
    return _LOGIN.sub("<redacted>@", text)


def _versions() -> dict[str, str]:
    import platform
    from importlib import metadata

    found = {
        "Python": f"{platform.python_version()} ({platform.python_implementation()})",
        "system": platform.platform(),
    }
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _hardware() -> dict[str, str]:
    import torch

    rows = {"CPU cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())}
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        rows["memory"] = f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.1f} GiB"
    rows["CUDA that torch was built with"] = str(torch.version.cuda)
    if not torch.cuda.is_available():
        rows["GPU"] = "none that torch can use; FP8 is emulated"
        return rows
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        can = "FP8" if (properties.major, properties.minor) >= (8, 9) else "no FP8; emulated"
        gib = properties.total_memory / 2**30
        rows[f"GPU {index}"] = f"{properties.name}, sm_{properties.major}{properties.minor} ({can}), {gib:.1f} GiB"
    return rows


def _configuration(environ: Mapping[str, str], config_file: Path | None) -> dict[str, str]:
    from acceler8.config import ENTRIES
    from acceler8.config.resolve import load
    from acceler8.errors import ConfigError

    try:
        effective = load(None, environ, config_file)
    except ConfigError as error:
        return {"unusable": str(error)}
    rows: dict[str, str] = {f"note {i}": note for i, note in enumerate(effective.notes, 1)}
    for path, value in effective.values.items():
        rows[path] = f"{redact(path, ENTRIES[path].setting.text(value.value))}  ({value.source})"
    return rows or {"nothing": "no file, flag or variable sets anything; every setting has its default"}
