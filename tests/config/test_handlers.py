"""Recipe classes: Accelerate's names and defaults, over the one schema, without a vendor's library."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from dataclasses import dataclass

import pytest

from acceler8 import recipes
from acceler8.config import ENTRIES, Precedence
from acceler8.config.handlers import (
    AORecipeKwargs,
    FP8KwargsHandler,
    FP8RecipeKwargs,
    KwargsHandler,
    MSAMPRecipeKwargs,
    NativeRecipeKwargs,
    TERecipeKwargs,
    build_recipe,
    recipe_values,
)
from acceler8.errors import ConfigError, RecipeError
from acceler8.recipes import DelayedScaling
from tests.config.packages import forget_environment, install

CLASSES = (TERecipeKwargs, AORecipeKwargs, MSAMPRecipeKwargs, NativeRecipeKwargs)
CODE_ONLY = {"config", "weight", "master", "gradient", "exp_avg", "exp_avg_sq"}


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch) -> None:
    forget_environment(monkeypatch)


@pytest.mark.parametrize("kind", CLASSES)
def test_fields_are_the_schemas_settings_of_the_backend(kind) -> None:
    fields = {f.name for f in dataclasses.fields(kind)} - CODE_ONLY
    settings = {
        entry.key
        for entry in ENTRIES.values()
        if entry.is_fp8 and (kind.BACKEND in entry.setting.backends or kind.BACKEND in entry.setting.defaults)
    }
    assert fields == set(kind.PATHS) == settings
    handler = kind()
    for name, path in kind.PATHS.items():
        assert getattr(handler, name) == ENTRIES[path].setting.defaults.get(kind.BACKEND), name
        assert handler.filled(name).source.precedence is Precedence.DEFAULT
    assert handler.to_kwargs() == {}


@pytest.mark.parametrize("kind", [TERecipeKwargs, AORecipeKwargs, MSAMPRecipeKwargs, FP8RecipeKwargs])
def test_names_and_order_are_accelerates(kind) -> None:
    theirs = getattr(pytest.importorskip("accelerate.utils.dataclasses"), kind.__name__)
    ours = list(inspect.signature(kind).parameters.values())
    positional = [p.name for p in ours if p.kind is not p.KEYWORD_ONLY]
    assert positional == list(inspect.signature(theirs).parameters)
    assert all(p.default is None for p in ours)


def test_defaults_are_accelerates() -> None:
    layerwise = {"layer_recipes": (), "skip": (), "fp8_steps": ":", "fp8_last_layers": "0:all"}
    assert TERecipeKwargs().to_dict() == layerwise | {
        "recipe": "delayed",
        "use_autocast_during_eval": False,
        "margin": 0,
        "interval": 1,
        "fp8_format": "HYBRID",
        "amax_history_len": 1024,
        "amax_compute_algo": "most_recent",
        "override_linear_precision": (False, False, False),
        "use_mxfp8_block_scaling": False,
        "convert_norms": True,
    }
    ao = AORecipeKwargs()
    assert (ao.pad_inner_dim, ao.enable_fsdp_float8_all_gather) == (True, True)
    assert MSAMPRecipeKwargs().opt_level == "O2"


def test_argument_before_variable_before_default(monkeypatch) -> None:
    monkeypatch.setenv("ACCELERATE_FP8_MARGIN", "3")
    monkeypatch.setenv("ACCELERATE_FP8_FORMAT", "e4m3")
    monkeypatch.setenv("ACCELERATE_FP8_OVERRIDE_DGRAD", "yes")
    handler = TERecipeKwargs(margin=2)
    assert (handler.margin, handler.fp8_format, handler.interval) == (2, "E4M3", 1)
    assert handler.override_linear_precision == (False, True, False)
    sources = {path: str(value.source) for path, value in handler.route_values().values.items()}
    assert sources == {
        "fp8_config.margin": "code TERecipeKwargs(margin=)",
        "fp8_config.fp8_format": "environment ACCELERATE_FP8_FORMAT",
        "fp8_config.override_linear_precision": "environment ACCELERATE_FP8_OVERRIDE_DGRAD",
    }
    assert handler.to_kwargs() == {
        "margin": 2,
        "fp8_format": "E4M3",
        "override_linear_precision": (False, True, False),
    }


def test_a_value_equal_to_the_default_still_counts_as_given() -> None:
    route = TERecipeKwargs(amax_compute_algo="MOST_RECENT").route_values()
    assert route.values["fp8_config.amax_compute_algo"].value == "most_recent"
    assert not TERecipeKwargs().route_values().values


def test_the_flag_that_a_launcher_passed_on_stays_the_source(monkeypatch) -> None:
    monkeypatch.setenv("ACCELERATE_FP8_MARGIN", "3")
    monkeypatch.setenv("ACCELER8_CONFIG_SOURCES", '{"fp8_config.margin": ["FLAG", "--fp8_margin", "3"]}')
    assert str(TERecipeKwargs().route_values().values["fp8_config.margin"].source) == "flag --fp8_margin"


def test_a_field_that_is_changed_later_is_given_in_code_and_checked() -> None:
    handler = TERecipeKwargs()
    handler.margin = 4
    assert str(handler.route_values().values["fp8_config.margin"].source) == "code TERecipeKwargs(margin=)"
    handler.margin = 99
    with pytest.raises(ConfigError, match=r"TERecipeKwargs\(margin=\): .* got 99; allowed: an integer from -16 to 16"):
        handler.route_values()


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (
            lambda: TERecipeKwargs(fp8_format="E3M4"),
            r"TERecipeKwargs\(fp8_format=\).*got 'E3M4'; allowed: HYBRID, E4M3",
        ),
        (lambda: TERecipeKwargs(amax_compute_algo="mean"), "allowed: max, most_recent"),
        (lambda: TERecipeKwargs(margin=True), "got True; allowed: an integer from -16"),
        (lambda: TERecipeKwargs(override_linear_precision=(True, False)), "three booleans for fprop, dgrad, wgrad"),
        (lambda: TERecipeKwargs(margin=1, amax_history_length=2, amax_history_len=3), "are one setting"),
        (lambda: MSAMPRecipeKwargs("O4"), r"MSAMPRecipeKwargs\(opt_level=\).*allowed: O1, O2, O3"),
        (lambda: AORecipeKwargs(pad_inner_dim="si"), r"AORecipeKwargs\(pad_inner_dim=\).*allowed: true, false"),
        (lambda: AORecipeKwargs(module_filter_func=3), "allowed: a function of a module and its name"),
        (lambda: NativeRecipeKwargs(recipe="rowwize"), r"NativeRecipeKwargs\(recipe=\).*allowed: tensorwise, rowwise"),
        (
            lambda: NativeRecipeKwargs(recipe=3),
            "got a int; allowed: tensorwise, .*, a Recipe, or a mapping of patterns",
        ),
        (lambda: NativeRecipeKwargs(recipe=recipes.get(), margin=1), "beside a Recipe, which says it already"),
    ],
)
def test_errors_say_where_what_and_what_is_allowed(build, match) -> None:
    with pytest.raises(ConfigError, match=match):
        build()


def test_a_wrong_variable_is_named(monkeypatch) -> None:
    monkeypatch.setenv("ACCELERATE_FP8_MARGIN", "lots")
    with pytest.raises(ValueError, match=r"ACCELERATE_FP8_MARGIN: fp8_config\.margin got 'lots'"):
        TERecipeKwargs()


def test_unknown_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="amax_len"):
        TERecipeKwargs(amax_len=2)


def test_zero_for_the_letter_o_is_read_and_said() -> None:
    with pytest.warns(UserWarning, match="opt_level '02' is read as O2") as caught:
        assert MSAMPRecipeKwargs("02").opt_level == "O2"
    assert caught[0].filename == __file__
    assert MSAMPRecipeKwargs("O3").opt_level == "O3"


def test_wizard_spellings_are_taken() -> None:
    handler = TERecipeKwargs(amax_history_length=8, amax_compute_algorithm="max", format="E4M3")
    assert (handler.amax_history_len, handler.amax_compute_algo, handler.fp8_format) == (8, "max", "E4M3")


def test_torchaos_own_config_says_everything() -> None:
    config = object()
    handler = AORecipeKwargs(config)
    assert handler.config is config
    assert (handler.pad_inner_dim, handler.route_values().values) == (None, {})
    assert "AORecipeKwargs(config=) is an object" in handler.code_only()[0]
    with pytest.warns(UserWarning, match="pad_inner_dim not used") as caught:
        AORecipeKwargs(config, pad_inner_dim=False)
    assert caught[0].filename == __file__
    assert AORecipeKwargs(module_filter_func=lambda m, n: True).code_only()


# --- the deprecated class


def test_deprecated_class_without_library_takes_levels_and_says_so() -> None:
    with pytest.warns(FutureWarning, match="backend MSAMP, because none was given and TransformerEngine is not") as c:
        handler = FP8RecipeKwargs()
    assert c[0].filename == __file__
    assert (handler.backend, handler.opt_level) == ("MSAMP", "O2")
    assert handler.backend_value().value == "MSAMP"
    assert FP8KwargsHandler is FP8RecipeKwargs
    assert isinstance(handler, TERecipeKwargs)
    assert isinstance(handler, MSAMPRecipeKwargs)


def test_deprecated_class_takes_transformer_engine_where_it_is(monkeypatch, tmp_path) -> None:
    install(monkeypatch, tmp_path, "transformer_engine", "2.9.0")
    with pytest.warns(FutureWarning, match="backend TE, because none was given and TransformerEngine is installed"):
        handler = FP8RecipeKwargs()
    assert (handler.backend, handler.opt_level) == ("TE", None)


@pytest.mark.filterwarnings("ignore:FP8RecipeKwargs is deprecated:FutureWarning")
def test_deprecated_class_spellings_backends_and_levels(monkeypatch) -> None:
    assert FP8RecipeKwargs(backend="msamp").opt_level == "O2"
    assert FP8RecipeKwargs(optimization_level="o1", backend="MSAMP").opt_level == "O1"
    assert FP8RecipeKwargs("O3", True, 2).margin == 2
    assert str(FP8RecipeKwargs(backend="te").backend_value().source) == "code FP8RecipeKwargs(backend=)"
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "te")
    value = FP8RecipeKwargs().backend_value()
    assert (value.value, str(value.source)) == ("TE", "environment ACCELERATE_FP8_BACKEND")
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "NO")
    assert (FP8RecipeKwargs().backend, FP8RecipeKwargs().opt_level) == ("MSAMP", "O2")
    with pytest.raises(ValueError, match="got backend AO; allowed: TE, MSAMP; write AORecipeKwargs"):
        FP8RecipeKwargs(backend="ao")
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "ao")
    with pytest.raises(ValueError, match=r"environment ACCELERATE_FP8_BACKEND: .* allowed: TE, MSAMP"):
        FP8RecipeKwargs()
    with pytest.raises(ConfigError, match="optimization_level and opt_level are one setting"):
        FP8RecipeKwargs(opt_level="O1", optimization_level="O1", backend="te")


# --- native recipes


def test_settings_reach_the_recipe() -> None:
    handler = NativeRecipeKwargs(
        recipe="Delayed",
        fp8_format="e4m3",
        margin=2,
        interval=3,
        amax_history_len=8,
        amax_compute_algo="Most_Recent",
        override_linear_precision=(False, False, True),
        use_autocast_during_eval=True,
        skip=["lm_head", "layers.0.*"],
        pow2_scales=True,
        save_for_backward="FP8_Compressed",
    )
    recipe = handler.to_recipe()
    assert recipe.scaling == DelayedScaling(amax_history_len=8, amax_compute_algo="most_recent", margin=2, interval=3)
    assert recipe.fp8_gemms == ("fprop", "dgrad")
    assert (recipe.eval, recipe.skip, recipe.pow2_scales) == ("fp8", ("lm_head", "layers.0.*"), True)
    assert recipe.dgrad.a.format.name == "E4M3"
    assert recipe.save_for_backward == "fp8_compressed"


@pytest.mark.parametrize("name", recipes.names())
def test_defaults_give_the_named_recipe(name) -> None:
    assert NativeRecipeKwargs(recipe=name).to_recipe() == recipes.get(name)


def test_torchaos_name_is_rowwise_without_wgrad() -> None:
    made = NativeRecipeKwargs(recipe="rowwise_with_gw_hp", pow2_scales=True).to_recipe()
    assert made == recipes.get("rowwise", pow2_scales=True).with_gemms(wgrad=False)
    handler = NativeRecipeKwargs(recipe="tensorwise", layer_recipes=["*.up=rowwise_with_gw_hp"])
    assert [(pattern, recipe.name, recipe.wgrad.is_fp8) for pattern, recipe in handler.to_recipe().patterns] == [
        ("*.up", "rowwise", False), ("*", "tensorwise", True),
    ]  # fmt: skip


def test_delayed_defaults_are_those_of_the_scaling() -> None:
    for key in DelayedScaling.__dataclass_fields__:
        default = ENTRIES[f"fp8_config.{key}"].setting.defaults["NATIVE"]
        assert default == DelayedScaling.__dataclass_fields__[key].default, key


@pytest.mark.parametrize(
    "recipe",
    [
        *(recipes.get(name) for name in recipes.names()),
        recipes.get("tensorwise", formats="E5M2", pow2_scales=True),
        recipes.get("rowwise", formats="HYBRID", eval="fp8", skip=("a", "b.*")),
        recipes.get("delayed", margin=3, amax_history_len=4, amax_compute_algo="most_recent", interval=2),
        recipes.get("rowwise").with_gemms(wgrad=False),
        recipes.get("tensorwise").with_gemms(fprop=False, dgrad=False),
        recipes.get("activations_only", formats="E5M2"),
        recipes.get("rowwise", save_for_backward="bf16"),
        recipes.get("activations_only", save_for_backward="fp8_compressed"),
    ],
    ids=str,
)
def test_a_recipe_object_is_settings_and_back(recipe) -> None:
    values, is_exact = recipe_values(recipe)
    assert is_exact
    assert build_recipe(values) == recipe
    handler = NativeRecipeKwargs(recipe=recipe)
    assert handler.to_recipe() == recipe
    assert handler.code_only() == []


def test_a_recipe_of_ones_own_is_code_only() -> None:
    recipe = recipes.get("rowwise").replace(name="mine")
    handler = NativeRecipeKwargs(recipe=recipe, skip=["up"])
    assert "NativeRecipeKwargs(recipe=) is an object" in handler.code_only()[0]
    assert handler.to_recipe() == recipe.replace(skip=("up",))
    assert handler.to_dict()["recipe"] is recipe


def test_contradicting_parts_are_the_recipes_own_error() -> None:
    with pytest.raises(RecipeError, match="E5M2 with 1x128 scales"):
        NativeRecipeKwargs(recipe="blockwise", fp8_format="E5M2").to_recipe()


# --- what every handler does


def test_handlers_copy_and_pickle() -> None:
    handler = TERecipeKwargs(margin=2)
    for twin in (copy.deepcopy(handler), pickle.loads(pickle.dumps(handler))):
        assert twin == handler
        assert twin.route_values().values == handler.route_values().values


def test_to_dict_is_a_deep_copy_and_to_kwargs_the_difference() -> None:
    @dataclass
    class Mine(KwargsHandler):
        a: int = 1
        b: list | None = None

    handler = Mine(b=[1])
    handler.to_dict()["b"].append(2)
    assert handler.b == [1]
    assert handler.to_kwargs() == {"b": [1]}


def test_a_subclass_keeps_the_schema() -> None:
    @dataclass
    class Mine(TERecipeKwargs):
        extra: int = 0

    handler = Mine(margin=2, extra=1)
    assert str(handler.route_values().values["fp8_config.margin"].source) == "code Mine(margin=)"
    assert handler.backend_value().value == "TE"
