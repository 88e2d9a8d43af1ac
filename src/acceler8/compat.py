"""Hugging Face Accelerate's ``Accelerator``, member by member: what is here, what differs, what takes its place.

``python -m acceler8.compat`` prints the tables; ``python -m acceler8.compat --write docs/compatibility.md`` writes the
page, and ``--check`` says whether it is as it should be. Tests compare them with the installed Accelerate: every public
member is listed, those that are here take its parameters, and those that are not raise AttributeError.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from acceler8.accelerator.surface import ABSENT, REFUSED

ACCELERATE = "1.15"
"""The release that the tables are compared with."""
SUPPORTED, DIFFERS, MISSING = "supported", "differs", "absent"


@dataclass(frozen=True)
class Entry:
    """One member or argument."""

    name: str
    status: str
    """``supported``: same parameters and meaning. ``differs``: the note says how. ``absent``: what to do instead."""
    note: str = ""


_SAME = """
accumulate ao_recipe_handler autocast autocast_handler backward check_trigger clear clip_grad_norm_ clip_grad_value_
dataloader_config ddp_handler deepspeed_plugin delayed_fp8_autocast device device_placement dispatch_batches
distributed_type end_training even_batches fp8_enabled fp8_recipe_handler free_memory gather_for_metrics
get_state_dict gradient_accumulation_steps has_fp8_handler init_handler is_composable_parallelism_enabled is_fsdp2
is_last_process is_local_main_process is_main_process local_main_process_first local_process_index log_with
logging_dir main_process_first mixed_precision msamp_recipe_handler multi_device native_amp no_sync non_blocking
num_processes on_last_process optimizer_step_was_skipped pad_across_processes prepare_optimizer prepare_scheduler
print process_index profile profile_handler project_configuration project_dir register_load_state_pre_hook
register_save_state_pre_hook save save_iteration scaler_handler set_trigger should_save_model skip_first_batches
split_batches split_between_processes step step_scheduler_with_optimizer sync_gradients te_recipe_handler trackers
unscale_gradients unwrap_model use_distributed use_seedable_sampler wait_for_everyone
"""

_DIFFERENT = {
    "fp8_backend": "has a member more, NATIVE: acceler8's own kernels, the first choice",
    "gather": "shapes or dtypes that differ between processes raise ShapeError in all of them",
    "get_tracker": "knows `jsonl` too; an unknown name raises ConfigError, a ValueError",
    "gradient_state": "belongs to this Accelerator; has the loop's position, not Accelerate's plugin and loader lists",
    "init_trackers": "also opens `metrics.jsonl` in `logging_dir`; a second call without `end_training` raises"
    " ConfigError",
    "join_uneven_inputs": "refuses the recipe `delayed` and FP16 with uneven batches, which would hang or skip",
    "load_state": "returns a report; keywords are `strict`, `force`, `map_location`; reads no pickle, and changes"
    " nothing unless all of it fits",
    "log": "a tracker that fails is logged once and the training goes on; tensors become numbers; only the main process"
    " logs, whatever a tracker's `main_process_only` says",
    "on_local_main_process": "`function` is required",
    "on_local_process": "without a `local_process_index` raises ConfigError",
    "on_main_process": "`function` is required",
    "on_process": "without a `process_index` raises ConfigError",
    "parallelism_config": "None always",
    "prepare": "models are the same objects, converted, and compiled in place if a compiler is configured; FSDP"
    " puts new Parameters into them; under DeepSpeed the engine comes in the model's place",
    "prepare_data_loader": "`slice_fn_for_dispatch` raises NotInThisVersionError",
    "prepare_model": "`evaluation_mode` leaves FP8 out, and the model out of checkpoints",
    "reduce": "`scale` other than 1 raises ConfigError; `max` is a reduction more",
    "register_for_checkpointing": "an object's state must hold no more than numbers, text, tensors and containers",
    "rng_types": "a tuple of `generator`, `torch`, `cuda`",
    "save_model": "a model with NaN or inf raises CheckpointError (`force=True` saves it); no pickle",
    "save_state": "whole or not at all, no pickle; keywords are `max_shard_size`, `progress`, `force`",
    "scaler": "a LossScaler, whose scale changes between steps; None but under FP16",
    "state": "a view of this Accelerator, no process-wide singleton; has `_mixed_precision` and the like not",
    "torch_device_mesh": "None always",
    "use_stateful_dataloader": "what was asked for; prepared loaders are resumable either way",
    "verify_device_map": "raises NotInThisVersionError instead of returning True; `prepare` asks it",
}

MEMBERS = sorted(
    [
        *(Entry(name, SUPPORTED) for name in _SAME.split()),
        *(Entry(name, DIFFERS, note) for name, note in _DIFFERENT.items()),
        *(Entry(name, MISSING, note) for name, note in ABSENT.items()),
    ],
    key=lambda entry: entry.name,
)

_ARGUMENTS: Mapping[str, tuple[str, str]] = {
    "device_placement": (SUPPORTED, ""),
    "split_batches": (SUPPORTED, ""),
    "mixed_precision": (SUPPORTED, ""),
    "gradient_accumulation_steps": (DIFFERS, "None, the default, leaves it to variable and file; 1 wins over them"),
    "cpu": (SUPPORTED, ""),
    "dataloader_config": (SUPPORTED, ""),
    "deepspeed_plugin": (DIFFERS, "one plugin; nothing is clipped where no number is given"),
    "fsdp_plugin": (DIFFERS, "version 1 is run by FSDP2 too; what becomes of each field: docs/parallel.md"),
    "rng_types": (DIFFERS, "of `generator`, `torch`, `cuda`; default `generator`"),
    "log_with": (
        DIFFERS,
        "a library that is missing raises MissingLibraryError; aim, comet_ml, clearml, dvclive and"
        " swanlab raise NotInThisVersionError: pass a GeneralTracker of your own",
    ),
    "project_dir": (SUPPORTED, ""),
    "project_config": (SUPPORTED, ""),
    "gradient_accumulation_plugin": (SUPPORTED, ""),
    "step_scheduler_with_optimizer": (SUPPORTED, ""),
    "kwargs_handlers": (SUPPORTED, ""),
    "dynamo_backend": (SUPPORTED, ""),
    "dynamo_plugin": (DIFFERS, "`prepare` compiles in place, so a model stays the same object with the same keys"),
}
ARGUMENTS = sorted(
    [
        *(Entry(name, *status) for name, status in _ARGUMENTS.items()),
        *(Entry(name, MISSING, note) for name, note in REFUSED.items()),
    ],
    key=lambda entry: entry.name,
)

_INTRODUCTION = f"""\
# Compatibility with Accelerate's Accelerator

