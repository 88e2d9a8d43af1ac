"""Descriptions that cannot be right are refused when they are made."""

from __future__ import annotations

import pytest

from acceler8.errors import LaunchError
from acceler8.launch import LaunchSpec


def make(**fields: object) -> LaunchSpec:
    return LaunchSpec(command=("train.py",), **fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_processes": 0}, "num_processes=0"),
        ({"num_processes": "2"}, "num_processes='2'"),
        ({"num_processes": True}, "num_processes=True"),
        ({"num_processes": 3, "num_machines": 2, "main_process_ip": "n0"}, "num_processes=3 is not a multiple"),
        ({"num_processes": 2, "num_machines": 2}, "main_process_ip is not set"),
        ({"machine_rank": 1}, "machine_rank=1 with num_machines=1"),
        ({"max_restarts": -1}, "max_restarts=-1"),
        ({"monitor_interval_s": 0}, "monitor_interval_s=0"),
        ({"grace_period_s": float("nan")}, "grace_period_s=nan"),
        ({"rdzv_backend": "etcd"}, "rdzv_backend='etcd'; valid: static, c10d"),
        ({"run_id": "a b"}, "run_id='a b'"),
        *(({"main_process_port": port}, "main_process_port=") for port in (0, -1, 65536, "80", True)),
        *(
            ({"main_process_ip": host}, "main_process_ip=")
            for host in ("", "a b", "tcp://n0", "n0:29500", "-n0", "n0\n", "n0;ls", "1.2.3", "1.2.3.256", "a" * 300)
        ),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, object], message: str):
    with pytest.raises(LaunchError) as caught:
        make(**fields)
    assert message in str(caught.value)


@pytest.mark.parametrize("host", ["localhost", "node-0.cluster.internal", "10.0.0.1", "::1", "gpu_01"])
def test_hosts(host: str):
    assert make(main_process_ip=host).address == host


def test_defaults():
    spec = make()
    assert (spec.address, spec.local_processes) == ("127.0.0.1", 1)
    assert make(num_processes=8, num_machines=2, main_process_ip="n0").local_processes == 4
