"""Real launches: what workers see, what the launcher returns and says."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.support import launcher, needs_linux, run, wait_until, write

SHOW = """
import json, os, sys
own = {"argv": sys.argv, "path0": sys.path[0], "file": __file__, "name": __name__, "environ": dict(os.environ)}
own["package"], own["flags"], own["stdin"] = __package__, str(sys.flags), sys.stdin.read()
with open(f"seen-{os.environ.get('RANK')}.json", "w") as file:
    json.dump(own, file)
"""
ARGUMENTS = ["a b", "'", '"', "--x=1", "-", "--", "", "l1\nl2", "$HOME", "$$", "${local_rank}", "*", "\\", "ü"]
ALL_REDUCE = """
import datetime, sys, torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=50))
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
sys.stdout.write(f"rank {dist.get_rank()} of {dist.get_world_size()}: {total.item()}\\n")  # whole, unlike print
dist.destroy_process_group()
"""


def seen(folder: Path, rank: int | None) -> dict:
    return json.loads((folder / f"seen-{rank}.json").read_text())


@pytest.mark.parametrize("is_module", [False, True], ids=["script", "module"])
def test_a_worker_sees_what_python_alone_would_show(tmp_path: Path, is_module: bool):
    write(tmp_path, "sub/show.py", SHOW)
    command = ["sub.show" if is_module else "sub/show.py", *ARGUMENTS]
    done = run(tmp_path, command=command, is_module=is_module)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "")
    launched = seen(tmp_path, 0)
    python = [sys.executable, *(["-m"] if is_module else []), *command]
    environ = {name: value for name, value in launched["environ"].items() if name != "RANK"}
    subprocess.run(python, cwd=tmp_path, env=environ, stdin=subprocess.DEVNULL, check=True)
    alone = seen(tmp_path, None)
    del launched["environ"], alone["environ"]
    assert launched == alone


def test_one_process_has_the_variables_of_many(tmp_path: Path):
    write(tmp_path, "show.py", SHOW)
    fields = {"use_cpu": True, "environment": {"ACCELER8_X": "1"}}
    run(tmp_path, command=["show.py"], stdin="typed", **fields)
    one = seen(tmp_path, 0)
    assert one["stdin"] == "typed"
    done = run(tmp_path, command=["show.py", *ARGUMENTS], stdin="typed", num_processes=2, **fields)
    assert (done.returncode, done.stderr) == (0, "")
    first, second = seen(tmp_path, 0), seen(tmp_path, 1)
    assert (first["stdin"], second["stdin"]) == ("typed", "")
    assert second["argv"] == ["show.py", *ARGUMENTS]
    assert one["environ"].keys() == first["environ"].keys() == second["environ"].keys()
    for rank, environ in enumerate([first["environ"], second["environ"]]):
        assert (environ["RANK"], environ["LOCAL_RANK"], environ["WORLD_SIZE"]) == (str(rank), str(rank), "2")
        assert (environ["ACCELERATE_USE_CPU"], environ["ACCELER8_X"]) == ("true", "1")
        assert environ["MASTER_ADDR"] == "127.0.0.1"
    assert first["environ"]["MASTER_PORT"] == second["environ"]["MASTER_PORT"]
    assert first["environ"].get("CUDA_VISIBLE_DEVICES") == os.environ.get("CUDA_VISIBLE_DEVICES")


def test_two_processes_meet(tmp_path: Path):
    write(tmp_path, "train.py", ALL_REDUCE)
    done = run(tmp_path, command=["train.py"], num_processes=2, use_cpu=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == ["rank 0 of 2: 3.0", "rank 1 of 2: 3.0"]


@pytest.mark.parametrize("code", [1, 7, 255])
def test_the_workers_own_exit_code_is_returned(tmp_path: Path, code: int):
    write(tmp_path, "fail.py", f"import sys; sys.exit({code})")
    done = run(tmp_path, command=["fail.py"])
    assert done.returncode == code
    assert done.stderr.startswith("acceler8 launch: rank 0 (local rank 0, pid ")
    assert done.stderr.endswith(f") failed with exit code {code}\n")


@pytest.mark.parametrize(("name", "status"), [("SIGKILL", 137), ("SIGSEGV", 139), ("SIGTERM", 143)])
def test_a_killed_worker_gives_128_and_the_signal(tmp_path: Path, name: str, status: int):
    write(tmp_path, "die.py", f"import os, signal; os.kill(os.getpid(), signal.{name})")
    done = run(tmp_path, command=["die.py"])
    assert done.returncode == status
    assert f"was killed by {name} (exit status {status})" in done.stderr


def test_the_first_failure_counts_and_ends_the_others(tmp_path: Path):
    write(
        tmp_path,
        "fail.py",
        """
import os, signal, sys, time
from pathlib import Path
if os.environ["RANK"] == "0":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(Path("asked").write_text("") or 3))
    Path("ready").write_text("")
    time.sleep(600)
while not Path("ready").exists():
    time.sleep(0.01)
