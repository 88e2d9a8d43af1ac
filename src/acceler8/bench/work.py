"""The work that every variant does: the same weights, the same batch, the same loss, one optimizer step at a time."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import acceler8
from acceler8.bench.llama import Llama
from acceler8.bench.presets import Preset
from acceler8.errors import MissingLibraryError, RunError

SEED = 0
DATA_SEED = 1


def _nothing() -> None:
    pass


@dataclass
class Trainee:
    """A model in one variant, ready to train."""

    model: nn.Module
    step: Callable[[Callable[[], None]], Tensor]
    """One optimizer step; calls its argument between forward and backward; returns the loss, detached."""
    activate: Callable[[], None] = _nothing
    """Called when its turn begins, for libraries whose state belongs to the process."""
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Around a forward of the model, also one that only evaluates."""


class Work:
    """A preset's model and batch on a device. Subclasses bring others."""

    def __init__(self, preset: Preset, device: torch.device) -> None:
        self.preset, self.device = preset, device
        generator = torch.Generator(device).manual_seed(DATA_SEED)
        shape = (preset.batch, preset.length + 1)
        self._batch = [torch.randint(0, preset.vocabulary, shape, device=device, generator=generator)]

    @property
    def tokens(self) -> Tensor:
        """The batch, [batch, length + 1]."""
        return self._batch[0]

    @tokens.setter
    def tokens(self, tokens: Tensor) -> None:
        self._batch[0] = tokens

    def with_settings(self, **changes: Any) -> Work:
        """The same work, now and with every later batch, where the preset's settings are others."""
        twin = copy.copy(self)
        twin.preset = dataclasses.replace(self.preset, **changes)
        return twin

    @property
    def inputs(self) -> Tensor:
        """What the model reads: all tokens but the last of each sequence, [batch, length]."""
        return self.tokens[:, :-1]

    def make_model(self) -> nn.Module:
        """The model with the weights that all variants begin with."""
        torch.manual_seed(SEED)
        with torch.device(self.device):
            model = hf_llama(self.preset) if self.preset.model == "hf-llama" else Llama(self.preset)
        dtype: torch.dtype = getattr(torch, self.preset.parameters)
        return model.to(dtype).train()

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """The repeated layers, which are what is compiled."""
        lists = [list(m) for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) > 0]
        return max(lists, key=len) if lists else [model]

    def is_converted(self, name: str) -> bool:
        """True if peers too take the linear layer of this name: all but the head."""
        return "lm_head" not in name

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Fused AdamW over the model's parameters."""
        return torch.optim.AdamW(model.parameters(), lr=self.preset.lr, fused=True)

    def forward(self, model: nn.Module) -> Any:
        """What the model gives for the batch; memory held for backward is counted behind it."""
        if self.preset.model == "hf-llama":
            return model(input_ids=self.inputs, labels=self.inputs)
        return model(self.inputs)

    def loss(self, output: Any) -> Tensor:
        """The loss of what ``forward`` gave: FP32, a scalar."""
        if self.preset.model == "hf-llama":
            loss: Tensor = output.loss
            return loss
        return F.cross_entropy(output.float().flatten(0, 1), self.tokens[:, 1:].flatten())

    def with_head_loss(self, model: nn.Module) -> nn.Module:
        """The same model; with ``head_loss`` one of Hugging Face computes head and loss as one."""
        if self.preset.head_loss:
            if self.preset.loop == "prepared" and isinstance(model, Llama):
                raise RunError("head_loss with this package's Llama needs a preset whose loop is plain: llama3-8b-4l")
            if not isinstance(model, Llama):
                acceler8.fused_head_loss(model)
        return model

    def own_forward(self, model: nn.Module) -> tuple[Any, Callable[[Any], Tensor]]:
        """``forward`` and what makes its loss, in variants of ours: with ``head_loss`` one operation of both."""
        if not self.preset.head_loss or not isinstance(model, Llama):  # another's model has it inside
            return self.forward(model), self.loss
        hidden, weight = model.hidden(self.inputs), model.lm_head.weight
        return hidden, lambda h: acceler8.head_loss(h.flatten(0, 1), weight, self.tokens[:, 1:].flatten())


def hf_llama(preset: Preset) -> nn.Module:
    """Hugging Face's Llama of the preset's shape, weights from the global generator."""
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        raise MissingLibraryError(
            f"preset {preset.name!r} needs transformers, which is not installed; pip install transformers, or use"
            " --preset llama3-8b-4l"
        ) from None
    model: nn.Module = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=preset.width, intermediate_size=preset.ffn, num_hidden_layers=preset.layers,
            num_attention_heads=preset.heads, num_key_value_heads=preset.kv_heads, vocab_size=preset.vocabulary,
            max_position_embeddings=preset.length,
        )
    )  # fmt: skip
    return model


def plain_trainee(
    work: Work,
    model: nn.Module,
    *,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    is_own: bool = False,
    is_converted: bool = False,
) -> Trainee:
    """A hand-written loop; ``context`` is around the forward. ``is_own``: may use our head."""
    optimizer = work.optimizer(model)
    if is_converted:
        acceler8.attach(model, optimizer)

    def step(after_forward: Callable[[], None]) -> Tensor:
        with context():
            output, loss_of = work.own_forward(model) if is_own else (work.forward(model), work.loss)
        after_forward()
        loss = loss_of(output)
        del output
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Trainee(model, step, context=context)


def prepared_trainee(
    work: Work, model: nn.Module, accelerator: Any, activate: Callable[[], None] = _nothing
) -> Trainee:
    """The loop of a user of an Accelerator, ours or Hugging Face's: ``prepare``, ``backward``, ``step``."""
    prepared, optimizer = accelerator.prepare(model, work.optimizer(model))
    prepared.train()

    def step(after_forward: Callable[[], None]) -> Tensor:
        output = work.forward(prepared)
        after_forward()
        loss = work.loss(output)
        del output
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Trainee(prepared, step, activate)
