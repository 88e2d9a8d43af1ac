"""Weights that are gathered in FP8 share one cast: recipes by pattern must agree on it."""

from __future__ import annotations

import pytest

from acceler8 import recipes
from acceler8.errors import PlanError
from acceler8.nn import fp8_layers
from acceler8.parallel.fp8_all_gather import _one_recipe
from tests.models import converted


def test_recipes_that_cast_weights_alike_may_differ_otherwise():
    mine = recipes.get("rowwise").replace(name="mine", eval="fp8")
    assert _one_recipe(list(fp8_layers(converted({"up": "rowwise", "*": mine})))) == recipes.get("rowwise")


@pytest.mark.parametrize("other", [recipes.get("tensorwise"), recipes.get("rowwise", pow2_scales=True)])
def test_recipes_that_do_not_are_refused(other):
    layers = list(fp8_layers(converted({"up": "rowwise", "*": other})))
    with pytest.raises(PlanError, match=r"'up' casts its weight by recipe 'rowwise' and 'down' by .*; allowed for FP8"):
        _one_recipe(layers)
