"""The table of levels: its words, what it takes, and that everybody reads this one."""

from __future__ import annotations

import pytest

from acceler8.config.registry import ENTRIES
from acceler8.errors import ConfigError
from acceler8.levels import LEVELS, level, table

MOST = {"O1": 11.1, "O2": 6.2, "O3": 7.2}


@pytest.mark.parametrize("name", LEVELS)
def test_a_level_takes_what_was_promised(name):
    assert LEVELS[name].bytes_per_parameter() <= MOST[name]
    assert LEVELS[name].bytes_per_parameter(128) <= MOST[name]
    assert LEVELS[name].name == name


def test_levels_are_ms_amps():
    assert [(made.gradient, made.exp_avg, made.exp_avg_sq) for made in LEVELS.values()] == [
        ("fp8", "fp32", "fp32"),
        ("fp8", "fp8", "fp16"),
        ("fp8", "fp8", "fp16"),
    ]
    assert [made.keeps_weight_codes for made in LEVELS.values()] == [False, False, True]
    assert {made.weight for made in LEVELS.values()} == {"bf16"}


def test_settings_have_these_levels():
    kind = ENTRIES["fp8_config.opt_level"].setting.kind
    for name in LEVELS:
        assert kind.parse(name) == name
    assert tuple(kind.words) == tuple(LEVELS)


def test_choices_can_be_made_one_by_one():
    made = level("o2", exp_avg_sq="fp8", master="bf16_remainder", gradient="weight")
    assert made.parts() == {
        "weight": 2.0,
        "weight codes": 0.0,
        "master": 2.0,
        "gradient": 2.0,
        "moments": 2 * (1 + 4 / 128),
    }
    assert level(made) == made
    assert level("O1", weight="fp16", master="none").bytes_per_parameter() == LEVELS["O1"].bytes_per_parameter()
    assert level("O1", weight="fp32").parts()["weight"] == 4.0


BAD = [
    (lambda: level("O4"), r"unknown opt_level 'O4'; valid: O1, O2, O3"),
    (lambda: level("O2", exp_avg_sq="fp4"), r"unknown exp_avg_sq 'fp4'"),
    (lambda: level("O2", moments="fp8"), r"unknown choice of a level 'moments'; .*exp_avg"),
    (lambda: level("O2", gradient="bf16"), r"unknown gradient 'bf16'; valid: fp8, weight"),
    (lambda: level("O2", weight="fp16"), r"weight='fp16' with master='stochastic'.*allowed: none"),
    (lambda: level("O2", master="half"), r"unknown master 'half'"),
]


@pytest.mark.parametrize(("make", "message"), BAD)
def test_what_there_is_not_is_said(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_the_table_has_a_row_for_each():
    rows = [line.split(" | ") for line in table().splitlines()]
    assert [row[0].removeprefix("| ") for row in rows[2:]] == list(LEVELS)
    assert [float(row[-1].removesuffix(" |")) for row in rows[2:]] == [11.03, 6.09, 7.09]
