"""What a terminal shows: a moving bar; what a file gets: few lines."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from acceler8.cli.demo_display import DemoDisplay


def _train(display: DemoDisplay, steps: int, first: int = 0) -> None:
    display.training_started("fp8", first, steps)
    for step in range(first + 1, steps + 1):
        display.step_done({"precision": "fp8", "step": step, "loss": 2.5, "time_ms": 100.0, "tokens_per_s": 10_240.0})
    display.training_ended("fp8")


def test_a_terminal_gets_a_bar_with_loss_rate_and_eta():
    out = io.StringIO()
    display = DemoDisplay(Console(file=out, force_terminal=True, width=120, color_system=None))
    _train(display, 50)
    shown = out.getvalue()
    assert "50/50" in shown
    assert "loss 2.500" in shown
    assert "10,240 tokens/s" in shown
    assert "ETA" in shown
    assert "fp8: step" not in shown


@pytest.mark.parametrize(("steps", "lines"), [(1, 1), (9, 9), (400, 10), (1003, 11)])
def test_a_file_gets_few_lines(steps: int, lines: int):
    out = io.StringIO()
    _train(DemoDisplay(Console(file=out, width=80)), steps)
    shown = out.getvalue().splitlines()
    assert shown[0] == f"fp8: training from step 0 to {steps}"
    assert len(shown) == 1 + lines
    assert shown[-1] == f"fp8: step {steps}/{steps}  loss 2.500  10,240 tokens/s  ETA 0 s"


def test_eta_counts_the_steps_that_are_left():
    out = io.StringIO()
    _train(DemoDisplay(Console(file=out, width=80)), 100, first=50)
    assert "step 60/100  loss 2.500  10,240 tokens/s  ETA 4 s" in out.getvalue()
