"""``fused_head_loss``: the switch for head and loss in one operation, and the models that it is for."""

from __future__ import annotations

import inspect

from torch import nn

from acceler8.errors import PlanError
from acceler8.nn.class_change import plain_type
from acceler8.nn.head_loss import fuse_head, fused_heads, has_causal_loss, unfuse_head


def fused_head_loss(model: nn.Module, *, on: bool = True) -> nn.Module:
    """Let a Hugging Face causal language model compute its loss without holding all logits; return the same model.

    With ``labels`` its forward then gives the same loss (``head_loss``), whatever the author's forward does around the
    head; ``logits`` of the output are computed only if somebody reads them. Also inside a wrapper (PEFT, DDP). Modules,
    Parameters, state_dict keys, hooks, class name and signature stay; ``on=False`` undoes it; both may be repeated.
    Before or after ``convert`` and ``Accelerator.prepare``.
    Where the head must compute all logits (it is FP8, has an adapter or a hook; another loss was set; the forward reads
    the logits), the author's forward does, a warning says why, and ``model.head_loss_reasons`` keeps it. So does
    ``torch.compile`` of the model as a whole, without a word.
    Raises: PlanError if no module inside is such a model, naming what is allowed and what is missing.
    """
    if not on:
        for _, fused in list(fused_heads(model)):
            unfuse_head(fused)
        return model
    known = {id(module) for _, module in fused_heads(model)}
    found = [(m, head) for m in model.modules() if id(m) not in known and (head := _head_of(m)) is not None]
    if not known and not found:
        lacks = next((why for m in model.modules() if (why := _lacks(m)) and _has_head(m)), None)
        raise PlanError(
            f"fused_head_loss found no causal language model in this {type(model).__name__}"
            f"{': ' + lacks if lacks else ''}; allowed: a Hugging Face model with get_output_embeddings(), a head among"
            " its children, labels in its forward, and ForCausalLMLoss as its loss_function; a model of your own calls"
            " acceler8.head_loss(hidden, weight, labels)"
        )
    for module, head in found:
        fuse_head(module, head)
    return model


def _has_head(module: nn.Module) -> bool:
    return callable(getattr(type(module), "get_output_embeddings", None))


def _head_of(module: nn.Module) -> str | None:
    """Name of the head if ``module`` is a model whose loss can be computed that way."""
    return None if not _has_head(module) or _lacks(module) else _name_of_head(module)


def _name_of_head(module: nn.Module) -> str | None:
    head = module.get_output_embeddings()  # type: ignore[operator]
    return next((name for name, child in module._modules.items() if child is not None and child is head), None)


def _lacks(module: nn.Module) -> str | None:
    """What a module with an output head lacks; None if nothing."""
    kind = type(module).__name__
    if not _has_head(module) or _name_of_head(module) is None:
        return f"{kind} has no output head among its children"
    if "labels" not in inspect.signature(plain_type(module).forward).parameters:
        return f"{kind}.forward takes no labels"
    if not has_causal_loss(module):
        return f"{kind}.loss_function is not ForCausalLMLoss"
    own = module.__dict__.get("forward")
    if own is not None and not _calls_class(own, module):
        return f"this {kind} has a forward of its own on the instance; call fused_head_loss before it is set"
    return None


def _calls_class(own: object, module: nn.Module) -> bool:
    """True if a forward set on the instance asks the class for its forward at each call, as a prepared model's does."""
    inner = getattr(own, "forward", None)
    return getattr(inner, "__func__", None) is type(module).forward
