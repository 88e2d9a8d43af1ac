"""From routes to effective values, and whether these fit together.

``load`` merges what flags, variables and a file give; ``check`` looks for values that contradict each other. Reading
needs no library and no GPU, so a configuration for another machine can be written and checked on this one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from acceler8.config import backend_choice, fsdp_rules
from acceler8.config.environment import CONFIG_FILE, ENGINE_SWITCHES, SOURCES, read_environment
from acceler8.config.files import default_file
from acceler8.config.fsdp_rules import RESHARD, SECTION
from acceler8.config.registry import BY_ENV, DEAD_ENV, ENTRIES, Entry
from acceler8.config.setting import shown_name
from acceler8.config.sources import Effective, Precedence, RouteValues, Source, merge
from acceler8.config.torchrun import read_torchrun
from acceler8.config.variables import objection
from acceler8.config.yaml_file import read_yaml
from acceler8.errors import ConfigError, unknown_name

SETTINGS = frozenset(
    {*BY_ENV, *DEAD_ENV, *ENGINE_SWITCHES, SOURCES, CONFIG_FILE, "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"}
)
"""Variables that are settings themselves, or are made from one."""
# DeepSpeed's own file says these, so they may not be said beside it
_OF_DEEPSPEED_FILE = (
    *("zero_stage", "gradient_accumulation_steps", "gradient_clipping", "offload_optimizer_device"),
    *("offload_param_device", "offload_optimizer_nvme_path", "offload_param_nvme_path", "zero3_save_16bit_model"),
)
_ENGINE_OF_SECTION = {"fsdp_config": "FSDP", "deepspeed_config": "DEEPSPEED"}


def load(
    flags: RouteValues | None,
    environ: Mapping[str, str],
    config_file: Path | None = None,
    use_default_file: bool = True,
    use_torchrun: bool = False,
) -> Effective:
    """The effective values: flag before environment before YAML; what none gives has its default.

    Without ``config_file`` the file that ACCELER8_CONFIG_FILE names is read, else the default file, if there is one and
    ``use_default_file``; a note says which. ``use_torchrun``: torchrun's ``PET_*`` variables count too.
    Raises ConfigError, naming the place, for a value that is not allowed and for a named file that is missing.
    """
    routes = []
    if config_file is None and environ.get(CONFIG_FILE):
        config_file = Path(environ[CONFIG_FILE])
        routes.append(RouteValues(notes=[f"reading {config_file}, which {CONFIG_FILE} names"]))
    elif config_file is None and use_default_file:
        config_file, note = default_file(environ)
        routes.append(RouteValues(notes=[note] if note else []))
    if config_file is not None:
        routes.append(read_yaml(config_file))
    if use_torchrun:
        routes.append(read_torchrun(environ))
    routes.append(read_environment(environ))
    if flags is not None:
        routes.append(flags)
    return merge(routes)


def parse_assignments(assignments: Iterable[str]) -> RouteValues:
    """The settings that ``key=value`` texts give; a key is ``fp8_config.margin``, or ``margin`` alone.

    Raises ConfigError for an unknown key, one given twice, and a value that is not allowed.
    """
    route = RouteValues()
    for text in assignments:
        key, equals, value = text.partition("=")
        where = f"--set {shown_name(key.strip())}"
        if not equals:
            raise ConfigError(
                f"--set {shown_name(text)}: got no value; allowed: key=value, such as fp8_config.margin=2"
            )
        entry = find_key(key.strip(), where)
        if entry.path in route.values:
            raise ConfigError(f"{where}: {entry.path} is set twice; give it once")
        route.put(entry.path, value, Source(Precedence.FLAG, where))
    return route


def find_key(key: str, where: str) -> Entry:
    """The setting that a dotted or bare key names. Raises ConfigError with the nearest name."""
    if key in ENTRIES:
        return ENTRIES[key]
    names: dict[str, Entry] = {}
    for entry in ENTRIES.values():
        for name in (entry.key, *entry.setting.flags, *entry.setting.aliases):
            names.setdefault(name, entry)
            names.setdefault(f"{entry.section}.{name}", entry)
    if key not in names:
        known = ENTRIES if "." in key else [entry.key for entry in ENTRIES.values()]
        raise ConfigError(f"{where}: {unknown_name('setting', shown_name(key), known)}")
    return names[key]


def check(effective: Effective) -> list[str]:
    """Notes on values that have no use together. Raises ConfigError, naming both places, for a contradiction."""
    for problem in contradictions(effective):
        raise ConfigError(problem)
    return [*_idle(effective), *backend_choice.check(effective)]


def notes(effective: Effective) -> list[str]:
    """All that a user should read beside the values: of reading, of ``check``, and what this version cannot run yet."""
    return [*effective.notes, *check(effective), *backend_choice.cannot_run(effective)]


def contradictions(effective: Effective) -> Iterator[str]:
    """Each contradiction between devices, processes and engines, as the message of an error."""
    for part in (_device_problems, _process_problems, _fsdp_problems, _deepspeed_problems, _variable_problems):
        yield from part(_Given(effective))


class _Given:
    """Effective values, and each with its place for a message."""

    def __init__(self, effective: Effective) -> None:
        self.effective = effective

    def __getitem__(self, path: str) -> Any:
        return self.effective[path]

    def problem(self, path: str, *others: str, allowed: str) -> str:
        """One line: what was got where, what it contradicts, what is allowed."""
        first, *rest = (self._said(name) for name in (path, *others))
        against = f" with {' and '.join(rest)}" if rest else ""
        return f"{self.effective.source(path).where}: got {first}{against}; allowed: {allowed}"

    def _said(self, path: str) -> str:
        value = self.effective.values[path]
        text = f"{ENTRIES[path].key} {ENTRIES[path].setting.text(value.value)}"
        return f"{text} ({value.source.where})"


def _device_problems(given: _Given) -> Iterator[str]:
    kind = given["distributed_type"]
    if given["use_cpu"] and kind == "MULTI_GPU":
        yield given.problem("distributed_type", "use_cpu", allowed="MULTI_CPU on a CPU, or use_cpu false")
    if given["use_cpu"] is False and kind == "MULTI_CPU":
        yield given.problem("use_cpu", "distributed_type", allowed="true for MULTI_CPU, or MULTI_GPU")
    if given["gpu_ids"] not in (None, "all"):
        yield from _gpu_only("gpu_ids", "all, or leave it out on a CPU", given)
    if given["enable_cpu_affinity"]:
        yield from _gpu_only("enable_cpu_affinity", "false on a CPU: it binds processes to the cores near a GPU", given)


def _gpu_only(path: str, allowed: str, given: _Given) -> Iterator[str]:
    if given["use_cpu"]:
        yield given.problem(path, "use_cpu", allowed=allowed)
    elif given["distributed_type"] == "MULTI_CPU":
        yield given.problem(path, "distributed_type", allowed=allowed)


def _process_problems(given: _Given) -> Iterator[str]:
    many, kind = given.effective.source("num_processes"), given.effective.source("distributed_type")
    # NO of a file gives way to processes asked for above it, as a plain `launch --num_processes 2` does
    if (given["num_processes"] or 1) > 1 and given["distributed_type"] == "NO" and kind.precedence >= many.precedence:
        several = "MULTI_CPU, MULTI_GPU, FSDP or DEEPSPEED"
        yield given.problem("num_processes", "distributed_type", allowed=f"1 for NO; several need {several}")


def _fsdp_problems(given: _Given) -> Iterator[str]:
    if given["distributed_type"] != "FSDP":
        return

    def value(key: str) -> Any:
        return None if key == RESHARD and _is_exported(given) else given[SECTION + key]

    for found in fsdp_rules.problems(value):
        against = () if given[SECTION + found.against] is None else (SECTION + found.against,)
        yield given.problem(SECTION + found.key, *against, allowed=found.allowed)


def _is_exported(given: _Given) -> bool:
    """True for version 2's word with version 1 where Accelerate's launcher says it, which exports it with both."""
    source = given.effective.source(SECTION + RESHARD)
    return source.precedence is Precedence.ENVIRONMENT and given[SECTION + "version"] != 2


def _deepspeed_problems(given: _Given) -> Iterator[str]:
    if given["distributed_type"] != "DEEPSPEED":
        return
    section, backend = "deepspeed_config.", "fp8_config.backend"
    file = section + "deepspeed_config_file"
    for key in _OF_DEEPSPEED_FILE:
        # the constructor's own number is compared with the file's, which may say "auto"
        is_argument = key == "gradient_accumulation_steps" and given.effective.source(section + key).precedence is (
            Precedence.CODE
        )
        if given[file] is not None and given[section + key] is not None and not is_argument:
            yield given.problem(section + key, file, allowed="one of the two; DeepSpeed's file says it already")
    if given[section + "zero_stage"] == 3 and given["mixed_precision"] == "fp8" and given[backend] == "MSAMP":
        yield given.problem(backend, section + "zero_stage", allowed="stages 0, 1, 2 with MSAMP; or another backend")


def _variable_problems(given: _Given) -> Iterator[str]:
    """Variables of ``environment`` that are settings themselves: there they would win without being seen."""
    for name, value in (given["environment"] or {}).items():
        reason = objection(name, value, SETTINGS)
        if reason:
            yield f"{given.effective.source('environment').where}: {reason}"


def _idle(effective: Effective) -> list[str]:
    """Sections of a file or a command line that nothing reads, because another engine is chosen."""
    notes = [
        f"{value.source.where}: {path} has no effect here; it is kept so that files of Accelerate stay whole"
        for path, value in effective.values.items()
        if ENTRIES[path].setting.is_idle and value.source.precedence is not Precedence.YAML and value.value
    ]
    for section, engine in _ENGINE_OF_SECTION.items():
        asked = [
            value
            for path, value in effective.values.items()
            if ENTRIES[path].section == section
            and value.source.precedence in (Precedence.YAML, Precedence.FLAG)
            and path != "deepspeed_config.gradient_accumulation_steps"  # every engine accumulates
        ]
        if asked and effective["distributed_type"] != engine:
            now = effective["distributed_type"] or "not given"
            notes.append(f"{asked[0].source.where}: {section} is not used: distributed_type is {now}, not {engine}")
    init, file = "deepspeed_config.zero3_init_flag", "deepspeed_config.deepspeed_config_file"
    stage = effective["deepspeed_config.zero_stage"]
    is_asked = effective["distributed_type"] == "DEEPSPEED" and effective[init] and effective[file] is None
    if is_asked and stage != 3:
        now = "not given" if stage is None else stage
        notes.append(f"{effective.source(init).where}: zero3_init_flag is not used: zero_stage is {now}, not 3")
    return notes
