"""Which backend computes FP8, what the effective values are for it, and whether they agree with each other.

A backend that is named (code > flag > environment > YAML) is taken, or is an error. Where none is named it is the first
of an order that is installed: ``NATIVE, AO, TE, MSAMP``. The order ``AO,TE,MSAMP`` is Accelerate's, and finds nothing
where Accelerate finds nothing. MS-AMP's levels change optimizer states, so they are never taken unnamed. Named, MSAMP
is level O2 (or ``opt_level``) on the native backend's GEMMs; ``opt_level`` beside another backend is a level on those
of that one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from acceler8.config.availability import INSTALL, is_backend_available
from acceler8.config.enums import FP8BackendType
from acceler8.config.handlers import build_recipes
from acceler8.config.kinds import layer_patterns
from acceler8.config.registry import ENTRIES, Entry
from acceler8.config.schema import BACKENDS, GW_HP, RECIPES
from acceler8.config.sources import DEFAULT, Effective, Precedence, Source, Value
from acceler8.errors import ConfigError, MissingLibraryError, RecipeError

if TYPE_CHECKING:
    from acceler8.recipes import LayerRecipes, Recipe

READY = ("NATIVE", "AO", "TE")
"""Backends that this version can train with: those of ``acceler8.backends``, under the words of settings."""
_FP8 = "fp8_config."
DELAYED = tuple(_FP8 + key for key in ("margin", "interval", "amax_history_len", "amax_compute_algo"))
ALL_GATHER = _FP8 + "enable_fsdp_float8_all_gather"
# settings about the choice itself, which no backend "has"
_CHOICE = (_FP8 + "backend", _FP8 + "backend_order", _FP8 + "opt_level")


def named_backend(effective: Effective) -> str | None:
    """The backend that some source names; None if none does (``NO`` names none)."""
    name: str | None = effective[_FP8 + "backend"]
    return None if name == "NO" else name


def backend_order(effective: Effective) -> tuple[str, ...]:
    """Where to look for a backend when none is named."""
    return effective[_FP8 + "backend_order"] or BACKENDS


def preferred_backend(effective: Effective) -> str | None:
    """The named backend, installed or not; else the first of the order that is; None if there is none."""
    found = (name for name in backend_order(effective) if name != "MSAMP" and is_backend_available(name))
    return named_backend(effective) or next(found, None)


def was_told(effective: Effective, path: str) -> bool:
    """True if somebody said it; a default of Accelerate's classes is nobody's word."""
    return path in effective.values and effective.source(path).precedence > Precedence.DEFAULT


def gemm_backend(effective: Effective) -> str | None:
    """The backend whose layers compute: NATIVE for MSAMP, which is levels and has none of its own."""
    name = preferred_backend(effective)
    return "NATIVE" if name == "MSAMP" else name


def level_of(effective: Effective) -> Value | None:
    """The level (O1, O2, O3) that is asked for, with who asks; None without one, or without ``fp8``."""
    if effective["mixed_precision"] != "fp8":
        return None
    path, is_named = _FP8 + "opt_level", named_backend(effective) == "MSAMP"
    if is_named and effective[path] is None:
        return Value(ENTRIES[path].setting.defaults["MSAMP"], DEFAULT)
    if effective[path] is None or (not is_named and _is_exported(effective, path)):
        return None
    return Value(effective[path], effective.source(path))


def _is_exported(effective: Effective, path: str) -> bool:
    """True for a default that Accelerate's launcher writes into the environment beside another backend."""
    is_default = effective.source(path).precedence is Precedence.ENVIRONMENT and _is_default(path, effective[path])
    return is_default and named_backend(effective) is not None


def choose_backend(effective: Effective) -> FP8BackendType:
    """The backend that computes FP8; NO if the precision is not ``fp8``.

    Raises: MissingLibraryError (an ImportError) if a named one is not installed, or none of the order is.
    """
    if effective["mixed_precision"] != "fp8":
        return FP8BackendType.NO
    name = preferred_backend(effective)
    if name is None:
        order = backend_order(effective)
        commands = "; ".join(f"{INSTALL[backend]} ({backend})" for backend in order if backend in INSTALL)
        raise MissingLibraryError(
            f"mixed_precision fp8 found no backend in the order {', '.join(order)}"
            f" ({effective.source(_FP8 + 'backend_order')}): the libraries are not installed, and MSAMP is only taken"
            f" when named; do one of: {commands + '; ' if commands else ''}put NATIVE into fp8_backend_order, which"
            " needs no library"
        )
    if not is_backend_available(name):
        raise MissingLibraryError(
            f"{effective.source(_FP8 + 'backend')}: FP8 backend {name} is not installed; {INSTALL[name]},"
            " or name backend NATIVE, which needs no library"
        )
    return FP8BackendType(name)


