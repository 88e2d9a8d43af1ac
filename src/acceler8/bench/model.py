"""A user's own model: what to train is named by the user, everything else is as for a preset.

``module:callable`` gives ``(model, batch)``; the batch is a mapping (keywords of the forward), a tuple (its arguments)
or one argument. Or a Hugging Face configuration: a name or folder that ``AutoConfig`` takes, or a JSON file of one;
then weights are random and the batch is random tokens. The loss is the output's ``loss``, its first element if that is
a scalar, the output itself if it is one, else the mean square of the output, which trains nothing useful and costs
what a loss costs.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from acceler8.bench.llama import Llama
from acceler8.bench.presets import PRESETS, Preset
from acceler8.bench.work import DATA_SEED, SEED, Work, hf_llama
from acceler8.errors import MissingLibraryError, RunError

Make = Callable[[], tuple[nn.Module, Any]]


class OwnWork(Work):
    """Work on a model that a user names."""

    def __init__(self, preset: Preset, device: torch.device, make: Make, dtype: torch.dtype | None = None) -> None:
        self.preset, self.device, self._make, self._dtype = preset, device, make, dtype
        torch.manual_seed(DATA_SEED)
        model, batch = make()
        self.batch = tree_map_only(Tensor, lambda t: t.to(device), batch)
        self.parameters = sum(p.numel() for p in model.parameters())

    def make_model(self) -> nn.Module:
        """The model as the user's function makes it from one seed, in training mode on the device."""
        torch.manual_seed(SEED)
        model, _ = self._make()
        return model.to(device=self.device, dtype=self._dtype).train()

    def forward(self, model: nn.Module) -> Any:
        """What the model gives for the batch."""
        if isinstance(self.batch, Mapping):
            return model(**self.batch)
        return model(*self.batch) if isinstance(self.batch, tuple | list) else model(self.batch)

    def loss(self, output: Any) -> Tensor:
        """The output's own loss if it has one."""
        own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if isinstance(own, Tensor):
            return own.float()
        tensors = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point()]
        if not tensors:
            raise RunError(f"the model gave a {type(output).__name__} without a tensor; return a loss or a tensor")
        first = tensors[0].float()
        return first if first.ndim == 0 else first.square().mean()


def preset_of(name: str, work_batch: int, length: int, steps: int | None, lr: float | None) -> Preset:
    """A preset with what is known of a model of one's own; its shape is not."""
    return Preset(
        name=name, about="a model of one's own", loop="prepared", layers=1, width=16, ffn=16, heads=1, kv_heads=1,
        vocabulary=16, batch=work_batch, length=length, parameters="float32", lr=1e-4 if lr is None else lr,
        steps=10 if steps is None else steps, turn=5,
    )  # fmt: skip


def resolve(spec: str, batch: int, length: int) -> Make:
    """What makes the model and its batch. Raises RunError, MissingLibraryError."""
    if ":" in spec and not Path(spec).exists():
        return _from_function(spec)
    return _from_config(spec, batch, length)


def on_meta(spec: str) -> tuple[nn.Module, int | None]:
    """The model that a preset, a configuration or a function names, without memory for its weights, and the tokens of
    a preset's step.

    A function may return the model alone. Raises RunError, MissingLibraryError.
    """
    with torch.device("meta"):
        if spec in PRESETS:
            preset = PRESETS[spec]
            model = hf_llama(preset) if preset.model == "hf-llama" else Llama(preset)
            return model.to(getattr(torch, preset.parameters)), preset.tokens
        if ":" in spec and not Path(spec).exists():
            made = _function(spec)()
            made = made[0] if isinstance(made, tuple) and made else made
            if not isinstance(made, nn.Module):
                raise RunError(f"{spec} returned a {type(made).__name__}; allowed: an nn.Module, or (model, batch)")
            return made, None
        model, _ = _from_config(spec, 1, 1)()
        return model, None


def _function(spec: str) -> Callable[[], Any]:
    module_name, _, name = spec.partition(":")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        function: Callable[[], Any] = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise RunError(
            f"cannot take {spec!r}: {error}; name MODULE:FUNCTION that Python can import from here"
        ) from error
    return function


def _from_function(spec: str) -> Make:
    function = _function(spec)

    def make() -> tuple[nn.Module, Any]:
        made = function()
        if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
            raise RunError(f"{spec} returned a {type(made).__name__}; allowed: (model, batch), the model an nn.Module")
        return made

    return make


def _from_config(spec: str, batch: int, length: int) -> Make:
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise MissingLibraryError(
            f"{spec!r} as a Hugging Face configuration needs transformers; pip install transformers, or name"
            " MODULE:FUNCTION"
        ) from None
    try:
        if spec.endswith(".json"):
            said = json.loads(Path(spec).read_text(encoding="utf-8"))
            config = AutoConfig.for_model(said.pop("model_type"), **said)
        else:
            config = AutoConfig.from_pretrained(spec)
    except (OSError, ValueError, KeyError) as error:
        why = " ".join(str(error).split())[:200]
        raise RunError(
            f"cannot take {spec!r} as a Hugging Face configuration: {type(error).__name__}: {why}; name a folder, a"
            " model, a JSON file with model_type, or MODULE:FUNCTION"
        ) from error

    def make() -> tuple[nn.Module, Any]:
        model = AutoModelForCausalLM.from_config(config)
        generator = torch.Generator().manual_seed(DATA_SEED)
        tokens = torch.randint(0, config.vocab_size, (batch, length), generator=generator, device="cpu")
        return model, {"input_ids": tokens, "labels": tokens}

    return make
