"""The parity scripts: their images' steps are the README's, with pinned versions, and what they call parity is."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

PARITY = Path(__file__).parents[2] / "benchmarks" / "parity"
BACKENDS = {"native": "native", "torchao": "torchao", "transformer_engine": "te"}
INSTRUCTIONS = {"FROM", "RUN", "ENV", "WORKDIR", "COPY", "CMD"}


def section(backend: str) -> list[str]:
    """The commands that the README gives for a backend."""
    found = re.search(rf"^## {backend}\n.*?```sh\n(.*?)```", (PARITY / "README.md").read_text(), re.S | re.M)
    assert found is not None
    return found[1].strip().splitlines()


def instructions(backend: str) -> list[tuple[str, str]]:
    """``(instruction, argument)`` of a Dockerfile, in order."""
    text = (PARITY / f"Dockerfile.{backend}").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_dockerfile_is_one(backend):
    found = instructions(backend)
    assert {word for word, _ in found} <= INSTRUCTIONS
    assert found[0][0] == "FROM"
    assert [word for word, _ in found].count("FROM") == 1
    assert found[-1][0] == "CMD"
    assert ("COPY", ". .") in found
    for word, argument in found:
        assert argument.strip(), word
        if word in ("RUN", "CMD"):
            shlex.split(argument)  # quotes are closed


@pytest.mark.parametrize("backend", BACKENDS)
def test_its_steps_are_the_readmes(backend):
    found = instructions(backend)
    start = found.index(("COPY", ". ."))
    assert [argument for word, argument in found[start:] if word in ("RUN", "CMD")] == section(backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_versions_are_pinned(backend):
    image, _, tag = instructions(backend)[0][1].partition(":")
    assert image
    assert re.search(r"\d+\.\d+\.\d+", tag), "an image by its exact version"
    installs = [line for line in section(backend) if "pip install" in line]
    assert installs
    for line in installs:
        words = shlex.split(line)
        names = [word for word in words[words.index("install") + 1 :] if not word.startswith("-")]
        for before, word in pairwise(words):
            if before == "--constraint":
                names.remove(word)
        for name in names:
            is_ours = name == "." and "--constraint" in words
            assert is_ours or re.fullmatch(r"[\w\-]+(\[\w+\])?==\d+(\.\d+)+", name), f"{name} is not pinned"


@pytest.mark.parametrize("backend", BACKENDS)
def test_pins_are_the_projects(backend):
    pinned = dict(re.findall(r"^([\w\-.]+)==(\S+)$", (PARITY.parents[1] / "constraints.txt").read_text(), re.M))
    for line in section(backend):
        for name, version in re.findall(r"([\w\-]+)==(\d[\d.]*)", line):
            if name in pinned and not (backend == "transformer_engine" and name == "torch"):
                assert pinned[name] == version, name


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_script_is_the_one_beside_it(backend):
    command = shlex.split(section(backend)[-1])
    assert command == ["python", f"benchmarks/parity/{BACKENDS[backend]}_raw_vs_acceler8.py", "--data", "/data"]
    assert (PARITY.parents[1] / command[1]).exists()


needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs transformers: pip install transformers"
)


@pytest.fixture
def common(monkeypatch):
    monkeypatch.syspath_prepend(str(PARITY))
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    spec = importlib.util.spec_from_file_location("parity_common", PARITY / "common.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "parity_common", module)
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec.loader.exec_module(module)
    return module


@needs_transformers
@pytest.mark.parametrize(
    ("raw", "again", "ours", "said"),
    [
        ((1.0, 80.0), (1.0, 80.0), (1.0, 80.0), "bit-equal"),
        ((1.0, 80.0), (1.1, 81.0), (1.2, 80.5), "within the spread of two raw runs"),
        ((1.0, 80.0), (1.1, 81.0), (1.2, 82.0), "within the spread of two raw runs"),
        ((1.0, 80.0), (1.1, 81.0), (1.2, 82.1), "differs"),
        ((1.0, 80.0), (1.0, 80.0), (1.2, 80.1), "differs"),
        ((1.0, 80.0), (1.0, 80.0), (1.0, 79.0), "differs"),
    ],
)
def test_verdicts(common, raw, again, ours, said):
    def outcome(loss: float, accuracy: float) -> object:
        return common.Outcome(before={"accuracy": 50.0}, after={"accuracy": accuracy}, losses=[2.0, loss])

    found = common.verdict({"raw": outcome(*raw), "raw again": outcome(*again), "acceler8": outcome(*ours)})
    assert found["parity"] == said
    assert found["raw_is_deterministic"] is (raw[0] == again[0])
    assert found["first_step_that_differs"] == (None if raw[0] == ours[0] else 1)


RUNS = [
    *(("native", "single"), ("torchao", "single"), ("torchao", "ddp"), ("torchao", "fsdp2"), ("native", "zero2")),
    *(pytest.param("native", name, marks=pytest.mark.slow) for name in ("ddp", "fsdp2", "zero1", "zero3")),
    *(pytest.param("torchao", name, marks=pytest.mark.slow) for name in ("zero1", "zero2", "zero3")),
]


def tiny(folder: Path) -> tuple[Path, Path]:
    """A BERT of one layer, and a few pairs of sentences in MRPC's form."""
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

    model, data = folder / "model", folder / "data"
    model.mkdir()
    data.mkdir()
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c", "d", "e", "f", "g"]
    (folder / "vocab.txt").write_text("\n".join(words))
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(model)
    config = BertConfig(
        vocab_size=16, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_labels=2
    )
    BertForSequenceClassification(config).save_pretrained(model)
    rows = [f"{i % 2}\t1\t2\ta b {words[5 + i % 7]}\tc {words[5 + i % 5]}" for i in range(24)]
    for name in ("train.tsv", "test.tsv"):
        (data / name).write_text(
            "\n".join(["Quality\t#1 ID\t#2 ID\t#1 String\t#2 String", *rows]), encoding="utf-8-sig"
        )
    return model, data


