"""Where configuration files lie, and writing one whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from acceler8.config.sources import Effective, merge
from acceler8.config.yaml_file import read_yaml, to_nested, to_yaml
from acceler8.errors import ConfigError


def own_default_file(environ: Mapping[str, str]) -> Path:
    """acceler8's default file, there or not: ``acceler8/config.yaml`` in the user's folder of configurations.

    That is XDG_CONFIG_HOME if it is set to an absolute path, as its specification asks; else ``~/.config``, or on
    Windows ``%APPDATA%``.
    """
    base = environ.get("XDG_CONFIG_HOME", "")
    if os.path.isabs(base):
        return Path(base) / "acceler8" / "config.yaml"
    if sys.platform == "win32" and environ.get("APPDATA"):
        return Path(environ["APPDATA"]) / "acceler8" / "config.yaml"
    return _home(environ) / ".config" / "acceler8" / "config.yaml"


def accelerate_default_file(environ: Mapping[str, str]) -> Path | None:
    """Accelerate's default file, where there is one: YAML, else JSON, in its folder of the Hugging Face cache."""
    cache = environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = _expanded(environ.get("HF_HOME") or f"{cache}/huggingface", environ) / "accelerate"
    found = [folder / name for name in ("default_config.yaml", "default_config.json") if (folder / name).is_file()]
    return found[0] if found else None


def default_file(environ: Mapping[str, str]) -> tuple[Path | None, str]:
    """The file that is read when none is named, and a note that says so; None and nothing if there is none."""
    own = own_default_file(environ)
    if own.is_file():
        return own, f"reading {own}, the default file"
    theirs = accelerate_default_file(environ)
    if theirs:
        return theirs, f"reading {theirs}, Accelerate's default file (there is no {own})"
    return None, ""


def render(path: Path, effective: Effective) -> str:
    """What ``write_file`` writes: JSON for a name that ends in .json, else YAML."""
    if path.suffix == ".json":
        return json.dumps(to_nested(effective), indent=2) + "\n"
    return to_yaml(effective)


def write_file(path: Path, effective: Effective) -> None:
    """Write the file from which every value reads back equal; the old file stays if anything fails.

    A link is followed, so that the file it names changes and the link stays. Raises ConfigError if the folder cannot
    be written to.
    """
    target = path.resolve()
    try:
        mode = target.stat().st_mode & 0o777 if target.exists() else 0o666 & ~_umask()
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=target.suffix, dir=target.parent)
        temporary = Path(name)
        try:
            with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
                file.write(render(target, effective))
                file.flush()
                os.fsync(file.fileno())
            _check_reads_back(temporary, effective)
            temporary.chmod(mode)
            os.replace(temporary, target)
        finally:
            with contextlib.suppress(FileNotFoundError):
                temporary.unlink()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror}); name another file") from None


def _check_reads_back(temporary: Path, effective: Effective) -> None:
    found = merge([read_yaml(temporary)]).given()
    assert found == effective.given(), "the file would read back as another configuration"


def _umask() -> int:
    umask = os.umask(0o077)
    os.umask(umask)
    return umask


def _home(environ: Mapping[str, str]) -> Path:
    return _expanded("~", environ)


def _expanded(text: str, environ: Mapping[str, str]) -> Path:
    """``~`` by the HOME of this environment, which need not be that of the process."""
    if text == "~" or text.startswith("~/"):
        home = environ.get("HOME") or os.path.expanduser("~")
        return Path(home + text[1:])
    return Path(text)
