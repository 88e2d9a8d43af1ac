"""What backends are told beside the recipe, from each place where a setting may stand. Needs no vendor's library."""

from __future__ import annotations

from pathlib import Path

import pytest

from acceler8.accelerator.backend_settings import options_of
from acceler8.backends.torchao import TorchaoOptions
from acceler8.backends.transformer_engine import TransformerEngineOptions
from acceler8.config import Effective, merge, parse_flags, read_environment, read_yaml
from acceler8.utils import TERecipeKwargs


def effective(route: str, folder: Path) -> Effective:
    if route == "yaml":
        (folder / "run.yaml").write_text("fp8_config:\n  backend: TE\n  convert_norms: false\n")
        return merge([read_yaml(folder / "run.yaml")])
    if route == "flag":
        return merge([parse_flags(["--fp8_convert_norms=false"]).route])
    if route == "variable":
        return merge([read_environment({"ACCELERATE_FP8_CONVERT_NORMS": "false"})])
    return merge([TERecipeKwargs(convert_norms=False).route_values()])


@pytest.mark.parametrize("route", ["yaml", "flag", "variable", "handler"])
def test_norms_are_left_by_every_route(tmp_path, route):
    found = effective(route, tmp_path)
    assert options_of(found, "TE", None) == TransformerEngineOptions(convert_norms=False)
    assert isinstance(options_of(found, "AO", None), TorchaoOptions)
    assert options_of(found, "NATIVE", None) is None


def test_norms_are_converted_by_default():
    assert options_of(merge([]), "TE", None) == TransformerEngineOptions(convert_norms=True)
