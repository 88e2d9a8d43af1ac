"""Which layers torchao takes, as functions of a module and its name: Hugging Face Accelerate's, with its names."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from acceler8.errors import PlanError


def find_first_last_linear_layers(model: nn.Module) -> tuple[str | None, str | None]:
    """Names of the first and the last ``nn.Linear``, in the order of registration; None, None without one."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return (names[0], names[-1]) if names else (None, None)


def filter_linear_layers(module: nn.Module, fqn: str, layers_to_filter: Sequence[str | None]) -> bool:
    """False for a linear layer whose dimensions are not multiples of 16, and for a name in ``layers_to_filter``."""
    if isinstance(module, nn.Linear) and (module.in_features % 16 or module.out_features % 16):
        return False
    return fqn not in layers_to_filter


def filter_first_and_last_linear_layers(module: nn.Module, fqn: str) -> bool:
    """False for the first and the last linear layer of the model ``module``, whose layers ``fqn`` names one of, and for
    one that FP8 cannot take.

    As ``module_filter_func`` it is what is left by default. A library that calls it with a layer alone asks what
    nobody can answer: Accelerate's, which looks for both inside the layer, leaves neither out.
    Raises: PlanError for a layer alone, or a name that the model lacks.
    """
    layers = dict(module.named_modules())
    if fqn == "" or fqn not in layers or isinstance(module, nn.Linear):
        raise PlanError(
            f"filter_first_and_last_linear_layers got {type(module).__name__} and the name {fqn!r}; allowed: the model"
            " and the name of one of its layers; as a filter of single layers use functools.partial("
            "filter_linear_layers, layers_to_filter=find_first_last_linear_layers(model))"
        )
    return filter_linear_layers(layers[fqn], fqn, find_first_last_linear_layers(module))
