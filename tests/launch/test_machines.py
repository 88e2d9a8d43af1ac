"""Two launchers, each as a machine of its own, through every way in which a launch can end.

One process for each machine goes through all scenarios, so that torch is loaded twice and not twenty times. The
workers are plain scripts: what is looked at is what the launchers return and say.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from acceler8.errors import LaunchError
from acceler8.launch.rendezvous import check_ranks
from tests.launch.support import SOURCE, free_port, needs_linux, wait_until, write

pytestmark = needs_linux

MACHINE = """
import json, os, signal, sys, time
from pathlib import Path
from acceler8.errors import LaunchError
from acceler8.launch import LaunchSpec, launch
from acceler8.launch.run import load_elastic
load_elastic(is_quiet=True)
from acceler8.launch.rendezvous import ElasticRendezvous

machine = int(sys.argv[1])
quickly = ElasticRendezvous.have_all_finished
def slowly(self, store):
    time.sleep(1.5)
    return quickly(self, store)
for number, fields in list(enumerate(json.loads(sys.argv[2])))[int(sys.argv[3]):]:
    own = fields.pop("of_machine", {}).get(str(machine), {})
    if own.pop("reads_slowly", False):  # between saying that it has finished and hearing that the others have
        ElasticRendezvous.have_all_finished = slowly
    else:
        ElasticRendezvous.have_all_finished = quickly
    fields = {**fields, "machine_rank": machine, **own, "command": ("act.py", str(number))}
    try:
        status = launch(LaunchSpec(num_machines=2, main_process_ip="127.0.0.1", **fields), parent=os.environ)
    except LaunchError as error:
        print(f"LaunchError: {error}", file=sys.stderr)
        status = 2
    print(f"status {status}", file=sys.stderr, flush=True)
"""

ACT = """
import json, os, sys, time
from pathlib import Path
number, rank, attempt = sys.argv[1], os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME")
seen = {name: os.environ.get(name) for name in names}
Path(f"seen-{number}-{rank}-{attempt}.json.new").write_text(json.dumps(seen))
os.rename(f"seen-{number}-{rank}-{attempt}.json.new", f"seen-{number}-{rank}-{attempt}.json")
acts = json.loads(Path("acts.json").read_text())[int(number)]
act = acts[rank] if isinstance(acts[rank], str) else acts[rank][int(attempt)]
while act.startswith("after "):  # "after R A act": once rank R has begun its attempt A
    _, other, least, act = act.split(" ", 3)
    while not Path(f"seen-{number}-{other}-{least}.json").exists():
        time.sleep(0.01)
if act == "sleep":
    time.sleep(600)
