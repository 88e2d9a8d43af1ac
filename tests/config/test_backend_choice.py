"""Who computes FP8, and whether the values agree: by every route, without a vendor's library."""

from __future__ import annotations

from pathlib import Path

import pytest

from acceler8 import backends, recipes
from acceler8.config import Effective, Precedence, RouteValues, Source, merge, parse_flags, read_environment, read_yaml
from acceler8.config.backend_choice import (
    READY,
    cannot_run,
    check,
    choose_backend,
    fp8_values,
    gemm_backend,
    level_of,
    preferred_backend,
    recipe_of,
)
from acceler8.config.enums import FP8BackendType
from acceler8.errors import ConfigError
from acceler8.recipes import DelayedScaling
from tests.config.packages import forget_environment, install, uninstall


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch) -> None:
    forget_environment(monkeypatch)


def flags(*words: str, precision: str = "fp8") -> Effective:
    return merge([parse_flags([f"--mixed_precision={precision}", *words]).route])


def environment(**variables: str) -> Effective:
    return merge([read_environment({"ACCELERATE_MIXED_PRECISION": "fp8", **variables})])


def yaml(folder: Path, text: str, precision: str = "fp8") -> Effective:
    path = folder / "run.yaml"
    path.write_text(f"mixed_precision: {precision}\n{text}")
    return merge([read_yaml(path)])


def code(values: dict[str, object], precision: str = "fp8") -> Effective:
    layer = RouteValues()
    layer.put("mixed_precision", precision, Source(Precedence.CODE, "Accelerator(mixed_precision=)"))
    for path, value in values.items():
        layer.put(path, value, Source(Precedence.CODE, f"Recipe({path})"))
    return merge([layer])


# --- the choice


def test_without_fp8_no_backend() -> None:
    assert choose_backend(flags("--fp8_backend=te", precision="bf16")) is FP8BackendType.NO


@pytest.mark.parametrize("spelling", ["native", "NATIVE", "Native"])
def test_named_in_any_case(spelling: str) -> None:
    assert choose_backend(flags(f"--fp8_backend={spelling}")) is FP8BackendType.NATIVE


@pytest.mark.parametrize("spelling", ["te", "TE", "Te", "transformer_engine"])
def test_one_backend_by_every_spelling(monkeypatch, tmp_path, spelling: str) -> None:
    install(monkeypatch, tmp_path, "transformer_engine", "2.9.0")
    assert choose_backend(yaml(tmp_path, f"fp8_config: {{backend: {spelling}}}\n")) is FP8BackendType.TE


def test_nothing_named_takes_native_even_where_others_are(monkeypatch, tmp_path) -> None:
    install(monkeypatch, tmp_path, "torchao", "0.9.0")
    assert choose_backend(flags()) is FP8BackendType.NATIVE
    assert choose_backend(flags("--fp8_backend=no")) is FP8BackendType.NATIVE


def test_the_order_decides_among_those_that_are_there(monkeypatch, tmp_path) -> None:
    uninstall(monkeypatch, "torchao", "transformer_engine")
    order = {"ACCELERATE_FP8_BACKEND_ORDER": "AO,TE,MSAMP"}
    with pytest.raises(ImportError) as error:
        choose_backend(environment(**order))
    for word in ("AO, TE, MSAMP", "environment ACCELERATE_FP8_BACKEND_ORDER", "pip install 'torchao>=", "NATIVE"):
        assert word in str(error.value)
    assert preferred_backend(environment(**order)) is None
    assert check(environment(**order)) == []
    install(monkeypatch, tmp_path, "transformer_engine", "2.9.0")
    assert choose_backend(environment(**order)) is FP8BackendType.TE
    install(monkeypatch, tmp_path, "torchao", "0.9.0")
    assert choose_backend(environment(**order)) is FP8BackendType.AO


def test_levels_are_never_taken_unnamed() -> None:
    with pytest.raises(ImportError, match="MSAMP is only taken when named"):
        choose_backend(flags("--fp8_backend_order=msamp"))
    assert choose_backend(flags("--fp8_backend=msamp")) is FP8BackendType.MSAMP


@pytest.mark.parametrize(
    ("name", "command"), [("te", "pip install --no-build-isolation"), ("ao", "pip install 'torch")]
)
def test_named_and_missing_says_how_to_install_it(monkeypatch, name: str, command: str) -> None:
    uninstall(monkeypatch, "torchao", "transformer_engine")
    with pytest.raises(
        ImportError, match=f"flag --fp8_backend: FP8 backend {name.upper()} is not installed; {command}"
    ):
        choose_backend(flags(f"--fp8_backend={name}"))


