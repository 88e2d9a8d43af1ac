"""``acceler8 env``: what it says, and what it does not."""

from __future__ import annotations

import json
import re

import pytest
import torch
from typer.testing import CliRunner

from acceler8 import backends, recipes
from acceler8.cli.app import app
from acceler8.cli.env import describe, redact


def test_versions_hardware_and_configuration_with_sources(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("mixed_precision: fp8\nfp8_config:\n  margin: 2\n")
    report = describe({"ACCELERATE_FP8_MARGIN": "3", "HOME": "/nowhere"}, file)
    assert torch.__version__.startswith(report["Versions"]["torch"])  # some builds leave "+cu130" out of it
    assert report["Versions"]["transformer-engine"]
    assert "CPU cores" in report["Hardware"]
    assert report["Effective configuration"]["mixed_precision"] == f"fp8  (yaml {file}:1)"
    assert report["Effective configuration"]["fp8_config.margin"] == "3  (environment ACCELERATE_FP8_MARGIN)"
    assert report["Environment variables"] == {"ACCELERATE_FP8_MARGIN": "3"}


@pytest.mark.parametrize(
    ("name", "text", "secret"),
    [
        ("HF_TOKEN", "hf_abc", "hf_abc"),
        ("ACCELERATE_API_KEY", "k-123", "k-123"),
        ("TORCH_PASSWORD", "pw", "pw"),
        ("HF_ENDPOINT", "https://me:pw9@host/x", "pw9"),
        ("ACCELER8_ENVIRONMENT", '{"WANDB_API_KEY": "abc", "NCCL_DEBUG": "INFO"}', "abc"),
    ],
)
def test_secrets_are_left_out(name, text, secret):
    assert secret not in redact(name, text)
    assert secret not in json.dumps(describe({name: text}))


def test_what_is_no_secret_stays():
    assert redact("NCCL_DEBUG", "INFO") == "INFO"
    assert "INFO" in redact("ACCELER8_ENVIRONMENT", '{"WANDB_API_KEY": "abc", "NCCL_DEBUG": "INFO"}')


def test_an_unusable_configuration_is_part_of_the_report(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("mixed_precision: fp9\n")
    assert f"{file}:1" in describe({}, file)["Effective configuration"]["unusable"]


def test_the_command_prints_json():
    result = CliRunner().invoke(app, ["env", "--json"])
    assert result.exit_code == 0
    assert set(json.loads(result.output)) >= {"Versions", "Hardware", "Effective configuration"}


def test_the_matrix_is_the_backends_own_table():
    """Each cell is what ``plan`` does, for the recipe by that name on a device that it runs on."""
    result = CliRunner().invoke(app, ["env", "--matrix", "--json"])
    rows = json.loads(result.output)
    assert {(row["backend"], row["recipe"]) for row in rows} == {
        (name, capability.recipe) for name in backends.names() for capability in backends.find(name).capabilities()
    }
    for row in rows:
        assert tuple(row["strategies"]) == backends.STRATEGIES
        engine, recipe = backends.find(row["backend"]), recipes.get(row["recipe"])
        for strategy, cell in row["strategies"].items():
            why = engine.lacks(recipe, torch.device("meta"), strategy)
            assert cell["runs"] is (why is None), (row["backend"], row["recipe"], strategy, why)
            assert cell["runs"] is not bool(cell["reason"])
            assert why is None or not cell["reason"] or "refused" in cell["reason"] or cell["reason"] in why


def test_the_matrix_as_text_names_every_refusal():
    text = CliRunner().invoke(app, ["env", "--matrix"]).output
    header = next(line for line in text.splitlines() if line.startswith("| backend"))
    assert all(f" {strategy} " in header for strategy in backends.STRATEGIES)
    numbers = {int(n) for n in re.findall(r"no \((\d+)\)", text)}
    notes = {int(n) for n in re.findall(r"^  (\d+)\. \S", text, re.MULTILINE)}
    assert numbers == notes
