"""What people who had just met the library ran into."""

from __future__ import annotations

import pytest

from acceler8 import Accelerator
from acceler8.config import merge, parse_flags, read_environment, read_yaml
from acceler8.config.resolve import check, notes, parse_assignments
from acceler8.config.show import rows
from acceler8.errors import ConfigError, unknown_name
from acceler8.utils import NativeRecipeKwargs, TERecipeKwargs
from tests.config.packages import forget_environment


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch) -> None:
    forget_environment(monkeypatch)


def flags(*words: str):
    return merge([parse_flags(words).route])


@pytest.mark.parametrize("text", ["!!python/name:os.system", "!!str fp8", "!!map fp8"])
def test_a_tag_is_no_empty_file(text, tmp_path):
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"a.yaml:1: "):
        read_yaml(tmp_path / "a.yaml")


def test_what_is_shown_is_what_runs():
    effective = flags("--mixed_precision=fp8", "--fp8_margin=0")
    shown = {row.path.removeprefix("fp8_config."): (row.text, row.source) for row in rows(effective)}
    assert shown["backend"][0] == "NATIVE"
    assert shown["recipe"] == ("rowwise", "default of NATIVE")
    assert "amax_history_len" not in shown  # rowwise has none
    delayed = {row.path for row in rows(flags("--mixed_precision=fp8", "--fp8_recipe=delayed"))}
    assert "fp8_config.amax_history_len" in delayed


def test_the_report_names_the_recipes_own_format():
    recipe = NativeRecipeKwargs(override_linear_precision=True)
    accelerator = Accelerator(mixed_precision="fp8", cpu=True, kwargs_handlers=[recipe])
    assert accelerator.fp8_report().values["fp8_config.fp8_format"].value == "E4M3"


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda: NativeRecipeKwargs(skip=3), r"NativeRecipeKwargs\(skip=\): .*got 3; allowed: a list of names"),
        (lambda: Accelerator("fp8", kwargs_handlers=NativeRecipeKwargs()), r"write \[NativeRecipeKwargs\(\.\.\.\)\]"),
        (lambda: Accelerator("fp8", kwargs_handlers=[TERecipeKwargs]), r"write TERecipeKwargs\(\.\.\.\)"),
    ],
)
def test_a_slip_in_code_names_the_argument(build, expected):
    with pytest.raises(ConfigError, match=expected):
        build()


def test_a_misspelt_variable_gets_a_word():
    slips = {"ACCELERATE_FP8_MARGN": "3", "ACCELERATE_MIXED_PRECISON": "fp8"}
    layer = read_environment({**slips, "ACCELERATE_LOG_LEVEL": "info"})
    assert layer.notes == [
        "ACCELERATE_FP8_MARGN is no variable that is read; did you mean ACCELERATE_FP8_MARGIN?",
        "ACCELERATE_MIXED_PRECISON is no variable that is read; did you mean ACCELERATE_MIXED_PRECISION?",
    ]


def test_backend_no_names_none_and_says_so():
    (note,) = check(flags("--mixed_precision=fp8", "--fp8_backend=NO"))
    assert note == "flag --fp8_backend: backend NO names none; NATIVE is taken by the order"


def test_a_setting_of_another_backend_is_an_error_at_its_default_too():
    with pytest.raises(ConfigError, match="pow2_scales=false is no setting of backend TE"):
        check(flags("--mixed_precision=fp8", "--fp8_backend=TE", "--fp8_pow2_scales=false"))
    with pytest.raises(ConfigError, match="set recipe mxfp8 in its place"):
        check(flags("--mixed_precision=fp8", "--fp8_backend=native", "--fp8_use_mxfp8_block_scaling"))


@pytest.mark.parametrize("words", [("--fp8_opt_level=O2", "--use_fsdp"), ("--fp8_backend=msamp", "--use_deepspeed")])
def test_what_cannot_be_trained_yet_is_said_before_it_starts(words):
    assert any("version" in note for note in notes(flags("--mixed_precision=fp8", *words)))


def test_a_set_none_takes_a_setting_out():
    layer = parse_assignments(["recipe=none"])
    assert layer.values["fp8_config.recipe"].value is None


def test_a_long_list_does_not_bury_the_nearest_name():
    many = [f"name_{i}" for i in range(50)] + ["fp8_margin"]
    assert unknown_name("flag", "FP8_MARGN", many) == "unknown flag 'FP8_MARGN'; did you mean 'fp8_margin'?"
    assert "name_49" in unknown_name("flag", "quite different", many)
    assert unknown_name("recipe", "rowise", ["rowwise", "mxfp8"]).endswith("valid: mxfp8, rowwise")


def test_the_bad_entry_of_a_table_is_named(tmp_path):
    (tmp_path / "a.yaml").write_text('environment: {NCCL_A: "1", NCCL_B: "2\\n3"}\n')
    with pytest.raises(ConfigError, match=r"a.yaml:1: environment 'NCCL_B': got '2\\n3'; allowed: a text on one line"):
        read_yaml(tmp_path / "a.yaml")
