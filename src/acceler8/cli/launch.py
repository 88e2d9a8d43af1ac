"""``acceler8 launch``: flags in, workers out."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand

if TYPE_CHECKING:
    from acceler8.config import Effective
    from acceler8.launch import LaunchSpec

SWITCHES = {
    "help": "Print this and exit; after --fp8_backend NAME with that backend's flags.",
    "module": "The script is a module, as after python -m (also -m).",
    "no_python": "The script is a program; no Python goes in front of it.",
    "quiet": "Do not say which file and which settings are used.",
    "verbose": "Show what torch's elastic training logs.",
    "dry_run": "Print what would run, with the source of each setting, and exit.",
}
OPTIONS = {
    "config_file": "YAML to read. Default: acceler8's own default file, else Accelerate's.",
    "log_dir": "Folder for the output of each worker.",
}
_SHORT = {"h": "help", "m": "module"}


class RawCommand(TyperCommand):
    """A command that leaves its whole line to its function: what follows the script belongs to the script."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keep every word."""
        ctx.args = list(args)
        return []


def launch(ctx: typer.Context) -> None:
    """Run a script in one process or many, on GPUs or the CPU, with a configuration.

    acceler8 launch [FLAGS] SCRIPT [ARGUMENTS OF THE SCRIPT]
    """
    from acceler8.config import current_environment, parse_flags

    parsed = parse_flags(ctx.args, switches=(*SWITCHES, *_SHORT), options=tuple(OPTIONS))
    others = {_SHORT.get(name, name): value for name, value in parsed.others.items()}
    if others.get("help"):
        from acceler8.cli.launch_help import print_help

        print_help(SWITCHES, OPTIONS, parsed.route)
        return
    from acceler8.config.resolve import load, notes

    environ = current_environment()
    file = others.get("config_file")
    effective = load(parsed.route, environ, Path(str(file)) if file else None, use_torchrun=True)
    said = [*notes(effective), *_machine_notes(effective)]
    if not others.get("quiet"):
        for note in said:
            typer.echo(f"acceler8: {note}", err=True)
    spec = launch_spec(effective, parsed.rest, others)
    if others.get("dry_run"):
        _print_plan(spec, effective, environ)
        return
    from acceler8.launch import launch as run

    sys.stdout.flush()
    raise typer.Exit(run(spec, parent=environ))


def launch_spec(effective: Effective, command: list[str], others: Mapping[str, Any]) -> LaunchSpec:
    """What to launch, from the effective configuration. Raises ConfigError or LaunchError."""
    from acceler8.config import write_environment
    from acceler8.launch import LaunchSpec

    given = {
        "num_machines": effective["num_machines"],
        "machine_rank": effective["machine_rank"],
        "main_process_ip": effective["main_process_ip"],
        "main_process_port": effective["main_process_port"] or None,  # 0 asks for a free one
        "max_restarts": effective["max_restarts"],
        "monitor_interval_s": effective["monitor_interval"],
        "rdzv_backend": effective["rdzv_backend"],
        "log_dir": Path(str(others["log_dir"])) if "log_dir" in others else None,
    }
    return LaunchSpec(
        command=tuple(command),
        is_module=bool(others.get("module")),
        is_program=bool(others.get("no_python")),
        num_processes=_num_processes(effective),
        use_cpu=effective.uses_cpu,
        environment=write_environment(effective) | _derived(effective),
        is_verbose=bool(others.get("verbose")),
        is_quiet=bool(others.get("quiet")),
        **{name: value for name, value in given.items() if value is not None},
    )


def _derived(effective: Effective) -> dict[str, str]:
    """Variables that libraries read under their own names."""
    from acceler8.config.environment import CONFIG_FILE

    added = dict(effective["environment"] or {})
    if effective["num_cpu_threads_per_process"]:
        added["OMP_NUM_THREADS"] = str(effective["num_cpu_threads_per_process"])
    if effective["gpu_ids"] not in (None, "all") and not effective.uses_cpu:
        added["CUDA_VISIBLE_DEVICES"] = effective["gpu_ids"]
    return added | {CONFIG_FILE: ""}  # what the file says is in the variables already


def _num_processes(effective: Effective) -> int:
    """As asked; else one for each GPU of each machine; else one for each machine."""
    if effective["num_processes"]:
        return int(effective["num_processes"])
    machines = int(effective["num_machines"] or 1)
    if effective.uses_cpu or effective["distributed_type"] == "NO":
        return machines
    ids = effective["gpu_ids"]
    if ids and ids != "all":
        return machines * len(ids.split(","))
    import torch

    return machines * max(1, torch.cuda.device_count())


def _machine_notes(effective: Effective) -> Iterator[str]:
    """What this machine lacks for the configuration. A script may ask for something else, so these are no errors."""
    from acceler8.config import choose_backend
    from acceler8.errors import MissingLibraryError

    try:
        choose_backend(effective)
    except MissingLibraryError as error:
        yield str(error)
    asks = [path for path in ("gpu_ids", "distributed_type") if effective[path] not in (None, "NO", "MULTI_CPU")]
    if asks and not effective.uses_cpu:
        import torch

        if not torch.cuda.is_available():
            source = effective.source(asks[0])
            yield f"{source}: {asks[0]} {effective[asks[0]]} asks for GPUs, and torch finds none: the CPU is used"


def _print_plan(spec: LaunchSpec, effective: Effective, environ: Mapping[str, str]) -> None:
    """What would run, and every value with its source; raises LaunchError for a command that cannot run."""
    from acceler8.config.show import rows
    from acceler8.launch.command import resolve_command

    command = resolve_command(
        spec.command,
        is_module=spec.is_module,
        is_program=spec.is_program,
        is_unbuffered=spec.local_processes > 1,
        search_path=environ.get("PATH"),
    )
    many = f"{spec.num_processes} process{'es' if spec.num_processes > 1 else ''}"
    machines = f"{spec.num_machines} machine{'s' if spec.num_machines > 1 else ''}"
    typer.echo(f"{many} on {machines}, {'on the CPU' if spec.use_cpu else 'on GPUs where there are any'}")
    typer.echo(shlex.join(command))
    for row in rows(effective):
        typer.echo(f"  {row.path} = {row.text}  ({row.source})")