`from acceler8 import Accelerator` takes the place of `from accelerate import Accelerator`. These tables list every
public member and constructor argument of Accelerate {ACCELERATE}: `supported` has the same parameters and meaning,
`differs` says how, `absent` what to do instead. They are made by `python -m acceler8.compat --write
docs/compatibility.md` and tested against the installed Accelerate.
"""
_CONSTRUCTOR = """\
## Constructor

`mixed_precision` comes first, the others by keyword. An absent argument may be None; anything else raises
NotInThisVersionError.
"""


def page() -> str:
    """``docs/compatibility.md``."""
    counts = ", ".join(
        f"{sum(entry.status == status for entry in MEMBERS)} {status}" for status in (SUPPORTED, DIFFERS, MISSING)
    )
    members = f"## Members\n\nOf {len(MEMBERS)}: {counts}.\n"
    return "\n".join([_INTRODUCTION, members, _table("member", MEMBERS), _CONSTRUCTOR, _table("argument", ARGUMENTS)])


def _table(head: str, entries: Sequence[Entry]) -> str:
    rows = [f"| `{entry.name}` | {entry.status} | {entry.note} |" for entry in entries]
    return "\n".join([f"| {head} | status | how, or what instead |", "|---|---|---|", *rows, ""])


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables, or write or check the page; 1 if it is stale and only checked."""
    parser = argparse.ArgumentParser(prog="python -m acceler8.compat", description="Members of Accelerate's class.")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the page to a file")
    parser.add_argument("--check", type=Path, metavar="FILE", help="exit with 1 if the file is not as it should be")
    asked = parser.parse_args(arguments)
    if asked.check is not None:
        is_stale = not asked.check.exists() or asked.check.read_text(encoding="utf-8") != page()
        if is_stale:
            print(f"{asked.check} is stale; run python -m acceler8.compat --write {asked.check}", file=sys.stderr)
        return int(is_stale)
    if asked.write is not None:
        asked.write.write_text(page(), encoding="utf-8")
        return 0
    width = max(len(entry.name) for entry in (*MEMBERS, *ARGUMENTS))
    for title, entries in (("members", MEMBERS), ("constructor arguments", ARGUMENTS)):
        print(f"{title} of accelerate.Accelerator {ACCELERATE}:")
        for entry in entries:
            print(f"  {entry.name:<{width}}  {entry.status:<9}  {entry.note}".rstrip())
    return 0


if __name__ == "__main__":
    sys.exit(main())
