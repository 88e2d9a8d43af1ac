"""Variables, as Accelerate's launcher writes them and as people do."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from acceler8.config import ENTRIES, Precedence, read_environment, write_environment
from acceler8.config.environment import SOURCES
from acceler8.errors import ConfigError
from tests.config.support import effective_of, refusal


@pytest.mark.parametrize(
    ("environ", "path", "value"),
    [
        ({"ACCELERATE_MIXED_PRECISION": "FP8"}, "mixed_precision", "fp8"),
        ({"ACCELERATE_FP8_BACKEND": "te"}, "fp8_config.backend", "TE"),
        ({"ACCELERATE_FP8_FORMAT": "hybrid"}, "fp8_config.fp8_format", "HYBRID"),
        ({"ACCELERATE_FP8_OVERRIDE_WGRAD": "True"}, "fp8_config.override_linear_precision", (False, False, True)),
        ({"ACCELERATE_FP8_OVERRIDE_FPROP": "0"}, "fp8_config.override_linear_precision", (False,) * 3),
        ({"ACCELERATE_USE_FSDP": "true"}, "distributed_type", "FSDP"),
        ({"ACCELERATE_USE_DEEPSPEED": "1"}, "distributed_type", "DEEPSPEED"),
        ({"ACCELERATE_USE_FSDP": "false"}, "distributed_type", None),
        ({"FSDP_TRANSFORMER_CLS_TO_WRAP": "A,B"}, "fsdp_config.fsdp_transformer_layer_cls_to_wrap", ("A", "B")),
        ({"ACCELERATE_CPU_AFFINITY": "yes"}, "enable_cpu_affinity", True),
        ({"ACCELERATE_FP8_MARGIN": ""}, "fp8_config.margin", None),
        ({"accelerate_fp8_margin": "1"}, "fp8_config.margin", None),
    ],
)
def test_read(environ: dict[str, str], path: str, value: Any):
    found = read_environment(environ).values.get(path)
    assert (found.value if found else None) == value
    if found:
        assert found.source.precedence is Precedence.ENVIRONMENT
        assert found.source.where == next(iter(environ))


def test_dead_variables_are_read_with_a_note():
    layer = read_environment({"ACCELERATE_FP8_AMAX_HISTORY_LENGTH": "7"})
    assert layer.values["fp8_config.amax_history_len"].value == 7
    assert layer.notes == [
        "ACCELERATE_FP8_AMAX_HISTORY_LENGTH is read as ACCELERATE_FP8_AMAX_HISTORY_LEN, its name elsewhere"
    ]


def test_a_live_variable_wins_over_its_dead_name_without_a_note():
    layer = read_environment({"ACCELERATE_FP8_AMAX_HISTORY_LENGTH": "7", "ACCELERATE_FP8_AMAX_HISTORY_LEN": "8"})
    assert layer.values["fp8_config.amax_history_len"].value == 8
    assert layer.notes == []


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"ACCELERATE_FP8_MARGIN": "x"}, "ACCELERATE_FP8_MARGIN: fp8_config.margin got 'x'; allowed: an integer"),
        ({"ACCELERATE_FP8_OVERRIDE_DGRAD": "x"}, "ACCELERATE_FP8_OVERRIDE_DGRAD: got 'x'; allowed: true, false"),
        ({"ACCELERATE_USE_FSDP": "perhaps"}, "ACCELERATE_USE_FSDP: got 'perhaps'"),
        ({"ACCELERATE_USE_FSDP": "1", "ACCELERATE_USE_DEEPSPEED": "1"}, "allowed: one engine"),
        ({SOURCES: "[1]"}, f"{SOURCES}: got '\\[1\\]'"),
        ({SOURCES: '{"debug": [["x"], "y"]}'}, SOURCES),
        ({SOURCES: "[" * 100_000}, SOURCES),
    ],
)
def test_a_wrong_variable_is_named(environ: dict[str, str], message: str):
    with pytest.raises(ConfigError, match=message):
        read_environment(environ)


def test_every_engine_that_is_written_is_what_accelerate_reads():
    assert write_environment(effective_of({"distributed_type": "FSDP"}))["ACCELERATE_USE_FSDP"] == "true"
    assert write_environment(effective_of({"distributed_type": "DEEPSPEED"}))["ACCELERATE_USE_DEEPSPEED"] == "true"
    assert write_environment(effective_of({"distributed_type": "NO"}))["ACCELERATE_USE_FSDP"] == "false"


NAMES = [name for entry in ENTRIES.values() for name in entry.setting.env]
LINES = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))


@given(environ=st.dictionaries(st.sampled_from([*NAMES, SOURCES, "ACCELERATE_USE_FSDP", "HOME"]), LINES, max_size=4))
@examples(max_examples=300, deadline=None)
def test_any_value_is_read_or_refused_by_name(environ: dict[str, str]):
    message = refusal(lambda: read_environment(environ))
    if message is not None:
        assert any(name in message for name in environ)
        assert len(message.splitlines()) == 1
