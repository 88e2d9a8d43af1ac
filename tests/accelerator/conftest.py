"""Accelerators that take nothing from the environment of the tests themselves."""

from __future__ import annotations

import pytest

from tests.config.packages import forget_environment


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_environment(monkeypatch)
