"""What each kind takes, refuses, and writes so that it reads back."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from acceler8.config import ENTRIES
from acceler8.config.kinds import (
    Bool,
    Choice,
    GpuIds,
    Host,
    Int,
    Names,
    Number,
    Stages,
    Steps,
    Table,
    Text,
    ThreeBools,
    Words,
)
from tests.config.support import values_of

TAKEN = [
    (Bool(), "Yes", True),
    (Bool(), " off ", False),
    (Bool(), 1, True),
    (Int(), " 7 ", 7),
    (Int(), "1_000", 1000),
    (Int(), "-3", -3),
    (Number(), "1e3", 1000.0),
    (Number(), 2, 2.0),
    (Choice(("TE", "NO")), "te", "TE"),
    (Choice(("TE", "NO")), False, "NO"),
    (Text(), 0, "0"),
    (Steps(), " 10 : 20", "10:20"),
    (Steps(), "0:", ":"),
    (Stages(), " 10 : ALL, 0:4", "0:4,10:all"),
    (Stages(), {0: 4, "10": "all"}, "0:4,10:all"),
    (Stages(), '{"0": 4, "10": "all"}', "0:4,10:all"),
    (Host(), "10.0.0.1", "10.0.0.1"),
    (Host(), "fe80::1", "fe80::1"),
    (GpuIds(), "ALL", "all"),
    (GpuIds(), " 1, 0", "1,0"),
    (Text(), "  a b ", "a b"),
    (Names(), "a, 'b' ,", ("a", "b")),
    (Names(), "[a, b]", ("a", "b")),
    (Names(), "(a)", ("a",)),
    (Names(), '["a", "none"]', ("a", "none")),
    (Names(), "layers.[01].*,*.[ab]", ("layers.[01].*", "*.[ab]")),
    (Names(), "[01]*,x[2]", ("[01]*", "x[2]")),
    (Names(), [], ()),
    (Names(), "[]", ()),
    (Words(("AO", "TE")), "te,ao", ("TE", "AO")),
    (ThreeBools(), "(false, False, true)", (False, False, True)),
    (ThreeBools(), "no,no,yes", (False, False, True)),
    (ThreeBools(), True, (True, True, True)),
    (ThreeBools(), "false", (False, False, False)),
    (ThreeBools(), "(true,)", (True, True, True)),
    (ThreeBools(), [0, "1", False], (False, True, False)),
    (Table(), '{"A": true, "B": 1.5}', {"A": "true", "B": "1.5"}),
]
REFUSED = [
    (Bool(), "maybe"),
    (Bool(), 2),
    (Bool(), None),
    (Bool(), []),
    (Int(), True),
    (Int(), "010"),
    (Int(), "0x10"),
    (Int(), "1.0"),
    (Int(), 1.0),
    (Int(), "٣"),
    (Int(), "9" * 40),
    (Int(0, 3), 4),
    (Int(0, 3), -1),
    (Number(), "nan"),
    (Number(), "inf"),
    (Number(), "1e999"),
    (Number(), "٣"),
    (Number(), True),
    (Choice(("TE",)), "T"),
    (Text(), "a\nb"),
    (Text(), "a\0b"),
    (Text(), "a\udc80"),
    (Text(), ["a"]),
    (Steps(), 10),
    (Steps(), ["1", "2"]),
    (Stages(), 4),
    (Stages(), ["0:4"]),
    (Stages(), "{0: 4}"),
    (Stages(), "0:4,5:2"),
    (Host(), "http://host"),
    (Host(), "1.2.3"),
    (Host(), "-a"),
    (GpuIds(), "0,0"),
    (GpuIds(), "0,x"),
    (GpuIds(), "-1"),
    (Text(), True),
    (Names(), ["a,b"]),
    (Names(), [1]),
    (Names(), '[["a"]]'),
    (Words(("AO", "TE")), "ao,ao"),
    (Words(("AO", "TE")), "[]"),
    (ThreeBools(), "true,false"),
    (ThreeBools(), [True] * 4),
    (ThreeBools(), "((((true))))x"),
    (Table(), "[1]"),
    (Table(), {"a": ["b"]}),
    (Table(), {1: "b"}),
    (Table(), "{"),
]


@pytest.mark.parametrize(("kind", "raw", "value"), TAKEN)
def test_taken(kind: Any, raw: Any, value: Any):
    found = kind.parse(raw)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(("kind", "raw"), REFUSED)
def test_refused(kind: Any, raw: Any):
    with pytest.raises((ValueError, TypeError)):
        kind.parse(raw)


@given(data=st.data())
def test_text_reads_back(data: st.DataObject):
    setting = ENTRIES[data.draw(st.sampled_from(list(ENTRIES)))].setting
    value = data.draw(values_of(setting.kind))
    text = setting.kind.text(value)
    assert "\n" not in text
    assert "\0" not in text
    assert setting.parse(text) == value
    assert setting.parse(value) == value


@pytest.mark.parametrize("raw", ["", " ", "None", "NULL", "~", None])
def test_nothing_is_nothing(raw: Any):
    for path, entry in ENTRIES.items():
        is_word = isinstance(raw, str) and raw.lower() in getattr(entry.setting.kind, "words", ())
        assert (entry.setting.parse(raw) is None) == (not is_word), path


@pytest.mark.parametrize(("path", "raw"), [("fp8_config.margin", 99), ("fp8_config.backend", "x" * 500), ("debug", {})])
def test_a_refusal_says_got_and_allowed_on_one_short_line(path: str, raw: Any):
    with pytest.raises(ValueError, match=r"^got .*; allowed: ") as caught:
        ENTRIES[path].setting.parse(raw)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("path", ENTRIES)
def test_defaults_of_backends_are_valid(path: str):
    setting = ENTRIES[path].setting
    for value in setting.defaults.values():
        assert setting.parse(value) == value
