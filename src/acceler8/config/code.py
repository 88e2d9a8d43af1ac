"""The code route: constructor arguments and objects as values, and effective values as Python.

``values_from_code`` is to code what ``read_yaml`` is to a file; ``to_python`` is its inverse. Code can say more than
the other routes (a function that chooses layers, a library's own object) and less (how many processes a launch
starts); both are named, never dropped without a word.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from acceler8.config.backend_choice import named_backend, preferred_backend
from acceler8.config.environment import CONFIG_FILE, current_environment, read_environment
from acceler8.config.handlers import (
    AORecipeKwargs,
    FP8RecipeKwargs,
    KwargsHandler,
    MSAMPRecipeKwargs,
    NativeRecipeKwargs,
    RecipeHandler,
    SchemaHandler,
    TERecipeKwargs,
)
from acceler8.config.plugins import DeepSpeedPlugin, FullyShardedDataParallelPlugin, Plugin, TorchDynamoPlugin
from acceler8.config.registry import ENTRIES
from acceler8.config.sources import Effective, Precedence, RouteValues, Source, Value, merge
from acceler8.config.yaml_file import read_yaml
from acceler8.errors import ConfigError

_BACKEND, _FP8 = "fp8_config.backend", "fp8_config."
_GEMM_HANDLERS: dict[str, type[RecipeHandler]] = {
    "NATIVE": NativeRecipeKwargs,
    "AO": AORecipeKwargs,
    "TE": TERecipeKwargs,
}
# settings that are arguments of the constructor, in its order
_ARGUMENTS = {
    "mixed_precision": "mixed_precision",
    "cpu": "use_cpu",
    "gradient_accumulation_steps": "deepspeed_config.gradient_accumulation_steps",
    "backend": _BACKEND,
    "skip": _FP8 + "skip",
    "fp8_backend_order": _FP8 + "backend_order",
}


@dataclass(frozen=True)
class RecipeHandlers:
    """The recipes among ``kwargs_handlers``, each under the attribute that scripts read."""

    fp8: FP8RecipeKwargs | None = None
    ao: AORecipeKwargs | None = None
    te: TERecipeKwargs | None = None
    msamp: MSAMPRecipeKwargs | None = None
    native: NativeRecipeKwargs | None = None
    others: Mapping[str, Any] = field(default_factory=dict)
    """What is no recipe, under the attribute that scripts read."""

    @property
    def found(self) -> tuple[RecipeHandler, ...]:
        """Those that are there; the one that names the backend last."""
        return tuple(h for h in (self.msamp, self.ao, self.te, self.native, self.fp8) if h is not None)


# class -> attribute; the deprecated class is a subclass of two others and so stands before them
_SLOTS: dict[type[RecipeHandler], str] = {
    FP8RecipeKwargs: "fp8",
    AORecipeKwargs: "ao",
    TERecipeKwargs: "te",
    MSAMPRecipeKwargs: "msamp",
    NativeRecipeKwargs: "native",
}


def sort_handlers(
    handlers: Iterable[Any] | None, others: Mapping[type[KwargsHandler], str] | None = None
) -> RecipeHandlers:
    """Find the recipes among handlers; a subclass counts as its base. ``others``: classes of other handlers allowed.

    Raises ConfigError for what is no handler, for two of a class, and for two recipes at once, except MS-AMP's levels
    (``MSAMPRecipeKwargs``) beside one recipe for GEMMs.
    """
    slots: dict[type[Any], str] = {**_SLOTS, **(others or {})}
    found: dict[str, Any] = {}
    if handlers is not None and not isinstance(handlers, Iterable):
        kind = type(handlers).__name__
        raise ConfigError(f"kwargs_handlers got a {kind}; allowed: a list of such objects; write [{kind}(...)]")
    for handler in handlers or ():
        if isinstance(handler, type):
            name = handler.__name__
            raise ConfigError(f"kwargs_handlers got the class {name}; allowed: an object of it; write {name}(...)")
        slot = next((name for kind, name in slots.items() if isinstance(handler, kind)), None)
        if slot is None:
            own = next((kind for kind in slots if kind.__name__ == type(handler).__name__), None)
            if own is not None:
                raise ConfigError(
                    f"kwargs_handlers got the {own.__name__} of {type(handler).__module__.partition('.')[0]}; allowed:"
                    f" acceler8's; write from acceler8.utils import {own.__name__}"
                )
            known = ", ".join(kind.__name__ for kind in slots)
            why = " in this version" if isinstance(handler, KwargsHandler) else ""
            raise ConfigError(
                f"kwargs_handlers got a {type(handler).__name__}; allowed{why}: objects of {known}; leave it out"
            )
        if slot in found:
            names = f"{type(found[slot]).__name__} and {type(handler).__name__}"
            what = "recipes" if slot in _SLOTS.values() else "objects"
            raise ConfigError(f"kwargs_handlers got two {what} of one class ({names}); allowed: one; leave one out")
        found[slot] = handler
    rest = {slot: found.pop(slot) for slot in (others or {}).values() if slot in found}
    rivals = [handler for slot, handler in found.items() if slot != "msamp"]
    if "fp8" in found and "msamp" in found:
        rivals.append(found["msamp"])
    if len(rivals) > 1:
        raise ConfigError(
            f"kwargs_handlers got {' and '.join(type(h).__name__ for h in rivals)}; allowed: one recipe, and"
            " MSAMPRecipeKwargs beside it; leave one out"
        )
    return RecipeHandlers(**found, others=rest)


def values_from_code(
    *,
    mixed_precision: Any = None,
    cpu: bool = False,
    gradient_accumulation_steps: int | None = None,
    recipe: Any = None,
    backend: Any = None,
    skip: Iterable[str] | None = None,
    fp8_backend_order: Iterable[str] | str | None = None,
    handlers: RecipeHandlers | None = None,
    fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
    dynamo_plugin: TorchDynamoPlugin | None = None,
    deepspeed_plugin: DeepSpeedPlugin | None = None,
) -> RouteValues:
    """What a script says in code: arguments of ``Accelerator`` (None, and ``cpu=False``, say nothing) and objects.

    ``recipe`` and ``skip`` are short for a ``NativeRecipeKwargs`` that names no backend.
    Raises: ConfigError for a value that is not allowed, and for two objects or arguments that say the same differently.
    """
    handlers = handlers or RecipeHandlers()
    route = RouteValues()
    for name, plugin, kind in (
        ("fsdp_plugin", fsdp_plugin, FullyShardedDataParallelPlugin),
        ("dynamo_plugin", dynamo_plugin, TorchDynamoPlugin),
        ("deepspeed_plugin", deepspeed_plugin, DeepSpeedPlugin),
    ):
        if plugin is not None and not isinstance(plugin, kind):
            raise ConfigError(
                f"Accelerator({name}=) got a {type(plugin).__qualname__}; allowed: acceler8.utils.{kind.__name__}"
            )
    for object_ in (*handlers.found, fsdp_plugin, dynamo_plugin, deepspeed_plugin):
        if object_ is not None:
            _take_object(object_, route)
    _take_shortcuts(recipe, skip, handlers, route)
    _take_backend(backend, route)
    if fsdp_plugin is not None and deepspeed_plugin is not None:
        raise ConfigError("Accelerator got fsdp_plugin and deepspeed_plugin; allowed: one of them; leave one out")
    if isinstance(fp8_backend_order, Iterable) and not isinstance(fp8_backend_order, str):
        fp8_backend_order = list(fp8_backend_order)
    for path, raw, name in (
        ("mixed_precision", mixed_precision, "mixed_precision"),
        ("use_cpu", cpu or None, "cpu"),
        ("deepspeed_config.gradient_accumulation_steps", gradient_accumulation_steps, "gradient_accumulation_steps"),
        (_FP8 + "backend_order", fp8_backend_order, "fp8_backend_order"),
        ("distributed_type", "FSDP" if fsdp_plugin is not None else None, "fsdp_plugin"),
        ("distributed_type", "DEEPSPEED" if deepspeed_plugin is not None else None, "deepspeed_plugin"),
    ):
        if raw is not None:
            route.put(path, raw, _argument(name))
    return route


def gather(code: RouteValues, config_file: Path | str | None = None) -> Effective:
    """The effective values of a script: code, the environment, and the file named in code or ACCELER8_CONFIG_FILE."""
    if config_file is not None and not isinstance(config_file, str | os.PathLike):
        raise ConfigError(f"config_file got {config_file!r}; allowed: the path of a YAML file, as text or a Path")
    environ = current_environment()
    routes = [read_yaml(environ[CONFIG_FILE])] if environ.get(CONFIG_FILE) and not config_file else []
    routes.append(read_environment(environ))
    if config_file:  # after the environment: it wins over what a launcher read from another file
        routes.append(read_yaml(config_file))
    return merge([*routes, code])


def _argument(name: str) -> Source:
    return Source(Precedence.CODE, f"Accelerator({name}=)")


def _take_object(handler: SchemaHandler, route: RouteValues) -> None:
    given = handler.route_values()
    for path, value in given.values.items():
        held = route.values.get(path)
        if held and held.source.precedence is value.source.precedence is Precedence.CODE and held.value != value.value:
            raise ConfigError(
                f"{value.source.where}: {path} got {value.value!r}, and {held.value!r} from {held.source.where};"
                " allowed: one of them"
            )
        if held is None or value.source.precedence >= held.source.precedence:
            route.values[path] = value
    route.notes += [*given.notes, *handler.code_only()]
    if isinstance(handler, RecipeHandler) and (named := handler.backend_value()) is not None:
        route.values[_BACKEND] = named
    if isinstance(handler, DeepSpeedPlugin) and handler.asks_for_levels:
        route.values.setdefault(_BACKEND, Value("MSAMP", Source(Precedence.CODE, "DeepSpeedPlugin(enable_msamp=)")))


def _take_shortcuts(recipe: Any, skip: Iterable[str] | None, handlers: RecipeHandlers, route: RouteValues) -> None:
    """``recipe=`` and ``skip=`` of the constructor."""
    if recipe is None and skip is None:
        return
    argument = "recipe" if recipe is not None else "skip"
    rival = next((h for h in handlers.found if h is not handlers.msamp), None)
    if rival is not None and (recipe is not None or rival is handlers.native):
        other = type(rival).__name__
        raise ConfigError(
            f"Accelerator({argument}=) and {other} are given both; allowed: one recipe;"
            f" move {argument} into {other}, or leave that out"
        )
    if skip is not None and not isinstance(skip, str):
        if not isinstance(skip, Iterable):
            raise ConfigError(
                f"Accelerator(skip=) got {skip!r}; allowed: a list of layer names; write skip=['lm_head']"
            )
        skip = tuple(skip)
    short = None
    if recipe is not None:
        short = NativeRecipeKwargs(recipe=recipe, skip=skip)
        for path, value in short.route_values().values.items():
            if value.source.precedence is Precedence.CODE:  # what it took from elsewhere is read there
                route.values[path] = Value(value.value, _argument("recipe"))
        route.notes += [note.replace("NativeRecipeKwargs", "Accelerator") for note in short.code_only()]
    if skip is not None and (short is None or short.recipe is None or isinstance(short.recipe, str)):
        route.put(_FP8 + "skip", skip, _argument("skip"))


def _take_backend(backend: Any, route: RouteValues) -> None:
    if backend is None:
        return
    named, source = route.values.get(_BACKEND), _argument("backend")
    value = ENTRIES[_BACKEND].parse(backend, source.where)
    # MS-AMP's levels go with any backend's GEMMs
    if named is not None and named.source.precedence is Precedence.CODE and named.value not in (value, "MSAMP"):
        raise ConfigError(
            f"{source.where} got {value}, and {named.source.where} is for backend {named.value}; allowed: one backend;"
            " leave one out"
        )
    route.put(_BACKEND, backend, source)


@dataclass
class _Script:
    """Python that is being written."""

    handlers: list[str] = field(default_factory=list)
    arguments: dict[str, str] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    told: set[str] = field(default_factory=set)
    """Paths that are expressed."""

    def build(self, kind: type[SchemaHandler], effective: Effective, only: Iterable[str] | None = None) -> str:
        """``Kind(field=value, ...)`` of the given settings that the class has."""
        self.names.add(kind.__name__)
        parts = []
        for name, path in kind.PATHS.items():
            if path in effective.values and path not in self.told and (not only or path in only):
                self.told.add(path)
                parts.append(f"{name}={_literal(path, effective[path])}")
        return f"{kind.__name__}({', '.join(parts)})"

    def source(self) -> str:
        """The text."""
        lines = ["from acceler8 import Accelerator"]
        if self.names:
            lines.append(f"from acceler8.utils import {', '.join(sorted(self.names))}")
        arguments = dict(self.arguments)
        if self.handlers:
            lines += ["", *(f"{name} = {text}" for name, text in zip(_recipe_names(self), self.handlers, strict=True))]
            arguments["kwargs_handlers"] = f"[{', '.join(_recipe_names(self))}]"
        inner = "".join(f"    {name}={text},\n" for name, text in arguments.items())
        call = f"accelerator = Accelerator(\n{inner})" if inner else "accelerator = Accelerator()"
        return "\n".join([*lines, "", call, ""])


def _recipe_names(script: _Script) -> list[str]:
    return ["recipe", "levels"][: len(script.handlers)]


def _literal(path: str, value: Any) -> str:
    return repr(list(value) if isinstance(value, tuple) and path != _FP8 + "override_linear_precision" else value)


def to_python(effective: Effective) -> tuple[str, list[str]]:
    """Python from which ``values_from_code`` makes the same values, and what it leaves out because code cannot say it.

    Needs no library. A backend that is not named is named by the recipe's class if there are settings for it.
    """
    script = _Script()
    for name, path in _ARGUMENTS.items():
        is_fp8 = path.startswith(_FP8) and path != _FP8 + "backend_order"
        if path in effective.values and not is_fp8 and effective[path] is not False:
            script.arguments[name] = _literal(path, effective[path])
            script.told.add(path)
    if effective["mixed_precision"] == "fp8":
        _write_recipes(effective, script)
    _write_plugins(effective, script)
    return script.source(), [*_inexpressible(effective, script)]


def _write_recipes(effective: Effective, script: _Script) -> None:
    named = named_backend(effective)
    given = [p for p in effective.values if p.startswith(_FP8) and p not in (_BACKEND, _FP8 + "backend_order")]
    if not given and not named:
        if effective[_BACKEND] == "NO":
            script.arguments["backend"] = repr("NO")
            script.told.add(_BACKEND)
        return
    backend = named or preferred_backend(effective) or "NATIVE"
    if backend != "MSAMP":
        script.handlers.append(script.build(_GEMM_HANDLERS[backend], effective))
    if backend == "MSAMP" or _FP8 + "opt_level" in given:
        script.handlers.append(script.build(MSAMPRecipeKwargs, effective))
    if named:
        script.told.add(_BACKEND)


def _write_plugins(effective: Effective, script: _Script) -> None:
    kinds: Mapping[str, tuple[type[Plugin], bool]] = {
        "fsdp_plugin": (FullyShardedDataParallelPlugin, effective["distributed_type"] == "FSDP"),
        "deepspeed_plugin": (DeepSpeedPlugin, effective["distributed_type"] == "DEEPSPEED"),
        "dynamo_plugin": (TorchDynamoPlugin, bool(effective.given("dynamo_config"))),
    }
    for name, (kind, is_asked) in kinds.items():
        if is_asked:
            sections = {path for path in kind.PATHS.values() if not path.startswith(_FP8)}
            script.arguments[name] = script.build(kind, effective, only=sections)
            if name != "dynamo_plugin":
                script.told.add("distributed_type")


def _inexpressible(effective: Effective, script: _Script) -> Iterator[str]:
    for path, value in effective.values.items():
        if path in script.told:
            continue
        entry = ENTRIES[path]
        said = f"{path}={entry.setting.text(value.value)}"
        if entry.is_fp8:
            has = " and ".join(entry.setting.backends)
            why = f"only recipes of {has} have it" if has and effective["mixed_precision"] == "fp8" else "needs fp8"
            if path == _BACKEND and effective["mixed_precision"] == "fp8":
                why = "a recipe is given, and that names a backend"
        elif entry.section:
            why = f"needs distributed_type {'FSDP' if entry.section == 'fsdp_config' else 'DEEPSPEED'} and a plugin"
            if effective["distributed_type"] == "DEEPSPEED" and entry.section == "deepspeed_config":
                why = "belongs to the launch; give it to acceler8 launch"
        elif path == "use_cpu":
            why = "code says so by leaving cpu out"
        else:
            why = "belongs to the launch; give it to acceler8 launch"
        yield f"{said}: {why}"
