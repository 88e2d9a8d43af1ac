"""TransformerEngine by hand, under Hugging Face Accelerate's names.

``Accelerator`` and ``acceler8.convert`` need none of this: there FP8 belongs to each layer. Here it is the library's
own context around the model's forward, with its rules: scales of delayed scaling change when that forward ends, and
a layer that is called from elsewhere is not in FP8.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

from acceler8 import recipes
from acceler8.backends.layer_rules import refuse_linear
from acceler8.backends.transformer_engine import carry_out, donors, library, recipe_of_kwargs
from acceler8.backends.transformer_engine.norms import find_norms
from acceler8.backends.transformer_engine.recipes import build, describe
from acceler8.backends.transformer_engine.region import autocast
from acceler8.config.handlers import TERecipeKwargs
from acceler8.config.sources import Precedence
from acceler8.errors import MissingLibraryError, PlanError, RecipeError
from acceler8.nn import find_state

_log = logging.getLogger("acceler8")


def convert_model(
    model: nn.Module, to_transformer_engine: bool = True, _convert_linear: bool = True, _convert_ln: bool = True
) -> None:
    """Make ``nn.Linear`` and LayerNorm inside ``model`` TransformerEngine's, in place, or plain again.

    Modules keep their place, hooks and attributes, and Parameters are the same objects: ties and optimizers stay right.
    What TransformerEngine cannot take (dimensions that are no multiples of 16, norms without weight or bias) stays as
    it is, by itself, with a line in the log. They compute in FP8 inside ``te.autocast``: see ``apply_fp8_autowrap``.
    Raises: MissingLibraryError (an ImportError) without TransformerEngine; PlanError for a model that
        ``acceler8.convert`` converted.
    """
    _require()
    if find_state(model) is not None:
        raise PlanError(
            f"{type(model).__name__} is converted by acceler8.convert already; call acceler8.restore(model) first"
        )
    if to_transformer_engine:
        if _convert_linear:
            _convert_linears(model)
        if _convert_ln:
            _convert_norms(model)
    else:
        _to_plain(model, linears=_convert_linear, norms=_convert_ln)


def _convert_linears(model: nn.Module) -> None:
    from acceler8.backends.transformer_engine._modules import TeLinear
    from acceler8.backends.transformer_engine.in_place import take_over

    recipe = recipes.get("delayed")
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or isinstance(module, TeLinear):
            continue
        reason = refuse_linear(module, recipe) or donors.linear_clash(module)
        if reason is None:
            take_over(module, donors.linear_donor(module), nn.Linear, TeLinear)
        else:
            _log.info("convert_model left %s: %s", name or "the model itself", reason)


def _convert_norms(model: nn.Module) -> None:
    for norm in find_norms(model):
        reason = norm.refusal or donors.norm_clash(norm)
        if reason is not None:
            _log.info("convert_model left %s: %s", norm.name or "the model itself", reason)
        elif norm.kind is not None and norm.kind.kind == "layer":
            carry_out.convert_norm(norm, donors.norm_donor(norm), [], always=True)


def _to_plain(model: nn.Module, *, linears: bool, norms: bool) -> None:
    """Modules that were changed get their class back; those that a script made itself become new plain ones."""
    te = library.load()
    carry_out.restore(model, linears=linears, norms=norms)
    kinds = (*((te.Linear,) if linears else ()), *((te.LayerNorm,) if norms else ()))
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if type(child) in kinds:
                parent._modules[name] = _plain_twin(child, te)


def _plain_twin(module: Any, te: Any) -> nn.Module:
    """PyTorch's module with the same Parameters, hooks and mode."""
    plain: nn.Module
    if type(module) is te.Linear:
        plain = nn.Linear(module.in_features, module.out_features, bias=module.use_bias, device="meta")
    else:
        plain = nn.LayerNorm(tuple(module.weight.shape), eps=module.eps, device="meta")
    for name in plain._parameters:
        plain._parameters[name] = module._parameters.get(name)
    for name, value in module.__dict__.items():
        if name == "training" or name.endswith("_hooks"):
            plain.__dict__[name] = value
    return plain


def has_transformer_engine_layers(model: nn.Module) -> bool:
    """True if a module inside ``model`` is one of TransformerEngine's, whoever made it.

    Raises: MissingLibraryError (an ImportError) without TransformerEngine.
    """
    _require()
    return any(
        base.__module__.partition(".")[0] == "transformer_engine"
        for module in model.modules()
        for base in type(module).__mro__
    )


def contextual_fp8_autocast(
    model_forward: Callable[..., Any], fp8_recipe: Any, use_during_eval: bool = False
) -> Callable[..., Any]:
    """``model_forward`` inside TransformerEngine's context, in training; in evaluation too with ``use_during_eval``.

    ``fp8_recipe`` is TransformerEngine's object. The result takes the model as its first argument, and has the forward
    that it wraps as ``__wrapped__``.
    Raises: MissingLibraryError (an ImportError) without TransformerEngine.
    """
    _require()

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with autocast(fp8_recipe, enabled=use_during_eval or self.training):
            return model_forward(*args, **kwargs)

    forward.__wrapped__ = model_forward  # type: ignore[attr-defined]
    return forward


def apply_fp8_autowrap(model: nn.Module, fp8_recipe_handler: TERecipeKwargs | None) -> nn.Module:
    """Wrap ``model.forward`` with ``contextual_fp8_autocast`` by a handler's settings, and return the same model.

    Every setting of the handler reaches TransformerEngine, defaults too; None is ``TERecipeKwargs()``'s defaults.
    Raises: MissingLibraryError (an ImportError) without TransformerEngine; RecipeError for ``interval`` and
        ``override_linear_precision``, which this TransformerEngine dropped and a context cannot honour.
    """
    _require()
    fields = {} if fp8_recipe_handler is None else _fields(fp8_recipe_handler)
    recipe = recipe_of_kwargs(**fields)
    described = describe(recipe)
    if described.interval != 1 or not (described.dgrad and described.wgrad):
        what = "interval" if described.interval != 1 else "override_linear_precision"
        raise RecipeError(
            f"apply_fp8_autowrap got {what}={fields[what]!r}, which TransformerEngine dropped; allowed: its default;"
            " leave it out, or use Accelerator or acceler8.convert, which honour it"
        )
    during_eval = bool(fields.get("use_autocast_during_eval"))
    forward = contextual_fp8_autocast(model.forward, build(described), use_during_eval=during_eval)
    model.forward = MethodType(forward, model)
    return model


def _fields(handler: TERecipeKwargs) -> dict[str, Any]:
    """What the handler says beside its defaults, which are ``recipe_of_kwargs``'s too.

    Raises: RecipeError for what is said of single layers or steps.
    """
    known = inspect.signature(recipe_of_kwargs).parameters
    found = {name: handler.filled(name) for name in TERecipeKwargs.PATHS}
    fields = {
        name: getattr(handler, name)
        for name, value in found.items()
        if value is None or value.source.precedence > Precedence.DEFAULT
    }
    if extra := [name for name in fields if name not in known]:
        raise RecipeError(
            f"apply_fp8_autowrap got {extra[0]}={fields[extra[0]]!r}, which one context for all layers cannot follow;"
            " leave it out, or use Accelerator or acceler8.convert"
        )
    return fields


def _require() -> None:
    if (reason := library.unavailable()) is not None:
        raise MissingLibraryError(reason)