def cannot_run(effective: Effective) -> Iterator[str]:
    """What is configured rightly and this version cannot train with yet, each with its place and what to do."""
    if effective["mixed_precision"] == "fp8":
        yield from _cannot_run_fp8(effective)


def _cannot_run_fp8(effective: Effective) -> Iterator[str]:
    level, backend = level_of(effective), gemm_backend(effective)
    if level is not None and (engine := effective["distributed_type"]) in ("FSDP", "DEEPSPEED"):
        yield (
            f"{level.source}: opt_level {level.value} with distributed_type {engine} is not in this version yet, for"
            " gradients in FP8 are not exchanged between processes; allowed: levels in one process; leave opt_level and"
            " MSAMPRecipeKwargs (enable_msamp) out and name backend NATIVE"
        )
    if backend is not None and backend not in READY and is_backend_available(backend):
        yield (
            f"{effective.source(_FP8 + 'backend')}: backend {backend} is installed, but this version has no"
            f" connection to it yet; allowed: {', '.join(READY)}; name backend NATIVE"
        )


def fp8_values(effective: Effective, backend: str | None) -> dict[str, Value]:
    """Every FP8 value that holds for ``backend``, by path, defaults included, each with its source.

    Settings of other backends are left out. Delayed scaling's are left out of other recipes.
    """
    is_level, backend = backend == "MSAMP", "NATIVE" if backend == "MSAMP" else backend
    values = {}
    for path, entry in ENTRIES.items():
        if not entry.is_fp8 or path == _FP8 + "backend" or (entry.setting.backends and not _has(entry, backend)):
            continue
        if path in DELAYED and "delayed" not in recipe_names(effective, backend):
            continue
        if path == _FP8 + "recipe" and path not in effective.values and _decides_all(effective):
            continue
        if path == ALL_GATHER and not was_told(effective, path):
            continue  # AORecipeKwargs has Accelerate's default; here it counts where it is given
        found = effective.values.get(path)
        default = Value(entry.setting.defaults.get(backend or ""), DEFAULT)
        value = found if found is not None and found.value is not None else default
        if path == _FP8 + "opt_level" and value.value is None and is_level:
            value = Value(entry.setting.defaults["MSAMP"], DEFAULT)
        if value.value is not None:
            values[path] = value
    return values


def recipe_names(effective: Effective, backend: str | None) -> tuple[str, ...]:
    """Names of the recipes that layers may have: ``recipe`` first, then those of ``layer_recipes``."""
    base = effective[_FP8 + "recipe"] or _default_recipe(effective, backend)
    of_layers = [word for _, word in layer_patterns(effective[_FP8 + "layer_recipes"]) if word != "none"]
    return tuple(dict.fromkeys((base, *of_layers)))


def _default_recipe(effective: Effective, backend: str | None) -> str:
    """What a backend runs where no recipe is named."""
    if backend == "TE" and effective[_FP8 + "use_mxfp8_block_scaling"]:
        return "mxfp8"
    defaults = ENTRIES[_FP8 + "recipe"].setting.defaults
    found: str = defaults.get(backend or "", defaults["NATIVE"])
    return found


def _decides_all(effective: Effective) -> bool:
    """True if ``layer_recipes`` ends in ``*``, so that no layer is left for ``recipe``."""
    return any(pattern == "*" for pattern, _ in layer_patterns(effective[_FP8 + "layer_recipes"]))


