"""What is compared: a registry of ways to train the same model.

A variant builds a ``Trainee`` from a ``Work``. Those of peers import their library when they are built, and are shown
as not installed where it is missing. ``register`` adds one; a name that is there already is replaced.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, nn

import acceler8
from acceler8 import recipes
from acceler8.bench.presets import Loop, Preset
from acceler8.bench.work import Trainee, Work, plain_trainee, prepared_trainee
from acceler8.errors import NotInThisVersionError, RunError, unknown_name
from acceler8.kernels import has_hardware_matmul
from acceler8.recipes import LayerRecipes, Recipe

BASELINE = "bf16"
Group = Literal["PyTorch", "acceler8", "torchao", "TransformerEngine", "Accelerate"]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to train the model."""

    name: str
    group: Group
    loops: tuple[Loop, ...]
    build: Callable[[Work], Trainee]
    needs: tuple[str, ...] = ()
    """Modules without which it cannot be built."""
    recipe: str | None = None
    """The recipe of acceler8 whose GEMMs its floor counts; None: BF16."""
    is_default: bool = True
    """False: only when it is asked for by name."""
    is_compiled: bool = False

    def missing(self) -> list[str]:
        """What it needs and is not installed."""
        return [name for name in self.needs if importlib.util.find_spec(name) is None]


_SETTINGS: dict[str, dict[str, Any]] = {
    "": {},
    "-compressed": {"save_for_backward": "fp8_compressed"},
    "-half-compressed": {"compress_every": 2},
    "-head-loss": {"head_loss": True},
    "-compressed-head-loss": {"save_for_backward": "fp8_compressed", "head_loss": True},
}
"""Suffix of a recipe's variant -> what it changes of the preset."""
VARIANTS: dict[str, dict[Loop, Variant]] = {}
"""Name -> loop -> variant."""


def register(variant: Variant) -> None:
    """Add a variant for each of its loops."""
    for loop in variant.loops:
        VARIANTS.setdefault(variant.name, {})[loop] = variant


def find(name: str, loop: Loop) -> Variant:
    """The variant. Raises RunError naming those that the loop has."""
    known = [key for key, by_loop in VARIANTS.items() if loop in by_loop]
    if name not in known:
        raise RunError(unknown_name(f"variant of a {loop} loop", name, known))
    return VARIANTS[name][loop]


def select(
    loop: Loop,
    device: torch.device,
    patterns: Sequence[str] | None = None,
    wanted_recipes: Sequence[str] | None = None,
) -> list[Variant]:
    """The variants to run, BF16 first.

    ``patterns`` are names or globs; None: all that are on by default, without compiled ones on a CPU. Of ours only
    those of ``wanted_recipes``, if given; by default all that the device multiplies itself (all on a CPU).
    Raises: RunError for a pattern that fits no variant, RecipeError for an unknown recipe.
    """
    for name in wanted_recipes or ():
        recipes.get(name)
    known = [by_loop[loop] for by_loop in VARIANTS.values() if loop in by_loop]
    chosen: list[Variant] = []
    if patterns is None:
        chosen = [v for v in known if v.is_default and not (v.is_compiled and device.type == "cpu")]
        chosen = [v for v in chosen if v.group != "acceler8" or _is_worth(v, device, wanted_recipes)]
        if wanted_recipes:  # a recipe that is not on by default, asked for by name
            chosen += [v for v in known if v.name in wanted_recipes and v not in chosen]
    for pattern in patterns or ():
        fits = [v for v in known if fnmatchcase(v.name, pattern)]
        if not fits:
            raise RunError(unknown_name(f"variant of a {loop} loop", pattern, [v.name for v in known]))
        chosen += [v for v in fits if v not in chosen and not _is_unwanted(v, wanted_recipes)]
    baseline = find(BASELINE, loop)
    return [baseline, *(v for v in chosen if v is not baseline)]


def _is_unwanted(variant: Variant, wanted: Sequence[str] | None) -> bool:
    return bool(wanted) and variant.group == "acceler8" and variant.recipe not in (wanted or ())


def _is_worth(variant: Variant, device: torch.device, wanted: Sequence[str] | None) -> bool:
    if wanted:
        return variant.recipe in wanted
    if device.type == "cpu" or variant.recipe is None:
        return True
    recipe = recipes.get(variant.recipe)
    return not recipe.fp8_gemms or has_hardware_matmul(device, recipe.granularity)


