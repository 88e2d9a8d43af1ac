"""The native backend: our own kernels, by changing a layer's class in place.

No module is created and no Parameter replaced, so hooks, attributes, the training flag, state_dict keys,
ties, requires_grad, ``isinstance`` and deepcopy all survive, and an optimizer that already holds the
Parameters stays right.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from acceler8.backends.capability import STRATEGIES, Capability, device_said
from acceler8.backends.fusion import Fusion
from acceler8.backends.options import BackendOptions
from acceler8.backends.protocol import Backend, Conversion
from acceler8.errors import PlanError
from acceler8.functional import LinearSlots, linear
from acceler8.kernels import HAVE_TRITON, has_hardware_matmul
from acceler8.nn import (
    Fp8Linear,
    FusedMLP,
    FusedNorm,
    LayerState,
    LinearGroup,
    MLPState,
    NormKind,
    NormState,
    fp8_layers,
    fuse,
    fuse_norm,
    neighbourhood,
    unfuse,
    unfuse_norm,
)
from acceler8.nn.class_change import plain_type, swap_class
from acceler8.recipes import DelayedScaling, Recipe
from acceler8.recipes import names as recipe_names
from acceler8.scaling import LINE, AmaxSlot, AmaxState

ROLES = ("x", "w", "dy")


class NativeBackend(Backend):
    """FP8 by acceler8's own kernels; on devices without FP8 GEMMs the same numerics, emulated."""

    name = "native"
    fuses = True

    def capabilities(self) -> tuple[Capability, ...]:
        """Everything everywhere: what a device does not multiply is emulated."""
        return tuple(Capability(recipe=name, strategies=STRATEGIES) for name in recipe_names())

    def notes(self, recipe: Recipe, device: torch.device, options: BackendOptions | None = None) -> list[str]:
        """Says when products are emulated, or casts are slow."""
        gemms = [g for g in (recipe.fprop, recipe.dgrad, recipe.wgrad) if g.is_fp8]
        notes = []
        if device.type == "cuda" and not HAVE_TRITON:
            notes.append("Triton is not installed: casts run in plain PyTorch, several times slower; install triton")
        if all(has_hardware_matmul(device, gemm.a.granularity) for gemm in gemms):
            return notes
        what = device_said(device) if device.type in ("cpu", "cuda") else f"{device.type} here"
        notes.append(
            f"emulated: {what} has no {recipe.granularity} FP8 GEMM; same numerics, not faster, no GEMM memory saved"
        )
        return notes

    def kept_input_bytes(self, recipe: Recipe, dtype: torch.dtype) -> float:
        """One where wgrad reads codes that were kept, else those of the input itself."""
        return 1.0 if recipe.wgrad.b.is_fp8 and recipe.save_for_backward != "bf16" else float(dtype.itemsize)

    def layers(self, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """Those of its class: one that was set back by hand is none."""
        return fp8_layers(model)

    def convert_layers(self, conversion: Conversion) -> None:
        """Change the class of each layer and give it its state."""
        layers, state, fusions = conversion.layers, conversion.state, conversion.fusions
        delayed = [layer for layer in layers if layer[2].is_delayed]
        amax = state.amax = _amax_state(delayed)
        if amax is not None:
            own = {id(s): s for name, _, _ in delayed if (s := state.schedules.get(name)) is not None}
            amax.schedules = list(own.values())
        slots, made = 0, {}
        for name, module, recipe in layers:
            layer = made[name] = conversion.layer_state(name, recipe)
            if recipe.is_delayed:
                assert amax is not None
                layer.amax = amax
                x, w, dy = (AmaxSlot(amax, slots + i) for i in range(len(ROLES)))
                layer.slots = LinearSlots(x, w, dy)
                slots += LINE
            state.codes.append(layer.codes)
            module.__dict__["_acceler8_layer"] = layer
            swap_class(module, nn.Linear, Fp8Linear)
        _share(fusions, made, amax)
        for fusion, module in fusions:
            if fusion.kind == "merged linears":
                children = [module._modules[name.rpartition(".")[2]] for name in fusion.layers]
                group = LinearGroup(fusion.name, [child for child in children if isinstance(child, Fp8Linear)])
                state.codes.append(group.codes)
                for name in fusion.layers:
                    made[name].group = group
            if fusion.is_mlp:
                names = tuple(name.rpartition(".")[2] for name in fusion.layers)
                is_gated = fusion.kind == "gated MLP"
                mlp = MLPState(fusion.name, names, fusion.activation, plain_type(module), is_gated)
                state.codes.append(mlp.codes)
                fuse(module, mlp)
            if fusion.norm is not None:
                fuse_norm(module, _norm_state(fusion.name, fusion.norm, plain_type(module), made))

    def expected_output(self, layer: nn.Module, x: Tensor) -> Tensor | None:
        """The forward without kept codes, without recording an amax."""
        assert isinstance(layer, Fp8Linear)
        state = layer._acceler8_layer
        slots = None if state.slots is None else state.slots._replace(records=False)
        return linear(x, layer.weight, layer.bias, recipe=state.recipe, slots=slots)

    def restore_layers(self, model: nn.Module) -> None:
        """Set each class back and drop the state."""
        for module in model.modules():
            if isinstance(module, Fp8Linear):
                swap_class(module, Fp8Linear, nn.Linear)
                del module.__dict__["_acceler8_layer"]
            elif isinstance(module, FusedMLP):
                unfuse(module)
            elif isinstance(module, FusedNorm):
                unfuse_norm(module)


def _norm_state(name: str, kind: NormKind, author: type[nn.Module], layers: dict[str, LayerState]) -> NormState:
    """A norm follows the layers beside it: their schedules, and what they keep for backward."""
    beside = _layers_beside(name, layers)
    schedules = list({id(s): s for layer in beside if (s := layer.schedule) is not None}.values())
    compressed = any(layer.recipe.save_for_backward == "fp8_compressed" for layer in beside)
    return NormState(name, kind, author, schedules, compressed)


def _layers_beside(norm: str, layers: dict[str, LayerState]) -> list[LayerState]:
    """Those in the innermost module around the norm that holds some."""
    parts = [name.split(".") for name in layers]
    around = neighbourhood(norm, {".".join(part[:i]) for part in parts for i in range(1, len(part))})
    return [layer for name, layer in layers.items() if not around or name.startswith(f"{around}.")]


def _share(fusions: Sequence[tuple[Fusion, nn.Module]], layers: dict[str, LayerState], amax: AmaxState | None) -> None:
    """Layers that read one activation know how many they are, and have one scale for it; those that run as one have one
    scale for each of their operands.
    """
    pairs = []
    for fusion, _ in fusions:
        if not fusion.layers:
            continue
        first, *others = (layers[name] for name in fusion.readers)
        for layer in (first, *others):
            layer.readers = 1 + len(others)
        for layer in others:
            if first.slots is None or layer.slots is None:
                continue
            shared = ROLES[:1] if fusion.kind == "shared input" else ROLES
            pairs += [(getattr(layer.slots, role).index, getattr(first.slots, role).index) for role in shared]
            layer.slots = layer.slots._replace(**{role: getattr(first.slots, role) for role in shared})
    if amax is not None:
        amax.share(pairs)


def _amax_state(layers: list[tuple[str, nn.Module, Recipe]]) -> AmaxState | None:
    """Histories of these layers, which are delayed, and whose recipes agree on them."""
    if not layers:
        return None
    recipe = layers[0][2]
    scaling = recipe.scaling
    assert isinstance(scaling, DelayedScaling)
    weights: list[Any] = [module.weight for _, module, _ in layers]
    devices = {weight.device for weight in weights}
    if len(devices) > 1:
        raise PlanError(
            f"recipe {recipe.name!r} got layers on {', '.join(sorted(map(str, devices)))}; allowed: one device, where"
            " the amax histories of all layers are; use a current-scaling recipe, such as rowwise"
        )
    (device,) = devices
    device = device if device.type != "meta" else torch.device("cpu")
    # a line a layer, so the fourth place stays empty
    names = [f"{name}.{role}" for name, _, _ in layers for role in (*ROLES, "-")]
    return AmaxState(names, scaling.amax_history_len, scaling.amax_compute_algo, scaling.interval, device)