print("my own words", file=sys.stderr)
sys.exit(7)
""",
    )
    with launcher(tmp_path, command=["fail.py"], num_processes=2) as started:
        done = started.finish()
        assert done.returncode == 7
        started.assert_nothing_left()
    own, last = done.stderr.splitlines()
    assert own == "my own words"
    assert last.startswith("acceler8 launch: rank 1 (local rank 1, pid ")
    assert "failed with exit code 7. It was the first of 2 workers to fail" in last
    assert (tmp_path / "asked").exists(), "the other worker was not asked with SIGTERM"


def test_restarts_start_all_workers_again(tmp_path: Path):
    write(
        tmp_path,
        "fail.py",
        "import os, sys; attempt = int(os.environ['TORCHELASTIC_RESTART_COUNT']); print(os.environ['MASTER_PORT']); "
        "sys.exit(5 + attempt)",
    )
    done = run(tmp_path, command=["fail.py"], max_restarts=1)
    assert done.returncode == 6
    restart, last = done.stderr.splitlines()
    assert restart.endswith("failed with exit code 5; starting all workers again, attempt 2 of 2")
    assert last.endswith("failed with exit code 6")
    assert len(set(done.stdout.split())) == 2, "the second attempt got the store of the first, and its stale addresses"


@pytest.mark.slow
def test_the_workers_of_a_restart_meet(tmp_path: Path):
    """They did not, three times of four: they found the addresses of the attempt before in the same store."""
    die = "if dist.get_rank() == attempt % 2 and attempt < 2: os.kill(os.getpid(), 9)"
    attempt = "import os; attempt = int(os.environ['TORCHELASTIC_RESTART_COUNT'])"
    write(
        tmp_path, "train.py", ALL_REDUCE.replace("sys.stdout", f"{attempt}\n{die}\ndist.all_reduce(total)\nsys.stdout")
    )
    done = run(tmp_path, command=["train.py"], num_processes=2, use_cpu=True, max_restarts=2)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 of 2: 6.0", "rank 1 of 2: 6.0"]
    restarts = [line for line in done.stderr.splitlines() if "starting all workers again" in line]
    assert [line[-14:] for line in restarts] == ["attempt 2 of 3", "attempt 3 of 3"]


def test_output_passes_through_in_bulk_and_a_closed_one_is_no_failure(tmp_path: Path):
    write(tmp_path, "much.py", "for _ in range(50_000): print('x' * 79)")
    assert len(run(tmp_path, command=["much.py"]).stdout) == 80 * 50_000
    write(tmp_path, "closes.py", "import os, sys; sys.stdout.close(); sys.exit(4)")
    assert run(tmp_path, command=["closes.py"]).returncode == 4


def test_logs_go_to_files_and_the_end_of_the_failed_one_is_shown(tmp_path: Path):
    write(tmp_path, "fail.py", "print('out')\nraise RuntimeError('what went wrong')")
    done = run(tmp_path, command=["fail.py"], log_dir="logs")
    assert done.returncode == 1
    assert done.stdout == ""
    assert (tmp_path / "logs" / "rank_0.stdout.log").read_text() == "out\n"
    assert "Traceback" in done.stderr
    assert "RuntimeError: what went wrong" in done.stderr
    assert done.stderr.endswith("failed with exit code 1\n")


def test_programs_run_without_python(tmp_path: Path):
    tool = write(tmp_path, "tool", '#!/bin/sh\necho "$RANK|$1|$2"\nyes | head -1\nexit 9\n')
    tool.chmod(0o755)
    done = run(tmp_path, command=["./tool", "a b", "$HOME"], is_program=True)
    assert (done.returncode, done.stdout) == (9, "0|a b|$HOME\ny\n")
    assert "Broken pipe" not in done.stderr
    write(tmp_path, "broken", "#!/absent/interpreter\n").chmod(0o755)
    done = run(tmp_path, command=["./broken"], is_program=True)
    assert done.returncode == 126
    assert "cannot execute './broken'" in done.stderr


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"command": ["absent.py"]}, "'absent.py' does not exist"),
        ({"command": ["show.py"], "environment": {"LD_PRELOAD": "x"}}, "LD_PRELOAD cannot come from"),
    ],
)
def test_nothing_starts_when_the_launch_is_wrong(tmp_path: Path, fields: dict, message: str):
    write(tmp_path, "show.py", SHOW)
    done = run(tmp_path, **fields)
    assert done.returncode == 2
    assert done.stderr.startswith("LaunchError: ")
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("seen-*"))


def test_a_port_in_use_is_said(tmp_path: Path):
    write(tmp_path, "show.py", SHOW)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = run(tmp_path, command=["show.py"], num_processes=2, main_process_port=taken.getsockname()[1])
    assert done.returncode == 2
    assert "cannot listen on main_process_ip='127.0.0.1'" in done.stderr
    assert not list(tmp_path.glob("seen-*"))


@needs_linux
def test_after_success_what_a_worker_left_on_purpose_goes_on(tmp_path: Path):
    write(
        tmp_path,
        "leave.py",
        "import subprocess, sys; quiet = subprocess.DEVNULL\n"
        "subprocess.Popen(['sleep', '600'], stdin=quiet, stdout=quiet, stderr=quiet)",
    )
    with launcher(tmp_path, command=["leave.py"]) as started:
        assert started.finish().returncode == 0
        wait_until(lambda: len(started.processes()) == 1)
