"""Wrong configurations, made at random from right ones: each is one line that says where, and nothing is written."""

from __future__ import annotations

import io
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from acceler8.cli import main
from acceler8.config import ENTRIES
from acceler8.config.kinds import Bool, Choice, Int, Number
from acceler8.config.registry import SECTIONS
from acceler8.config.resolve import parse_assignments

RIGHT = {
    "mixed_precision": "fp8",
    "num_processes": 2,
    "num_machines": 1,
    "debug": False,
    "gpu_ids": "0,1",
    "distributed_type": "MULTI_GPU",
    "environment": {"NCCL_DEBUG": "INFO"},
    "fp8_config": {"backend": "TE", "margin": 1, "amax_history_len": 16, "fp8_format": "HYBRID"},
    "dynamo_config": {"dynamo_backend": "INDUCTOR", "dynamo_mode": "default"},
    "fsdp_config": {"fsdp_version": 2, "fsdp_offload_params": False},
    "deepspeed_config": {"zero_stage": 2, "gradient_clipping": 1.0},
}
Fault = Callable[[random.Random], str]


def dumped(config: dict) -> str:
    return yaml.safe_dump(config, sort_keys=False)


def copy() -> dict:
    return {key: dict(value) if isinstance(value, dict) else value for key, value in RIGHT.items()}


def anywhere(rng: random.Random, config: dict) -> dict:
    """The top level or one of its sections."""
    return rng.choice([config, *(config[section] for section in SECTIONS)])


def shuffled(rng: random.Random, table: dict, key: object, value: object) -> None:
    items = [*table.items(), (key, value)]
    rng.shuffle(items)
    table.clear()
    table.update(items)


def unknown_key(rng: random.Random) -> str:
    config = copy()
    shuffled(rng, anywhere(rng, config), rng.choice(["precision", "fp8", "x y", "", "é", "a" * 3000, "0", "Margin"]), 1)
    return dumped(config)


def typo(rng: random.Random) -> str:
    config = copy()
    table = anywhere(rng, config)
    key = rng.choice(list(table))
    i = rng.randrange(len(key))
    wrong = rng.choice(
        [key[:i] + key[i + 1 :], key[:i] + "x" + key[i:], key.upper(), f"{key}_", key.replace("_", "-") + "s"]
    )
    table[wrong] = table.pop(key)
    return dumped(config)


def key_of_another_section(rng: random.Random) -> str:
    config = copy()
    first, second = rng.sample(SECTIONS, 2)
    key = rng.choice(list(RIGHT[first]))
    config[second][key] = RIGHT[first][key]
    return dumped(config)


def wrong_type(rng: random.Random) -> str:
    config = copy()
    entry = rng.choice(list(ENTRIES.values()))
    wrong: list[object] = [[[1]], {"a": {"b": 1}}, "a\nb", {1: [2]}, [None, {}]]
    if isinstance(entry.setting.kind, Bool):
        wrong += ["maybe", 2, -1, 0.5]
    if isinstance(entry.setting.kind, Int | Number):
        wrong += ["many", True, "0x1", "1.2.3", "1 2", 10**400, -(10**30), float("nan"), float("inf"), "010x"]
    if isinstance(entry.setting.kind, Choice):
        wrong += ["fp9", 99, "", "two words", ["a"]][:2]
    table = config[entry.section] if entry.section else config
    table.pop(entry.key, None)
    shuffled(rng, table, entry.key, rng.choice(wrong))
    return dumped(config)


def section_of_another_shape(rng: random.Random) -> str:
    config = copy()
    config[rng.choice(SECTIONS)] = rng.choice([[1, 2], "text", 7, True, [{"margin": 1}], [], False])
    return dumped(config)


def doubled_key(rng: random.Random) -> str:
    lines = dumped(copy()).splitlines()
    i = rng.choice([i for i, line in enumerate(lines) if not line.endswith(":")])
    lines.insert(i + 1, lines[i])
    return "\n".join(lines)


def doubled_section(rng: random.Random) -> str:
    return dumped(copy()) + f"{rng.choice(SECTIONS)}: {{}}\n"


