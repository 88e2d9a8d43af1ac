"""A preset of one step, so that the real thing runs within a test's time."""

from __future__ import annotations

import dataclasses

import pytest

from acceler8.bench.presets import PRESETS, Preset


@pytest.fixture
def least() -> Preset:
    return dataclasses.replace(PRESETS["tiny"], layers=1, length=16, check_steps=2, steps=1)
