"""The recipe classes of the code route: Hugging Face Accelerate's names, fields and defaults, over the one schema.

Each field is a setting of the schema and is read and checked there. A field that is left None takes its variable, else
the default of the class's backend; which of these it was is remembered, so that reports can say who decided.
Nothing here needs a vendor's library: that is needed to run, not to describe. The classes are mutable, as scripts
expect; a field that is changed later counts as given in code, and is checked when the Accelerator takes it.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from acceler8.config.availability import is_transformer_engine_available
from acceler8.config.environment import current_environment, read_environment
from acceler8.config.kinds import layer_patterns
from acceler8.config.registry import ENTRIES
from acceler8.config.schema import GW_HP, RECIPES
from acceler8.config.sources import DEFAULT, Precedence, RouteValues, Source, Value
from acceler8.errors import ConfigError

if TYPE_CHECKING:
    from acceler8.recipes import LayerRecipes, Recipe

_DELAYED = ("margin", "interval", "amax_history_len", "amax_compute_algo")
_LAYERWISE = ("recipe", "layer_recipes", "skip", "fp8_steps", "fp8_last_layers")
_OF_EVERY_RECIPE = ("pow2_scales", "save_for_backward", "skip")
_NOT_OF_A_RECIPE = ("fp8_steps", "fp8_last_layers", "tokens", "never_slower", "enable_fsdp_float8_all_gather")
"""Settings of the native backend that no Recipe says, so that they stand beside one."""
C = TypeVar("C", bound="SchemaHandler")


class KwargsHandler:
    """Base of what ``Accelerator(kwargs_handlers=[...])`` takes: dataclasses of settings."""

    def to_dict(self) -> dict[str, Any]:
        """A deep copy of the fields."""
        return {key: copy.deepcopy(value) for key, value in self.__dict__.items() if not key.startswith("_")}

    def to_kwargs(self) -> dict[str, Any]:
        """The fields that differ from the class's defaults. For display; a backend is always told every field."""
        defaults = self._defaults()
        return {key: value for key, value in self.to_dict().items() if defaults[key] != value}

    def _defaults(self) -> dict[str, Any]:
        return type(self)().to_dict()