def compile_blocks(work: Work, model: nn.Module) -> None:
    """torch.compile for each repeated layer, in place: what peers recommend, and quicker to start than the whole.

    Without the cache for generation, which Transformers' models fill in training too: it counts layers, so every one
    of them would be compiled for itself.
    """
    if getattr(getattr(model, "config", None), "use_cache", False):
        model.config.use_cache = False  # type: ignore[union-attr]
    for block in work.blocks(model):
        block.compile()


def _bf16(work: Work) -> Trainee:
    return plain_trainee(work, work.make_model())


def _bf16_head_loss(work: Work) -> Trainee:
    return plain_trainee(work, work.with_head_loss(work.make_model()), is_own=True)


def _bf16_compiled(work: Work) -> Trainee:
    model = work.make_model()
    compile_blocks(work, model)
    return plain_trainee(work, model)


def _recipe(name: str, preset: Preset) -> Recipe | LayerRecipes:
    """What the preset makes of the recipe of that name."""
    own = recipes.get(name, save_for_backward=preset.save_for_backward or "fp8")
    if not preset.compress_every:
        return own
    compressed = recipes.get(name, save_for_backward="fp8_compressed")
    some = range(0, preset.layers, preset.compress_every)
    return recipes.LayerRecipes((*((f"*layers.{i}.*", compressed) for i in some), ("*", own)))


def _own(recipe: str, compiled: bool = False) -> Callable[[Work], Trainee]:
    def build(work: Work) -> Trainee:
        model = work.with_head_loss(work.make_model())
        acceler8.convert(model, acceler8.plan(model, _recipe(recipe, work.preset), fuse=work.preset.fuse))
        if compiled:
            compile_blocks(work, model)
        return plain_trainee(work, model, is_own=True, is_converted=True)

    return build


def _torchao(recipe: str, compiled: bool) -> Callable[[Work], Trainee]:
    def build(work: Work) -> Trainee:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        model = work.make_model()
        convert_to_float8_training(
            model,
            config=Float8LinearConfig.from_recipe_name(recipe),
            module_filter_fn=lambda module, name: work.is_converted(name),
        )
        if compiled:
            compile_blocks(work, model)
        return plain_trainee(work, model)

    return build


def _through_us(backend: str, recipe: str, compiled: bool = False) -> Callable[[Work], Trainee]:
    """A peer's library as a backend of ours, doing the same work as the peer's own variant."""

    def build(work: Work) -> Trainee:
        from acceler8.backends.torchao import TorchaoOptions
        from acceler8.backends.transformer_engine import TransformerEngineOptions

        model = work.make_model()
        options: Any = TorchaoOptions(skip_first_and_last=False)
        own = recipes.get(recipe, amax_history_len=1024) if recipe == "delayed" else recipes.get(recipe)
        if backend == "transformer_engine":
            options = TransformerEngineOptions(convert_norms=False)
        acceler8.convert(
            model,
            acceler8.plan(model, own, backend, options=options, filter_fn=lambda name, _: work.is_converted(name)),
        )
        if compiled:
            compile_blocks(work, model)
        return plain_trainee(work, model, is_converted=True)

    return build


def exchange_linears(
    model: nn.Module, is_converted: Callable[[str], bool], make: Callable[[nn.Linear], nn.Module]
) -> None:
    """Put ``make(linear)`` in the place of each linear layer that ``is_converted`` names, with the same weights."""
    for name, module in list(model.named_modules()):
        if type(module) is not nn.Linear or not is_converted(name):
            continue
        other = make(module)
        with torch.no_grad():
            own: Any = other
            own.weight.copy_(module.weight)
            if module.bias is not None:
                own.bias.copy_(module.bias)
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, other)


def _transformer_engine(kind: str) -> Callable[[Work], Trainee]:
    def build(work: Work) -> Trainee:
        import transformer_engine.pytorch as te
        from transformer_engine.common import recipe as te_recipes

        model = work.make_model()
        exchange_linears(
            model,
            work.is_converted,
            lambda linear: te.Linear(
                linear.in_features, linear.out_features, bias=linear.bias is not None,
                params_dtype=linear.weight.dtype, device=work.device,
            ),
        )  # fmt: skip
        how = {
            "delayed": lambda: te_recipes.DelayedScaling(amax_history_len=1024, amax_compute_algo="max"),
            "current": te_recipes.Float8CurrentScaling,
            "block": te_recipes.Float8BlockScaling,
        }[kind]()

        def context() -> AbstractContextManager[Any]:
            around: AbstractContextManager[Any] = te.fp8_autocast(enabled=True, fp8_recipe=how)
            return around

        return plain_trainee(work, model, context=context)

    return build


