"""One finished run, shared by the tests that read it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from acceler8.demo.interrupt import StopRequest
from acceler8.demo.run import create_run, execute_run
from acceler8.demo.run_folder import RunFolder
from tests.demo.runs import WISHES, Recorder


@pytest.fixture(scope="session")
def text_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text that the tests' runs read: 60 kB with some structure and some letters outside ASCII."""
    path = tmp_path_factory.mktemp("text") / "täxt.txt"
    lines = (f"Zeile {i}: {i * i} ist das Quadrat von {i}, größer als {i - 1} → {i % 7}\n" for i in range(1000))
    path.write_text("".join(lines), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def wishes(text_path: Path) -> dict[str, Any]:
    return WISHES | {"text": str(text_path)}


@pytest.fixture(scope="session")
def finished(wishes: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """One run that nobody stopped. Tests read it and leave it as it is."""
    with StopRequest() as stop:
        folder, corpus = create_run(wishes, tmp_path_factory.mktemp("runs"))
        execute_run(folder, corpus, Recorder(), stop)
    return folder
