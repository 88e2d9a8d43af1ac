"""``acceler8 launch`` as a user runs it: what reaches the workers, by every route, and what comes back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from acceler8.config import ENTRIES

# Reports what a worker's script sees: the effective values and, without any vendor's library, the recipe of each class.
SCRIPT = """
import json, sys
from pathlib import Path
from acceler8 import Accelerator
from acceler8.utils import AORecipeKwargs, MSAMPRecipeKwargs, NativeRecipeKwargs, TERecipeKwargs
a = Accelerator() if sys.argv[1] == "accelerator" else None
seen = {
    "arguments": sys.argv[2:],
    "te": TERecipeKwargs().to_dict(),
    "ao": AORecipeKwargs().to_dict(),
    "msamp": MSAMPRecipeKwargs().to_dict(),
    "native": NativeRecipeKwargs().to_recipe().to_dict(),
    "schedule": [NativeRecipeKwargs().fp8_steps, NativeRecipeKwargs().fp8_last_layers],
}
if a is not None:
    seen |= {
        "rank": a.process_index, "local_rank": a.local_process_index, "world": a.num_processes,
        "is_main": a.is_main_process, "device": str(a.device), "mixed_precision": str(a.mixed_precision),
        "backend": a.fp8_backend.value, "recipe": a.recipe.to_dict() if a.recipe else None,
        "report": str(a.fp8_report()),
        "effective": {p: [v.value, str(v.source)] for p, v in a.effective.values.items()},
    }
    a.wait_for_everyone()
