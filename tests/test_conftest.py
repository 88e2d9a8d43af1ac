"""The ``requires`` marker says what a machine lacks; workers that share out the tests leave some of them together."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.conftest import missing_hardware, pytest_runtest_setup


def machine_with(monkeypatch: pytest.MonkeyPatch, *capabilities: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capabilities))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: capabilities[i])


def test_no_gpu_is_named(monkeypatch):
    machine_with(monkeypatch)
    assert missing_hardware(sm=90).startswith("needs 1 CUDA GPU of sm_90 or newer; this ")


@pytest.mark.parametrize(
    ("need", "has", "reason"),
    [
        ({}, [(7, 5)], None),
        ({"sm": 90}, [(9, 0)], None),
        ({"sm": 90}, [(12, 0)], None),
        ({"sm": 90, "gpus": 2}, [(9, 0), (9, 0)], None),
        ({"sm": 90}, [(8, 9)], "needs 1 CUDA GPU of sm_90 or newer; this machine has sm_89"),
        ({"gpus": 2}, [(9, 0)], "needs 2 CUDA GPUs; this machine has sm_90"),
        (
            {"sm": 90, "gpus": 2},
            [(9, 0), (8, 0)],
            "needs 2 CUDA GPUs of sm_90 or newer; this machine has sm_90, sm_80",
        ),
    ],
)
def test_need_against_machine(monkeypatch, need, has, reason):
    machine_with(monkeypatch, *has)
    assert missing_hardware(**need) == reason


def test_a_misspelt_need_is_an_error():
    with pytest.raises(TypeError, match="gpu"):
        missing_hardware(gpu=2)


def test_a_marked_test_is_skipped_with_the_reason(request):
    request.node.add_marker(pytest.mark.requires(gpus=1000))
    with pytest.raises(pytest.skip.Exception, match="needs 1000 CUDA GPUs; this "):
        pytest_runtest_setup(request.node)


def test_generators_are_seeded_apart(make_generator):
    first, again, other = (torch.rand(4, generator=make_generator(seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_what_is_made_once_stays_in_one_worker():
    """What a file makes once would be made by each worker that gets some of its tests."""
    pytest.importorskip("xdist")
    from tests.workers import TOGETHER, piece_of

    root = Path(__file__).parents[1]
    makes_once = re.compile(r"@pytest\.fixture\(.*scope=")
    files = {path.relative_to(root).as_posix(): path.read_text() for path in root.glob("tests/*/test_*.py")}
    assert files.keys() >= TOGETHER.keys()
    assert {name for name, text in files.items() if makes_once.search(text)} - TOGETHER.keys() == set()
    several = {name for name, text in TOGETHER.items() if "processes" in text}
    assert len({piece_of(f"{name}::test_a[{i}]") for i, name in enumerate(several)}) == 1
    assert piece_of("tests/nn/test_linear.py::test_a[0]") != piece_of("tests/nn/test_linear.py::test_a[1]")