def _prepared(
    precision: str, recipe: str | None = None, *, compiled: bool = False, head_loss: bool = False
) -> Callable[[Work], Trainee]:
    def build(work: Work) -> Trainee:
        preset = work.preset
        own = None
        if recipe is not None:
            if not preset.fuse:
                raise NotInThisVersionError(
                    "Accelerator.prepare takes no --no-fuse; use a preset whose loop is plain, such as llama3-8b-4l"
                )
            own = _recipe(recipe, preset)
        model = work.make_model()
        if recipe is not None or head_loss:
            work.with_head_loss(model)
        accelerator = acceler8.Accelerator(mixed_precision=precision, device=work.device, recipe=own)
        trainee = prepared_trainee(work, model, accelerator)
        if compiled:
            compile_blocks(work, trainee.model)
        return trainee

    return build


def _altered(build: Callable[[Work], Trainee], **changes: Any) -> Callable[[Work], Trainee]:
    """``build`` for the same work with some of its preset's settings changed."""

    def altered(work: Work) -> Trainee:
        return build(work.with_settings(**changes))

    return altered if changes else build


def _amp(dtype: torch.dtype) -> Callable[[Work], Trainee]:
    """PyTorch's own automatic mixed precision, with its loss scaler for FP16."""

    def build(work: Work) -> Trainee:
        model = work.make_model()
        optimizer = work.optimizer(model)
        # a first scale at which no step overflows: steps that the scaler skips would not be the same work
        scaler = torch.amp.GradScaler(work.device.type, init_scale=2.0**12, enabled=dtype is torch.float16)

        def context() -> AbstractContextManager[Any]:
            return torch.autocast(work.device.type, dtype=dtype)

        def step(after_forward: Callable[[], None]) -> Tensor:
            with context():
                output = work.forward(model)
            after_forward()
            loss = work.loss(output)
            del output
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            return loss.detach()

        return Trainee(model, step, context=context)

    return build


class _AccelerateState:
    """Hugging Face Accelerate's state, which is one for the process: taken out and put back at each turn."""

    def __init__(self) -> None:
        from accelerate.state import AcceleratorState, GradientState, PartialState

        self._classes = (PartialState, AcceleratorState, GradientState)
        self._saved: list[dict[str, Any]] = [{} for _ in self._classes]

    def clear(self) -> None:
        for owner in self._classes:
            owner._shared_state.clear()

    def keep(self) -> None:
        self._saved = [dict(owner._shared_state) for owner in self._classes]

    def activate(self) -> None:
        for owner, saved in zip(self._classes, self._saved, strict=True):
            owner._shared_state.clear()
            owner._shared_state.update(saved)


def _accelerate(
    precision: str, handler: str | None = None, handler_options: dict[str, Any] | None = None, compiled: bool = False
) -> Callable[[Work], Trainee]:
    def build(work: Work) -> Trainee:
        from accelerate import Accelerator
        from accelerate import utils as accelerate_utils

        state = _AccelerateState()
        state.clear()
        options: dict[str, Any] = {"cpu": work.device.type == "cpu"}
        if handler is not None:
            options["kwargs_handlers"] = [getattr(accelerate_utils, handler)(**(handler_options or {}))]
        if compiled:
            options["dynamo_plugin"] = accelerate_utils.TorchDynamoPlugin(
                backend="inductor", use_regional_compilation=True
            )
        accelerator = Accelerator(mixed_precision=precision, **options)
        trainee = prepared_trainee(work, work.make_model(), accelerator, state.activate)
        state.keep()
        return trainee

    return build