def test_what_trains_is_not_refused(monkeypatch, tmp_path) -> None:
    install(monkeypatch, tmp_path, "transformer_engine", "2.9.0")
    for backend in ("te", "ao"):
        assert list(cannot_run(flags(f"--fp8_backend={backend}"))) == []
    assert list(cannot_run(flags("--dynamo_backend=inductor"))) == []


def test_ready_backends_are_those_that_there_are() -> None:
    assert [backends.full_name(word) for word in READY] == list(backends.names())


@pytest.mark.parametrize(
    ("words", "level", "gemms"),
    [
        (("--fp8_backend=msamp",), "O2", "NATIVE"),
        (("--fp8_backend=msamp", "--fp8_opt_level=o1"), "O1", "NATIVE"),
        (("--fp8_opt_level=O1",), "O1", "NATIVE"),
        (("--fp8_opt_level=O3", "--fp8_backend=te"), "O3", "TE"),
        ((), None, "NATIVE"),
    ],
)
def test_a_level_is_on_the_gemms_of_a_backend(words: tuple[str, ...], level: str | None, gemms: str) -> None:
    effective = flags(*words)
    asked = level_of(effective)
    assert (asked and asked.value) == level
    assert gemm_backend(effective) == gemms
    assert level_of(merge([parse_flags([*words, "--mixed_precision=bf16"]).route])) is None


@pytest.mark.parametrize("engine", ["--use_fsdp", "--use_deepspeed"])
def test_levels_are_refused_with_an_engine_that_would_exchange_their_gradients(engine: str) -> None:
    (limit,) = cannot_run(flags(engine, "--fp8_backend=msamp"))
    assert "allowed: levels in one process; leave opt_level and MSAMPRecipeKwargs (enable_msamp) out" in limit
    assert list(cannot_run(flags(engine))) == []
    assert list(cannot_run(flags("--fp8_backend=msamp"))) == []


def test_what_launchers_export_unasked_is_no_level() -> None:
    """Accelerate's writes ACCELERATE_FP8_OPT_LEVEL=O2 for every backend; it refused every script that it launched."""
    exported = {"ACCELERATE_MIXED_PRECISION": "fp8", "ACCELERATE_FP8_OPT_LEVEL": "O2"}
    effective = merge([read_environment({**exported, "ACCELERATE_FP8_BACKEND": "NATIVE"})])
    assert level_of(effective) is None
    assert list(cannot_run(effective)) == []
    (note,) = [note for note in check(effective) if "opt_level" in note]
    assert "ask in code (MSAMPRecipeKwargs), by flag or in the YAML file" in note
    for asked in ({"ACCELERATE_FP8_BACKEND": "MSAMP"}, {}, {"ACCELERATE_FP8_BACKEND": "TE"}):
        level = "O1" if asked.get("ACCELERATE_FP8_BACKEND") == "TE" else "O2"
        found = level_of(merge([read_environment({**exported, **asked, "ACCELERATE_FP8_OPT_LEVEL": level})]))
        assert found is not None
        assert found.value == level


# --- values


def test_values_are_the_backends_with_their_sources() -> None:
    values = fp8_values(flags("--fp8_margin=2", "--fp8_recipe=delayed", "--fp8_pad_inner_dim=false"), "NATIVE")
    shown = {path.rpartition(".")[2]: (value.value, str(value.source)) for path, value in values.items()}
    assert shown["margin"] == (2, "flag --fp8_margin")
    assert shown["amax_compute_algo"] == ("max", "default")
    assert "pad_inner_dim" not in shown
    assert fp8_values(flags(), "TE")["fp8_config.amax_compute_algo"].value == "most_recent"
    assert "fp8_config.margin" not in fp8_values(flags(), "NATIVE")  # not of rowwise


