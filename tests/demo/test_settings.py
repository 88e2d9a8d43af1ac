"""Settings: defaults by size, and every wish that no run can have."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from acceler8.demo.settings import SIZES, STANDARD_LIBRARY, DemoSettings, resolve_device, resolve_settings
from acceler8.errors import HardwareError, RecipeError, RunError


def test_nothing_asked_gives_the_defaults_of_the_size():
    settings = resolve_settings({"device": "cpu"})
    small = SIZES["small"]
    assert (settings.size, settings.recipe, settings.seed, settings.text) == (
        "small",
        "rowwise",
        0,
        STANDARD_LIBRARY,
    )
    assert (settings.steps, settings.batch, settings.seq, settings.lr) == (
        small.steps,
        small.batch,
        small.seq,
        small.lr,
    )


def test_what_is_asked_wins_and_none_means_not_asked():
    settings = resolve_settings({"device": "cpu", "size": "tiny", "steps": 3, "lr": None, "seed": 9})
    assert (settings.steps, settings.seed, settings.lr) == (3, 9, SIZES["tiny"].lr)


def test_settings_survive_json():
    settings = resolve_settings({"device": "cpu", "size": "tiny"})
    assert DemoSettings.from_dict(settings.to_dict()) == settings


def test_relative_text_path_is_kept_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert resolve_settings({"device": "cpu", "text": "book.txt"}).text == str(tmp_path / "book.txt")


@pytest.mark.parametrize("size", SIZES)
def test_every_width_of_every_size_fits_the_fp8_gemm(size: str):
    shape = SIZES[size]
    assert shape.dim % shape.heads == 0
    assert shape.heads % shape.kv_heads == 0
    assert shape.head_dim % 2 == 0  # rotary pairs
    widths = (shape.dim, shape.ffn, shape.kv_heads * shape.head_dim, shape.batch * shape.seq)
    assert all(width % 16 == 0 for width in widths)


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"size": "smal"}, r"unknown size 'smal'; did you mean 'small'\? valid: .*tiny"),
        ({"device": "gpu"}, r"unknown device 'gpu'.*valid: auto, cpu, cuda, cuda:N"),
        ({"device": "cuda:x"}, r"unknown device 'cuda:x'.*did you mean 'cuda"),
        ({"device": "cpu:0"}, r"unknown device 'cpu:0'; did you mean 'cpu'"),
        ({"steps": 0}, r"steps=0 is not allowed.*at least 1.*--steps"),
        ({"steps": -5}, r"steps=-5 is not allowed"),
        ({"batch": 0}, r"batch=0 is not allowed.*--batch"),
        ({"seq": 0}, r"seq=0 is not allowed"),
        ({"lr": 0.0}, r"lr=0.0 is not allowed.*above 0.*--lr"),
        ({"lr": float("nan")}, r"lr=nan is not allowed"),
        ({"lr": float("inf")}, r"lr=inf is not allowed"),
        ({"seed": -1}, r"seed=-1 is not allowed"),
        ({"seed": 2**63}, r"seed=9223372036854775808 is not allowed"),
    ],
)
def test_wishes_that_no_run_can_have(wish: dict[str, Any], message: str):
    with pytest.raises(RunError, match=message):
        resolve_settings({"device": "cpu"} | wish)


def test_unknown_recipe_names_the_nearest():
    with pytest.raises(RecipeError, match=r"unknown recipe 'rowise'; did you mean 'rowwise'"):
        resolve_settings({"device": "cpu", "recipe": "rowise"})


def test_a_gpu_that_is_not_there_is_a_hardware_error():
    with pytest.raises(HardwareError, match=r"device 'cuda:99' is not here: .*use --device cpu"):
        resolve_device("cuda:99")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA GPU")
def test_auto_without_a_gpu_is_the_cpu():
    assert resolve_device(None) == resolve_device("auto") == "cpu"


@pytest.mark.requires(sm=0)
def test_auto_with_a_gpu_is_the_first_one_and_a_large_model():
    assert resolve_device("auto") == "cuda:0"
    assert resolve_settings({}).size == "large"


def test_saved_settings_of_another_version_are_refused():
    saved = resolve_settings({"device": "cpu"}).to_dict()
    with pytest.raises(RunError, match=r"other keys than this version knows: momentum; resume with"):
        DemoSettings.from_dict(saved | {"momentum": 0.9})
    del saved["seed"]
    with pytest.raises(RunError, match=r"other keys than this version knows: seed"):
        DemoSettings.from_dict(saved)


@pytest.mark.parametrize(("key", "value"), [("lr", "fast"), ("seed", None), ("steps", True), ("text", 3)])
def test_saved_settings_of_a_wrong_type_are_refused(key: str, value: object):
    saved = resolve_settings({"device": "cpu"}).to_dict()
    with pytest.raises(RunError, match=f"{key}="):
        DemoSettings.from_dict(saved | {key: value})
