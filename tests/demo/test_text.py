"""Text: which files are read, how they are split, and that batches are functions of (seed, step)."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch

from acceler8.demo.settings import STANDARD_LIBRARY
from acceler8.demo.text import held_out_windows, load_corpus, training_windows
from acceler8.errors import RunError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Thirty files of 400 bytes, each of a byte of its own, in two folders, and hidden ones beside them."""
    for i in range(30):
        path = tmp_path / ("a" if i % 2 else "b") / f"file{i:02}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes([100 + i]) * 400)
    (tmp_path / ".hidden").write_bytes(b"\x00" * 400)
    (tmp_path / "a" / "__pycache__").mkdir()
    (tmp_path / "a" / "__pycache__" / "x.pyc").write_bytes(b"\x02" * 400)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "object").write_bytes(b"\x01" * 400)
    return tmp_path


def test_standard_library_is_real_source_without_tests_or_installed_packages():
    corpus = load_corpus(STANDARD_LIBRARY, 128)
    root = Path(sysconfig.get_paths()["stdlib"])
    whole = corpus.train.tobytes() + b"\n" + corpus.held_out.tobytes()
    assert (root / "json" / "decoder.py").read_bytes() in whole
    assert (root / "functools.py").read_bytes() in whole
    assert (root / "encodings" / "cp1252.py").read_bytes() not in whole
    assert (root / "pydoc_data" / "topics.py").read_bytes() not in whole
    assert Path(pytest.__file__).read_bytes() not in whole
    assert len(corpus.train) > 3_000_000
    assert 0.05 < len(corpus.held_out) / len(whole) < 0.2


def test_split_is_by_file_and_the_same_every_time(folder: Path):
    first, again = load_corpus(str(folder), 64), load_corpus(str(folder), 64)
    assert first.digest == again.digest
    train, held_out = set(first.train.tolist()), set(first.held_out.tolist())
    assert train | held_out == set(range(100, 130))
    assert not train & held_out
    assert (first.train_files, first.held_out_files) == (27, 3)


def test_split_ignores_the_order_of_the_file_system(folder: Path, monkeypatch: pytest.MonkeyPatch):
    expected = load_corpus(str(folder), 64).digest
    real_walk = os.walk

    def backwards(*args, **kwargs):
        for path, below, files in real_walk(*args, **kwargs):
            below.sort(reverse=True)
            yield path, below, sorted(files, reverse=True)

    monkeypatch.setattr(os, "walk", backwards)
    assert load_corpus(str(folder), 64).digest == expected


def test_split_of_a_file_does_not_depend_on_where_the_folder_is(folder: Path, tmp_path_factory: pytest.TempPathFactory):
    moved = tmp_path_factory.mktemp("elsewhere") / "moved"
    expected = load_corpus(str(folder), 64).digest
    folder.rename(moved)
    assert load_corpus(str(moved), 64).digest == expected


def test_no_large_file_decides_the_held_out_loss(tmp_path: Path):
    for i in range(200):
        (tmp_path / f"small{i}").write_bytes(b"s" * 100)
    for i in range(10):
        (tmp_path / f"large{i}").write_bytes(b"L" * 1800)
    corpus = load_corpus(str(tmp_path), 64)
    assert set(corpus.held_out.tolist()) == {ord("s")}
    assert len(corpus.held_out) == 3800
    assert corpus.held_out_files == 38


def test_digest_tells_changed_text_and_changed_split(folder: Path):
    before = load_corpus(str(folder), 64).digest
    (folder / "a" / "file01.txt").write_bytes(b"!" * 400)
    changed = load_corpus(str(folder), 64).digest
    assert changed != before


def test_one_file_is_split_at_its_end(tmp_path: Path):
    path = tmp_path / "one.txt"
    path.write_bytes(bytes(range(200)) * 10)
    corpus = load_corpus(str(path), 32)
    assert corpus.train.tobytes() + corpus.held_out.tobytes() == path.read_bytes()
    assert len(corpus.held_out) == 200


def test_uneven_files_are_split_by_bytes(tmp_path: Path):
    (tmp_path / "large").write_bytes(b"x" * 5000)
    (tmp_path / "small").write_bytes(b"y" * 10)
    corpus = load_corpus(str(tmp_path), 32)
    assert len(corpus.held_out) == 501
    assert "last tenth" in corpus.split