def _register_all() -> None:
    register(Variant(name=BASELINE, group="PyTorch", loops=("plain",), build=_bf16))
    register(Variant(name=BASELINE, group="PyTorch", loops=("prepared",), build=_prepared("bf16")))
    for loop, build in (("plain", _bf16_head_loss), ("prepared", _prepared("bf16", head_loss=True))):
        register(
            Variant(
                name="bf16-head-loss", group="acceler8", loops=(loop,), build=_altered(build, head_loss=True),  # type: ignore[arg-type]
                is_default=False,
            )
        )  # fmt: skip
    register(Variant(name="bf16-compile", group="PyTorch", loops=("plain",), build=_bf16_compiled, is_compiled=True))
    register(
        Variant(
            name="bf16-compile", group="PyTorch", loops=("prepared",), build=_prepared("bf16", compiled=True),
            is_compiled=True,
        )
    )  # fmt: skip
    for name, dtype in (("fp16-amp", torch.float16), ("bf16-amp", torch.bfloat16)):
        register(Variant(name=name, group="PyTorch", loops=("prepared",), build=_amp(dtype), is_default=False))
    for name in recipes.names():
        for loop, build in (("plain", _own(name)), ("prepared", _prepared("fp8", name))):
            for suffix, changes in _SETTINGS.items():
                register(
                    Variant(
                        name=f"{name}{suffix}", group="acceler8", loops=(loop,), build=_altered(build, **changes),  # type: ignore[arg-type]
                        recipe=name, is_default=not suffix,
                    )
                )  # fmt: skip
        for loop, build in (("plain", _own(name, compiled=True)), ("prepared", _prepared("fp8", name, compiled=True))):
            register(
                Variant(
                    name=f"{name}-compile", group="acceler8", loops=(loop,), build=build,  # type: ignore[arg-type]
                    recipe=name, is_default=False, is_compiled=True,
                )
            )  # fmt: skip
    for name, own in (("tensorwise", "tensorwise"), ("rowwise", "rowwise"), ("rowwise_with_gw_hp", "rowwise")):
        for compiled in (False, True):
            register(
                Variant(
                    name=f"torchao-{name.replace('_', '-')}" + "-compile" * compiled, group="torchao", loops=("plain",),
                    build=_torchao(name, compiled), needs=("torchao",), recipe=own, is_compiled=compiled,
                    is_default=compiled or name == own,
                )
            )  # fmt: skip
    for kind, own in (("delayed", "delayed"), ("current", "tensorwise"), ("block", "blockwise")):
        register(
            Variant(
                name=f"te-{kind}", group="TransformerEngine", loops=("plain",), build=_transformer_engine(kind),
                needs=("transformer_engine",), recipe=own,
            )
        )  # fmt: skip
    for name, backend, own, compiled in (
        ("torchao-tensorwise", "torchao", "tensorwise", False),
        ("torchao-tensorwise-compile", "torchao", "tensorwise", True),
        ("torchao-rowwise-compile", "torchao", "rowwise", True),
        ("te-delayed", "transformer_engine", "delayed", False),
        ("te-current", "transformer_engine", "tensorwise", False),
    ):
        register(
            Variant(
                name=f"acceler8-{name}", group="acceler8", loops=("plain",),
                build=_through_us(backend, own, compiled), needs=(backend,), recipe=own, is_compiled=compiled,
                is_default=False,
            )
        )  # fmt: skip
    without = {"enable_fsdp_float8_all_gather": False}
    for name, build, needs, nearest, compiled in (
        ("accelerate-bf16", _accelerate("bf16"), (), None, False),
        ("accelerate-bf16-compile", _accelerate("bf16", compiled=True), (), None, True),
        ("accelerate-torchao", _accelerate("fp8", "AORecipeKwargs"), ("torchao",), "tensorwise", False),
        ("accelerate-torchao-no-gather", _accelerate("fp8", "AORecipeKwargs", without), ("torchao",), "tensorwise",
         False),
        ("accelerate-torchao-no-gather-compile", _accelerate("fp8", "AORecipeKwargs", without, True), ("torchao",),
         "tensorwise", True),
        ("accelerate-te", _accelerate("fp8", "TERecipeKwargs"), ("transformer_engine",), "delayed", False),
    ):  # fmt: skip
        register(
            Variant(
                name=name, group="Accelerate", loops=("prepared",), build=build, needs=("accelerate", *needs),
                recipe=nearest, is_compiled=compiled,
            )
        )  # fmt: skip


def names(loop: Loop) -> Iterable[str]:
    """Names of the variants that a loop has."""
    return [name for name, by_loop in VARIANTS.items() if loop in by_loop]


__all__ = ["BASELINE", "VARIANTS", "Variant", "compile_blocks", "find", "names", "register", "select"]

_register_all()
