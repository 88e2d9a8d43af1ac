"""A loader that N processes left in the middle of an epoch gives M processes what was not used, once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import IterableDataset

from acceler8 import Accelerator
from acceler8.accelerator import epoch_position
from acceler8.errors import CheckpointError
from tests.accelerator.resume_data import CHANGES, LOADERS, ROUNDS, SAMPLES, Stream

ROOT = Path(__file__).parent.parent.parent
EVERYTHING = set(range(SAMPLES))


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    if not hasattr(os, "fork"):
        pytest.skip("needs fork")
    folder = tmp_path_factory.mktemp("data")
    command = [sys.executable, "-W", "ignore", "-m", "tests.accelerator.resume_data", str(folder)]
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    out = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert out.returncode == 0, out.stderr[-5000:]
    return torch.load(folder / "facts.pt", weights_only=False)


def in_order(processes: list[list[list[int]]], remainder: int = 0) -> list[int]:
    """Samples round by round; of the last one so many, for the others are copies that fill it."""
    rounds = [
        [x for batches in processes if i < len(batches) for x in batches[i]] for i in range(max(map(len, processes)))
    ]
    last = rounds[-1][:remainder] if remainder > 0 else rounds[-1]
    return [x for one in rounds[:-1] for x in one] + last


def check_rest(name: str, used: list[int], found: list[dict]) -> None:
    rest = in_order([one[name]["rest"] for one in found], found[0][name]["remainder"])
    if name == "any size":  # whole batches are given again to fill the last round
        before = in_order([one[name]["rest"][:-1] for one in found])
        assert EVERYTHING - set(used) <= set(rest)
        assert len(set(before + used)) == len(before + used)
    elif name == "drop last":
        assert len(set(rest)) == len(rest)
        assert set(rest) <= EVERYTHING - set(used)
        assert len(EVERYTHING - set(used) - set(rest)) < 4 * len(found)
    else:
        assert sorted(used + rest) == sorted(EVERYTHING)
    following = in_order([one[name]["next"] for one in found])
    assert len(EVERYTHING - set(following)) < (4 * len(found) if name == "drop last" else 1)


@pytest.mark.parametrize(("was", "now"), CHANGES)
@pytest.mark.parametrize("name", LOADERS)
def test_none_twice_and_none_lost(facts, name, was, now):
    used, found = in_order([one[name] for one in facts["used"][was]]), facts["rest"][was, now]
    resets = {one[name]["reset"] for one in found}
    lines = [line for reset in resets for line in reset if line.startswith("loader 0")]
    if name == "windows":  # three micro-batches of two a step: the third comes again
        size = len(used) // ROUNDS
        used = used[: 2 * size]
        assert all("1 batches of the unfinished step come again; it goes on behind the" in line for line in lines)
    if name == "stream of a worker":
        assert len({line for line in lines if f"{len(used)} samples were used and come again; its epoch" in line}) == 1
        assert set(in_order([one[name]["rest"] for one in found])) == EVERYTHING
        return
    assert lines
    assert all("it goes on behind the" in line for line in lines)
    check_rest(name, used, found)


@pytest.mark.parametrize("name", [name for name in LOADERS if name not in ("windows", "stream of a worker")])
def test_a_second_change_goes_on_from_the_first(facts, name):
    """4 processes, then 2, then 2 again or 1."""
    used = in_order([one[name] for one in facts["used"][4]])
    middle = in_order([one[name]["rest"] for one in facts["middle"]])
    for found in facts["end"].values():
        check_rest(name, used + middle, found)


def test_orders_are_the_ones_that_were_left(facts):
    """The rest comes in the order in which those that left would have used it."""
    for was, now in CHANGES:
        for name in ("shuffled", "by seed", "subset", "stateful"):
            (left,) = {tuple(in_order([one[name] for one in facts["used"][was]]))}
            rest = in_order([one[name]["rest"] for one in facts["rest"][was, now]])
            other = in_order([one[name]["rest"] for one in facts["rest"][was, {1: 2, 2: 4, 4: 1}[was]]])
            count = SAMPLES - len(left)
            assert rest[:count] == other[:count], (name, was, now)


class Plain(IterableDataset):
    def __iter__(self):
        return iter(range(40))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_resumed_twice_does_not_count_the_first_time_twice(workers):
    def start(state=None):
        accelerator = Accelerator(cpu=True)
        loader = accelerator.prepare(torch.utils.data.DataLoader(Plain(), 4, num_workers=workers))
        if state is not None:
            loader.load_state_dict(state)
        return loader

    state, seen = None, []
    for _ in range(3):
        loader = start(state)
        batches = iter(loader)
        seen += torch.cat([next(batches) for _ in range(2)]).tolist()
        state = loader.state_dict()
    assert seen + torch.cat(list(start(state))).tolist() == list(range(40))


def test_the_length_is_that_of_a_whole_epoch_behind_a_resume_too():
    first = Accelerator(cpu=True).prepare(torch.utils.data.DataLoader(range(40), 4))
    batches = iter(first)
    for _ in range(3):
        next(batches)
    other = Accelerator(cpu=True).prepare(torch.utils.data.DataLoader(range(40), 8))
    other.load_state_dict(first.state_dict())
    assert len(other) == 5
    assert sum(map(len, other)) == 28
    assert len(other) == len(list(other)) == 5


def test_a_stream_that_knows_its_place_goes_on_by_itself():
    class Knows(Stream):
        at = 0

        def __iter__(self):
            while self.at < 40:
                self.at += 1
                yield self.at - 1
            self.at = 0

        def state_dict(self):
            return {"at": self.at}

        def load_state_dict(self, state):
            self.at = state["at"] + 400 * (state["at"] > 400)  # a jump shows who read

    def start():
        return Accelerator(cpu=True).prepare(torch.utils.data.DataLoader(Knows(40), 4))

    loader = start()
    batches = iter(loader)
    first = torch.cat([next(batches) for _ in range(3)]).tolist()
    state = loader.state_dict()
    assert epoch_position.holds_state(state["loader"])
    again = start()
    again.load_state_dict(state)
    assert first + torch.cat(list(again)).tolist() == list(range(40))


@pytest.mark.parametrize(
    "damage",
    [
        {"used": []},
        {"used": {"rounds": 1}},
        {"used": {"base": {"samples": -1, "batches": 0}, "rounds": 0, "round_samples": 1, "round_batches": 1}},
        {"used": {"base": {"samples": 0, "batches": 0}, "rounds": "1", "round_samples": 1, "round_batches": 1}},
        {"go_on": {"samples": 1}},
        {"go_on": {"samples": 1, "batches": None, "loader": 3, "used": {"samples": 1, "batches": None}}},
        {"go_on": {"samples": 1, "batches": None, "loader": None, "used": None}},
    ],
)
def test_a_damaged_place_is_refused(damage):
    loader = Accelerator(cpu=True).prepare(torch.utils.data.DataLoader(range(12), 4))
    next(iter(loader))
    with pytest.raises(CheckpointError, match=r"the state of a loader has (used|go_on)="):
        loader.load_state_dict(loader.state_dict() | damage)
