"""What a configuration may add to the children's environment."""

from __future__ import annotations

import pytest

from acceler8.errors import LaunchError
from acceler8.launch import LaunchSpec, child_environment
from acceler8.launch.worker_environment import check_configured, default_threads


def test_children_get_the_parents_environment_and_the_added_one():
    parent = {"PATH": "/bin", "LD_PRELOAD": "/lib/mine.so", "HF_TOKEN": "secret", "ACCELERATE_MIXED_PRECISION": "no"}
    before = dict(parent)
    added = {"ACCELERATE_MIXED_PRECISION": "fp8", "NCCL_DEBUG": "INFO"}
    assert child_environment(parent, added) == {**before, **added}
    assert parent == before


@pytest.mark.parametrize(
    "name",
    [
        "ACCELERATE_USE_CPU",
        "ACCELER8_ENVIRONMENT",
        "FSDP_VERSION",
        "GLOO_SOCKET_IFNAME",
        "NCCL_P2P_DISABLE",
        "TORCH_DISTRIBUTED_DEBUG",
        "CUDA_VISIBLE_DEVICES",
        "OMP_NUM_THREADS",
        "MKL_NUM_THREADS",
        "TOKENIZERS_PARALLELISM",
        "HF_HUB_OFFLINE",
    ],
)
def test_settings_of_training_may_be_added(name: str):
    check_configured({name: "1"})
    assert child_environment({}, {name: "1"}) == {name: "1"}


@pytest.mark.parametrize(
    ("name", "why"),
    [
        *((name, "loads") for name in ("LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONSTARTUP", "PATH")),
        *((name, "loads") for name in ("BASH_ENV", "DYLD_INSERT_LIBRARIES", "NCCL_NET_PLUGIN", "TORCH_HOME")),
        *((name, "secret") for name in ("HF_TOKEN", "WANDB_API_KEY", "ACCELERATE_TOKEN", "NCCL_SECRET")),
        *((name, "loads") for name in ("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "NCCL_CUDA_PATH", "NCCL_DEBUG_FILE")),
        *((name, "allowed are GLOO_") for name in ("HOME", "ld_preload", "ACCELERATEX", "HF_ENDPOINT", "TORCH_LOGZ")),
        *((name, "is not allowed") for name in ("", "A B", "A=B", "NCCL_Ä", "1A", "NCCL_A\n", "NCCL_\0A")),
    ],
)
def test_other_names_are_refused_with_the_reason(name: str, why: str):
    with pytest.raises(LaunchError, match=why) as caught:
        check_configured({name: "value-of-it"})
    assert "value-of-it" not in str(caught.value)


@pytest.mark.parametrize("value", ["a\nLD_PRELOAD=b", "a\rb", "a\0b", 3, None])
def test_values_are_text_on_one_line(value: object):
    with pytest.raises(LaunchError, match="NCCL_DEBUG"):
        check_configured({"NCCL_DEBUG": value})


@pytest.mark.parametrize("name", ["RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"])
def test_a_configuration_does_not_say_what_the_launch_computes(name: str):
    with pytest.raises(LaunchError, match=f"{name}.*main_process_port"):
        check_configured({name: "0"})
    with pytest.raises(LaunchError, match=name):
        LaunchSpec(command=("a.py",), environment={name: "0"})


def test_a_launch_marks_its_processes_itself():
    with pytest.raises(LaunchError, match="ACCELER8_LAUNCH_ID"):
        check_configured({"ACCELER8_LAUNCH_ID": "0"})


@pytest.mark.parametrize(
    ("parent", "added", "cores", "processes", "threads"),
    [
        ({}, {}, 8, 2, "4"),
        ({}, {}, 3, 2, "1"),
        ({}, {}, 2, 8, "1"),
        ({}, {}, 8, 1, None),
        ({"OMP_NUM_THREADS": "3"}, {}, 8, 2, None),
        ({}, {"OMP_NUM_THREADS": "3"}, 8, 2, None),
    ],
)
def test_processes_share_the_cores_unless_somebody_chose(parent, added, cores, processes, threads):
    expected = {} if threads is None else {"OMP_NUM_THREADS": threads}
    assert default_threads(parent, added, cores, processes) == expected
