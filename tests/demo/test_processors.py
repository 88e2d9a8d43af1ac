"""Processors: the affinity, the quota and a number that was set before each lower the count."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from acceler8.demo import processors
from acceler8.demo.settings import DemoSettings, resolve_settings

needs_affinity = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="needs a system whose processes have an affinity"
)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("100000 100000\n", 1),
        ("50000 100000\n", 1),
        ("150000 100000\n", 2),
        ("800000 100000\n", 8),
        ("max 100000\n", 64),
        ("", 64),
        ("nonsense\n", 64),
        (None, 64),
    ],
)
def test_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None, expected: int):
    path = tmp_path / "cpu.max"
    if content is not None:
        path.write_text(content)
    monkeypatch.setattr(processors, "CGROUP_QUOTA", path)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
    assert processors.usable_processors() == expected


@needs_affinity
def test_affinity():
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert processors.usable_processors() == 1
    finally:
        os.sched_setaffinity(0, before)


def _settings(**asked: Any) -> DemoSettings:
    return resolve_settings({"device": "cpu"} | asked)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """What PyTorch uses; the tests' own single thread would hide a limit."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_small_models_get_one_thread_and_larger_ones_what_there_is(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(processors, "usable_processors", lambda: 64)
    assert processors.thread_count(_settings(size="small")) == 1
    assert processors.thread_count(_settings(size="base")) == 2
    monkeypatch.setattr(processors, "usable_processors", lambda: 1)
    assert processors.thread_count(_settings(size="base")) == 1


@pytest.mark.usefixtures("two_threads")
def test_threads_are_as_before_afterwards():
    inside = []

    def fail() -> None:
        with processors.threads_of(_settings(size="tiny")):
            inside.append(torch.get_num_threads())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert inside == [1]
    assert torch.get_num_threads() == 2
