"""Which tests stay in one worker where several processes share out the suite (``pytest -n 2``, as ``make test`` does).

Every other test goes to whichever worker is free, in the order of collection.
"""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling

SEVERAL_PROCESSES = "they train in processes of their own, so two at once would crowd a small machine"
TOGETHER = {
    "tests/accelerator/test_ddp.py": SEVERAL_PROCESSES,
    "tests/accelerator/test_documented_script.py": SEVERAL_PROCESSES,
    "tests/accelerator/test_fsdp.py": SEVERAL_PROCESSES,
    "tests/accelerator/test_processes.py": SEVERAL_PROCESSES,
    "tests/accelerator/test_resume_data.py": SEVERAL_PROCESSES,
    "tests/accelerator/test_uneven.py": SEVERAL_PROCESSES,
    "tests/checkpoint/test_sharded.py": SEVERAL_PROCESSES,
    "tests/checkpoint/test_two_processes.py": SEVERAL_PROCESSES,
    "tests/checkpoint/test_zero.py": SEVERAL_PROCESSES,
    "tests/examples/test_examples.py": SEVERAL_PROCESSES,
    "tests/parallel/test_deepspeed.py": SEVERAL_PROCESSES,
    "tests/parallel/test_fsdp2_all_gather.py": SEVERAL_PROCESSES,
    "tests/optim/test_fsdp2.py": SEVERAL_PROCESSES,
    "tests/backends/test_registry.py": "a package that pip installs once",
    "tests/checkpoint/test_hostile.py": "one checkpoint, which each damages in its own way",
    "tests/cli/test_demo.py": "one whole run, which stopped ones are compared with",
    "tests/demo/test_report.py": "one finished run",
    "tests/demo/test_run.py": "one finished run",
}
"""A test file -> what its tests share, which is the same text for all files that share it."""


def piece_of(nodeid: str) -> str:
    """Name the piece of work that a test belongs to, by its ``file::test[parameters]``."""
    return TOGETHER.get(nodeid.partition("::")[0], nodeid)


class SharedOut(LoadScopeScheduling):  # type: ignore[misc]
    """Hands out tests one at a time, and those of ``TOGETHER`` as one piece of work; the largest pieces first."""

    def _split_scope(self, nodeid: str) -> str:
        return piece_of(nodeid)
