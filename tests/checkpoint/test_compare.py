from __future__ import annotations

import json

import pytest

from acceler8.checkpoint import compare_config

SAVED = {"recipe": {"name": "rowwise", "skip": ["lm_head"]}, "lr": 0.003, "seed": 0, "size": "small"}


@pytest.mark.parametrize(
    ("current", "lines"),
    [
        (SAVED, []),
        (
            SAVED | {"recipe": {"name": "tensorwise", "skip": ["lm_head"]}},
            ["recipe.name: saved 'rowwise', now 'tensorwise'"],
        ),
        (SAVED | {"recipe": {"name": "rowwise", "skip": ("lm_head",)}}, []),
        (SAVED | {"recipe": {"name": "rowwise", "skip": []}}, ["recipe.skip: saved ['lm_head'], now []"]),
        (SAVED | {"recipe": None}, ["recipe: saved {'name': 'rowwise', 'skip': ['lm_head']}, now None"]),
        (SAVED | {"recipe": {"name": "rowwise"}}, ["recipe.skip: saved ['lm_head'], now not set"]),
        (SAVED | {"steps": 20}, ["steps: saved not set, now 20"]),
        (SAVED | {"seed": 0.0}, []),
        (SAVED | {"seed": False}, ["seed: saved 0, now False"]),
        (
            SAVED | {"lr": 0.001, "size": "base"},
            ["lr: saved 0.003, now 0.001", "size: saved 'small', now 'base'"],
        ),
    ],
)
def test_each_difference_is_one_line(current, lines):
    assert [str(difference) for difference in compare_config(SAVED, current)] == lines


def test_a_config_equals_itself_after_json():
    config = {"betas": (0.9, 0.95), "nested": {"shape": (2, (3,)), "none": None}}
    assert compare_config(json.loads(json.dumps(config)), config) == []


def test_nan_equals_nan():
    assert compare_config({"a": float("nan")}, {"a": float("nan")}) == []
