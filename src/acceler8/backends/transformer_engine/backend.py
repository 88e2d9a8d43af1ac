"""TransformerEngine as a backend: its modules and kernels, acceler8's rules.

Which GEMM, cast and norm kernels run is TransformerEngine's affair. What a layer is, when it is in FP8, when scales are
updated and how long weight codes live is the same as under the native backend, so that plans, schedules, windows,
evaluation and checkpoints mean the same. Nothing of TransformerEngine is imported before it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from acceler8.backends.capability import Capability, kind_of
from acceler8.backends.options import BackendOptions
from acceler8.backends.protocol import AlsoConverted, Backend, Conversion
from acceler8.backends.transformer_engine import library
from acceler8.backends.transformer_engine.donors import linear_clash, norm_clash
from acceler8.backends.transformer_engine.norms import find_norms
from acceler8.backends.transformer_engine.options import TransformerEngineOptions
from acceler8.backends.transformer_engine.recipes import CAPABILITIES, odd_dimensions, unsupported
from acceler8.errors import PlanError
from acceler8.recipes import LayerRecipes, Recipe

if TYPE_CHECKING:
    from acceler8.backends.transformer_engine.histories import AmaxHistories

_BLOCKWISE_CUDA = (12, 9)


class TransformerEngineBackend(Backend):
    """FP8 by NVIDIA's TransformerEngine, from version 2.5 on."""

    name = "transformer_engine"
    options_type = TransformerEngineOptions
    default_recipe = "delayed"

    def unavailable(self) -> str | None:
        """Missing, too old, of mixed versions, or unable to load: one sentence, found out once."""
        return library.unavailable()

    def capabilities(self) -> tuple[Capability, ...]:
        """Recipes by GPU."""
        return CAPABILITIES

    def lacks(self, recipe: Recipe, device: torch.device, strategy: str = "single") -> str | None:
        """Also settings of recipes that TransformerEngine does not have, and GEMMs that this CUDA does not have."""
        if reason := unsupported(recipe) or super().lacks(recipe, device, strategy):
            return reason
        cuda = torch.version.cuda
        if kind_of(recipe) == "blockwise" and cuda is not None and library.numbers(cuda)[:2] < _BLOCKWISE_CUDA:
            return (
                f"recipe 'blockwise' needs CUDA {'.'.join(map(str, _BLOCKWISE_CUDA))} or newer, and torch"
                f" {torch.__version__} is built for {cuda}; allowed there: delayed, tensorwise; choose one of them, or"
                " install a torch for a newer CUDA"
            )
        return None

    def notes(self, recipe: Recipe, device: torch.device, options: BackendOptions | None = None) -> list[str]:
        """What is TransformerEngine's way here."""
        notes = []
        if high := [gemm for gemm in ("dgrad", "wgrad") if not getattr(recipe, gemm).is_fp8]:
            notes.append(f"{' and '.join(high)} in high precision, computed beside TransformerEngine")
        if _converts_norms(options):
            notes.append(
                "norms run as TransformerEngine's in training: under autocast they cast their input to its dtype and"
                " give that, where PyTorch's LayerNorm computes and gives FP32"
            )
        return notes

    def kept_input_bytes(self, recipe: Recipe, dtype: torch.dtype) -> float:
        """Codes and their scales, in one orientation; the input itself where wgrad reads that."""
        if not recipe.wgrad.is_fp8:
            return float(dtype.itemsize)
        return 1.0 + {"blockwise": 4 / 128, "mxfp8": 1 / 32}.get(kind_of(recipe), 0.0)

    def refuses(self, module: nn.Module, recipe: Recipe) -> str | None:
        """The layer rules of FP8 GEMMs, the recipe's blocks, and attributes that TransformerEngine has too."""
        if reason := super().refuses(module, recipe):
            return reason
        rows, columns = cast(Tensor, module._parameters["weight"]).shape
        if reason := odd_dimensions((rows, columns), recipe):
            return reason
        if library.unavailable() is not None:
            return None  # a plan of a machine that has it; there the layer is asked again
        return linear_clash(module)

    def also_converts(
        self, model: nn.Module, recipe: Recipe | LayerRecipes, options: BackendOptions | None = None
    ) -> list[AlsoConverted]:
        """Norms."""
        is_here, off = library.unavailable() is None, None if _converts_norms(options) else "convert_norms is off"
        found = []
        for norm in find_norms(model):
            refusal = norm.refusal or off or (norm_clash(norm) if is_here else None)
            found.append(AlsoConverted(name=norm.name, module=norm.module, refusal=refusal))
        return found

    def convert_layers(self, conversion: Conversion) -> None:
        """Change the class of each layer and norm, and give it its state."""
        for name, _, recipe in conversion.layers:
            if reason := unsupported(recipe):
                raise PlanError(f"layer {name!r}: {reason}")
        from acceler8.backends.transformer_engine.carry_out import convert

        convert(conversion, with_norms=_converts_norms(conversion.options))

    def restore_layers(self, model: nn.Module) -> None:
        """Give each module its class back and drop the state."""
        from acceler8.backends.transformer_engine.carry_out import restore

        restore(model)

    def expected_output(self, layer: nn.Module, x: Tensor) -> Tensor | None:
        """By TransformerEngine, with codes made for this call."""
        made: Tensor = layer.expected_output(x)  # type: ignore[operator]
        return made

    def on_step(self, model: nn.Module) -> None:
        """Update the scales of delayed scaling."""
        if (histories := self._histories(model)) is not None:
            histories.update(model)

    def state(self, model: nn.Module) -> dict[str, Tensor]:
        """Amax histories and scales of delayed scaling by layer name; else nothing."""
        histories = self._histories(model)
        return {} if histories is None else histories.state(model)

    def initial_state(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Histories of zeros and scales of one."""
        return {
            name: torch.ones_like(tensor) if name.rpartition(".")[2].startswith("scale_") else torch.zeros_like(tensor)
            for name, tensor in state.items()
        }

    def load_state(self, model: nn.Module, state: dict[str, Tensor]) -> None:
        """Restore what ``state`` gave. Raises PlanError if it does not fit; nothing is changed then."""
        histories = self._histories(model)
        if histories is None:
            super().load_state(model, state)
        else:
            histories.load_state(model, state)

    def _histories(self, model: nn.Module) -> AmaxHistories | None:
        for _, layer in self.layers(model):
            if (found := layer.__dict__["_acceler8_layer"].histories) is not None:
                return cast("AmaxHistories", found)
        return None


def _converts_norms(options: Any) -> bool:
    return options is None or bool(options.convert_norms)