sys.exit(int(act))
"""


@dataclass(frozen=True)
class Scenario:
    """What the workers do, by rank; which machine gets which signal; what the two launchers return and say."""

    name: str
    acts: dict[str, str | list[str]]
    status: tuple[int, int] = (0, 0)
    said: tuple[str, str] = ("", "")
    fields: dict[str, object] | None = None
    signal_to: tuple[int, signal.Signals] | None = None
    returns: bool = False  # the killed machine is started again, for the same launch


FAILED_7 = "rank 0 (local rank 0, pid #) failed with exit code 7"
FAILED_5 = "rank 1 (local rank 0, pid #) failed with exit code 5"
AGAIN = "another machine starts its workers again, or was lost; starting all workers again, attempt 2"
SLOW = {"reads_slowly": True}
SCENARIOS = [
    Scenario("success", {"0": "0", "1": "0"}),
    Scenario("success and a slow reader", {"0": "0", "1": "0"}, fields={"of_machine": {"1": SLOW}}),
    Scenario(
        "success by c10d and slow readers",
        {"0": "0", "1": "0"},
        fields={"of_machine": {"0": SLOW, "1": SLOW}, "rdzv_backend": "c10d"},
    ),
    Scenario(
        "machine 0 fails",
        {"0": "after 1 0 7", "1": "sleep"},
        (7, 1),
        (FAILED_7, f"machine 0 ended the run: {FAILED_7}"),
    ),
    Scenario(
        "machine 1 fails",
        {"0": "sleep", "1": "after 0 0 5"},
        (1, 5),
        (f"machine 1 ended the run: {FAILED_5}", FAILED_5),
    ),
    Scenario("machine 0 fails after the success of 1", {"0": "after 1 0 7", "1": "0"}, (7, 0), (FAILED_7, "")),
    Scenario(
        "machine 0 is stopped",
        {"0": "sleep", "1": "sleep"},
        (143, 1),
        ("stopped by SIGTERM", "machine 0 ended the run: stopped by SIGTERM"),
        signal_to=(0, signal.SIGTERM),
    ),
    Scenario(
        "machine 1 fails once",
        {"0": ["sleep", "0"], "1": ["after 0 0 5", "0"]},
        said=(AGAIN, f"{FAILED_5}; starting all workers again, attempt 2"),
        fields={"max_restarts": 1},
    ),
    Scenario(
        "rank 1 of c10d fails once",
        {"0": ["sleep", "0"], "1": ["after 0 0 5", "0"]},
        fields={"max_restarts": 1, "rdzv_backend": "c10d"},
    ),
    Scenario("different numbers", {}, (2, 2), fields={"of_machine": {"0": {"num_processes": 4}}}),
    Scenario(
        "machine 1 is lost",
        {"0": "sleep", "1": "sleep"},
        (1, -9),
        ("a machine has not been heard of for 2 s", ""),
        fields={"lost_after_s": 2.0},
        signal_to=(1, signal.SIGKILL),
    ),
    Scenario(
        "machine 1 is lost and comes back",
        {"0": ["sleep", "0"], "1": ["sleep", "0"]},
        said=(AGAIN, ""),
        fields={"lost_after_s": 2.0, "max_restarts": 1},
        signal_to=(1, signal.SIGKILL),
        returns=True,
    ),
    Scenario(
        "machine 0 is lost",
        {"0": "sleep", "1": "sleep"},
        (-9, 1),
        ("", "the launcher at 127.0.0.1:#, machine 0, is gone"),
        fields={"max_restarts": 3},
        signal_to=(0, signal.SIGKILL),
    ),
]
NUMBERS = {scenario.name: number for number, scenario in enumerate(SCENARIOS)}


@dataclass(frozen=True)
class End:
    """What one launcher returned and said."""

    status: int
    said: str


class Machine:
    """The process that stands for one machine; it may be killed, and started again at a later scenario."""

    def __init__(self, number: int, folder: Path, fields: list[dict[str, object]], numbers: range) -> None:
        self.number, self._folder, self._fields, self._numbers = number, folder, fields[: numbers.stop], numbers
        self._errors = (folder / f"machine_{number}.stderr").open("a+")
        self.start(numbers.start)

    def start(self, first: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", MACHINE, str(self.number), json.dumps(self._fields), str(first)],
            cwd=self._folder,
            env={**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=self._errors,
            stderr=self._errors,
        )

    def ends(self) -> dict[int, End]:
        """What the launches so far returned and said."""
        text = (self._folder / f"machine_{self.number}.stderr").read_text()
        text = re.sub(r"pid \d+", "pid #", re.sub(r"127\.0\.0\.1:\d+", "127.0.0.1:#", text))
        words = re.split(r"^status (-?\d+)\n", text, flags=re.MULTILINE)
        found = [End(int(status), said) for said, status in zip(words[::2], words[1::2], strict=False)]
        return dict(zip(self._numbers, found, strict=False))

    def kill(self, *, returns: bool, number: int) -> None:
        """End the launcher as a loss of power would."""
        self.process.kill()
        self.process.wait()
        if returns:
            self.start(number)
        else:
            self._errors.write("status -9\n")
            self._errors.flush()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._errors.close()


def play(scenario: Scenario, number: int, folder: Path, machines: list[Machine]) -> None:
    """Let both machines go through one scenario."""
    for machine in machines:
        if machine.process.poll() is not None:
            machine.start(number)
    if scenario.signal_to is not None:
        to, signum = scenario.signal_to
        wait_until(lambda: all((folder / f"seen-{number}-{rank}-0.json").exists() for rank in range(2)))
        if signum == signal.SIGKILL:
            machines[to].kill(returns=scenario.returns, number=number)
        else:
            machines[to].process.send_signal(signum)
    wait_until(lambda: all(number in machine.ends() for machine in machines), lambda: scenario.name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder in which the machines ran, each pair in its own."""
    return tmp_path_factory.mktemp("machines")


