"""The templates for clusters, as far as one machine can tell: what they would run, and (slow) that it trains."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.launch.support import free_port

ROOT = Path(__file__).parents[2]
SLURM = ROOT / "examples" / "clusters" / "slurm.sbatch"
JOB = ROOT / "examples" / "clusters" / "pytorchjob.yaml"
pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")

# srun starts a task on each node, with that node's number; scontrol names the nodes.
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do echo "srun $1" >>srun.log; shift; done
for ((node = SLURM_JOB_NUM_NODES - 1; node >= 0; node--)); do
    SLURM_NODEID=$node "$@" &
    tasks+=($!)
done
for task in "${tasks[@]}"; do wait "$task" || exit $?; done
"""
SCONTROL = '#!/bin/bash\n[[ "$*" == "show hostnames localhost,other" ]] && printf "localhost\\nother\\n"\n'
LISTS = """#!/bin/bash
python3 -c 'import json, sys; print(json.dumps(sys.argv[1:]))' "$@" >"arguments.$SLURM_NODEID"
"""
RUNS = f'#!/bin/bash\nexec {sys.executable} -m acceler8 "$@"\n'


def environment(folder: Path, programs: dict[str, str], **own: str) -> dict[str, str]:
    """Environment in which ``programs`` are found first, and training stays on the CPU."""
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    for name, text in programs.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "ACCELER8_", "SLURM_", "PET_"))}
    quiet = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "XDG_CONFIG_HOME": str(folder)}
    paths = {"PYTHONPATH": str(ROOT / "src"), "PATH": f"{tools}:{os.environ['PATH']}", "HF_HOME": str(folder)}
    return {**kept, **quiet, **paths, **own}


def submit(folder: Path, acceler8: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the Slurm script as the first of two nodes would."""
    slurm = {"SLURM_JOB_NODELIST": "localhost,other", "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "1"}
    slurm["SLURM_JOB_ID"] = str(free_port())
    programs = {"srun": SRUN, "scontrol": SCONTROL, "acceler8": acceler8}
    command = ["bash", str(SLURM), *arguments]
    env = environment(folder, programs, **slurm)
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=150)


def last_lines(output: str) -> list[str]:
    return re.findall(r"^step 4: loss 0x\S+, weights [0-9a-f]{16}$", output, flags=re.MULTILINE)


def test_the_slurm_script_is_bash():
    subprocess.run(["bash", "-n", str(SLURM)], check=True)
    wanted = {"--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=8", "--requeue"}
    assert wanted <= set(re.findall(r"^#SBATCH (\S+)$", SLURM.read_text(), flags=re.MULTILINE))


def test_the_slurm_script_starts_a_launcher_on_each_node(tmp_path: Path):
    done = submit(tmp_path, LISTS, "train.py", "--name", "a b")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "srun.log").read_text() == "srun --kill-on-bad-exit=1\n"
    nodes = [json.loads((tmp_path / f"arguments.{node}").read_text()) for node in range(2)]
    for number, words in enumerate(nodes):
        assert words[0] == "launch"
        assert words[-3:] == ["train.py", "--name", "a b"]
        flags = dict(zip(words[1:-3:2], words[2:-3:2], strict=True))
        assert 20000 <= int(flags.pop("--main_process_port")) < 30000
        assert flags == {
            "--num_processes": "2",
            "--num_machines": "2",
            "--machine_rank": str(number),
            "--main_process_ip": "localhost",
            "--max_restarts": "3",
        }


@pytest.mark.slow
def test_the_slurm_script_trains(tmp_path: Path):
    done = submit(tmp_path, RUNS, str(ROOT / "examples" / "restart.py"), "--steps", "4", "--cpu")
    assert done.returncode == 0, done.stderr
    assert len(last_lines(done.stdout)) == 1


def replicas() -> dict[str, dict]:
    job = yaml.safe_load(JOB.read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert job["metadata"]["name"]
    return job["spec"]["pytorchReplicaSpecs"]


def test_the_job_has_what_the_operator_needs():
    assert set(replicas()) == {"Master", "Worker"}
    for name, replica in replicas().items():
        assert replica["restartPolicy"] in {"Always", "OnFailure", "Never", "ExitCode"}
        assert replica["replicas"] >= 1
        assert name != "Master" or replica["replicas"] == 1
        pod = replica["template"]["spec"]
        [container] = [each for each in pod["containers"] if each["name"] == "pytorch"]
        assert [port["name"] for port in container["ports"]] == ["pytorchjob-port"]
        assert container["image"]
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def pods(folder: Path, port: int, *more: str) -> list[subprocess.Popen[str]]:
    """The command of each pod, with the variables that the operator gives it."""
    started = []
    for rank, replica in enumerate(replicas().values()):
        [container] = replica["template"]["spec"]["containers"]
        words = [*container["command"], *more, *container["args"]]
        words = [word.replace("/checkpoints", str(folder)).replace("examples/", f"{ROOT}/examples/") for word in words]
        place = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
        place |= {"PET_MASTER_ADDR": "localhost", "PET_MASTER_PORT": str(port), "PET_NODE_RANK": str(rank)}
        place |= {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PYTHONUNBUFFERED": "1"}
        env = environment(folder, {"acceler8": RUNS}, **place)
        pipe = subprocess.PIPE
        extra = ["--steps", "4", "--cpu"]
        started.append(subprocess.Popen([*words, *extra], cwd=folder, env=env, stdout=pipe, stderr=pipe, text=True))
    return started


def test_the_launcher_takes_what_the_operator_sets(tmp_path: Path):
    for rank, pod in enumerate(pods(tmp_path, 23456, "--dry_run")):
        out, errors = pod.communicate(timeout=60)
        assert pod.returncode == 0, errors
        assert out.startswith("2 processes on 2 machines, on the CPU\n")
        for line in (
            "num_processes = 2  (environment PET_NPROC_PER_NODE)",
            "num_machines = 2  (environment PET_NNODES)",
            f"machine_rank = {rank}  (environment PET_NODE_RANK)",
            "main_process_ip = localhost  (environment PET_MASTER_ADDR)",
            "main_process_port = 23456  (environment PET_MASTER_PORT)",
        ):
            assert f"  {line}\n" in out


@pytest.mark.slow
def test_the_job_trains(tmp_path: Path):
    ends = [(*pod.communicate(timeout=150), pod.returncode) for pod in pods(tmp_path, free_port(), "--quiet")]
    assert [status for *_, status in ends] == [0, 0], ends
    assert len(last_lines(ends[0][0])) == 1
