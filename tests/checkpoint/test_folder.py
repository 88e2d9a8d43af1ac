"""Written whole or not at all, whenever the writer dies."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from acceler8.checkpoint import is_checkpoint, load, save
from acceler8.checkpoint.folder import whole_folder
from acceler8.checkpoint.project import numbered
from acceler8.checkpoint.save import OWNED
from acceler8.errors import CheckpointError

ROOT = Path(__file__).parent.parent.parent


def model_of(value: float) -> nn.Module:
    model = nn.Linear(64, 64)
    with torch.no_grad():
        model.weight.fill_(value)
        model.bias.fill_(value)
    return model


def value_in(folder: Path) -> float:
    """The one value that every element of a whole checkpoint holds; anything mixed or damaged raises."""
    checkpoint = load(folder)
    checkpoint.verify()
    (value,) = {v for tensor in checkpoint.model_state().values() for v in tensor.unique().tolist()}
    assert checkpoint.progress == {"value": value}
    return value


def save_value(folder: Path, value: float) -> Path:
    return save(folder, model=model_of(value), progress={"value": value})


def siblings(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.parent.iterdir() if path != folder)


def test_overwriting_replaces_all_and_leaves_nothing_behind(tmp_path):
    save_value(tmp_path / "c", 1.0)
    save_value(tmp_path / "c", 2.0)
    assert value_in(tmp_path / "c") == 2.0
    assert siblings(tmp_path / "c") == []


def test_parts_of_the_replaced_checkpoint_do_not_linger(tmp_path):
    model = model_of(1.0)
    save(
        tmp_path / "c",
        model=model,
        optimizer=torch.optim.SGD(model.parameters()),
        fp8_state={"a": torch.ones(1)},
    )
    save(tmp_path / "c", model=model, rng=False)
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == [
        "checkpoint.json",
        "model.safetensors",
    ]


def test_files_of_others_are_carried_over(tmp_path):
    folder = save_value(tmp_path / "c", 1.0)
    (folder / "config.json").write_text("theirs")
    (folder / "sub").mkdir()
    (folder / "sub" / "notes").write_text("too")
    save_value(folder, 2.0)
    assert value_in(folder) == 2.0
    assert (folder / "config.json").read_text() == "theirs"
    assert (folder / "sub" / "notes").read_text() == "too"


def test_parents_are_made_and_an_empty_folder_is_taken(tmp_path):
    (tmp_path / "empty").mkdir()
    assert value_in(save_value(tmp_path / "empty", 1.0)) == 1.0
    assert value_in(save_value(tmp_path / "a" / "b", 2.0)) == 2.0


def test_a_relative_path_and_a_link(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert value_in(save_value(Path("c"), 1.0)) == 1.0
    (tmp_path / "latest").symlink_to("c")
    save_value(Path("latest"), 2.0)
    assert (tmp_path / "latest").is_symlink()
    assert value_in(tmp_path / "c") == value_in(Path("latest")) == 2.0


def test_a_folder_of_someone_else_is_not_overwritten(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(
        CheckpointError, match="holds files but no checkpoint, so it is not overwritten; choose another"
    ):
        save_value(tmp_path, 1.0)
    with pytest.raises(CheckpointError, match="is a file; a checkpoint is a folder"):
        save_value(tmp_path / "thesis.txt", 1.0)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such locks")
def test_two_writers_of_one_folder(tmp_path):
    save_value(tmp_path / "c", 1.0)
    with whole_folder(tmp_path / "c", OWNED) as building:
        (building / "mine").write_text("half")
        with pytest.raises(
            CheckpointError, match=r"another process is saving to .*c; give each its own folder, or wait"
        ):
            save_value(tmp_path / "c", 2.0)
        assert (building / "mine").read_text() == "half"
        assert value_in(tmp_path / "c") == 1.0
        assert value_in(save_value(tmp_path / "d", 3.0)) == 3.0
        assert list(numbered(tmp_path)) == []
        (building / "checkpoint.json").write_text("{}")
    (tmp_path / ".d.lock").touch()  # of a process that was killed
    assert value_in(save_value(tmp_path / "d", 4.0)) == 4.0
    assert siblings(tmp_path / "c") == ["d"]


def test_a_file_system_without_locks_is_written_all_the_same(tmp_path, monkeypatch):
    def none(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    fcntl = pytest.importorskip("fcntl")
    monkeypatch.setattr(fcntl, "flock", none)
    assert value_in(save_value(tmp_path / "c", 1.0)) == 1.0
    monkeypatch.setattr("acceler8.checkpoint.folder.fcntl", None)
    assert value_in(save_value(tmp_path / "c", 2.0)) == 2.0
    assert siblings(tmp_path / "c") == []


class Fails:
    def __init__(self, error):
        self.error = error

    def state_dict(self):
        raise self.error

    def load_state_dict(self, state):
        pass


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()], ids=["error", "ctrl-c"])
def test_a_save_that_fails_leaves_the_old_one_and_nothing_else(tmp_path, error):
    save_value(tmp_path / "c", 1.0)
    with pytest.raises(type(error)):
        save(tmp_path / "c", model=model_of(2.0), extra={"bad": Fails(error)})
    assert value_in(tmp_path / "c") == 1.0
    assert siblings(tmp_path / "c") == []


def test_a_full_disk_is_a_typed_error(tmp_path):
    save_value(tmp_path / "c", 1.0)
    limited = f"""
