"""A training that crashes, or loses a machine, ends with the weights of one that did not.

``examples/restart.py``: DDP, native FP8 with delayed scaling, dropout and shuffled data, so that weights, optimizer,
amax histories, place in the data and random generators all have to come back. All runs go at once, in one fixture.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch.namespaces import missing, two_machines
from tests.launch.support import SOURCE, free_port, needs_linux, write

pytestmark = needs_linux
EXAMPLE = SOURCE.parent / "examples" / "restart.py"
LIMIT_S = 120.0
# In place of itself the worker kills its launcher, and so its machine.
LOSE_MACHINE = f"""
import os, runpy, sys, time
kill = os.kill
def lose(pid, signum):
    kill(os.getppid(), signum)
    time.sleep(600)
os.kill = lose
sys.argv[0] = {str(EXAMPLE)!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def start(
    folder: Path, *words: str, flags: tuple[str, ...] = (), wrapper: tuple[str, ...] = ()
) -> subprocess.Popen[str]:
    """``acceler8 launch`` of a script and its arguments, on the CPU, two processes in all."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "ACCELER8_", "GLOO_"))}
    own = {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "XDG_CONFIG_HOME": str(folder), "HF_HOME": str(folder)}
    launch = [sys.executable, "-m", "acceler8", "launch", "--quiet", "--cpu", "--num_processes", "2", *flags]
    return subprocess.Popen(
        [*wrapper, *launch, *words],
        cwd=folder,
        env=kept | own,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


TRAIN = (str(EXAMPLE), "--cpu", "--recipe", "delayed", "--project")
CRASH = ("--crash_at", "7")
Ends = dict[str, tuple[int, str, str]]
"""Exit status, output and errors of each launcher."""


def finish(started: dict[str, subprocess.Popen[str]]) -> Ends:
    deadline = time.monotonic() + LIMIT_S
    try:
        outputs = {name: each.communicate(timeout=deadline - time.monotonic()) for name, each in started.items()}
    finally:
        for process in started.values():
            process.kill()
    return {name: (started[name].returncode, *output) for name, output in outputs.items()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Ends:
    """An undisturbed training, and one with a killed worker, on one machine."""
    folder = tmp_path_factory.mktemp("goes_on")
    crashed = start(folder, *TRAIN, "crashed", *CRASH, flags=("--max_restarts", "1"))
    return finish({"whole": start(folder, *TRAIN, "whole"), "crashed": crashed})


@pytest.fixture(scope="module")
def lost(tmp_path_factory: pytest.TempPathFactory) -> Ends:
    """A training on two machines with networks of their own, one of which is lost and comes back."""
    if reason := missing():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("lost")
    write(folder, "lose_machine.py", LOSE_MACHINE)
    with two_machines() as machines:

        def machine(rank: int) -> subprocess.Popen[str]:
            flags = ("--num_machines", "2", "--main_process_ip", machines[0].address, "--machine_rank", str(rank))
            wrapper = tuple(machines[rank].wrapper)
            script = ("lose_machine.py", *TRAIN[1:], "lost", *CRASH)
            return start(folder, *script, flags=(*flags, "--max_restarts", "1"), wrapper=wrapper)

        started = {"machine 0": machine(0), "machine 1, lost": machine(1)}
        try:
            started["machine 1, lost"].wait(LIMIT_S)
            started["machine 1, back"] = machine(1)
        finally:
            ends = finish(started)
    return ends


# In place of its crash it gets SIGTERM; then it is started again, and once more behind its end.
STOPPED = f"""
import os, runpy, signal, sys
kill = os.kill
os.kill = lambda pid, signum: kill(pid, signal.SIGTERM)
for crash_at in "3", "-1", "-1":
    sys.argv = [{str(EXAMPLE)!r}, "--cpu", "--project", "stopped", "--steps", "10", "--crash_at", crash_at]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        print("status", end.code)
"""


def test_a_stopped_training_has_saved_and_a_finished_one_has_nothing_to_do(tmp_path: Path):
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RESTART_COUNT": "0"}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(
        [sys.executable, "-c", STOPPED],
        cwd=tmp_path,
        env=os.environ | place,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    stopped, status, resumed, end, again, nothing = done.stdout.splitlines()
    assert (stopped, status) == ("stopped behind step 4, which is saved", "status 143")
    assert resumed == "resumed at step 4"
    assert end.startswith("step 10: loss 0x")
    assert (again, nothing) == ("resumed at step 10", "nothing is left to train")


def last_line(output: str) -> str:
    [line] = re.findall(r"^step 20: loss 0x\S+, weights [0-9a-f]{16}$", output, flags=re.MULTILINE)
    return line


def test_a_killed_worker_costs_no_bit(runs: Ends):
    (status, whole, _), (crashed_status, crashed, errors) = runs["whole"], runs["crashed"]
    assert (status, crashed_status) == (0, 0), errors
    assert "resumed at step 5" in crashed
    assert re.search(r"rank 1 .* was killed by SIGKILL .*; starting all workers again, attempt 2 of 2\n", errors)
    assert last_line(crashed) == last_line(whole)


@pytest.mark.slow
def test_a_lost_machine_costs_no_bit(runs: Ends, lost: Ends):
    assert lost["machine 1, lost"][0] == -9
    (first, output, errors), (second, _, back_errors) = lost["machine 0"], lost["machine 1, back"]
    assert (first, second) == (0, 0), f"{errors}\n{back_errors}"
    assert "resumed at step 5" in output
    assert last_line(output) == last_line(runs["whole"][1])
    assert "recvValue" not in errors + back_errors
