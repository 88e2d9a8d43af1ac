"""The wizard in a real terminal: its answers arrive in the file, and leaving in the middle writes nothing."""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import acceler8
from acceler8.config import merge, read_yaml
from tests.cli.test_launch import launch, seen

pty = pytest.importorskip("pty", reason="needs a POSIX terminal")

SOURCE = Path(acceler8.__file__).parent.parent
DOWN, ENTER, CTRL_C, CTRL_D = "\x1b[B", "\r", "\x03", "\x04"
LIMIT_S = 30
_ESCAPES = re.compile(r"\x1b(\[[0-9;?]*[a-zA-Z]|[()][A-Z0-9]|[=>])|\r")


class Terminal:
    """A process on a terminal of its own, and what it has printed since the last question."""

    def __init__(self, arguments: list[str], folder: Path, *, has_menus: bool) -> None:
        hide = "" if has_menus else "import sys; sys.modules['questionary'] = None; "
        # whoever runs the tests in the background may have its children ignore Ctrl-C
        heed = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        code = f"{heed}{hide}from acceler8.cli import main; main({arguments!r})"
        environ = {"PYTHONPATH": str(SOURCE), "HOME": str(folder), "TERM": "xterm", "PATH": os.environ["PATH"]}
        environ |= {"PROMPT_TOOLKIT_NO_CPR": "1", "COLUMNS": "200", "LINES": "50"}
        self._master, slave = pty.openpty()
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environ,
            cwd=folder,
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        os.close(slave)
        self._unread = ""
        self.all = ""

    def wait_for(self, text: str) -> None:
        """Read until ``text`` has been printed after what was waited for before."""
        deadline = time.monotonic() + LIMIT_S
        while text not in self._unread:
            if not select.select([self._master], [], [], max(0, deadline - time.monotonic()))[0]:
                raise AssertionError(f"{text!r} did not come in {LIMIT_S} s; there was:\n{self.all[-3000:]}")
            self._read()
        self._unread = self._unread.partition(text)[2]

    def move_to(self, word: str) -> None:
        """Move the cursor of a menu down until it stands at ``word``."""
        for _ in range(30):
            self.wait_for("» ")
            while not (line := re.match(r"(.*)(\n|\? )", self._unread)) and not self._unread.startswith(word):
                if not select.select([self._master], [], [], 0.1)[0]:
                    break
                self._read()
            if (line[1] if line else self._unread).strip() == word:
                return
            self.send(DOWN)
        raise AssertionError(f"{word!r} is not in the menu:\n{self.all[-3000:]}")

    def _read(self) -> bool:
        try:
            data = os.read(self._master, 1 << 16)
        except OSError:  # Linux: the other end is closed
            data = b""
        text = _ESCAPES.sub("", data.decode(errors="replace"))
        self._unread += text
        self.all += text
        assert data or "is closed" in self._unread, f"ended early:\n{self.all[-3000:]}"
        return bool(data)

    def send(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def end(self) -> int:
        """Read what is left and give the exit status."""
        self._unread += "is closed"
        while self._read():
            pass
        os.close(self._master)
        return self._process.wait(LIMIT_S)

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait(LIMIT_S)


def _take_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.fixture(params=[True, False], ids=["menus", "lines"])
def has_menus(request: pytest.FixtureRequest) -> bool:
    if request.param:
        pytest.importorskip("questionary")
    return request.param


@pytest.fixture
def terminals() -> Iterator[list[Terminal]]:
    made: list[Terminal] = []
    yield made
    for terminal in made:
        terminal.kill()


def start(terminals: list[Terminal], folder: Path, *arguments: str, has_menus: bool) -> Terminal:
    terminals.append(Terminal(["config", "--config_file", "run.yaml", *arguments], folder, has_menus=has_menus))
    return terminals[-1]


@dataclass(frozen=True)
class Pick:
    """An entry of a menu; in lines of text its word."""

    word: str


Step = tuple[str, Any]
# question -> answer: an entry of a menu, True or False, a text, or None for Enter
TO_PRECISION: list[Step] = [
    ("Which type of machine?", Pick("no distributed training")),
    ("Train on the CPU only?", None),
    ("Compile the model", None),
    ("Use DeepSpeed?", False),
    ("Which GPUs?", None),
    ("Bind each process", None),
    ("Which precision?", Pick("fp8")),
]
BACKENDS: dict[str, tuple[list[Step], dict[str, Any]]] = {
    "NATIVE": (
        [
            ("Which FP8 backend?", Pick("NATIVE")),
            ("Which recipe?", Pick("delayed")),
            ("Run FP8 during evaluation too?", True),
            ("Headroom", "2"),
            ("Steps between", "3"),
            ("Which FP8 format?", Pick("E4M3")),
            ("Length of the amax history?", "16"),
            ("How does the history", Pick("most_recent")),
            ("Run fprop, dgrad or wgrad", None),
            ("What stays of activations", Pick("bf16")),
            ("Layers to leave", "lm_head"),
            ("Turn FP8 on by a schedule?", True),
            ("In which steps", "5:900"),
            ("How many of the last layers", "0:4,800:all"),
        ],
        {
            "recipe": "delayed",
            "use_autocast_during_eval": True,
            "margin": 2,
            "interval": 3,
            "fp8_format": "E4M3",
            "amax_history_len": 16,
            "amax_compute_algo": "most_recent",
            "override_linear_precision": (False, False, False),
            "save_for_backward": "bf16",
            "skip": ("lm_head",),
            "fp8_steps": "5:900",
            "fp8_last_layers": "0:4,800:all",
        },
    ),
    "TE": (
        [
            ("Which FP8 backend?", Pick("TE")),
            ("Which recipe?", None),
            ("Run FP8 during evaluation too?", None),
            ("Headroom", "1"),
            ("Steps between", None),
            ("Which FP8 format?", Pick("E4M3")),
            ("Length of the amax history?", "32"),
            ("How does the history", None),
            ("Run fprop, dgrad or wgrad", True),
            ("Run fprop in", None),
            ("Run dgrad in", None),
            ("Run wgrad in", True),
        ],
        {
            "recipe": "delayed",
            "use_autocast_during_eval": False,
            "margin": 1,
            "interval": 1,
            "fp8_format": "E4M3",
            "amax_history_len": 32,
            "amax_compute_algo": "most_recent",
            "override_linear_precision": (False, False, True),
        },
    ),
    "AO": (
        [
            ("Which FP8 backend?", Pick("AO")),
            ("Which recipe?", Pick("rowwise")),
            ("Gather FSDP2", False),
            ("Fill the inner", None),
        ],
        {"recipe": "rowwise", "enable_fsdp_float8_all_gather": False, "pad_inner_dim": True},
    ),
    "MSAMP": ([("Which FP8 backend?", Pick("MSAMP")), ("Which level?", Pick("O1"))], {"opt_level": "O1"}),
}


def answer(terminal: Terminal, step: Step, *, has_menus: bool) -> None:
    question, given = step
    terminal.wait_for(f"? {question}" if has_menus else question)
    if not has_menus:
        terminal.wait_for(": ")
        word = given.word if isinstance(given, Pick) else {None: "", True: "yes", False: "no"}.get(given, given)
        terminal.send(f"{word}\n")
    elif isinstance(given, Pick):
        terminal.move_to(given.word)
        terminal.send(ENTER)
    elif isinstance(given, bool):
        terminal.wait_for("(")
        terminal.send("y" if given else "n")
    else:
        terminal.wait_for(" ")
        terminal.send(ENTER if given is None else "\x15" + given + ENTER)  # Ctrl-U empties the line of its default


@pytest.mark.parametrize("backend", BACKENDS)
def test_answers_arrive_in_the_file(backend: str, has_menus: bool, tmp_path: Path, terminals: list[Terminal]):
    steps, expected = BACKENDS[backend]
    terminal = start(terminals, tmp_path, has_menus=has_menus)
    for step in TO_PRECISION + steps:
        answer(terminal, step, has_menus=has_menus)
    terminal.wait_for("Wrote run.yaml")
    assert terminal.end() == 0
    found = merge([read_yaml(tmp_path / "run.yaml")])
    assert found["mixed_precision"] == "fp8"
    assert found["distributed_type"] == "NO"
    fp8 = {path.removeprefix("fp8_config."): value for path, value in found.given("fp8_config").items()}
    assert fp8 == {"backend": backend} | expected
    if backend in ("TE", "AO"):
        assert f"{backend} is not installed" in terminal.all or "there is no GPU" in terminal.all
    assert "Traceback" not in terminal.all
    if not has_menus:  # the file is the same: once is enough
        assert_reaches_a_launched_recipe(backend, expected, tmp_path)


def assert_reaches_a_launched_recipe(backend: str, expected: dict[str, Any], folder: Path) -> None:
    """Launch a script with the file that the wizard wrote, and look at the recipe object that it makes."""
    done = launch(folder, "--config_file", "run.yaml", "script.py", "no accelerator")
    assert done.returncode == 0, done.stderr
    got = seen(folder)[backend.lower()]
    if backend == "NATIVE":
        scaling = {key: expected[key] for key in ("margin", "interval", "amax_history_len", "amax_compute_algo")}
        assert got["scaling"] == {"time": "delayed", **scaling}
        assert (got["name"], got["eval"], got["skip"]) == (expected["recipe"], "fp8", list(expected["skip"]))
        assert got["dgrad"]["a"]["format"] == expected["fp8_format"]
        assert seen(folder)["schedule"] == [expected["fp8_steps"], expected["fp8_last_layers"]]
    else:
        shown = {key: tuple(value) if isinstance(value, list) else value for key, value in got.items()}
        assert {key: shown[key] for key in expected} == expected


def test_a_wrong_answer_is_asked_again_with_the_reason(has_menus: bool, tmp_path: Path, terminals: list[Terminal]):
    terminal = start(terminals, tmp_path, has_menus=has_menus)
    for step in TO_PRECISION[:4]:
        answer(terminal, step, has_menus=has_menus)
    terminal.wait_for("? Which GPUs?" if has_menus else "Which GPUs?")
    terminal.wait_for(" " if has_menus else ": ")
    terminal.send("\x150,0" + ENTER if has_menus else "0,0\n")
    terminal.wait_for("allowed: all, or different numbers")
    terminal.send("\x150,1" + ENTER if has_menus else "0,1\n")
    for step in [*TO_PRECISION[5:-1], ("Which precision?", Pick("no"))]:
        answer(terminal, step, has_menus=has_menus)
    terminal.wait_for("Wrote run.yaml")
    assert terminal.end() == 0
    assert merge([read_yaml(tmp_path / "run.yaml")])["gpu_ids"] == "0,1"


@pytest.mark.parametrize(("key", "code"), [(CTRL_C, 130), (CTRL_D, 1)])
def test_leaving_in_the_middle_writes_nothing(
    key: str, code: int, has_menus: bool, tmp_path: Path, terminals: list[Terminal]
):
    terminal = start(terminals, tmp_path, has_menus=has_menus)
    for step in TO_PRECISION[:4]:
        answer(terminal, step, has_menus=has_menus)
    terminal.wait_for("? Which GPUs?" if has_menus else "Which GPUs?")
    terminal.wait_for(" " if has_menus else ": ")
    terminal.send(("\x15" if has_menus else "") + key)
    terminal.wait_for("Stopped; nothing was written.")
    assert terminal.end() == code
    assert "Traceback" not in terminal.all
    assert not (tmp_path / "run.yaml").exists()


@pytest.mark.parametrize(("is_wanted", "text"), [(True, "mixed_precision: fp8\n"), (False, "mixed_precision: bf16\n")])
def test_a_file_is_overwritten_only_if_that_is_wanted(
    is_wanted: bool, text: str, has_menus: bool, tmp_path: Path, terminals: list[Terminal]
):
    (tmp_path / "run.yaml").write_text("mixed_precision: bf16\n")
    terminal = start(terminals, tmp_path, "--set", "mixed_precision=fp8", has_menus=has_menus)
    terminal.wait_for("+mixed_precision: fp8")
    answer(terminal, ("Overwrite run.yaml?", is_wanted), has_menus=has_menus)
    terminal.wait_for("Wrote run.yaml" if is_wanted else "Nothing was written.")
    assert terminal.end() == 0
    assert (tmp_path / "run.yaml").read_text() == text