def bad_yaml(rng: random.Random) -> str:
    lines = dumped(copy()).splitlines()
    wrong = [
        "key: [open",
        "key: {open",
        "'open",
        '"\\q"',
        "a: b: c",
        "\tkey: 1",
        "- item",
        "%TAG",
        "@x",
        "`x",
        "&",
        "*",
    ]
    wrong += [
        "a: *nowhere",
        "? [a]\n: b",
        "key: !",
        "? {a: b}\n: c",
        "--- a\n--- b",
        "\x07",
        '"\\UFFFFFFFF": 1',
        "just text",
    ]
    lines.insert(rng.randrange(len(lines)), rng.choice(wrong))
    return "\n".join(lines)


def tabs(rng: random.Random) -> str:
    lines = dumped(copy()).splitlines()
    i = rng.choice([i for i, line in enumerate(lines) if line.startswith("  ")])
    lines[i] = "\t" + lines[i].strip()
    return "\n".join(lines)


def other_root(rng: random.Random) -> str:
    return rng.choice(
        ["- a\n- b\n", "text", "42", "[1]", "true", "!!set {a}", "!x {}", "--- >\n a\n b\n", "{}{}", "'a': 1, b"]
    )


def tag(rng: random.Random) -> str:
    config = dumped(copy())
    word = rng.choice(["fp8", "TE", "HYBRID", "INFO"])
    wrong = rng.choice(
        [
            "!!python/name:os.system ",
            "!!python/object/apply:os.system ",
            "!env ",
            "!!binary ",
            "!!python/tuple ",
            "!!bool ",
        ]
    )
    return config.replace(f": {word}", f": {wrong}{word}", 1)


def nested_deeply(rng: random.Random) -> str:
    opened, closed = rng.choice(["[]", "{}"])
    depth = rng.choice([3, 50, 300, 400])
    return f"debug: false\nnum_processes: {opened * depth}{closed * depth}\n"


def merge_key(rng: random.Random) -> str:
    section = rng.choice(SECTIONS)
    return f"debug: &d {{}}\n{section}:\n  <<: {{margin: 1}}\n"


def second_spelling(rng: random.Random) -> str:
    config = copy()
    other = rng.choice(["amax_history_length", "fp8_amax_history_len", "fp8_margin", "format"])
    shuffled(rng, config["fp8_config"], other, RIGHT["fp8_config"].get(other.removeprefix("fp8_"), 4))
    if other == "format":
        config["fp8_config"][other] = "E4M3"
    return dumped(config)


CONTRADICTIONS = [
    {"use_cpu": True},
    {"num_processes": 3, "num_machines": 2},
    {"machine_rank": 5},
    {"gpu_ids": "0,0"},
    {"gpu_ids": "-1"},
    {"distributed_type": "NO"},
    {"distributed_type": "MULTI_CPU"},
    {"num_machines": 2},
    {"fp8_config": {"backend": "AO", "margin": 1}},
    {"fp8_config": {"backend": "TE", "fp8_format": "E5M2"}},
    {"fp8_config": {"backend": "NATIVE", "recipe": "rowwise", "margin": 3}},
    {"fp8_config": {"backend": "TE", "use_mxfp8_block_scaling": True, "amax_history_len": 3}},
    {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": "NO_SHARD"}},
    {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2, "fsdp_state_dict_type": "LOCAL_STATE_DICT"}},
    {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 2, "deepspeed_config_file": "a"}},
    {"tpu_name": "a"},
    {"megatron_lm_config": {"a": 1}},
    {"compute_environment": "AMAZON_SAGEMAKER"},
    {"fp16": True},
]


def contradiction(rng: random.Random) -> str:
    return dumped(copy() | rng.choice(CONTRADICTIONS))


FAULTS: list[Fault] = [
    unknown_key,
    typo,
    key_of_another_section,
    wrong_type,
    section_of_another_shape,
    doubled_key,
    doubled_section,
    bad_yaml,
    tabs,
    other_root,
    tag,
    nested_deeply,
    merge_key,
    second_spelling,
    contradiction,
]
EACH = 15
BINARY = [b"\xff\xfe\0a", b"debug: false\n\x80\n", b"\x89PNG\r\n\x1a\n\0\0", b"a: \0", "use_cpu: true".encode("utf-16")]


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of an error of exit status 2."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    output = capsys.readouterr()
    assert caught.value.code == 2, output
    assert output.out == ""
    lines = output.err.splitlines()
    assert len(lines) == 1, output.err
    assert len(lines[0]) < 2500
    return lines[0]


