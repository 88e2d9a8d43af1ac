"""The help of ``acceler8 launch``, made from the schema."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rich.console import Console
from rich.table import Table
from rich.text import Text

from acceler8.config import ENTRIES, RouteValues
from acceler8.config.registry import Entry

_TITLES = {
    "": "Machines, processes, precision",
    "fp8_config": "FP8",
    "dynamo_config": "torch.compile",
    "fsdp_config": "FSDP",
    "deepspeed_config": "DeepSpeed ZeRO",
}


def print_help(switches: Mapping[str, str], options: Mapping[str, str], route: RouteValues) -> None:
    """Print usage and flags; with a backend among the flags of ``route`` only that backend's FP8 flags."""
    asked = route.values.get("fp8_config.backend")
    backend = None if asked is None or asked.value == "NO" else str(asked.value)
    console = Console(soft_wrap=False, highlight=False)
    console.print("Usage: acceler8 launch [FLAGS] SCRIPT [ARGUMENTS OF THE SCRIPT]\n", markup=False)
    console.print("Runs a script in one process or many. Flags may be spelled with - or _. What a flag does not say")
    console.print("comes from the environment, then from the YAML file, then from the default.\n")
    _print_group(console, "Launch", [(f"--{n}", t) for n, t in {**switches, **options}.items()])
    for section, title in _TITLES.items():
        entries = [e for e in ENTRIES.values() if e.section == section and _belongs(e, backend)]
        if section == "fp8_config":
            title = (
                f"{title}: backend {backend}" if backend else f"{title} (--fp8_backend NAME -h: one backend's flags)"
            )
        _print_group(console, title, [_row(entry, backend) for entry in entries])


def _belongs(entry: Entry, backend: str | None) -> bool:
    return backend is None or not entry.setting.backends or backend in entry.setting.backends


def _row(entry: Entry, backend: str | None) -> tuple[str, str]:
    setting = entry.setting
    names = ", ".join(f"--{name}" for name in setting.flags)
    parts = [setting.help, f"[{setting.kind.allowed}]"]
    if setting.unit:
        parts.append(f"Unit: {setting.unit}.")
    defaults = setting.defaults if backend is None else {b: v for b, v in setting.defaults.items() if b == backend}
    if defaults:
        shown = {setting.kind.text(v) or "none" for v in defaults.values()}
        each = ", ".join(f"{b}: {setting.kind.text(v) or 'none'}" for b, v in defaults.items())
        parts.append(f"Default: {shown.pop() if len(shown) == 1 else each}.")
    if entry.is_fp8 and setting.backends and backend is None:
        parts.append(f"For {', '.join(setting.backends)}.")
    return names, " ".join(parts)


def _print_group(console: Console, title: str, rows: Iterable[tuple[str, str]]) -> None:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 2), expand=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for names, text in rows:
        table.add_row(Text(names), Text(text))
    console.print(Text(title, style="bold"))
    console.print(table)
    console.print()