def test_smallest_text_gives_one_window_each(tmp_path: Path):
    path = tmp_path / "tiny.txt"
    path.write_bytes(b"a" * 17 + b"b" * 17)
    corpus = load_corpus(str(path), 16)
    windows = held_out_windows(corpus.held_out, batch=8, seq=16, tokens=1 << 16)
    assert [w.tolist() for w in windows] == [[[ord("b")] * 17]]
    assert training_windows(corpus.train, seed=0, step=1, batch=3, seq=16).tolist() == [[ord("a")] * 17] * 3


@pytest.mark.parametrize(
    "content", ["Grüße, 世界, \U0001f9ea ".encode() * 50, bytes(range(256)) * 4, b"\x00\xff" * 400]
)
def test_any_bytes_are_text(tmp_path: Path, content: bytes):
    path = tmp_path / "Änderung 世界.bin"
    path.write_bytes(content)
    corpus = load_corpus(str(path), 16)
    assert corpus.train.tobytes() + corpus.held_out.tobytes() == content
    window = training_windows(corpus.train, seed=1, step=1, batch=1, seq=16)
    assert bytes(window[0].tolist()) in content


def test_empty_text_is_refused(tmp_path: Path):
    (tmp_path / "empty").touch()
    with pytest.raises(RunError, match=r"has no text at all; seq=16 needs at least 34.*--text"):
        load_corpus(str(tmp_path / "empty"), 16)
    with pytest.raises(RunError, match="has no text at all"):
        load_corpus(str(tmp_path), 16)


def test_short_text_is_refused_with_what_it_lacks(tmp_path: Path):
    (tmp_path / "short").write_bytes(b"x" * 33)
    with pytest.raises(RunError, match=r"has 33 bytes of text; seq=16 needs at least 34.*lower --seq"):
        load_corpus(str(tmp_path / "short"), 16)


def test_missing_path_is_refused(tmp_path: Path):
    with pytest.raises(RunError, match=r"absent' does not exist; --text takes a file or a folder"):
        load_corpus(str(tmp_path / "absent"), 16)


def test_special_file_is_refused(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RunError, match="neither a file nor a folder"):
        load_corpus(str(tmp_path / "pipe"), 16)


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs /proc, for a file that fails on reading")
def test_unreadable_file_is_refused_with_the_reason():
    with pytest.raises(RunError, match=r"cannot read text '/proc/self/mem': .*; check the path"):
        load_corpus("/proc/self/mem", 16)


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0, reason="needs a user whom permissions bind, not root"
)
def test_forbidden_folder_is_refused_not_skipped(folder: Path):
    (folder / "a").chmod(0)
    try:
        with pytest.raises(RunError, match="Permission denied"):
            load_corpus(str(folder), 16)
    finally:
        (folder / "a").chmod(0o700)


def test_a_link_to_a_file_is_a_file(folder: Path):
    (folder / "a" / "link").symlink_to(folder / "a" / "file01.txt")
    corpus = load_corpus(str(folder), 64)
    assert corpus.train_files + corpus.held_out_files == 31


def test_batches_are_functions_of_seed_and_step():
    text = np.random.default_rng(0).integers(0, 256, 5000).astype(np.uint8)

    def batch(seed: int, step: int) -> torch.Tensor:
        return training_windows(text, seed=seed, step=step, batch=4, seq=32)

    later = batch(3, 7)
    assert later.dtype == torch.int64
    assert later.shape == (4, 33)
    batch(3, 1)
    assert torch.equal(batch(3, 7), later)
    assert not torch.equal(batch(3, 8), later)
    assert not torch.equal(batch(4, 7), later)
    assert all(bytes(row) in text.tobytes() for row in later.tolist())


def test_held_out_windows_predict_each_byte_once():
    text = np.arange(103).astype(np.uint8)
    windows = held_out_windows(text, batch=3, seq=10, tokens=1000)
    assert [len(w) for w in windows] == [3, 3, 3, 1]
    predicted = torch.cat([w[:, 1:].flatten() for w in windows]).tolist()
    assert predicted == list(range(1, 101))


def test_held_out_windows_spread_over_long_text():
    text = np.zeros(100_001, dtype=np.uint8)
    text[50_000:] = 1
    windows = torch.cat(held_out_windows(text, batch=8, seq=10, tokens=200))
    assert windows.shape == (20, 11)
    assert windows.float().mean().item() == pytest.approx(0.5)
