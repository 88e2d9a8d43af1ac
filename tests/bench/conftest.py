"""A preset of one step, so that the real thing runs within a test's time."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from acceler8.bench.presets import PRESETS, Preset


@pytest.fixture(autouse=True)
def _one_thread():
    """Small work is slowed by a second thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def least() -> Preset:
    return dataclasses.replace(PRESETS["tiny"], layers=1, length=16, check_steps=2, steps=1)
