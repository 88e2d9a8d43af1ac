"""Real launchers in processes of their own, and a way to see every process that one of them leaves.

Each launcher gets a tag in its environment, which all its descendants inherit: whoever carries it is still there.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
TAG = "ACCELER8_TEST_TAG"
DEADLINE_S = 60.0

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: /proc and PR_SET_PDEATHSIG")

# A shell that runs tests in the background has them ignore SIGINT; a launcher would rightly inherit that.
DRIVER = """
import json, os, signal, sys
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)
for stop in (signal.SIGHUP, signal.SIGQUIT):  # ignored, if the tests run in the background
    signal.signal(stop, signal.SIG_DFL)
from acceler8.errors import LaunchError
from acceler8.launch import LaunchSpec, launch
assert "torch" not in sys.modules, "import acceler8.launch loads torch"
fields = json.loads(sys.argv[1])
fields["command"] = tuple(fields["command"])
if "log_dir" in fields:
    fields["log_dir"] = Path(fields["log_dir"])
try:
    status = launch(LaunchSpec(**fields), parent=os.environ)
except LaunchError as error:
    print(f"LaunchError: {error}", file=sys.stderr)
    status = 2
sys.exit(status)
"""


class Launcher:
    """A launcher process with ``fields`` for its LaunchSpec; ``folder`` is its current folder."""

    def __init__(self, folder: Path, fields: dict[str, object], **popen: object) -> None:
        self.tag = uuid.uuid4().hex
        own = {TAG: self.tag, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
        wrapper = [sys.executable, popen.pop("wrapper")] if "wrapper" in popen else []
        self.process = subprocess.Popen(
            [*wrapper, sys.executable, "-c", DRIVER, json.dumps(fields)],
            env={**os.environ, **own},
            cwd=folder,
            text=True,
            **{"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **popen},
        )

    def processes(self) -> list[int]:
        """Everything that this launcher started and that runs, itself included; zombies have no environment."""
        wanted = f"{TAG}={self.tag}".encode()
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return found

    def finish(self, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        """Wait for the launcher and its streams."""
        out, err = self.process.communicate(stdin, timeout=DEADLINE_S)
        return subprocess.CompletedProcess(self.process.args, self.process.returncode, out, err)

    def assert_nothing_left(self) -> None:
        wait_until(lambda: not self.processes(), lambda: f"still running: {self.processes()}")


@contextlib.contextmanager
def launcher(folder: Path, popen: dict[str, object] | None = None, **fields: object) -> Iterator[Launcher]:
    """A running launcher; whatever happens, nothing of it stays behind."""
    started = Launcher(folder, fields, **(popen or {}))
    try:
        yield started
    finally:
        for pid in (started.process.pid, *started.processes()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with started.process:
            pass


def run(folder: Path, *, stdin: str | None = None, **fields: object) -> subprocess.CompletedProcess[str]:
    """Launch to the end."""
    popen = {} if stdin is None else {"stdin": subprocess.PIPE}
    with launcher(folder, popen, **fields) as started:
        return started.finish(stdin)


def wait_until(condition: Callable[[], object], explain: Callable[[], str] = str) -> None:
    """Return once ``condition()`` holds; a loaded machine has a minute."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {DEADLINE_S} s in vain. {explain()}"
        time.sleep(0.02)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path