def check_refused(path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = path.parent / "out" / "written.yaml"
    line = refused(["config", "validate", str(path)], capsys)
    located = line.removeprefix("acceler8: error: ").removeprefix("yaml ")
    assert line.startswith("acceler8: error: "), (line, text)
    assert located.startswith(f"{path}:"), (line, text)
    place = located.removeprefix(f"{path}:").partition(":")[0]
    assert place.isdecimal(), (line, text)
    assert 1 <= int(place) <= text.count("\n") + 2, (line, text)
    assert refused(["config", "--from-accelerate", str(path), "--config_file", str(out)], capsys) == line
    assert not out.exists()
    assert not out.parent.exists()


def test_the_right_configuration_is_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "run.yaml"
    path.write_text(dumped(copy()))
    with pytest.raises(SystemExit) as caught:
        main(["config", "validate", str(path)])
    assert caught.value.code == 0
    assert ": valid, " in capsys.readouterr().out


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_wrong_file_is_one_located_line(fault: Fault, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rng = random.Random(fault.__name__)
    path = tmp_path / "run.yaml"
    for _ in range(EACH):
        text = fault(rng)
        path.write_bytes(text.encode())
        check_refused(path, text, capsys)


def test_there_are_enough_of_them():
    texts = {fault(rng) for fault in FAULTS for rng in [random.Random(fault.__name__)] for _ in range(EACH)}
    assert EACH * len(FAULTS) >= 200
    assert len(texts) >= 140


@pytest.mark.parametrize("data", BINARY)
def test_binary_data(data: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "run.yaml"
    path.write_bytes(data)
    check_refused(path, data.decode("latin1"), capsys)


@pytest.mark.parametrize("index", range(len(CONTRADICTIONS)))
def test_each_contradiction(index: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "run.yaml"
    text = dumped(copy() | CONTRADICTIONS[index])
    path.write_text(text)
    check_refused(path, text, capsys)


@pytest.mark.parametrize(
    "arguments",
    [
        ["config", "show", "--fp8_margin=x"],
        ["config", "show", "--unknown"],
        ["config", "show", "word"],
        ["config", "convert", "--from", "flags", "--fp8_margin", "--to", "yaml"],
        ["config", "convert", "--from", "flags", "--use_cpu", "--gpu_ids=0", "--to", "yaml"],
        ["config", "convert", "--to", "yaml"],
        ["config", "convert", "a.yaml", "b.yaml", "--to", "yaml"],
        ["config", "convert", "a.yaml", "--from", "env", "--to", "yaml"],
        ["config", "convert", "--from", "env", "--to", "toml"],
        ["config", "convert", "--from", "python", "--to", "yaml"],
        ["config", "--set", "margn=1"],
        ["config", "--set", "margin=x"],
        ["config", "--set", "num_processes=4"],
        ["config", "--defaults", "--from-accelerate", "none.yaml"],
        ["config", "--from-accelerate", "none.yaml"],
        ["config", "default", "--mixed_precision", "fp9"],
        ["config", "show", "--config_file", "none.yaml"],
        ["config", "validate", "none.yaml"],
        ["config"],
    ],
    ids=" ".join,
)
def test_a_wrong_command_line_is_one_line(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert refused(arguments, capsys).startswith("acceler8: error: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "fault", [unknown_key, wrong_type, bad_yaml, tag, contradiction], ids=lambda fault: fault.__name__
)
def test_the_command_itself(fault: Fault, tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.write_text(fault(random.Random(7)))
    code = "from acceler8.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "config", "validate", str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("acceler8: error: ")
    assert f"{path}:" in done.stderr


def test_an_assignment_cannot_smuggle_lines():
    with pytest.raises(ValueError, match="got 'a") as caught:
        parse_assignments(["main_process_ip=a\nb"])
    assert len(str(caught.value).splitlines()) == 1