def test_every_setting_reaches_the_recipe() -> None:
    recipe = recipe_of(
        environment(
            ACCELERATE_FP8_RECIPE="DELAYED",
            ACCELERATE_FP8_FORMAT="e4m3",
            ACCELERATE_FP8_MARGIN="2",
            ACCELERATE_FP8_INTERVAL="3",
            ACCELERATE_FP8_AMAX_HISTORY_LENGTH="8",
            ACCELERATE_FP8_AMAX_COMPUTE_ALGO="Most_recent",
            ACCELERATE_FP8_OVERRIDE_WGRAD="1",
            ACCELERATE_FP8_SKIP="a,b",
            ACCELERATE_FP8_USE_AUTOCAST_DURING_EVAL="yes",
            ACCELERATE_FP8_POW2_SCALES="on",
            ACCELERATE_FP8_SAVE_FOR_BACKWARD="FP8_COMPRESSED",
        )
    )
    scaling = DelayedScaling(amax_history_len=8, amax_compute_algo="most_recent", margin=2, interval=3)
    expected = recipes.get("delayed", formats="E4M3", eval="fp8", skip=("a", "b"), pow2_scales=True)
    expected = expected.replace(scaling=scaling, save_for_backward="fp8_compressed")
    assert recipe == expected.with_gemms(wgrad=False)
    assert recipe_of(flags()) == recipes.get("rowwise")


def test_every_backends_recipe_is_made_of_its_settings() -> None:
    """One vocabulary: the same words, each backend's own defaults."""
    assert recipe_of(flags(), "AO") == recipes.get("tensorwise")
    assert recipe_of(flags("--fp8_recipe=rowwise", "--fp8_skip=a"), "AO") == recipes.get("rowwise", skip=("a",))
    wgrad_off = flags("--fp8_recipe=rowwise", "--fp8_override_linear_precision=false,false,true")
    assert recipe_of(wgrad_off, "AO") == recipes.get("rowwise").with_gemms(wgrad=False)
    assert recipe_of(flags(), "TE") == recipes.get("delayed", amax_compute_algo="most_recent")
    assert recipe_of(flags("--fp8_margin=2"), "TE").margin == 2
    assert recipe_of(flags("--fp8_recipe=blockwise"), "TE") == recipes.get("blockwise")
    assert recipe_of(flags("--fp8_use_mxfp8_block_scaling"), "TE") == recipes.get("mxfp8")
    hybrid = flags("--fp8_use_mxfp8_block_scaling", "--fp8_format=HYBRID")
    assert recipe_of(hybrid, "TE") == recipes.get("mxfp8", formats="HYBRID")
    assert fp8_values(flags("--fp8_layer_recipes=a=rowwise"), "AO")["fp8_config.layer_recipes"].value == ("a=rowwise",)


# --- agreement


def test_what_is_kept_for_backward_contradicts_a_recipe() -> None:
    contradiction = flags("--fp8_recipe=activations_only", "--fp8_save_for_backward=bf16", "--mixed_precision=fp8")
    with pytest.raises(
        ConfigError, match=r"save_for_backward bf16 \(flag --fp8_save_for_backward\): .*allowed: fp8, fp8_compressed"
    ):
        check(contradiction)
    assert check(flags("--fp8_save_for_backward=bf16", "--mixed_precision=fp8")) == []
    with pytest.raises(ConfigError, match="with recipe 'activations_only'"):
        check(
            flags(
                *("--fp8_layer_recipes=*.mlp.*=activations_only", "--fp8_save_for_backward=bf16"),
                "--mixed_precision=fp8",
            )
        )


def test_one_route_that_contradicts_itself_is_an_error(tmp_path) -> None:
    with pytest.raises(
        ConfigError,
        match="--fp8_pad_inner_dim: pad_inner_dim=false is no setting of backend NATIVE, which --fp8_backend names;"
        " it is one of AO",
    ):
        check(flags("--fp8_backend=native", "--fp8_pad_inner_dim=false"))
    text = "fp8_config:\n  backend: AO\n  margin: 2\n"
    with pytest.raises(ConfigError, match=r"run\.yaml:4: margin=2 is no setting of backend AO, which .*run\.yaml:3"):
        check(yaml(tmp_path, text))
    with pytest.raises(ConfigError, match="is no setting of backend TE"):
        check(code({"fp8_config.backend": "TE", "fp8_config.pow2_scales": True}))


def test_two_routes_that_differ_make_a_note() -> None:
    routes = [
        parse_flags(["--fp8_backend=ao"]).route,
        read_environment({"ACCELERATE_MIXED_PRECISION": "fp8", "ACCELERATE_FP8_MARGIN": "2"}),
    ]
    assert check(merge(routes)) == [
        "environment ACCELERATE_FP8_MARGIN: margin=2 is not used, backend AO does not have it (NATIVE and TE does)"
    ]
    assert "pad_inner_dim=false is not used" in check(environment(ACCELERATE_FP8_PAD_INNER_DIM="false"))[0]