def recipe_of(effective: Effective, backend: str = "NATIVE", default: str | None = None) -> Recipe | LayerRecipes:
    """What a backend runs; ``default`` is its recipe if no source names one. Raises ConfigError naming where the
    settings stand.
    """
    backend = "NATIVE" if backend == "MSAMP" else backend
    values = fp8_values(effective, backend)
    if backend == "TE" and (found := values.get(_FP8 + "fp8_format")) and found.source is DEFAULT:
        del values[_FP8 + "fp8_format"]  # of delayed scaling; block scaling has another one
    keys = {path.removeprefix(_FP8): value.value for path, value in values.items()}
    keys["recipe"] = recipe_names(effective, backend)[0]
    if default is not None and effective[_FP8 + "recipe"] is None:
        keys["recipe"] = default
    try:
        return build_recipes(keys)
    except ValueError as error:
        places = ", ".join(
            f"{key} {_text(effective, key)} ({effective.source(_FP8 + key)})"
            for key in ("recipe", "layer_recipes", "fp8_format", "save_for_backward")
            if key in ("recipe", "fp8_format") or effective[_FP8 + key]
        )
        raise ConfigError(f"{places}: {error}") from None


def _text(effective: Effective, key: str) -> str:
    value = effective[_FP8 + key]
    return ENTRIES[_FP8 + key].setting.text(value) if value else "default"


def check(effective: Effective) -> list[str]:
    """Whether the effective values agree with each other: notes for the user. No library is needed.

    Raises: ConfigError naming the places of what contradicts itself.
    """
    _check_machines(effective)
    given = [path for path in effective.given() if ENTRIES[path].is_fp8]
    if effective["mixed_precision"] != "fp8":
        return _kept_for_the_script(effective, given)
    backend = gemm_backend(effective)
    if backend is None:
        return []
    notes = [note for path in given for note in _check_belongs(effective, path, backend)]
    if effective[_FP8 + "backend"] == "NO":
        notes.append(f"{effective.source(_FP8 + 'backend')}: backend NO names none; {backend} is taken by the order")
    if effective[_FP8 + "opt_level"] and level_of(effective) is None:
        path = _FP8 + "opt_level"
        notes.append(
            f"{effective.source(path)}: opt_level {effective[path]} is not used beside backend {backend}: launchers"
            " export it unasked; ask in code (MSAMPRecipeKwargs), by flag or in the YAML file"
        )
    if backend == "TE":
        _check_te(effective)
    if backend in READY:
        _check_recipe(effective, backend)
    return notes


def _has(entry: Entry, backend: str | None) -> bool:
    return backend in entry.setting.backends


def _is_default(path: str, value: Any) -> bool:
    return value in ENTRIES[path].setting.defaults.values()


def _shown(effective: Effective, path: str) -> str:
    """``margin=2``, as written in the kind's own text."""
    entry = ENTRIES[path]
    return f"{entry.key}={entry.setting.text(effective[path])}"


def _kept_for_the_script(effective: Effective, given: list[str]) -> list[str]:
    told = [path for path in given if effective.source(path).precedence > Precedence.DEFAULT]
    if not told:
        return []
    places = ", ".join(f"{_shown(effective, path)} ({effective.source(path)})" for path in told)
    precision = effective["mixed_precision"] or "not given"
    return [
        f"mixed_precision is {precision} ({effective.source('mixed_precision')}); these are kept for a script that asks"
        f" for fp8 itself: {places}"
    ]


def _check_belongs(effective: Effective, path: str, backend: str) -> Iterator[str]:
    """A setting that the backend does not have: an error if one route says both, else a note."""
    entry, source = ENTRIES[path], effective.source(path)
    if path in _CHOICE or not entry.setting.backends or _has(entry, backend):
        return
    if source.precedence is Precedence.CODE and source == effective.source(_FP8 + "recipe"):
        return  # a Recipe object says all settings; the backend judges it
    if source.precedence is Precedence.ENVIRONMENT and _is_default(path, effective[path]):
        return  # Accelerate's launcher exports the defaults of every backend
    namer = effective.source(_FP8 + "backend")
    has = " and ".join(entry.setting.backends)
    is_one_route = named_backend(effective) and namer.precedence == source.precedence
    if is_one_route and source.precedence in (Precedence.FLAG, Precedence.YAML, Precedence.CODE):
        raise ConfigError(
            f"{source.where}: {_shown(effective, path)} is no setting of backend {backend}, which {namer.where} names;"
            f" it is one of {has}; {_instead(path, backend)}remove it, or name that backend"
        )
    yield f"{source}: {_shown(effective, path)} is not used, backend {backend} does not have it ({has} does)"