Path(f"seen-{a.process_index if a else 0}.json").write_text(json.dumps(seen, default=str))
"""


def launch(folder: Path, *arguments: str, environ: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(SCRIPT)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "ACCELER8_", "FSDP_"))}
    home = {"XDG_CONFIG_HOME": str(folder / "config"), "HF_HOME": str(folder / "hf")}
    return subprocess.run(
        [sys.executable, "-m", "acceler8", "launch", *arguments],
        cwd=folder, env=kept | home | (environ or {}), capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip


def seen(folder: Path, rank: int = 0) -> dict[str, object]:
    return json.loads((folder / f"seen-{rank}.json").read_text())


# One value other than the default for every setting of fp8_config, as each route spells it.
TE = {
    "use_autocast_during_eval": True, "margin": 2, "interval": 3, "fp8_format": "E4M3", "amax_history_len": 17,
    "amax_compute_algo": "max", "override_linear_precision": [False, True, True], "use_mxfp8_block_scaling": True,
    "convert_norms": False,
}  # fmt: skip
AO = {
    "pad_inner_dim": False, "enable_fsdp_float8_all_gather": False, "skip_first_and_last": False,
    "module_filter_func": "math:isnan",
}  # fmt: skip
LEVEL = {"opt_level": "O3"}
NATIVE = {
    "recipe": "delayed", "skip": ["lm_head", "layers.0.*"], "pow2_scales": True, "fp8_steps": "5:900",
    "fp8_last_layers": "0:4,1000:8,2000:all", "layer_recipes": ["*.mlp.*=tensorwise", "layers.1=none"],
    "save_for_backward": "fp8_compressed", "tokens": 4096, "never_slower": False,
}  # fmt: skip


def as_flags(settings: dict[str, object]) -> list[str]:
    text = {k: ",".join(map(str, v)) if isinstance(v, list) else str(v) for k, v in settings.items()}
    return [f"--fp8_{key.removeprefix('fp8_')}={value}" for key, value in text.items()]


def as_environment(settings: dict[str, object]) -> dict[str, str]:
    variables = {}
    for key, value in settings.items():
        names = ENTRIES[f"fp8_config.{key}"].setting.env
        parts = value if len(names) == 3 else [",".join(value) if isinstance(value, list) else value]
        variables |= {name: str(part) for name, part in zip(names, parts, strict=True)}
    return variables


@pytest.mark.parametrize("route", ["flags", "environment", "yaml"])
def test_every_setting_of_every_recipe_reaches_a_launched_script(tmp_path, route):
    settings = TE | AO | LEVEL | NATIVE
    choice = {"fp8_config.backend", "fp8_config.backend_order"}
    assert {f"fp8_config.{key}" for key in settings} | choice == {p for p, e in ENTRIES.items() if e.is_fp8}
    arguments, environ = [], {}
    if route == "flags":
        arguments = as_flags(settings)
    elif route == "environment":
        environ = as_environment(settings)
    else:
        (tmp_path / "run.yaml").write_text(yaml.safe_dump({"fp8_config": settings}))
        arguments = ["--config_file", "run.yaml"]
    done = launch(tmp_path, *arguments, "script.py", "no accelerator", environ=environ)
    assert done.returncode == 0, done.stderr
    got = seen(tmp_path)
    assert {key: got["te"][key] for key in TE} == TE
    assert {key: got["ao"][key] for key in AO} == AO
    assert got["msamp"]["opt_level"] == "O3"
    assert got["schedule"] == ["5:900", "0:4,1000:8,2000:all"]
    patterns = dict(got["native"]["layers"])
    assert [*patterns] == ["*.mlp.*", "layers.1", "*"]
    assert patterns["*.mlp.*"]["name"] == "tensorwise"
    assert patterns["*.mlp.*"]["save_for_backward"] == patterns["*"]["save_for_backward"] == "fp8_compressed"
    assert patterns["layers.1"] is None
    native = patterns["*"]
    assert (native["name"], native["skip"], native["pow2_scales"], native["eval"]) == (
        "delayed", ["lm_head", "layers.0.*"], True, "fp8",
    )  # fmt: skip
    assert native["scaling"] == {
        "time": "delayed", "amax_history_len": 17, "amax_compute_algo": "max", "margin": 2, "interval": 3,
    }  # fmt: skip
    assert native["fprop"]["a"]["format"] == "E4M3"
    assert native["dgrad"]["a"] is None
    assert native["wgrad"]["a"] is None


def test_two_cpu_processes_report_rank_world_and_recipe(tmp_path):
    (tmp_path / "run.yaml").write_text("fp8_config:\n  recipe: delayed\n  margin: 1\n  amax_history_len: 8\n")
    done = launch(
        tmp_path,
        *("--cpu", "--num-processes", "2", "--mixed_precision", "fp8"),
        *("--config_file", "run.yaml", "--fp8-margin", "2"),
        *("script.py", "accelerator", "--num_processes", "a b", "-h", "it's\n$HOME"),
        environ={"ACCELERATE_FP8_AMAX_HISTORY_LEN": "4"},
    )
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        got = seen(tmp_path, rank)
        assert got["arguments"] == ["--num_processes", "a b", "-h", "it's\n$HOME"]
        assert (got["rank"], got["local_rank"], got["world"], got["is_main"]) == (rank, rank, 2, rank == 0)
        assert (got["device"], got["mixed_precision"], got["backend"]) == ("cpu", "fp8", "NATIVE")
        assert got["recipe"]["scaling"]["margin"] == 2
        assert got["recipe"]["scaling"]["amax_history_len"] == 4
        # the source that won is the one that the launcher saw
        assert got["effective"]["fp8_config.margin"] == [2, "flag --fp8_margin"]
        assert got["effective"]["fp8_config.amax_history_len"] == [4, "environment ACCELERATE_FP8_AMAX_HISTORY_LEN"]
        assert got["effective"]["fp8_config.recipe"] == ["delayed", "yaml run.yaml:2"]
        assert "run.yaml:2" in got["report"]


def test_the_first_failing_childs_code_comes_back(tmp_path):
    (tmp_path / "fails.py").write_text("import os, sys\nsys.exit(7 if os.environ['RANK'] == '1' else 0)\n")
    done = launch(tmp_path, "--cpu", "--num_processes", "2", "fails.py")
    assert done.returncode == 7, done.stderr
    assert "rank 1" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--fp8_marginn", "1", "x.py"], "did you mean '--fp8_margin'"),
        (["--fp8_margin", "much", "x.py"], "--fp8_margin: fp8_config.margin got 'much'"),
        (["--fp8_margin"], "--fp8_margin: got no value"),
        (["--mixed_precision", "fp9", "x.py"], "no, fp16, bf16, fp8"),
        (["--config_file", "gone.yaml", "x.py"], "gone.yaml"),
        (["gone.py"], "gone.py"),
        ([], "script"),
        (["--environment", '{"LD_PRELOAD": "x.so"}', "x.py"], "--environment: environment variable LD_PRELOAD"),
        (["--num_processes", "3", "--num_machines", "2", "--main_process_ip", "h", "x.py"], "num_processes"),
    ],
)
def test_bad_lines_are_one_error_and_nothing_starts(tmp_path, arguments, expected):
    (tmp_path / "x.py").write_text("open('started', 'w')\n")
    done = launch(tmp_path, *arguments)
    assert done.returncode == 2
    assert expected in done.stderr
    assert len([line for line in done.stderr.splitlines() if "error" in line]) == 1
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "started").exists()


def test_help_shows_a_backends_flags_and_no_others(tmp_path):
    everything = launch(tmp_path, "-h").stdout
    te = launch(tmp_path, "--fp8_backend", "te", "-h").stdout
    ao = launch(tmp_path, "--fp8_backend=AO", "--help").stdout
    for entry in ENTRIES.values():
        assert f"--{entry.setting.flags[0]}" in everything
    assert "--fp8_margin" in te
    assert "--fp8_pad_inner_dim" not in te
    assert "--fp8_pad_inner_dim" in ao
    assert "--fp8_margin" not in ao


def test_a_dry_run_prints_sources_and_starts_nothing(tmp_path):
    (tmp_path / "x.py").write_text("open('started', 'w')\n")
    done = launch(tmp_path, "--dry_run", "--cpu", "--num_processes=2", "--fp8_margin=2", "x.py")
    assert done.returncode == 0
    assert "fp8_config.margin = 2  (flag --fp8_margin)" in done.stdout
    assert not (tmp_path / "started").exists()


def test_help_imports_neither_torch_nor_the_schema():
    code = (
        "import sys\nfrom acceler8.cli.app import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "print([m for m in ('torch', 'pydantic', 'yaml', 'acceler8.config.schema') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_dry_run_checks_the_command_and_shows_it(tmp_path):
    (tmp_path / "x.py").write_text("")
    shown = launch(tmp_path, "--dry_run", "--mixed_precision=fp8", "--multi_gpu", "--num_processes=1", "x.py", "a b")
    assert shown.returncode == 0
    assert "1 process on 1 machine" in shown.stdout
    assert "x.py 'a b'" in shown.stdout
    assert "fp8_config.recipe = rowwise  (default of NATIVE)" in shown.stdout
    missing = launch(tmp_path, "--dry_run", "gone.py")
    assert missing.returncode == 2
    assert "gone.py" in missing.stderr


def test_a_missing_backend_gets_a_word_before_the_workers_start(tmp_path):
    (tmp_path / "x.py").write_text("print('ran')\n")
    done = launch(tmp_path, "--cpu", "--mixed_precision=fp8", "--fp8_backend=te", "x.py")
    if "is not installed" not in done.stderr:
        pytest.skip("transformer_engine is installed")
    assert done.returncode == 0  # the script may ask for another
    assert "ran" in done.stdout
    quiet = launch(tmp_path, "--quiet", "--cpu", "--num_processes=2", "--fp8_margin=1", "x.py")
    assert quiet.stderr == ""