def test_a_default_said_aloud_is_silent() -> None:
    exported = read_environment({"ACCELERATE_FP8_MARGIN": "0", "ACCELERATE_FP8_INTERVAL": "1"})  # as Accelerate does
    assert check(merge([exported, parse_flags(["--mixed_precision=fp8", "--fp8_backend=ao"]).route])) == []
    with pytest.raises(ConfigError, match="--fp8_margin: margin=0 is no setting of backend AO"):
        check(flags("--fp8_backend=ao", "--fp8_margin=0"))
    assert check(flags("--fp8_margin=0", "--fp8_amax_history_len=1024", "--fp8_amax_compute_algo=max")) == []


def test_delayed_settings_need_the_delayed_recipe(tmp_path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"yaml .*run\.yaml:4: margin=2 belongs to delayed scaling, and the recipe is blockwise \(yaml .*:3\);"
        " set recipe delayed, or remove margin",
    ):
        check(yaml(tmp_path, "fp8_config:\n  recipe: blockwise\n  margin: 2\n"))
    with pytest.raises(ConfigError, match=r"amax_history_len=8 .* the recipe is rowwise \(default\)"):
        check(environment(ACCELERATE_FP8_AMAX_HISTORY_LEN="8"))
    assert check(flags("--fp8_recipe=delayed", "--fp8_margin=2")) == []


def test_a_format_that_the_recipe_has_not_is_located() -> None:
    with pytest.raises(
        ConfigError,
        match=r"recipe blockwise \(flag --fp8_recipe\), fp8_format E5M2 \(flag --fp8_format\): fprop got E5M2",
    ):
        check(flags("--fp8_recipe=blockwise", "--fp8_format=E5M2"))


def test_formats_and_recipes_that_transformer_engine_has_not() -> None:
    with pytest.raises(ConfigError, match=r"flag --fp8_format: fp8_format=E5M2 is none .*; set HYBRID"):
        check(flags("--fp8_backend=te", "--fp8_format=E5M2"))
    with pytest.raises(ConfigError, match="use_mxfp8_block_scaling is on, and the recipe is blockwise"):
        check(flags("--fp8_backend=te", "--fp8_use_mxfp8_block_scaling", "--fp8_recipe=blockwise"))
    with pytest.raises(ConfigError, match="margin=2 belongs to delayed scaling, and the recipe is blockwise"):
        check(flags("--fp8_backend=te", "--fp8_margin=2", "--fp8_recipe=blockwise"))
    assert check(flags("--fp8_backend=te", "--fp8_use_mxfp8_block_scaling", "--fp8_recipe=mxfp8")) == []


def test_mxfp8_of_transformer_engine_has_no_history() -> None:
    with pytest.raises(ConfigError, match="amax_history_len=8 belongs to delayed scaling, and use_mxfp8_block_scaling"):
        check(flags("--fp8_backend=te", "--fp8_use_mxfp8_block_scaling", "--fp8_amax_history_len=8"))
    assert check(flags("--fp8_backend=te", "--fp8_use_mxfp8_block_scaling", "--fp8_amax_history_len=1024")) == []


def test_fp8_settings_without_fp8_are_kept_and_said(tmp_path) -> None:
    (note,) = check(yaml(tmp_path, "fp8_config:\n  backend: te\n  skip: [a]\n", precision="bf16"))
    assert "mixed_precision is bf16" in note
    assert "backend=TE" in note
    assert "run.yaml:4" in note
    assert check(flags(precision="bf16")) == []


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--machine_rank=1"], "machine_rank got 1; allowed: 0 to 0"),
        (
            ["--num_machines=2", "--machine_rank=2", "--main_process_ip=a"],
            r"--machine_rank: .* allowed: 0 to 1, for num_machines is 2 \(--num_machines\)",
        ),
        (["--num_machines=2", "--num_processes=3", "--main_process_ip=a"], "num_processes got 3; allowed: a multiple"),
        (["--num_machines=2", "--num_processes=4"], "--num_machines: num_machines 2 needs main_process_ip"),
    ],
)
def test_machines(words: list[str], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        check(flags(*words))


def test_machines_that_fit_and_fsdp_on_the_cpu() -> None:
    words = ["--num_machines=2", "--num_processes=4", "--machine_rank=1", "--main_process_ip=a"]
    assert check(flags(*words, "--use_fsdp", "--cpu")) == []
