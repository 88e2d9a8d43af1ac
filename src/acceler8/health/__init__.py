"""Seeing what quantisation does while a model trains."""

from __future__ import annotations

from acceler8.health.selftest import SelftestReport, selftest
from acceler8.health.statistics import Statistics, record_statistics

__all__ = ["SelftestReport", "Statistics", "record_statistics", "selftest"]
