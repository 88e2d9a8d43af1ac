"""Packages that look installed, for tests of what is found without importing it."""

from __future__ import annotations

import importlib
import os
import sys
from importlib import util
from pathlib import Path

import pytest


def install(monkeypatch: pytest.MonkeyPatch, folder: Path, module: str, version: str, name: str | None = None) -> None:
    """Put a distribution on the path whose import fails: whoever only looks does not notice."""
    _forget_module(monkeypatch, module)
    (folder / module).mkdir()
    (folder / module / "__init__.py").write_text("raise RuntimeError('imported')\n")
    info = folder / f"{(name or module).replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name or module}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(str(folder))
    importlib.invalidate_caches()


def uninstall(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    """Let packages look missing, those installed later by ``install`` not."""
    for module in modules:
        _forget_module(monkeypatch, module)
    found = util.find_spec

    def find_spec(name: str, package: str | None = None) -> object:
        spec = found(name, package)
        return None if name in modules and spec is not None and "site-packages" in str(spec.origin) else spec

    monkeypatch.setattr(util, "find_spec", find_spec)


def _forget_module(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    """Let a package that another test imported be looked for on the path."""
    monkeypatch.delitem(sys.modules, module, raising=False)


def forget_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take away what this process's environment says about a training."""
    for name in list(os.environ):
        if name.startswith(("ACCELERATE_", "ACCELER8_", "FSDP_")) or name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
            monkeypatch.delenv(name)
