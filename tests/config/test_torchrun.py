"""torchrun's ``PET_*`` variables as settings of a launch."""

from __future__ import annotations

import pytest

from acceler8.config.resolve import load
from acceler8.errors import ConfigError


def settings(**environ: str) -> dict[str, object]:
    found = load(None, environ, use_default_file=False, use_torchrun=True)
    return {path: value.value for path, value in found.values.items()}


def test_a_pod_s_variables_are_settings():
    assert settings(
        PET_NNODES="4",
        PET_NPROC_PER_NODE="8",
        PET_NODE_RANK="3",
        PET_MASTER_ADDR="job-master-0",
        PET_MASTER_PORT="23456",
        PET_MAX_RESTARTS="2",
    ) == {
        "num_machines": 4,
        "num_processes": 32,
        "machine_rank": 3,
        "main_process_ip": "job-master-0",
        "main_process_port": 23456,
        "max_restarts": 2,
    }


def test_an_elastic_policy_s_variables_are_settings():
    found = settings(PET_NNODES="2:2", PET_RDZV_ENDPOINT="job-worker-0:29400", PET_RDZV_BACKEND="c10d")
    assert found == {
        "num_machines": 2,
        "main_process_ip": "job-worker-0",
        "main_process_port": 29400,
        "rdzv_backend": "c10d",
    }
    assert settings(PET_RDZV_ENDPOINT="[fd00::1]:29400")["main_process_ip"] == "fd00::1"


def test_processes_by_gpu_are_left_to_the_launcher():
    assert settings(PET_NNODES="2", PET_NPROC_PER_NODE="auto") == {"num_machines": 2}


def test_own_variables_win():
    assert settings(PET_NNODES="2", ACCELERATE_NUM_MACHINES="3")["num_machines"] == 3


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("PET_NNODES", "1:4", r"PET_NNODES: got '1:4'; allowed: one number"),
        ("PET_RDZV_ENDPOINT", "29400", r"PET_RDZV_ENDPOINT: got '29400'; allowed: HOST:PORT"),
        ("PET_NODE_RANK", "x", "PET_NODE_RANK"),
    ],
)
def test_what_cannot_be_names_the_variable(name: str, value: str, message: str):
    with pytest.raises(ConfigError, match=message):
        settings(**{name: value})


def test_only_a_launch_reads_them():
    assert not load(None, {"PET_NNODES": "2"}, use_default_file=False).values
