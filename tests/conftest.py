"""What every test shares: the ``requires`` marker, seeded generators and one thread."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

# One thread everywhere: sums are the same on every machine, small work is quicker than on two, and the processes that
# share out the tests (`make test`) do not compete with each other's threads.
torch.set_num_threads(1)


def missing_hardware(*, sm: int = 0, gpus: int = 1) -> str | None:
    """What this machine lacks for ``requires(sm=, gpus=)``, in words; None when it lacks nothing."""
    need = f"needs {gpus} CUDA GPU{'s' * (gpus != 1)}" + (f" of sm_{sm} or newer" if sm else "")
    if not torch.cuda.is_available():
        build = "this torch is built without CUDA" if torch.version.cuda is None else "this machine has none"
        return f"{need}; {build}"
    found = [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())]
    if sum(major * 10 + minor >= sm for major, minor in found) >= gpus:
        return None
    return f"{need}; this machine has " + ", ".join(f"sm_{major}{minor}" for major, minor in found)


@pytest.fixture(autouse=True)
def _nothing_of_a_launch_is_left() -> Iterator[None]:
    """End a process group that the test began, and unset LOCAL_RANK: DeepSpeed needs both in one process too."""
    had_group, local_rank = torch.distributed.is_initialized(), os.environ.get("LOCAL_RANK")
    yield
    if not had_group and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if local_rank is None:
        os.environ.pop("LOCAL_RANK", None)


@pytest.hookimpl(optionalhook=True)  # pytest-xdist's
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep together what shares something, unless another ``--dist`` was asked for than the default of ``-n``."""
    if config.getoption("dist") != "load":
        return None
    from tests.workers import SharedOut

    return SharedOut(config, log)


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in item.iter_markers("requires"):
        if reason := missing_hardware(*marker.args, **marker.kwargs):
            pytest.skip(reason)


@pytest.fixture
def make_generator() -> Callable[..., torch.Generator]:
    """``make_generator(seed=0, device="cpu")``: a generator of the test's own, for any order and -k."""

    def make(seed: int = 0, device: str = "cpu") -> torch.Generator:
        return torch.Generator(device=device).manual_seed(seed)

    return make


@pytest.fixture(params=["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def device(request: pytest.FixtureRequest) -> str:
    """Each device that this machine has: the CPU, and a GPU if there is one."""
    return request.param
