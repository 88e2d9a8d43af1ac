from __future__ import annotations

import json
from collections import Counter, OrderedDict
from enum import IntEnum, StrEnum

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from acceler8.checkpoint.tree import decode, encode
from acceler8.errors import CheckpointError
from tests.checkpoint.support import assert_same

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
KEYS = st.text() | st.integers() | st.sampled_from(["$tensor", "$dict", "a.b", "a"]) | st.none() | st.booleans()
TREES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(KEYS, inner)
        | st.dictionaries(st.text(), inner).map(OrderedDict)
    ),
    max_leaves=20,
)


def round_trip(value):
    encoded, tensors = encode(value, "state")
    return decode(json.loads(json.dumps(encoded, allow_nan=False)), tensors)


@given(TREES)
@settings(deadline=None, derandomize=True)
def test_any_tree_comes_back_exactly(value):
    assert_same(round_trip(value), value)


@pytest.mark.parametrize(
    "value",
    [
        -0.0,
        5e-324,
        float("nan"),
        float("-inf"),
        2**200,
        (),
        {},
        {"": 1},
        {"$tensor": "x"},
        {0: "a", "0": "b"},
        {(1, None): [2]},
        Counter({3: 2, 8: 1}),
        torch.Size([2, 3]),
    ],
    ids=repr,
)
def test_values_that_json_has_no_word_for(value):
    expected = tuple(value) if isinstance(value, torch.Size) else value
    assert_same(round_trip(value), expected)


def test_plain_values_stand_in_the_json_as_themselves():
    value = {"lr": 0.1, "names": ["a", "b"], "on": True, "none": None}
    assert encode(value, "state") == (value, {})


def test_tensors_are_named_by_their_path():
    a, b, c = torch.zeros(1), torch.ones(2), torch.ones(3)
    _, tensors = encode({"x": {"y": a}, "x.y": b, "z": [c]}, "state")
    assert list(tensors) == ["x.y", "x.y#1", "z.0"]
    assert tensors["x.y"] is a
    assert tensors["x.y#1"] is b
    decoded = round_trip({"x": {"y": a}, "x.y": b})
    assert decoded["x"]["y"] is a
    assert decoded["x.y"] is b


def test_subclasses_come_back_plain():
    class Colour(StrEnum):
        RED = "red"

    class Level(IntEnum):
        HIGH = 3

    np = pytest.importorskip("numpy")
    assert_same(round_trip([Colour.RED, Level.HIGH, np.float64(0.1)]), ["red", 3, 0.1])


@pytest.mark.parametrize(
    "value", [object(), {1, 2}, b"bytes", lambda: None, torch.float32, 1j], ids=lambda v: type(v).__name__
)
def test_what_cannot_be_held_is_named(value):
    with pytest.raises(CheckpointError, match=r"extra\.scheduler\.lambdas\.1 is a .*allowed are None, bool"):
        encode({"scheduler": {"lambdas": [None, value]}}, "extra")


def test_an_unknown_word_is_an_error():
    with pytest.raises(ValueError, match=r"\$pickle"):
        decode({"$pickle": "x"}, {})


def test_what_holds_itself_and_what_is_too_long():
    cycle: list = []
    cycle.append({"a": cycle})
    with pytest.raises(CheckpointError, match=r"state\.v\.0\.a\.\.\. is nested more than 100 deep, or holds itself"):
        encode({"v": cycle}, "state")
    with pytest.raises(CheckpointError, match=r"state\.v is an integer of 16610 bits; allowed: up to 13000; keep"):
        encode({"v": 10**5000}, "state")
    deep: object = 10**3900
    for _ in range(99):
        deep = {1: deep}
    assert decode(json.loads(json.dumps(encode(deep, "state")[0], indent=1)), {}) == deep