def _instead(path: str, backend: str) -> str:
    is_mxfp8 = path == _FP8 + "use_mxfp8_block_scaling" and backend == "NATIVE"
    return "set recipe mxfp8 in its place, " if is_mxfp8 else ""


def _check_recipe(effective: Effective, backend: str) -> None:
    names = recipe_names(effective, backend)
    recipe_source = effective.source(_FP8 + "recipe")
    for path in DELAYED:
        source = effective.source(path)
        if effective[path] is None or "delayed" in names or source == recipe_source:  # both of one Recipe object
            continue
        if not _has(ENTRIES[path], backend):
            continue  # which is said, or refused, already
        if effective[path] != ENTRIES[path].setting.defaults[backend]:
            raise ConfigError(
                f"{source}: {_shown(effective, path)} belongs to delayed scaling, and the recipe is"
                f" {', '.join(names)} ({recipe_source}); set recipe delayed, or remove {ENTRIES[path].key}"
            )
    decides = effective[_FP8 + "fp8_format"] or effective[_FP8 + "save_for_backward"]
    if decides and set(names) <= {*RECIPES, GW_HP}:
        recipe_of(effective, backend)
    _check_schedule(effective)


def _check_schedule(effective: Effective) -> None:
    """The window of steps and the schedule by depth have a step in common."""
    steps, stages = (_FP8 + "fp8_steps", _FP8 + "fp8_last_layers")
    if (problem := schedule_problem(effective[steps], effective[stages])) is not None:
        raise ConfigError(f"{effective.source(steps).where}, {effective.source(stages).where}: {problem}")


def schedule_problem(steps: str | None, stages: str | None) -> str | None:
    """Why ``fp8_steps`` and ``fp8_last_layers`` never allow the same step, in words; None if they do."""
    if steps is None or stages is None:
        return None
    from acceler8.scaling import LastLayers, StepWindow, check_schedule  # here, for it brings torch

    try:
        check_schedule(StepWindow.of(steps), LastLayers.of(stages))
    except RecipeError as error:
        return str(error)
    return None


def _check_te(effective: Effective) -> None:
    path = _FP8 + "fp8_format"
    if effective[path] == "E5M2":
        raise ConfigError(
            f"{effective.source(path)}: fp8_format=E5M2 is none of TransformerEngine's; allowed: HYBRID (E4M3 forward,"
            " E5M2 for gradients), E4M3; set HYBRID"
        )
    block, recipe = _FP8 + "use_mxfp8_block_scaling", _FP8 + "recipe"
    if not effective[block]:
        return
    if effective[recipe] not in (None, "mxfp8"):
        raise ConfigError(
            f"{effective.source(block)}: use_mxfp8_block_scaling is on, and the recipe is {effective[recipe]}"
            f" ({effective.source(recipe)}); allowed: one of them; remove use_mxfp8_block_scaling"
        )
    for path in (_FP8 + "amax_history_len", _FP8 + "amax_compute_algo"):
        if effective[path] is not None and effective[path] != ENTRIES[path].setting.defaults["TE"]:
            raise ConfigError(
                f"{effective.source(path)}: {_shown(effective, path)} belongs to delayed scaling, and"
                f" use_mxfp8_block_scaling is on ({effective.source(_FP8 + 'use_mxfp8_block_scaling')}); remove one"
            )


def _check_machines(effective: Effective) -> None:
    machines, rank = effective["num_machines"] or 1, effective["machine_rank"]
    many = _place(effective, "num_machines")
    if rank is not None and rank >= machines:
        raise ConfigError(
            f"{_place(effective, 'machine_rank')}: machine_rank got {rank}; allowed: 0 to {machines - 1}, for"
            f" num_machines is {machines} ({many})"
        )
    processes = effective["num_processes"]
    if processes is not None and processes % machines:
        raise ConfigError(
            f"{_place(effective, 'num_processes')}: num_processes got {processes}; allowed: a multiple of num_machines"
            f" {machines} ({many}), it counts the processes of all machines"
        )
    if machines > 1 and not effective["main_process_ip"]:
        raise ConfigError(f"{many}: num_machines {machines} needs main_process_ip, the host of machine 0; give it")


def _place(effective: Effective, path: str) -> str:
    source: Source = effective.source(path)
    return source.where