class SchemaHandler(KwargsHandler):
    """A handler whose fields are settings of the schema. Raises ConfigError naming class, field or variable."""

    PATHS: ClassVar[Mapping[str, str]] = {}
    """Field -> path of its setting. Fields that are not here exist in code only."""
    BACKEND: ClassVar[str | None] = None
    """The FP8 backend that the class names, and whose defaults it takes."""

    def __post_init__(self) -> None:
        self._resolve()

    def _resolve(self) -> None:
        """Give every field its value: the argument, else the variable, else the default."""
        self._fill_in(self.PATHS)

    def _fill_in(self, names: Iterable[str]) -> None:
        environment = read_environment(current_environment())
        given = RouteValues()
        self._filled: dict[str, Value] = {}
        for name in names:
            path, raw = self.PATHS[name], getattr(self, name)
            if raw is not None:
                given.put(path, plain(raw), self._source(name))
            if path in given.values:
                setattr(self, name, self._shown(name, given.values[path].value))
                continue
            found = environment.values.get(path) or Value(self._default(name), DEFAULT)
            self._fill(name, found)
        for note in given.notes:
            warnings.warn(note, UserWarning, stacklevel=6)  # the caller of the decorated constructor

    def _fill(self, name: str, value: Value) -> None:
        shown = self._shown(name, value.value)
        self._filled[name] = Value(shown, value.source)
        setattr(self, name, shown)

    def _default(self, name: str) -> Any:
        """What a field is that neither argument nor variable give."""
        return ENTRIES[self.PATHS[name]].setting.defaults.get(self.BACKEND or "")

    def _shown(self, name: str, value: Any) -> Any:
        """A setting's value as the field shows it."""
        return value

    def _source(self, name: str) -> Source:
        return Source(Precedence.CODE, f"{type(self).__name__}({name}=)")

    def _defaults(self) -> dict[str, Any]:
        values = dict.fromkeys(self.to_dict())
        declared = {f.name: f.default for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        return {
            name: self._shown(name, self._default(name)) if name in self.PATHS else declared.get(name)
            for name in values
        }

    def filled(self, name: str) -> Value | None:
        """The value and source of a field that was left None and not changed since; None for a given one."""
        value: Value | None = getattr(self, "_filled", {}).get(name)
        return value if value is not None and value.value == getattr(self, name) else None

    def route_values(self) -> RouteValues:
        """The settings that this object gives: fields given in code, and what it took from the environment."""
        route = RouteValues()
        self._put_fields(route, self.PATHS)
        return route

    def _put_fields(self, route: RouteValues, names: Iterable[str]) -> None:
        for name in names:
            path = self.PATHS[name]
            filled = self.filled(name)
            source = filled.source if filled else self._source(name)
            if source.precedence > Precedence.DEFAULT:
                route.put(path, plain(getattr(self, name)), source)

    def code_only(self) -> list[str]:
        """What this object holds that no flag, variable or YAML key can say, in words."""
        return []

    @classmethod
    def spellings(cls) -> dict[str, str]:
        """Other names of fields -> fields: YAML keys, and what documentation and wizards call them."""
        table: dict[str, str] = {}
        for name, path in cls.PATHS.items():
            entry = ENTRIES[path]
            table |= dict.fromkeys((entry.key, *entry.setting.aliases), name)
        return {spelling: name for spelling, name in table.items() if spelling not in cls.PATHS}


class RecipeHandler(SchemaHandler):
    """A handler that describes FP8, and so names a backend."""

    def backend_value(self) -> Value | None:
        """The backend that this recipe is of."""
        return Value(self.BACKEND, Source(Precedence.CODE, type(self).__name__))


def plain(raw: Any) -> Any:
    """An enum of PyTorch by its name; anything else as it is."""
    return raw.name if isinstance(raw, Enum) and not isinstance(raw.value, str) else raw


def takes_other_spellings(cls: type[C]) -> type[C]:
    """Class decorator: the constructor takes a field under the names of ``spellings`` too."""
    table, plain_init = cls.spellings(), cls.__init__

    @functools.wraps(plain_init)
    def __init__(self: C, *args: Any, **kwargs: Any) -> None:
        for spelling in [name for name in kwargs if name in table]:
            name = table[spelling]
            if name in kwargs:
                raise ConfigError(f"{cls.__name__}: {spelling} and {name} are one setting; give one of them")
            kwargs[name] = kwargs.pop(spelling)
        plain_init(self, *args, **kwargs)

    cls.__init__ = __init__  # type: ignore[method-assign, assignment]
    return cls


def _paths(*keys: str) -> dict[str, str]:
    return {key: f"fp8_config.{key}" for key in keys}


@takes_other_spellings
@dataclass
class TERecipeKwargs(RecipeHandler):
    """FP8 by TransformerEngine. ``override_linear_precision``: fprop, dgrad, wgrad in high precision.

    Beside Accelerate's fields, by keyword: ``recipe`` (default ``delayed``) and which layers it is for, as in
    ``NativeRecipeKwargs``; ``convert_norms`` (default True): LayerNorm and RMSNorm as TransformerEngine's in training.
    """

    BACKEND = "TE"
    PATHS = _paths(
        *("use_autocast_during_eval", "margin", "interval", "fp8_format", "amax_history_len", "amax_compute_algo"),
        *("override_linear_precision", "use_mxfp8_block_scaling", "convert_norms", *_LAYERWISE),
    )

    use_autocast_during_eval: bool | None = None
    margin: int | None = None
    interval: int | None = None
    fp8_format: str | None = None
    amax_history_len: int | None = None
    amax_compute_algo: str | None = None
    override_linear_precision: tuple[bool, bool, bool] | None = None
    use_mxfp8_block_scaling: bool | None = None
    convert_norms: bool | None = dataclasses.field(default=None, kw_only=True)
    recipe: str | None = dataclasses.field(default=None, kw_only=True)
    layer_recipes: Iterable[str] | Mapping[str, str | None] | None = dataclasses.field(default=None, kw_only=True)
    skip: Iterable[str] | None = dataclasses.field(default=None, kw_only=True)
    fp8_steps: str | None = dataclasses.field(default=None, kw_only=True)
    fp8_last_layers: str | Mapping[Any, Any] | None = dataclasses.field(default=None, kw_only=True)


@takes_other_spellings
@dataclass
class AORecipeKwargs(RecipeHandler):
    """FP8 by torchao.

    ``config`` (a torchao Float8LinearConfig) says how layers compute; ``pad_inner_dim``, the recipe and the like then
    stay as they were passed and are not used. It exists in code only.
    ``module_filter_func(module, name)`` False leaves a layer; a function, or ``"module:function"``. It takes the place
    of what is left by default, also of ``skip_first_and_last``. Beside Accelerate's fields, by keyword: ``recipe``
    (default ``tensorwise``) and which layers it is for, as in ``NativeRecipeKwargs``.
    """

    BACKEND = "AO"
    PATHS = _paths(
        *("pad_inner_dim", "enable_fsdp_float8_all_gather", "skip_first_and_last", "module_filter_func"),
        *("fp8_format", "pow2_scales", "override_linear_precision", "use_autocast_during_eval", *_LAYERWISE),
    )
    _OF_CONFIG = (
        *("pad_inner_dim", "enable_fsdp_float8_all_gather", "recipe", "layer_recipes", "fp8_format", "pow2_scales"),
        "override_linear_precision",
    )

    config: Any = None
    module_filter_func: Callable[..., bool] | str | None = None
    pad_inner_dim: bool | None = None
    enable_fsdp_float8_all_gather: bool | None = None
    skip_first_and_last: bool | None = dataclasses.field(default=None, kw_only=True)
    recipe: str | None = dataclasses.field(default=None, kw_only=True)
    layer_recipes: Iterable[str] | Mapping[str, str | None] | None = dataclasses.field(default=None, kw_only=True)
    skip: Iterable[str] | None = dataclasses.field(default=None, kw_only=True)
    fp8_format: str | None = dataclasses.field(default=None, kw_only=True)
    pow2_scales: bool | None = dataclasses.field(default=None, kw_only=True)
    override_linear_precision: tuple[bool, bool, bool] | None = dataclasses.field(default=None, kw_only=True)
    use_autocast_during_eval: bool | None = dataclasses.field(default=None, kw_only=True)
    fp8_steps: str | None = dataclasses.field(default=None, kw_only=True)
    fp8_last_layers: str | Mapping[Any, Any] | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        given_filter = self.module_filter_func
        if given_filter is not None and not callable(given_filter) and not isinstance(given_filter, str):
            raise ConfigError(
                f"{type(self).__name__}(module_filter_func=): got {given_filter!r}; allowed: a function of a module and"
                " its name, or its place as 'module:function'"
            )
        self._fill_in(self._settings())
        if self.config is None:
            return
        if given := [name for name in self._OF_CONFIG if getattr(self, name) is not None]:
            warnings.warn(
                f"{type(self).__name__}: {' and '.join(given)} not used, for config says everything; leave them out",
                UserWarning,
                stacklevel=4,
            )

    def _settings(self) -> list[str]:
        """The fields that are settings: without what a ``config`` says, and a function."""
        without: tuple[str, ...] = () if self.config is None else self._OF_CONFIG
        without += ("module_filter_func",) if callable(self.module_filter_func) else ()
        return [name for name in self.PATHS if name not in without]

    def route_values(self) -> RouteValues:
        """The settings. Those that a ``config`` says are not among them: it is used as it is."""
        route = RouteValues()
        self._put_fields(route, self._settings())
        return route

    def code_only(self) -> list[str]:
        """The torchao object and the function."""
        return _code_only(self, ("config", *(("module_filter_func",) if callable(self.module_filter_func) else ())))


@takes_other_spellings
@dataclass
class MSAMPRecipeKwargs(RecipeHandler):
    """MS-AMP's levels: O1 FP8 gradients, O2 (default) and optimizer states, O3 and weights.

    Beside another recipe: levels on top of its GEMMs. Alone: on those of the native backend. No package msamp is used.
    By keyword, in code only, choices of the level one by one, as ``acceler8.levels.Level`` has them:
    ``exp_avg_sq="fp8"``, ``master="bf16_remainder"``, ``gradient="weight"``.
    """

    BACKEND = "MSAMP"
    PATHS = _paths("opt_level")

    opt_level: str | None = None
    weight: str | None = dataclasses.field(default=None, kw_only=True)
    master: str | None = dataclasses.field(default=None, kw_only=True)
    gradient: str | None = dataclasses.field(default=None, kw_only=True)
    exp_avg: str | None = dataclasses.field(default=None, kw_only=True)
    exp_avg_sq: str | None = dataclasses.field(default=None, kw_only=True)

    def choices(self) -> dict[str, str]:
        """What is chosen beside the level."""
        found = {name: getattr(self, name) for name in ("weight", "master", "gradient", "exp_avg", "exp_avg_sq")}
        return {name: value for name, value in found.items() if value is not None}

    def code_only(self) -> list[str]:
        """The choices."""
        of_level = [
            f"{type(self).__name__}({name}={value!r}) exists in code only, no flag, variable or YAML key has it"
            for name, value in self.choices().items()
        ]
        return [*super().code_only(), *of_level]

    def route_values(self) -> RouteValues:
        """With the level even where it is the default: the class asks for one."""
        route = super().route_values()
        if "fp8_config.opt_level" not in route.values and self.opt_level is not None:
            route.put("fp8_config.opt_level", self.opt_level, Source(Precedence.DEFAULT, f"of {type(self).__name__}"))
        return route


@takes_other_spellings
@dataclass
class FP8RecipeKwargs(TERecipeKwargs, MSAMPRecipeKwargs):
    """Deprecated: write ``TERecipeKwargs`` or ``MSAMPRecipeKwargs``.

    ``backend`` is TE or MSAMP; not given, by argument or variable: TE where it is installed, else MSAMP.
    """

    BACKEND = "TE"
    PATHS = {"backend": "fp8_config.backend", **MSAMPRecipeKwargs.PATHS, **TERecipeKwargs.PATHS}  # noqa: RUF012

    backend: str | None = None

    def __post_init__(self) -> None:
        self._resolve()
        if self.backend == "NO" and self.filled("backend"):
            self._fill("backend", Value(self._default("backend"), DEFAULT))
            self._level_of_backend()
        found = self.filled("backend")
        where = str(found.source) if found else self._source("backend").where
        if self.backend not in ("TE", "MSAMP"):
            raise ConfigError(
                f"{where}: FP8RecipeKwargs got backend {self.backend}; allowed: TE, MSAMP;"
                " write AORecipeKwargs or NativeRecipeKwargs for the others"
            )
        why = ""
        if found and found.source.precedence is Precedence.DEFAULT:
            have = "is" if self.backend == "TE" else "is not"
            why = f" (backend {self.backend}, because none was given and TransformerEngine {have} installed)"
        warnings.warn(
            f"FP8RecipeKwargs is deprecated{why}; write {self.backend}RecipeKwargs", FutureWarning, stacklevel=4
        )

    def _level_of_backend(self) -> None:
        if (found := self.filled("opt_level")) and found.source.precedence is Precedence.DEFAULT:
            self._fill("opt_level", Value(self._default("opt_level"), DEFAULT))

    def _default(self, name: str) -> Any:
        if name == "backend":
            return "TE" if is_transformer_engine_available() else "MSAMP"
        if name == "opt_level":
            return ENTRIES["fp8_config.opt_level"].setting.defaults["MSAMP"] if self.backend == "MSAMP" else None
        return super()._default(name)

    def backend_value(self) -> Value | None:
        """As given, from the variable, or as chosen."""
        found = self.filled("backend")
        if found and found.source.precedence > Precedence.DEFAULT:
            return found
        return Value(self.backend, Source(Precedence.CODE, type(self).__name__) if found else self._source("backend"))


FP8KwargsHandler = FP8RecipeKwargs


@takes_other_spellings
@dataclass
class NativeRecipeKwargs(RecipeHandler):
    """FP8 by acceler8's own kernels.

    ``recipe`` is a name or a ``Recipe``, which then says everything but more layers to ``skip``, the schedule and
    ``tokens``.
    ``margin``, ``interval`` and ``amax_*`` belong to the recipe ``delayed``. ``fp8_format`` None: the recipe's own.
    ``layer_recipes`` are ``"pattern=recipe"``, or a mapping, for single layers. A mapping as ``recipe`` is for all: a
    layer that no pattern fits is in high precision; of names it becomes ``layer_recipes``, with a ``Recipe`` in it it
    says everything. The schedule: ``fp8_steps`` is ``"START:STOP"``, outside of these steps all layers are in high
    precision; ``fp8_last_layers`` is how many of the last blocks are in FP8 from which step on, ``"0:4,1000:all"`` or a
    mapping. With ``tokens``, those of one forward on one GPU (batch x sequence), the plan predicts each layer's speed,
    and layers that FP8 would slow down stay in BF16 unless ``never_slower`` is False. Under FSDP2
    ``enable_fsdp_float8_all_gather`` sends weights as FP8 codes, in recipes that cast them alike in fprop and dgrad.
    """

    BACKEND = "NATIVE"
    PATHS = _paths(
        *("recipe", "layer_recipes", "fp8_format", "margin", "interval", "amax_history_len", "amax_compute_algo"),
        *("override_linear_precision", "use_autocast_during_eval", "skip", "pow2_scales", "save_for_backward"),
        *_NOT_OF_A_RECIPE,
    )

    recipe: str | Recipe | LayerRecipes | Mapping[str, str | Recipe | None] | None = None
    fp8_format: str | None = None
    margin: int | None = None
    interval: int | None = None
    amax_history_len: int | None = None
    amax_compute_algo: str | None = None
    override_linear_precision: tuple[bool, bool, bool] | None = None
    use_autocast_during_eval: bool | None = None
    skip: Iterable[str] | None = None
    pow2_scales: bool | None = None
    save_for_backward: str | None = None
    layer_recipes: Iterable[str] | Mapping[str, str | None] | None = None
    fp8_steps: str | None = None
    fp8_last_layers: str | Mapping[Any, Any] | None = None
    tokens: int | None = None
    never_slower: bool | None = None
    enable_fsdp_float8_all_gather: bool | None = None

    def __post_init__(self) -> None:
        self._spread_mapping()
        if isinstance(self.skip, Iterable) and not isinstance(self.skip, str | list | tuple):
            self.skip = tuple(self.skip)
        if isinstance(self.layer_recipes, Iterable) and not isinstance(self.layer_recipes, str | Mapping | list):
            self.layer_recipes = tuple(self.layer_recipes)
        if self.skip is not None:
            ENTRIES["fp8_config.skip"].parse(self.skip, self._source("skip").where)
        if self.recipe is None or isinstance(self.recipe, str):
            self._resolve()
            return
        self._fill_in(_NOT_OF_A_RECIPE)
        recipe = checked_recipes(self.recipe, self._source("recipe").where)
        beside = ("recipe", "skip", *_NOT_OF_A_RECIPE)
        if extra := [n for n in self.PATHS if n not in beside and getattr(self, n) is not None]:
            raise ConfigError(
                f"{self._source(extra[0]).where}: got {getattr(self, extra[0])!r} beside a Recipe, which says it"
                f" already; allowed: a Recipe, skip, {', '.join(_NOT_OF_A_RECIPE)}; change the Recipe with"
                f" replace(), or name it: {recipe.name!r}"
            )
        values = _object_values(recipe)
        if self.skip is not None:
            skip = ENTRIES["fp8_config.skip"].parse(self.skip, self._source("skip").where)
            self.skip = values["skip"] = (*values["skip"], *(skip or ()))
        for name, value in values.items():
            if name not in ("recipe", "layer_recipes"):
                self._fill(name, Value(value, self._source("recipe")))

    def _spread_mapping(self) -> None:
        """A mapping of names becomes ``layer_recipes`` that leave no layer to ``recipe``; else ``LayerRecipes``."""
        if not isinstance(self.recipe, Mapping):
            return
        if self.layer_recipes is not None and not self.filled("layer_recipes"):
            raise ConfigError(
                f"{type(self).__name__} got recipe as a mapping and layer_recipes; allowed: one of them; move the"
                " patterns into one"
            )
        mapping, self.recipe = self.recipe, recipe_object(self.recipe)
        if self.recipe is None:
            rest = {} if "*" in mapping else {"*": None}
            path = self.PATHS["layer_recipes"]
            self.layer_recipes = ENTRIES[path].parse({**mapping, **rest}, self._source("recipe").where)

    def route_values(self) -> RouteValues:
        """The settings, those of a Recipe object under its name."""
        self._spread_mapping()
        if self.recipe is None or isinstance(self.recipe, str):
            return super().route_values()
        route = RouteValues()
        values = _object_values(checked_recipes(self.recipe, self._source("recipe").where))
        if self.skip is not None:
            values["skip"] = tuple(self.skip)
        # not parsed: a Recipe may have a name of its own, which no other route could say
        names: tuple[str, ...] = ("recipe", "layer_recipes")
        for name in names:
            route.values[self.PATHS[name]] = Value(values.pop(name, None), self._source("recipe"))
        self._put_fields(route, _NOT_OF_A_RECIPE)
        names += _NOT_OF_A_RECIPE
        for name, path in self.PATHS.items():  # it says everything: what it leaves out is not for another route to say
            if name not in names:
                route.values[path] = Value(None, self._source("recipe"))
                route.put(path, values.get(name), self._source("recipe"))
        return route

    def to_dict(self) -> dict[str, Any]:
        """A copy of the fields; a Recipe is frozen, and stays the same object."""
        values = {**self.__dict__, "recipe": None}
        copied = {key: copy.deepcopy(value) for key, value in values.items() if not key.startswith("_")}
        return {**copied, "recipe": self.recipe}

    def to_recipe(self) -> Recipe | LayerRecipes:
        """What these fields run. Raises RecipeError for parts that contradict each other."""
        from acceler8.recipes import Recipe

        self._spread_mapping()
        if self.recipe is None or isinstance(self.recipe, str):
            parsed = ENTRIES["fp8_config.layer_recipes"].parse(self.layer_recipes, self._source("layer_recipes").where)
            return build_recipes({name: getattr(self, name) for name in self.PATHS} | {"layer_recipes": parsed})
        recipe = checked_recipes(self.recipe, self._source("recipe").where)
        if self.skip is None:
            return recipe
        skip = tuple(self.skip)
        return recipe.replace(skip=skip) if isinstance(recipe, Recipe) else recipe.and_skip(skip)

    def code_only(self) -> list[str]:
        """A Recipe that is more than a name and settings."""
        from acceler8.recipes import Recipe

        if self.recipe is None or isinstance(self.recipe, str | Mapping):
            return []
        if isinstance(self.recipe, Recipe) and recipe_values(self.recipe)[1]:
            return []
        return _code_only(self, ("recipe",))


def build_recipe(values: Mapping[str, Any]) -> Recipe:
    """The Recipe of settings by key; those that are None take the recipe's defaults. Raises RecipeError."""
    from acceler8 import recipes

    name = values.get("recipe") or ENTRIES["fp8_config.recipe"].setting.defaults["NATIVE"]
    is_gw_hp = name == GW_HP
    name = "rowwise" if is_gw_hp else name
    fields = {key: values.get(key) for key in (*_OF_EVERY_RECIPE, *(_DELAYED if name == "delayed" else ()))}
    if values.get("use_autocast_during_eval") is not None:
        fields["eval"] = "fp8" if values["use_autocast_during_eval"] else "high_precision"
    given = {key: value for key, value in fields.items() if value is not None}
    recipe = recipes.get(name, formats=values.get("fp8_format"), **given)
    fprop, dgrad, wgrad = values.get("override_linear_precision") or (False, False, False)
    wgrad = wgrad or is_gw_hp
    return recipe.with_gemms(fprop=not fprop, dgrad=not dgrad, wgrad=not wgrad)


def build_recipes(values: Mapping[str, Any]) -> Recipe | LayerRecipes:
    """As ``build_recipe``, with ``layer_recipes`` before the recipe of the other layers. Raises RecipeError."""
    from acceler8.recipes import LayerRecipes

    patterns = layer_patterns(values.get("layer_recipes"))
    if not patterns:
        return build_recipe(values)
    found: list[tuple[str, Recipe | None]] = []
    for pattern, word in patterns:
        found.append((pattern, None if word == "none" else build_recipe({**values, "recipe": word})))
    if all(pattern != "*" for pattern, _ in patterns):
        found.append(("*", build_recipe(values)))
    return LayerRecipes(tuple(found))


def _object_values(recipe: Recipe | LayerRecipes) -> dict[str, Any]:
    """What settings say of an object; of several recipes only which layers have which."""
    from acceler8.recipes import Recipe

    if isinstance(recipe, Recipe):
        return recipe_values(recipe)[0]
    return {"layer_recipes": tuple(f"{p}={r.name if r else 'none'}" for p, r in recipe.patterns), "skip": ()}


def recipe_values(recipe: Recipe) -> tuple[dict[str, Any], bool]:
    """A Recipe as settings by key, and whether these say all of it."""
    from acceler8 import recipes

    values: dict[str, Any] = {
        "recipe": recipe.name,
        "pow2_scales": recipe.pow2_scales,
        "save_for_backward": recipe.save_for_backward,
        "use_autocast_during_eval": recipe.eval == "fp8",
        "skip": recipe.skip,
    }
    if recipe.is_delayed:
        values |= {key: getattr(recipe.scaling, key) for key in _DELAYED}
    formats = [operand.format.name for operand in (recipe.fprop.a, recipe.dgrad.a, recipe.wgrad.b) if operand.format]
    values["fp8_format"] = "HYBRID" if len(set(formats)) > 1 else (formats or ["E4M3"])[0]
    if recipe.name not in RECIPES:
        return values, False
    plain_recipe = recipes.get(recipe.name)
    lost = [gemm in plain_recipe.fp8_gemms and gemm not in recipe.fp8_gemms for gemm in ("fprop", "dgrad", "wgrad")]
    values["override_linear_precision"] = tuple(lost)
    for policy in ENTRIES["fp8_config.fp8_format"].setting.kind.words:  # type: ignore[attr-defined]
        candidate = {**values, "fp8_format": policy}
        try:
            if build_recipe(candidate) == recipe:
                return candidate, True
        except ValueError:  # this recipe has no such format
            continue
    return values, False


def recipe_object(recipe: Any) -> Any:
    """What is more than names of recipes: a Recipe, or several by pattern if one of a mapping is; else None."""
    from acceler8.recipes import LayerRecipes

    if not isinstance(recipe, Mapping):
        return None if recipe is None or isinstance(recipe, str) else recipe
    names = {p: r.strip().lower() if isinstance(r, str) else r for p, r in recipe.items()}
    made = LayerRecipes.of(names)  # or it says what is wrong
    return None if all(r is None or isinstance(r, str) for r in names.values()) else made


def checked_recipes(recipe: Any, where: str) -> Recipe | LayerRecipes:
    """``recipe`` if it is a Recipe, or several by pattern. Raises ConfigError."""
    from acceler8.recipes import LayerRecipes, Recipe

    if not isinstance(recipe, Recipe | LayerRecipes):
        raise ConfigError(
            f"{where}: got a {type(recipe).__name__}; allowed: {', '.join(RECIPES)}, a Recipe, or a mapping of patterns"
            " to such"
        )
    return recipe


def _code_only(handler: SchemaHandler, names: Iterable[str]) -> list[str]:
    return [
        f"{type(handler).__name__}({name}=) is an object: it exists in code only, no flag, variable or YAML key has it"
        for name in names
        if getattr(handler, name) is not None
    ]
