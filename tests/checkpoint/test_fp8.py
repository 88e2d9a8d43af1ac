"""Which FP8 state of a file is one that a training writes: histories with the amaxes of the step that runs in row 0."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from acceler8.checkpoint.fp8 import fit_fp8
from acceler8.errors import CheckpointError

INF, NAN = float("inf"), float("nan")


def history(row: int, value: float) -> dict[str, Tensor]:
    tensor = torch.ones(4, 2)
    tensor[row, 0] = value
    return {"layers.0.amax_history_bwd": tensor}


@pytest.mark.parametrize("value", [INF, NAN, 0.0])
def test_the_staging_row_holds_what_the_step_after_it_drops(value):
    _, reset = fit_fp8(nn.Linear(4, 4), [], history(0, value), "FP8 file")
    assert "1 saved amax histories, such as layers.0.amax_history_bwd, have no use now" in reset[0]


@pytest.mark.parametrize(("row", "value"), [(1, INF), (3, NAN), (2, -1.0), (0, -1.0), (0, -INF)])
def test_what_is_in_use_is_finite_and_nothing_is_negative(row, value):
    with pytest.raises(CheckpointError, match=r"'layers\.0\.amax_history_bwd' .* must be finite and from 0"):
        fit_fp8(nn.Linear(4, 4), [], history(row, value), "FP8 file")


@pytest.mark.parametrize("name", ["layers.0.scale_bwd", "amax_history_bwd.scale"])
def test_other_state_is_finite(name):
    with pytest.raises(CheckpointError, match="must be finite"):
        fit_fp8(nn.Linear(4, 4), [], {name: torch.tensor([[INF, 1.0]])}, "FP8 file")