import resource, signal
from pathlib import Path
from tests.checkpoint.test_folder import CheckpointError, save_value
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    save_value(Path({str(tmp_path / "c")!r}), 2.0)
except CheckpointError as error:
    print(error)
"""
    assert "could not write" in run_python(limited).stdout
    assert value_in(tmp_path / "c") == 1.0
    assert siblings(tmp_path / "c") == []


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result


# Forks a child for each n that saves over the folder and is killed (SIGKILL) just before its n-th call of any
# function that changes the disk; after each death the parent reports what the folder holds.
KILL_AT_EACH_CALL = """
import os, shutil, signal, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from acceler8.checkpoint import save, tensorfile
from tests.checkpoint.test_folder import save_value, value_in

folder, first = Path(sys.argv[1]), sys.argv[2] == "first"

def arm(n):
    calls = iter(range(1, 10**9))
    def dying(function):
        def wrapped(*args, **kwargs):
            if next(calls) == n:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)
        return wrapped
    for name in ("mkdir", "rename", "replace", "fsync", "unlink", "rmdir"):
        setattr(os, name, dying(getattr(os, name)))
    tensorfile.save_file = dying(tensorfile.save_file)
    Path.write_text = dying(Path.write_text)

def report(value):
    try:
        held = value_in(folder)
    except Exception as error:
        held = type(error).__name__
    print(value, held, flush=True)

for n in range(1, 1000):
    if not first:
        save_value(folder, float(n))
    child = os.fork()
    if child == 0:
        arm(n)
        save_value(folder, float(n) + 0.5)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    report(n)
    if os.WIFEXITED(status):
        assert os.WEXITSTATUS(status) == 0
        break
    if first:
        for left in folder.parent.iterdir():
            if left == folder: shutil.rmtree(left)
"""


def killed_runs(folder: Path, how: str) -> list[tuple[float, str]]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    command = [sys.executable, "-c", KILL_AT_EACH_CALL, str(folder), how]
    result = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    lines = [line.split() for line in result.stdout.splitlines()]
    return [(float(value), held) for value, held in lines]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork, which this system lacks")
def test_killed_at_each_call_the_old_or_the_new_one_is_whole(tmp_path):
    runs = killed_runs(tmp_path / "c", "again")
    assert len(runs) > 10
    held = [float(value) - n for n, value in runs]
    assert set(held) == {0.0, 0.5}
    assert held == sorted(held)  # the old one up to some call, the new one from there on
    assert held[-1] == 0.5
    assert siblings(tmp_path / "c") == []


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork, which this system lacks")
def test_killed_at_each_call_of_the_first_save_there_is_none_or_a_whole_one(tmp_path):
    runs = killed_runs(tmp_path / "c", "first")
    held = [value for _, value in runs]
    assert held[0] == "CheckpointError"
    assert float(held[-1]) == runs[-1][0] + 0.5
    assert set(held[:-1]) <= {"CheckpointError", *(str(n + 0.5) for n, _ in runs)}


WRITE_FOREVER = """
import sys
from pathlib import Path
from tests.checkpoint.test_folder import save_value
value = float(sys.argv[2])
print("ready", flush=True)
while True:
    value += 1.0
    save_value(Path(sys.argv[1]), value)
    print(value, flush=True)
"""


@pytest.mark.slow
def test_killed_at_any_moment(tmp_path):
    folder, start, moments = tmp_path / "c", 0.0, random.Random(3)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    for _ in range(3):
        command = [sys.executable, "-c", WRITE_FOREVER, str(folder), str(start)]
        with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout.readline() == "ready\n"
            finished = [float(writer.stdout.readline()) for _ in range(2)]
            time.sleep(moments.uniform(0, 0.05))
            writer.send_signal(signal.SIGKILL)
            finished += [float(line) for line in writer.stdout.read().split()]
        held = value_in(folder)
        assert held in (finished[-1], finished[-1] + 1.0)
        start = held
    save_value(folder, -1.0)
    assert value_in(folder) == -1.0
    assert siblings(folder) == []


def test_what_killed_writers_leave_is_ignored_and_cleared(tmp_path):
    folder = save_value(tmp_path / "c", 1.0)
    half = tmp_path / ".c.writing-0a1b2c3d"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    neighbour = tmp_path / ".cc.writing-0a1b2c3d"
    neighbour.mkdir()
    assert value_in(folder) == 1.0
    assert not is_checkpoint(half)
    save_value(folder, 2.0)
    assert siblings(folder) == [neighbour.name]


def test_a_writer_killed_between_the_two_renames(tmp_path):
    folder = save_value(tmp_path / "c", 1.0)
    folder.rename(tmp_path / ".c.previous")
    assert is_checkpoint(folder)
    assert value_in(folder) == 1.0
    folder.mkdir()  # a run that prepares its output folder
    assert value_in(folder) == 1.0
    save_value(folder, 2.0)
    assert value_in(folder) == 2.0
    assert siblings(folder) == []
