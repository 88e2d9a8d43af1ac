"""Several processes: each finds its place, and they meet."""

from __future__ import annotations

import gc
import json
import os
import socket
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import distributed

from acceler8.accelerator.processes import Processes, join_processes
from acceler8.errors import ConfigError

SCRIPT = """
import json, sys, time
import torch
from torch import distributed
if sys.argv[1] == "own group":
    distributed.init_process_group("gloo")
from acceler8 import Accelerator

connect, connected = distributed.init_process_group, []

def connect_late(*args, **kwargs):
    connect(*args, **kwargs)
    time.sleep(2 * (kwargs["rank"] == 0))
    connected.append(time.monotonic())

distributed.init_process_group = connect_late

accelerator = Accelerator(mixed_precision="fp8", cpu=True)
joined = time.monotonic()
second = Accelerator(mixed_precision="bf16", cpu=True)
total = torch.tensor([accelerator.process_index + 1.0])
distributed.barrier()  # both are here, so that the second waits for as long as the first sleeps
if accelerator.is_main_process:
    time.sleep(1)
start = time.monotonic()
accelerator.wait_for_everyone()
waited = time.monotonic() - start
distributed.all_reduce(total)
scheduler = accelerator.prepare("anything else")
accelerator.print("only once")
facts = dict(
    count=accelerator.num_processes, index=accelerator.process_index, local=accelerator.local_process_index,
    main=accelerator.is_main_process, local_main=accelerator.is_local_main_process, total=total.item(),
    device=str(accelerator.device), kind=str(accelerator.distributed_type), backend=distributed.get_backend(),
    second=second.process_index, waited=waited, connected=connected, joined=joined,
)
second.end_training()
alive = distributed.is_initialized()
accelerator.end_training()
facts |= dict(alive=alive, ended=not distributed.is_initialized())
if distributed.is_initialized():
    distributed.destroy_process_group()
print(json.dumps(facts))
"""


REJOIN = """
import atexit, os, sys, time
from datetime import timedelta
import torch
from torch import distributed

atexit.register(lambda: print("left open" if distributed.is_initialized() else "ended", flush=True))
from acceler8.accelerator.processes import join_processes
from acceler8.config.run_handlers import InitProcessGroupKwargs

# The first process is late wherever the second can run ahead of it.
first = os.environ["RANK"] == "0"
destroy, connect = distributed.destroy_process_group, distributed.init_process_group

def destroy_late():
    time.sleep(0.5 * first)
    destroy()

def connect_late(*args, **kwargs):
    time.sleep(0.5 * first)
    connect(*args, **kwargs)

distributed.destroy_process_group, distributed.init_process_group = destroy_late, connect_late
for group in range(3):
    found = join_processes(os.environ, "cpu", True, InitProcessGroupKwargs(timeout=timedelta(seconds=20)))
    total = torch.tensor([found.process_index + 1.0])
    distributed.all_reduce(total)
    print(total.item(), flush=True)
    if group < 2:
        found.end()
if sys.argv[1] == "fails":
    raise SystemError("on purpose")
"""


def start(case: str, rank: int, port: int, script: str = SCRIPT, **more: str) -> subprocess.Popen[str]:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    source = Path(__file__).parents[2] / "src"
    env = {**os.environ, **{k: str(v) for k, v in place.items()}, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    env |= more
    return subprocess.Popen(
        [sys.executable, "-c", script, case], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("case", ["from the variables", "own group"])
def test_two_processes_know_their_places(case: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    workers = [start(case, rank, port) for rank in range(2)]
    outputs = [worker.communicate(timeout=120) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], outputs
    waits: list[float] = []
    connected: list[float] = []
    joined: list[float] = []
    for rank, (out, _) in enumerate(outputs):
        *before, last = out.splitlines()
        assert before == (["only once"] if rank == 0 else [])
        facts = json.loads(last)
        waits.append(facts.pop("waited"))
        connected += facts.pop("connected")
        joined.append(facts.pop("joined"))
        assert facts == {
            "count": 2,
            "index": rank,
            "local": rank,
            "main": rank == 0,
            "local_main": rank == 0,
            "total": 3.0,
            "device": "cpu",
            "kind": "MULTI_CPU",
            "backend": "gloo",
            "second": rank,
            "alive": True,  # the second Accelerator did not start the group, so it does not end it
            "ended": case != "own group",
        }
    assert waits[1] > waits[0]  # the second waited while the first slept
    assert waits[1] > 0.5
    # Nobody may leave while another still connects: it would be cut off, or wait for the one that left.
    assert len(connected) == (2 if case == "from the variables" else 0)
    assert all(time > max(connected) for time in joined if connected)


@pytest.mark.parametrize("store", ["of the first process", "of torchrun"])
def test_processes_join_again_and_a_group_is_ended_at_exit(store: str) -> None:
    """Without a new name in a store that stays they met in a store that ended, or read addresses of closed sockets."""
    of_torchrun = store == "of torchrun"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = (
        torch.distributed.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False) if of_torchrun else None
    )
    more = {"TORCHELASTIC_USE_AGENT_STORE": str(of_torchrun)}
    # After an error nothing is ended at exit: the others may be in the middle of something.
    case = "fails" if of_torchrun else "ends"
    workers = [start(case, rank, port, REJOIN, **more) for rank in range(2)]
    outputs = [worker.communicate(timeout=120) for worker in workers]
    for worker, (out, err) in zip(workers, outputs, strict=True):
        assert out.split("\n")[:-1] == ["3.0"] * 3 + ["left open" if of_torchrun else "ended"], err
        assert worker.returncode == int(of_torchrun), err
        assert ("on purpose" in err) == of_torchrun
    del server


PLACE = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"RANK": ""}, "RANK is not set, and WORLD_SIZE is above 1; start with acceler8 launch or torchrun"),
        ({"LOCAL_RANK": ""}, "LOCAL_RANK is not set"),
        ({"RANK": "2"}, "RANK: got 2; allowed: 0 to 1, for WORLD_SIZE is 2"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE: got 'two'; allowed: a whole number"),
        ({"WORLD_SIZE": "-1"}, "WORLD_SIZE: got '-1'"),
        ({"MASTER_PORT": ""}, "MASTER_PORT is not set"),
    ],
)
def test_a_wrong_place_is_named(changes: dict, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        join_processes({**PLACE, **changes}, "cpu", cpu=True)
    assert not torch.distributed.is_initialized()


def test_one_process_starts_no_group() -> None:
    for environ in ({}, {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}):
        found = join_processes(environ, None, cpu=True)
        assert (found.num_processes, found.process_index, found.device) == (1, 0, torch.device("cpu"))
        found.wait()
        found.end()
    assert not torch.distributed.is_initialized()


def test_a_group_that_is_ended_is_never_freed():
    """Freeing a Gloo group, as the end of a DistributedDataParallel does, may wait for ever for one of its threads."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    group = weakref.ref(distributed.group.WORLD)
    Processes(torch.device("cpu"), owns_group=True).end()
    gc.collect()
    assert not distributed.is_initialized()
    assert group() is not None
