"""One recipe per pattern of layer names: which decides, what is refused, JSON."""

from __future__ import annotations

import json

import pytest

from acceler8 import recipes
from acceler8.errors import RecipeError
from acceler8.recipes import LayerRecipes, Recipe
from acceler8.recipes.layers import recipe_from_dict, resolve_layers

MIXED = {"*.mlp.*": "tensorwise", "layers.0": None, "*": "delayed"}


def test_the_first_pattern_that_fits_decides():
    mixed = LayerRecipes.of(MIXED)
    found = {name: mixed.find(name) for name in ("layers.0.mlp.up", "layers.0.q", "layers.1.q")}
    assert found == {
        "layers.0.mlp.up": ("*.mlp.*", recipes.get("tensorwise")),
        "layers.0.q": ("layers.0", None),
        "layers.1.q": ("*", recipes.get("delayed")),
    }
    assert LayerRecipes.of({"mlp": "rowwise"}).find("attention.q") == (None, None)
    assert mixed.name == "*.mlp.*=tensorwise, layers.0=none, *=delayed"


def test_skip_is_added_to_each_recipe():
    own = recipes.get("rowwise", skip=("a",))
    got = LayerRecipes.of({"x": own, "y": None, "*": "tensorwise"}).and_skip(("b",))
    assert [recipe and recipe.skip for _, recipe in got.patterns] == [("a", "b"), None, ("b",)]


def test_json_round_trip():
    mixed = LayerRecipes.of({**MIXED, "z": recipes.get("rowwise").with_gemms(wgrad=False).replace(name="mine")})
    assert recipe_from_dict(json.loads(json.dumps(mixed.to_dict()))) == mixed
    assert recipe_from_dict(recipes.get("rowwise").to_dict()) == recipes.get("rowwise")


def test_what_stands_for_a_recipe():
    assert resolve_layers(None) == recipes.get()
    assert resolve_layers(MIXED) == LayerRecipes.of(MIXED) == resolve_layers(LayerRecipes.of(MIXED))
    assert LayerRecipes.of({"*": "none"}).patterns == (("*", None),)
    assert isinstance(resolve_layers("delayed"), Recipe)


@pytest.mark.parametrize(
    ("patterns", "said"),
    [
        ({}, r"recipe got no pattern; allowed: one or more, such as"),
        ({" ": "rowwise"}, r"recipe got the pattern ' '; allowed: a layer name or a glob"),
        ({"*": "rowise"}, r"pattern '\*': unknown recipe 'rowise'; did you mean 'rowwise'\?"),
        ({"*": 3}, r"pattern '\*': recipe is a int; allowed: a name"),
    ],
)
def test_errors(patterns, said):
    with pytest.raises(RecipeError, match=said):
        LayerRecipes.of(patterns)


def test_a_pattern_twice_is_an_error():
    with pytest.raises(RecipeError, match="the pattern 'a' twice; the first would decide: leave one out"):
        LayerRecipes((("a", None), ("a", None)))


def test_delayed_recipes_share_their_histories():
    short = recipes.get("delayed", amax_history_len=4)
    LayerRecipes.of({"a": recipes.get("delayed", amax_history_len=4, margin=1), "b": short})
    with pytest.raises(RecipeError, match=r"amax_history_len is 4 for 'a' and 1024 for 'b'; allowed: one for all"):
        LayerRecipes.of({"a": short, "*.x": "rowwise", "b": "delayed"})


@pytest.mark.parametrize(
    "data", [{"layers": 3}, {"layers": [["a"]]}, {"layers": [["*", None]], "extra": 1}, {"layers": [["*", {}]]}]
)
def test_json_that_is_no_recipe_is_an_error(data):
    with pytest.raises(RecipeError):
        recipe_from_dict(data)
