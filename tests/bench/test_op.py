"""Operations: every one is right here, and one that is not is shown and not timed."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from acceler8.bench import op as bench
from acceler8.kernels import Quantized

CPU = torch.device("cpu")


@pytest.mark.parametrize("op", bench.all_ops(), ids=lambda op: op.name)
def test_an_operation_is_right_before_it_is_timed(op: bench.Op):
    assert op.check(CPU) == ""
    work, size = op.make((32, 128), CPU)
    work()
    assert size >= 2 * 32 * 128


def test_codes_that_differ_are_seen(monkeypatch: pytest.MonkeyPatch):
    original = bench.quantize

    def one_code_off(*arguments, **options):
        rows, cols, statistics = original(*arguments, **options)
        codes = rows.codes.clone()
        codes.view(torch.uint8)[0, 0] ^= 1
        return Quantized(codes, rows.scale_inv, rows.granularity), cols, statistics

    monkeypatch.setattr(bench, "quantize", one_code_off)
    (op,) = bench.select(["quantize rowwise rows"], bench.all_ops())
    (row,) = bench._rows_of(op, [(32, 128)], CPU, 1e9)
    assert (row.status, row.detail, row.ms) == ("wrong", "rows: codes differ from the reference's", None)


def test_an_operation_that_raises_is_a_row():
    def check(device: torch.device) -> str:
        raise RuntimeError("no such kernel")

    op = dataclasses.replace(bench.all_ops()[0], check=check)
    (row,) = bench._rows_of(op, [(32, 128)], CPU, 1e9)
    assert (row.status, row.detail) == ("error", "RuntimeError: no such kernel")
