"""``layer_recipes`` on every route, and mappings of patterns in code."""

from __future__ import annotations

import json
from typing import Any

import pytest

from acceler8 import recipes
from acceler8.config import ENTRIES, read_yaml
from acceler8.config.backend_choice import check, fp8_values, recipe_of
from acceler8.config.kinds import LayerPatterns
from acceler8.config.schema import RECIPES
from acceler8.errors import ConfigError, RecipeError
from acceler8.recipes import LayerRecipes
from acceler8.utils import NativeRecipeKwargs
from tests.config.support import effective_of

KIND = LayerPatterns(RECIPES)
PATH = "fp8_config.layer_recipes"
VALUE = ("*.mlp.*=tensorwise", "layers.0=none")


@pytest.mark.parametrize(
    "raw",
    [
        list(VALUE),
        VALUE,
        "*.mlp.*=tensorwise, layers.0=none",
        "*.mlp.* = TensorWise,layers.0=NONE",
        '["*.mlp.*=tensorwise", "layers.0=none"]',
        {"*.mlp.*": "tensorwise", "layers.0": None},
        '{"*.mlp.*": "tensorwise", "layers.0": null}',
    ],
)
def test_spellings(raw: Any) -> None:
    assert KIND.parse(raw) == VALUE


def test_a_pattern_may_hold_an_equals_sign_and_the_order_is_kept() -> None:
    assert KIND.parse({"b=c": "rowwise", "a": "rowwise"}) == ("b=c=rowwise", "a=rowwise")
    assert KIND.parse([]) == KIND.parse(KIND.text(())) == ()


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ("*.mlp.*", r"run.yaml:3: got '\*.mlp.\*'; allowed: pattern=recipe, such as \*.mlp.\*=tensorwise"),
        (["=rowwise"], "run.yaml:3: got '=rowwise'; allowed: pattern=recipe"),
        ("a=rowise", "run.yaml:3: pattern 'a': unknown recipe 'rowise'; did you mean 'rowwise'"),
        ("a=rowwise,a=delayed", "run.yaml:3: got the pattern 'a' twice; the first would decide: leave one out"),
        (3, r"run.yaml:3: fp8_config.layer_recipes got 3; allowed: a list of pattern=recipe, or a mapping"),
    ],
)
def test_errors_name_the_place(raw: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ENTRIES[PATH].parse(raw, "run.yaml:3")


@pytest.mark.parametrize(
    "text",
    [
        'fp8_config:\n  layer_recipes: ["*.mlp.*=tensorwise", layers.0=none]\n',
        'fp8_config:\n  layer_recipes:\n    "*.mlp.*": tensorwise\n    layers.0: null\n',
        'fp8_config:\n  layer_recipes:\n    "*.mlp.*": tensorwise\n    layers.0: none\n',
    ],
)
def test_yaml_takes_a_list_and_a_mapping(tmp_path, text: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    assert read_yaml(file).values[PATH].value == VALUE


# --- what runs


def effective(**settings: Any) -> Any:
    return effective_of({"mixed_precision": "fp8", **{f"fp8_config.{key}": value for key, value in settings.items()}})


def test_recipe_is_for_the_layers_that_no_pattern_fits() -> None:
    got = recipe_of(effective(recipe="delayed", layer_recipes=VALUE, amax_history_len=4, skip=("a",)))
    assert got == LayerRecipes(
        (
            ("*.mlp.*", recipes.get("tensorwise", skip=("a",))),
            ("layers.0", None),
            ("*", recipes.get("delayed", amax_history_len=4, skip=("a",))),
        )
    )
    assert recipe_of(effective(layer_recipes=())) == recipes.get()
    assert recipe_of(effective(layer_recipes="*=blockwise")).patterns == (("*", recipes.get("blockwise")),)


def test_settings_of_delayed_scaling_go_with_any_delayed_layer() -> None:
    mixed = effective(layer_recipes="mlp=delayed", margin=2)
    assert check(mixed) == []
    assert recipe_of(mixed).find("mlp")[1] == recipes.get("delayed", margin=2)
    assert fp8_values(mixed, "NATIVE")["fp8_config.amax_history_len"].value == 1024
    with pytest.raises(ConfigError, match=r"margin=2 belongs to delayed.*recipe is rowwise, tensorwise \(default\)"):
        check(effective(layer_recipes="mlp=tensorwise", margin=2))


def test_a_format_is_for_every_recipe_and_must_suit_it() -> None:
    assert recipe_of(effective(layer_recipes="a=tensorwise", fp8_format="E4M3")).find("a")[1] == recipes.get(
        "tensorwise", formats="E4M3"
    )
    with pytest.raises(ConfigError, match=r"layer_recipes mlp=blockwise \(code test\), fp8_format HYBRID"):
        check(effective(layer_recipes="mlp=blockwise", fp8_format="HYBRID"))


def test_recipe_is_not_reported_where_patterns_leave_it_nothing() -> None:
    assert "fp8_config.recipe" in fp8_values(effective(layer_recipes="a=rowwise"), "NATIVE")
    assert "fp8_config.recipe" not in fp8_values(effective(layer_recipes="a=rowwise,*=none"), "NATIVE")


# --- code


def test_a_mapping_of_names_is_layer_recipes_that_leave_nothing_open() -> None:
    handler = NativeRecipeKwargs(recipe={"*.mlp.*": "Tensorwise", "layers.0": None}, pow2_scales=True)
    assert handler.layer_recipes == (*VALUE, "*=none")
    assert handler.route_values().values[PATH].value == handler.layer_recipes
    assert handler.to_recipe().find("x.mlp.y")[1] == recipes.get("tensorwise", pow2_scales=True)
    assert handler.to_recipe().find("other") == ("*", None)
    assert handler.code_only() == []
    assert NativeRecipeKwargs(recipe={"*": "rowwise"}).layer_recipes == ("*=rowwise",)


def test_layer_recipes_are_a_list_or_a_mapping() -> None:
    for given in (list(VALUE), iter(VALUE), {"*.mlp.*": "tensorwise", "layers.0": None}, ",".join(VALUE)):
        handler = NativeRecipeKwargs(layer_recipes=given)
        assert handler.to_recipe() == recipe_of(effective(layer_recipes=VALUE))
        assert handler.route_values().values[PATH].value == VALUE


def test_a_mapping_with_a_recipe_object_says_everything() -> None:
    mine = recipes.get("rowwise", skip=("q",)).with_gemms(wgrad=False).replace(name="mine")
    handler = NativeRecipeKwargs(recipe={"a": mine, "*": "Tensorwise"}, skip=["b"])
    assert handler.to_recipe() == LayerRecipes(
        (("a", mine.replace(skip=("q", "b"))), ("*", recipes.get("tensorwise", skip=("b",))))
    )
    values = handler.route_values().values
    assert values[PATH].value == ("a=mine", "*=tensorwise")
    assert values["fp8_config.skip"].value == ("b",)
    assert values["fp8_config.margin"].value is None
    assert "recipe=) is an object" in handler.code_only()[0]
    assert handler.to_dict()["recipe"] is handler.recipe
    with pytest.raises(ConfigError, match=r"pow2_scales=\): got True beside a Recipe"):
        NativeRecipeKwargs(recipe={"a": mine}, pow2_scales=True)


def test_errors_of_mappings() -> None:
    with pytest.raises(ConfigError, match="got recipe as a mapping and layer_recipes; allowed: one of them"):
        NativeRecipeKwargs(recipe={"a": "rowwise"}, layer_recipes=["b=rowwise"])
    with pytest.raises(RecipeError, match="pattern 'a': unknown recipe 'rowise'; did you mean 'rowwise'"):
        NativeRecipeKwargs(recipe={"a": "rowise"})
    with pytest.raises(ConfigError, match=r"got a int; allowed: tensorwise, .*, a Recipe, or a mapping of patterns"):
        NativeRecipeKwargs(recipe=3)


def test_a_mapping_that_is_set_later_counts() -> None:
    handler = NativeRecipeKwargs()
    handler.recipe = {"a": "delayed"}
    assert handler.route_values().values[PATH].value == ("a=delayed", "*=none")
    assert json.dumps(handler.to_dict())
