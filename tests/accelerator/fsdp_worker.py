"""One process of the tests of sharded training: runs scenarios, and leaves what each gave, or how it failed."""

from __future__ import annotations

import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from acceler8 import Accelerator
from acceler8.utils import InitProcessGroupKwargs
from tests.accelerator import fsdp_checks, fsdp_models, fsdp_training

SCENARIOS = {
    **fsdp_checks.SCENARIOS,
    **fsdp_checks.OF_FOUR,
    **fsdp_checks.COMPILED,
    **fsdp_models.SCENARIOS,
    **fsdp_training.SCENARIOS,
}


def main(folder: Path, names: list[str]) -> None:
    """Run the scenarios in order; one that fails ends this process, for the others cannot follow."""
    torch.set_num_threads(1)
    starter = Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=60))])
    rank = starter.process_index  # the starter owns the process group
    for name in names:
        start = time.monotonic()
        try:
            result: Any = SCENARIOS[name]()
        except BaseException:
            (folder / f"{name}.{rank}.txt").write_text(traceback.format_exc())
            raise
        torch.save(result, folder / f"{name}.{rank}.pt")
        print(f"{name}: {time.monotonic() - start:.1f} s", flush=True)
    if dist.is_initialized():
        dist.barrier()
    starter.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
