"""Flags: both spellings, bare booleans, where the script begins, and what is wrong with a line."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from acceler8.config import ENTRIES, Precedence, parse_flags
from acceler8.errors import ConfigError
from tests.config.support import refusal


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("--fp8_margin 2", {"fp8_config.margin": 2}),
        ("--fp8-margin=2", {"fp8_config.margin": 2}),
        ("--fp8_margin=-2", {"fp8_config.margin": -2}),
        ("--fp8_margin -2", {"fp8_config.margin": -2}),
        ("--fp8_use_autocast_during_eval", {"fp8_config.use_autocast_during_eval": True}),
        ("--fp8_use_autocast_during_eval false", {"fp8_config.use_autocast_during_eval": False}),
        ("--cpu", {"use_cpu": True}),
        ("--use_fsdp", {"distributed_type": "FSDP"}),
        ("--use-deepspeed --zero_stage 2", {"distributed_type": "DEEPSPEED", "deepspeed_config.zero_stage": 2}),
        ("--multi_gpu", {"distributed_type": "MULTI_GPU"}),
        ("--multi_gpu=false", {}),
        ("--multi_gpu --distributed_type multi_gpu", {"distributed_type": "MULTI_GPU"}),
        (
            "--fp8_override_linear_precision true,false,false",
            {"fp8_config.override_linear_precision": (True, False, False)},
        ),
        ("--fp8_margin 1 --fp8_margin 1", {"fp8_config.margin": 1}),
        ("--fp8_skip=", {}),
    ],
)
def test_read(line: str, values: dict[str, Any]):
    parsed = parse_flags(line.split())
    assert {path: value.value for path, value in parsed.route.values.items()} == values
    assert parsed.rest == []
    assert all(value.source.precedence is Precedence.FLAG for value in parsed.route.values.values())


def test_after_the_first_other_word_all_belongs_to_the_script():
    parsed = parse_flags(["--cpu", "train.py", "--fp8_margin", "x", "--", "--unknown"])
    assert parsed.rest == ["train.py", "--fp8_margin", "x", "--", "--unknown"]
    assert parse_flags(["--cpu", "--", "--odd name.py"]).rest == ["--odd name.py"]
    assert parse_flags(["-"]).rest == ["-"]


def test_flags_of_the_caller():
    parsed = parse_flags(["--quiet", "--log-dir", "x", "-m", "pkg"], switches=("quiet", "m"), options=("log_dir",))
    assert parsed.others == {"quiet": True, "log_dir": "x", "m": True}
    assert parsed.rest == ["pkg"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--fp8_margn 2", "command line: unknown flag '--fp8_margn'; did you mean '--fp8_margin'"),
        ("--fp8_margin", "--fp8_margin: got no value; allowed: an integer"),
        ("--fp8_margin --cpu", "--fp8_margin: got no value"),
        ("--fp8_margin 010", "--fp8_margin: fp8_config.margin got '010'"),
        ("--fp8_margin 1 --fp8-margin=2", "got a second, different value"),
        ("--use_fsdp --multi_gpu", "distributed_type got a second, different value"),
        ("-fp8_margin 2", "two dashes"),
        ("--multi_gpu=maybe", "--multi_gpu: got 'maybe'; allowed: true, false"),
        ("--quiet=maybe", "--quiet: got 'maybe'"),
        ("--=x", "unknown flag"),
        ("--cpu=maybe", "--cpu: use_cpu got 'maybe'"),
    ],
)
def test_a_wrong_line_is_named(line: str, message: str):
    with pytest.raises(ConfigError) as caught:
        parse_flags(line.split(), switches=("quiet",))
    assert message in str(caught.value)


FLAGS = [f"--{name}" for entry in ENTRIES.values() for name in entry.setting.flags]


@given(
    words=st.lists(st.text() | st.sampled_from([*FLAGS, "--use_fsdp", "--"]) | st.text().map("--fp8_margin={}".format))
)
@examples(max_examples=300, deadline=None)
def test_any_line_is_read_or_refused_in_one_line(words: list[str]):
    message = refusal(lambda: parse_flags(words))
    assert message is None or len(message.splitlines()) == 1