@needs_transformers
@pytest.mark.parametrize(("backend", "strategy"), RUNS)
def test_a_script_runs_and_finds_parity(tmp_path, backend, strategy):
    if importlib.util.find_spec(backend if backend != "native" else "torch") is None:
        pytest.skip(f"needs {backend}: pip install {backend}")
    model, data = tiny(tmp_path)
    script = PARITY / f"{BACKENDS[backend]}_raw_vs_acceler8.py"
    options = {"--model": model, "--data": data, "--steps": 3, "--batch": 4, "--json": tmp_path / "found.json"}
    options["--strategy"] = strategy
    if strategy.startswith("zero") and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("needs deepspeed: pip install 'acceler8[deepspeed]'")
    launch = ["-m", "acceler8", "launch", "--num_processes", "2", "--cpu"] if strategy != "single" else []
    words = [str(word) for pair in options.items() for word in pair]
    environment = {**os.environ, "PYTHONPATH": str(PARITY.parents[1] / "src"), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, *launch, str(script), *words, "--timed_steps", "0", "--device", "cpu"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["parity"] == "bit-equal"
    assert found["raw_is_deterministic"]
    assert "parity: bit-equal" in done.stdout


@needs_transformers
def test_without_its_library_a_script_says_what_to_do(tmp_path):
    from acceler8.backends.transformer_engine import library

    if library.unavailable() is None:
        pytest.skip("TransformerEngine works here")
    model, data = tiny(tmp_path)
    script = PARITY / "te_raw_vs_acceler8.py"
    environment = {**os.environ, "PYTHONPATH": str(PARITY.parents[1] / "src"), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, str(script), "--model", str(model), "--data", str(data)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert "TransformerEngine" in done.stderr