def play_all(folder: Path, fields: list[dict[str, object]], numbers: range) -> dict[str, tuple[End, End]]:
    """Let a pair of machines go through the scenarios with these numbers."""
    folder.mkdir()
    write(folder, "act.py", ACT)
    write(folder, "acts.json", json.dumps([scenario.acts for scenario in SCENARIOS]))
    machines = [Machine(number, folder, fields, numbers) for number in range(2)]
    try:
        for number in numbers:
            play(SCENARIOS[number], number, folder, machines)
        return {SCENARIOS[number].name: tuple(machine.ends()[number] for machine in machines) for number in numbers}
    finally:
        for machine in machines:
            machine.close()


@pytest.fixture(scope="module")
def ends(folder: Path) -> dict[str, tuple[End, End]]:
    """What the two launchers of each scenario returned and said; two pairs at once, for they mostly wait."""
    fields = [{"num_processes": 2, "main_process_port": free_port(), **(each.fields or {})} for each in SCENARIOS]
    middle = 7
    halves = range(middle), range(middle, len(SCENARIOS))
    with ThreadPoolExecutor(len(halves)) as threads:
        parts = list(threads.map(lambda numbers: play_all(folder / str(numbers.start), fields, numbers), halves))
    return {name: both for part in parts for name, both in part.items()}


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_both_launchers_return_and_say_what_happened(scenario: Scenario, ends: dict[str, tuple[End, End]]):
    both = ends[scenario.name]
    assert tuple(end.status for end in both) == scenario.status, both
    if "c10d" in scenario.name or scenario.name == "different numbers":
        return  # who says it is found out; what is said is looked at below
    for end, said in zip(both, scenario.said, strict=True):
        assert end.said == (f"acceler8 launch: {said}\n" if said else "")


def test_nothing_of_torch_is_said(ends: dict[str, tuple[End, End]]):
    for name, both in ends.items():
        for end in both:
            lines = end.said.splitlines()
            assert all(line.startswith(("acceler8 launch: ", "LaunchError: ")) for line in lines), (name, end.said)


def test_different_numbers_are_an_error_on_both(ends: dict[str, tuple[End, End]]):
    for end in ends["different numbers"]:
        assert end.said.startswith("LaunchError: num_processes differs between machines: [2, 4]; say the same on all")


def seen(folder: Path, scenario: str, rank: int, attempt: int) -> dict[str, str]:
    [path] = folder.glob(f"*/seen-{NUMBERS[scenario]}-{rank}-{attempt}.json")
    return json.loads(path.read_text())


@pytest.mark.usefixtures("ends")
def test_workers_know_their_places(folder: Path):
    for rank in range(2):
        place = seen(folder, "success", rank, 0)
        assert (place["GROUP_RANK"], place["LOCAL_RANK"], place["WORLD_SIZE"]) == (str(rank), "0", "2")
        assert (place["MASTER_ADDR"], place["GLOO_SOCKET_IFNAME"]) == ("127.0.0.1", "lo")


@pytest.mark.usefixtures("ends")
@pytest.mark.parametrize(
    "scenario", ["machine 1 fails once", "rank 1 of c10d fails once", "machine 1 is lost and comes back"]
)
def test_each_attempt_has_a_number_and_a_store_of_its_own_on_all_machines(folder: Path, scenario: str):
    ports = [{seen(folder, scenario, rank, attempt)["MASTER_PORT"] for rank in range(2)} for attempt in range(2)]
    assert [len(found) for found in ports] == [1, 1]
    assert ports[0] != ports[1]


def test_machines_of_the_same_rank_are_named():
    ranks = [{"machine_rank": rank, "address": address} for rank, address in ((0, "a"), (1, "b"), (1, "c"))]
    with pytest.raises(LaunchError, match=r"not different on each machine: 0 \(at a\), 1 \(at b\), 1 \(at c\)"):
        check_ranks(ranks)
    check_ranks(ranks[:2])
