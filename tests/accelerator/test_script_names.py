"""What scripts import beside the Accelerator: seeds, loggers, handlers."""

from __future__ import annotations

import logging
import random
import subprocess
import sys

import numpy as np
import pytest
import torch

import acceler8
from acceler8 import utils
from acceler8.errors import ConfigError
from acceler8.logging import get_logger
from acceler8.utils import send_to_device, set_seed


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(()).item()


def test_a_seed_decides_what_is_drawn():
    set_seed(7)
    first = draw()
    assert len(set(first)) == 3
    set_seed(7)
    assert draw() == first
    set_seed(8)
    assert all(a != b for a, b in zip(draw(), first, strict=True))


def test_a_seed_of_each_process(monkeypatch: pytest.MonkeyPatch):
    set_seed(10)
    want = draw()
    monkeypatch.setenv("RANK", "3")
    set_seed(7, device_specific=True)
    assert draw() == want
    set_seed(7)
    assert draw() != want


def test_seeds_and_algorithms_that_are_deterministic():
    before = torch.are_deterministic_algorithms_enabled()
    try:
        set_seed(0, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(before)


def test_the_main_process_speaks(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    log = get_logger("tests.script", "INFO")
    with caplog.at_level(logging.INFO):
        log.info("of the %s", "first")
        log.debug("too low")
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "2")
        log.info("of the second")
        log.info("of each", main_process_only=False)
        log.warning_once("once", main_process_only=False)
        log.warning_once("once", main_process_only=False)
    assert [r.getMessage() for r in caplog.records] == ["of the first", "of each", "once"]
    assert {r.filename for r in caplog.records} <= {"test_script_names.py", "logging.py"}
    assert caplog.records[0].filename == "test_script_names.py"


TURNS = """
import sys
from torch import distributed
rank = int(sys.argv[1])
distributed.init_process_group("gloo", init_method=sys.argv[2], rank=rank, world_size=2)
import logging
from acceler8.logging import get_logger
logging.basicConfig(level="INFO", stream=sys.stdout, format="%(message)s")
get_logger("turns").info(f"turn of {rank}", main_process_only=False, in_order=True)
get_logger("turns").info(f"main {rank}")
distributed.destroy_process_group()
"""


def test_processes_take_turns(tmp_path):
    where = f"file://{tmp_path}/meet"
    workers = [
        subprocess.Popen([sys.executable, "-c", TURNS, str(rank), where], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    said = [worker.communicate(timeout=100)[0].splitlines() for worker in workers]
    assert said == [["turn of 0", "main 0"], ["turn of 1"]]


def test_handlers_come_from_the_package_and_from_utils():
    for name in ("DistributedDataParallelKwargs", "DataLoaderConfiguration", "InitProcessGroupKwargs", "ProfileKwargs"):
        assert getattr(acceler8, name) is getattr(utils, name)
    moved = send_to_device({"a": [torch.ones(2)], "b": "text"}, torch.device("cpu"))
    assert moved["b"] == "text"
    assert torch.equal(moved["a"][0], torch.ones(2))
    with pytest.raises(AttributeError, match="set_seed"):
        _ = utils.find_executable_batch_size


def test_a_handler_of_accelerates_is_told_apart():
    accelerate = pytest.importorskip("accelerate")
    theirs = accelerate.DistributedDataParallelKwargs()
    with pytest.raises(
        ConfigError, match="DistributedDataParallelKwargs of accelerate; allowed: acceler8's; write from"
    ):
        acceler8.Accelerator(cpu=True, kwargs_handlers=[theirs])
