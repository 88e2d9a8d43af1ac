"""The templates: read, free of contradictions, each about what its name says."""

from __future__ import annotations

from pathlib import Path

import pytest

from acceler8.config import merge, read_yaml
from acceler8.config.backend_choice import READY, cannot_run, preferred_backend
from acceler8.config.resolve import check

FOLDER = Path(__file__).parents[2] / "examples" / "config_yaml_templates"
TEMPLATES = sorted(FOLDER.glob("*.yaml"))
NAMED = {
    "ao": ("fp8_config.backend", "AO"),
    "cpu": ("use_cpu", True),
    "deepspeed_zero1": ("deepspeed_config.zero_stage", 1),
    "deepspeed_zero2": ("deepspeed_config.zero_stage", 2),
    "deepspeed_zero3": ("deepspeed_config.zero_stage", 3),
    "fsdp": ("distributed_type", "FSDP"),
    "msamp_o2": ("fp8_config.opt_level", "O2"),
    "multi_cpu": ("distributed_type", "MULTI_CPU"),
    "multi_gpu": ("distributed_type", "MULTI_GPU"),
    "native_activations_only": ("fp8_config.recipe", "activations_only"),
    "native_blockwise": ("fp8_config.recipe", "blockwise"),
    "native_delayed": ("fp8_config.recipe", "delayed"),
    "native_mxfp8": ("fp8_config.recipe", "mxfp8"),
    "native_rowwise": ("fp8_config.recipe", "rowwise"),
    "native_tensorwise": ("fp8_config.recipe", "tensorwise"),
    "single_gpu": ("distributed_type", "NO"),
    "te_delayed": ("fp8_config.amax_compute_algo", "most_recent"),
    "te_mxfp8": ("fp8_config.use_mxfp8_block_scaling", True),
}


def test_every_template_is_known_here():
    assert [path.stem for path in TEMPLATES] == sorted(NAMED)


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_a_template_is_valid_and_what_its_name_says(path: Path):
    layer = read_yaml(path)
    effective = merge([layer])
    assert check(effective) == []
    assert layer.notes == []
    assert effective["mixed_precision"] == "fp8"
    assert effective["fp8_config.backend"] == path.stem.partition("_")[0].upper() or path.stem in (
        *("cpu", "fsdp", "multi_cpu", "multi_gpu", "single_gpu"),
        *(f"deepspeed_zero{stage}" for stage in (1, 2, 3)),
    )
    setting, value = NAMED[path.stem]
    assert effective[setting] == value


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_a_template_is_explained_and_says_how_it_is_used(path: Path):
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# ")
    assert f"acceler8 launch --config_file {path.name} train.py" in text


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_a_template_says_whether_this_version_trains_with_it(path: Path):
    effective = merge([read_yaml(path)])
    is_ready = preferred_backend(effective) in READY and not list(cannot_run(effective))
    assert ("does not train" in path.read_text()) is not is_ready
