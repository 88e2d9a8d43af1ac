"""The code route: objects and arguments as a layer, and effective values as Python that runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from acceler8 import recipes
from acceler8.config import Effective, Precedence, merge, parse_flags, read_environment
from acceler8.config.backend_choice import check, preferred_backend, recipe_of
from acceler8.config.code import gather, sort_handlers, to_python, values_from_code
from acceler8.errors import ConfigError
from acceler8.utils import (
    AORecipeKwargs,
    DeepSpeedPlugin,
    FP8RecipeKwargs,
    FullyShardedDataParallelPlugin,
    KwargsHandler,
    MSAMPRecipeKwargs,
    NativeRecipeKwargs,
    TERecipeKwargs,
    TorchDynamoPlugin,
)
from tests.config.packages import forget_environment


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch) -> None:
    forget_environment(monkeypatch)


def said(layer: Any) -> dict[str, tuple[Any, str]]:
    return {path.removeprefix("fp8_config."): (v.value, str(v.source)) for path, v in layer.values.items()}


# --- handlers


def test_a_recipe_names_its_backend_and_gives_its_fields() -> None:
    layer = values_from_code(mixed_precision="FP8", handlers=sort_handlers([TERecipeKwargs(margin=2)]))
    assert said(layer) == {
        "margin": (2, "code TERecipeKwargs(margin=)"),
        "backend": ("TE", "code TERecipeKwargs"),
        "mixed_precision": ("fp8", "code Accelerator(mixed_precision=)"),
    }


@pytest.mark.parametrize("gemms", [NativeRecipeKwargs, AORecipeKwargs, TERecipeKwargs])
@pytest.mark.parametrize("is_first", [True, False])
def test_levels_stand_beside_one_recipe(gemms, is_first: bool) -> None:
    pair = [gemms(), MSAMPRecipeKwargs()]
    layer = values_from_code(handlers=sort_handlers(pair if is_first else pair[::-1]))
    assert said(layer)["backend"] == (gemms.BACKEND, f"code {gemms.__name__}")
    assert said(layer)["opt_level"] == ("O2", "default of MSAMPRecipeKwargs")


def test_a_default_level_gives_way_to_a_named_one() -> None:
    code = values_from_code(handlers=sort_handlers([MSAMPRecipeKwargs()]))
    effective = merge([read_environment({"ACCELERATE_FP8_OPT_LEVEL": "O1"}), code])
    assert effective["fp8_config.opt_level"] == "O1"


class Mine(TERecipeKwargs):
    """A subclass counts as its base."""


@pytest.mark.filterwarnings("ignore:FP8RecipeKwargs is deprecated:FutureWarning")
def test_which_handlers_go_together() -> None:
    assert type(sort_handlers([Mine()]).te) is Mine
    found = sort_handlers([FP8RecipeKwargs(backend="te")])
    assert found.fp8 is not None
    assert found.te is found.msamp is None
    for pair, match in (
        ([TERecipeKwargs(), AORecipeKwargs()], "got TERecipeKwargs and AORecipeKwargs; allowed: one recipe"),
        ([TERecipeKwargs(), Mine()], r"two recipes of one class \(TERecipeKwargs and Mine\)"),
        ([FP8RecipeKwargs(backend="te"), MSAMPRecipeKwargs()], "FP8RecipeKwargs and MSAMPRecipeKwargs"),
        ([TERecipeKwargs(), NativeRecipeKwargs(), MSAMPRecipeKwargs()], "TERecipeKwargs and NativeRecipeKwargs"),
        ([object()], "got a object; allowed: objects of FP8RecipeKwargs"),
        ([KwargsHandler()], "got a KwargsHandler; allowed in this version"),
    ):
        with pytest.raises(ConfigError, match=match):
            sort_handlers(pair)


# --- arguments


def test_shortcuts_are_a_recipe_of_any_backend() -> None:
    layer = values_from_code(recipe="delayed", skip=iter(["a", "b"]))
    assert said(layer) == {
        "recipe": ("delayed", "code Accelerator(recipe=)"),
        "skip": (("a", "b"), "code Accelerator(skip=)"),
    }
    object_ = recipes.get("delayed", margin=3, skip=("x",)).with_gemms(dgrad=False)
    effective = merge([values_from_code(mixed_precision="fp8", recipe=object_, skip=["y"])])
    assert recipe_of(effective) == object_.replace(skip=("x", "y"))
    assert check(effective) == []


def test_a_recipe_object_hides_what_other_routes_say_of_it() -> None:
    environ = read_environment({"ACCELERATE_FP8_FORMAT": "E5M2", "ACCELERATE_FP8_SKIP": "z"})
    effective = merge([environ, values_from_code(mixed_precision="fp8", recipe=recipes.get("blockwise"))])
    assert effective["fp8_config.fp8_format"] == "E4M3"
    assert check(effective) == []
    delayed = read_environment({"ACCELERATE_FP8_MARGIN": "2", "ACCELERATE_FP8_OVERRIDE_WGRAD": "true"})
    effective = merge([delayed, values_from_code(mixed_precision="fp8", recipe=recipes.get("blockwise"))])
    assert check(effective) == []
    assert effective["fp8_config.margin"] is None
    assert effective["fp8_config.override_linear_precision"] != (False, False, True)


def test_a_recipe_with_a_name_of_its_own_is_code_only() -> None:
    mine = recipes.get("delayed", margin=3).replace(name="mine")
    layer = values_from_code(mixed_precision="fp8", recipe=mine)
    assert layer.notes == [
        "Accelerator(recipe=) is an object: it exists in code only, no flag, variable or YAML key has it"
    ]
    assert check(merge([layer])) == []  # its margin is its own


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"recipe": "rowwise", "handlers": [NativeRecipeKwargs()]}, r"Accelerator\(recipe=\) and NativeRecipeKwargs"),
        ({"skip": ["a"], "handlers": [NativeRecipeKwargs()]}, r"Accelerator\(skip=\) and NativeRecipeKwargs"),
        ({"recipe": "rowwise", "handlers": [TERecipeKwargs()]}, r"Accelerator\(recipe=\) and TERecipeKwargs"),
        ({"backend": "ao", "handlers": [TERecipeKwargs()]}, "got AO, and TERecipeKwargs is for backend TE"),
        (
            {"backend": "cuda"},
            r"Accelerator\(backend=\): fp8_config\.backend got 'cuda'; allowed: NATIVE, AO, TE, MSAMP",
        ),
        ({"fp8_backend_order": "AO,XX"}, r"Accelerator\(fp8_backend_order=\).*out of NATIVE, AO"),
        (
            {
                "deepspeed_plugin": DeepSpeedPlugin(enable_msamp=True, msamp_opt_level="O1"),
                "handlers": [MSAMPRecipeKwargs("O3")],
            },
            r"DeepSpeedPlugin\(msamp_opt_level=\): fp8_config\.opt_level got 'O1', and 'O3' from MSAMPRecipeKwargs",
        ),
        (
            {"deepspeed_plugin": DeepSpeedPlugin(), "fsdp_plugin": FullyShardedDataParallelPlugin()},
            "got fsdp_plugin and deepspeed_plugin",
        ),
    ],
)
def test_what_contradicts_itself_is_an_error(arguments: dict, match: str) -> None:
    handlers = sort_handlers(arguments.pop("handlers", None))
    with pytest.raises(ConfigError, match=match):
        values_from_code(**arguments, handlers=handlers)


def test_what_goes_together() -> None:
    handlers = sort_handlers([MSAMPRecipeKwargs("O1")])
    layer = values_from_code(backend="native", handlers=handlers)
    assert said(layer)["backend"][0] == "NATIVE"
    assert said(layer)["opt_level"][0] == "O1"
    layer = values_from_code(backend="ao", recipe="rowwise", skip=["a"])
    assert {name: value for name, (value, _) in said(layer).items()} == {
        "backend": "AO",
        "recipe": "rowwise",
        "skip": ("a",),
    }
    assert said(values_from_code(backend="Te", handlers=sort_handlers([TERecipeKwargs()])))["backend"][0] == "TE"


def test_plugins_give_settings_and_the_engine() -> None:
    layer = values_from_code(
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2),
        dynamo_plugin=TorchDynamoPlugin(backend="inductor"),
    )
    assert {path: value.value for path, value in layer.values.items()} == {
        "fsdp_config.fsdp_version": 2,
        "dynamo_config.dynamo_backend": "INDUCTOR",
        "distributed_type": "FSDP",
    }
    layer = values_from_code(deepspeed_plugin=DeepSpeedPlugin(enable_msamp=True))
    assert said(layer)["backend"] == ("MSAMP", "code DeepSpeedPlugin(enable_msamp=)")
    assert said(layer)["opt_level"] == ("O2", "default of DeepSpeedPlugin")


def test_a_level_given_in_code_stays_beside_a_plugins_default() -> None:
    levels = sort_handlers([MSAMPRecipeKwargs("O1")])
    layer = values_from_code(handlers=levels, deepspeed_plugin=DeepSpeedPlugin(enable_msamp=True))
    assert said(layer)["opt_level"] == ("O1", "code MSAMPRecipeKwargs(opt_level=)")


def test_saying_nothing_says_nothing() -> None:
    assert values_from_code().values == {}


# --- the routes together


def test_code_before_environment_before_file(monkeypatch, tmp_path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("mixed_precision: fp8\nfp8_config:\n  recipe: delayed\n  margin: 1\n  interval: 2\n  skip: [a]\n")
    monkeypatch.setenv("ACCELERATE_FP8_MARGIN", "2")
    monkeypatch.setenv("ACCELERATE_FP8_INTERVAL", "3")
    code = values_from_code(handlers=sort_handlers([NativeRecipeKwargs(margin=4)]))
    effective = gather(code, file)
    assert [str(effective.source(f"fp8_config.{key}")) for key in ("margin", "interval", "skip")] == [
        "code NativeRecipeKwargs(margin=)",
        "environment ACCELERATE_FP8_INTERVAL",
        f"yaml {file}:6",
    ]
    assert recipe_of(effective) == recipes.get("delayed", margin=4, interval=3, skip=("a",))
    monkeypatch.setenv("ACCELER8_CONFIG_FILE", str(file))
    assert gather(values_from_code()).values == gather(values_from_code(), file).values


def test_a_handlers_default_gives_way_to_the_file(tmp_path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("fp8_config: {margin: 3}\n")
    code = values_from_code(mixed_precision="fp8", handlers=sort_handlers([NativeRecipeKwargs(recipe="delayed")]))
    assert gather(code, file)["fp8_config.margin"] == 3


def test_fp8_that_code_overrides_is_said(monkeypatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    (note,) = gather(values_from_code(mixed_precision="bf16")).notes
    assert note == (
        "environment ACCELERATE_MIXED_PRECISION asks for mixed_precision fp8, which code Accelerator(mixed_precision=)"
        " overrides with bf16: this run is not FP8"
    )
    assert gather(values_from_code()).notes == ()


# --- Python


def run(source: str) -> Effective:
    """The effective values of a script, without the work of a real Accelerator."""
    names: dict[str, Any] = {}
    lines = source.replace("from acceler8 import Accelerator", "")
    arguments: dict[str, Any] = {}
    names["Accelerator"] = lambda **given: arguments.update(given)
    exec(compile(lines, "script", "exec"), names)
    arguments["handlers"] = sort_handlers(arguments.pop("kwargs_handlers", None))
    return merge([values_from_code(**arguments)])


SCRIPTS = [
    [],
    ["--mixed_precision=bf16", "--cpu", "--gradient_accumulation_steps=4"],
    ["--mixed_precision=fp8"],
    ["--mixed_precision=fp8", "--fp8_backend=no"],
    ["--mixed_precision=fp8", "--fp8_backend_order=AO,TE"],
    [
        "--mixed_precision=fp8",
        "--fp8_backend=native",
        "--fp8_recipe=delayed",
        "--fp8_margin=2",
        "--fp8_skip=a,l.[01].*",
    ],
    ["--mixed_precision=fp8", "--fp8_backend=te", "--fp8_override_linear_precision=false,true,false"],
    ["--mixed_precision=fp8", "--fp8_backend=te", "--fp8_format=E4M3", "--fp8_use_mxfp8_block_scaling"],
    ["--mixed_precision=fp8", "--fp8_backend=ao", "--fp8_pad_inner_dim=false", "--fp8_opt_level=O1"],
    ["--mixed_precision=fp8", "--fp8_backend=msamp", "--fp8_opt_level=O3"],
    [
        "--use_fsdp",
        "--fsdp_version=2",
        "--fsdp_reshard_after_forward=false",
        "--fsdp_transformer_layer_cls_to_wrap=A,B",
    ],
    ["--use_fsdp", "--fsdp_reshard_after_forward=FULL_SHARD", "--fsdp_auto_wrap_policy=size_based_wrap"],
    ["--use_deepspeed", "--zero_stage=3", "--offload_param_device=none", "--gradient_clipping=0.5"],
    ["--dynamo_backend=inductor", "--dynamo_use_dynamic=false", "--dynamo_mode=max-autotune"],
]


@pytest.mark.parametrize("words", SCRIPTS, ids=" ".join)
def test_written_python_gives_the_same_values(words: list[str]) -> None:
    effective = merge([parse_flags(words).route])
    source, lost = to_python(effective)
    assert lost == []
    again = run(source)
    assert again.given() == effective.given()
    assert all(value.source.precedence is Precedence.CODE for value in again.values.values())


def test_a_backend_that_is_not_named_is_named_by_the_class() -> None:
    effective = merge([parse_flags(["--mixed_precision=fp8", "--fp8_recipe=delayed", "--fp8_opt_level=O2"]).route])
    source, lost = to_python(effective)
    again = run(source)
    assert lost == []
    assert again.given() == {**effective.given(), "fp8_config.backend": "NATIVE"}
    assert preferred_backend(again) == preferred_backend(effective)
    assert "from acceler8.utils import MSAMPRecipeKwargs, NativeRecipeKwargs\n" in source


@pytest.mark.parametrize(
    ("words", "lost"),
    [
        (["--num_processes=2", "--main_process_port=0"], ["num_processes=2: belongs to the launch; give", "main_proc"]),
        (["--multi_gpu"], ["distributed_type=MULTI_GPU: belongs to the launch"]),
        (["--use_cpu=false"], ["use_cpu=false: code says so by leaving cpu out"]),
        (["--mixed_precision=bf16", "--fp8_margin=2"], ["fp8_config.margin=2: needs fp8"]),
        (
            ["--mixed_precision=fp8", "--fp8_backend=ao", "--fp8_margin=2"],
            ["fp8_config.margin=2: only recipes of NATIVE and TE have it"],
        ),
        (["--fsdp_version=2"], ["fsdp_config.fsdp_version=2: needs distributed_type FSDP and a plugin"]),
        (
            ["--use_deepspeed", "--deepspeed_hostfile=h"],
            ["deepspeed_config.deepspeed_hostfile=h: belongs to the launch"],
        ),
    ],
)
def test_what_code_cannot_say_is_named(words: list[str], lost: list[str]) -> None:
    effective = merge([parse_flags(words).route])
    source, found = to_python(effective)
    assert len(found) == len(lost)
    for got, expected in zip(found, lost, strict=True):
        assert got.startswith(expected)
    again = run(source).given()
    assert again.items() <= effective.given().items()
    assert len(again) == len(effective.given()) - len(lost)


def test_text_cannot_break_out_of_the_script() -> None:
    nasty = "a'); import os; ('"
    effective = merge([values_from_code(mixed_precision="fp8", recipe="rowwise", skip=[nasty])])
    assert run(to_python(effective)[0])["fp8_config.skip"] == (nasty,)


def test_none_of_it_needs_torch_or_a_vendor() -> None:
    work = """
import sys
from acceler8 import utils
from acceler8.config import values_from_code, merge, to_python
from acceler8.config.backend_choice import check
from acceler8.config.code import sort_handlers
layer = values_from_code(mixed_precision="fp8", handlers=sort_handlers([utils.TERecipeKwargs(margin=2)]))
print(check(merge([layer])), len(to_python(merge([layer]))[1]), utils.FullyShardedDataParallelPlugin().fsdp_version)
print(sorted({"torch", "transformer_engine", "torchao"} & set(sys.modules)))
"""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    result = subprocess.run([sys.executable, "-c", work], env=env, capture_output=True, text=True, check=False)
    assert (result.stdout, result.stderr) == ("[] 0 1\n[]\n", "")
