"""Models, data and the training loop of the DeepSpeed tests: the same script for one process, DDP and ZeRO."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from acceler8 import Accelerator, recipes
from acceler8.utils import DeepSpeedPlugin

Facts = dict[str, Any]
WIDTH, VOCABULARY, STEPS, MICRO_BATCHES, LR, CLIP = 64, 128, 3, 2, 1e-2, 0.2
_OF_FLOATS = ("plain", "number", "gated")
ROWS_ALONE = recipes.get("rowwise").with_gemms(wgrad=False)
"""Scales by token, and sums over tokens in high precision: a batch may be split in any way."""


class Temperature(nn.Module):
    """A trained number: its weight, its moments and the optimizer's count have the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Plain(nn.Module):
    """An odd number of weights in every layer, so that parts differ in size; one layer is frozen; ``with_number`` at
    the end, which is the optimizer's last parameter.
    """

    def __init__(self, *, with_number: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 80)
        self.norm = nn.LayerNorm(80)
        self.down = nn.Linear(80, WIDTH)
        self.fixed = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 7)
        self.temperature = Temperature() if with_number else nn.Identity()
        self.register_buffer("seen", torch.zeros(3))
        self.fixed.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.temperature(self.head(self.fixed(self.down(F.gelu(self.norm(self.up(x)))))))


class GatedMLP(nn.Module):
    """Fused by the native backend, and called by keyword: DeepSpeed sees no tensor go in."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, 128, bias=False)
        self.up_proj = nn.Linear(WIDTH, 128, bias=False)
        self.down_proj = nn.Linear(128, WIDTH, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Gated(nn.Module):
    """Two of them, one behind the other, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = GatedMLP(), GatedMLP()
        self.head = nn.Linear(WIDTH, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x=x)
        return self.head(x + self.second(x))


def make_model(kind: str) -> nn.Module:
    """``plain``, ``number`` (the same with a Parameter without dimensions), ``gated``, ``bert``, or ``llama``: q, k
    and v together, a gated MLP, tied embeddings.
    """
    torch.manual_seed(3)
    if kind in _OF_FLOATS:
        return Gated() if kind == "gated" else Plain(with_number=kind == "number")
    import transformers

    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    if kind == "bert":
        dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        config = transformers.BertConfig(**sizes, **dropout, num_attention_heads=4)
        return transformers.BertForMaskedLM(config)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, **heads, max_position_embeddings=64, tie_word_embeddings=True)
    return transformers.LlamaForCausalLM(config)


def make_data(kind: str, ranks: int, seed: int = 5) -> list[list[tuple[Tensor, Tensor]]]:
    """For each micro-batch, the input and target of each rank; ranks 2 and on see what 0 and 1 see."""
    generator = torch.Generator().manual_seed(seed)

    def sample() -> tuple[Tensor, Tensor]:
        if kind in _OF_FLOATS:
            return torch.randn(32, WIDTH, generator=generator), torch.randn(32, 7, generator=generator)
        ids = torch.randint(VOCABULARY, (4, 8), generator=generator)
        return ids, ids

    return [([sample(), sample()] * ranks)[:ranks] for _ in range(STEPS * MICRO_BATCHES)]


def loss_of(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    """The mean over tokens."""
    if x.is_floating_point():
        return F.mse_loss(model(x), target)
    return model(input_ids=x, labels=target).loss


def make_accelerator(way: str, *, recipe: Any = "rowwise", engine: str = "fp32", **options: Any) -> Accelerator:
    """``ddp``, or ``zero`` with a stage. engine: fp32 keeps FP32 weights, bf16 is what ``fp8`` gives."""
    zero = options.pop("zero", {})
    config = options.pop("config", {})
    if way.startswith("zero"):
        section = {"stage": int(way[4:]), "stage3_param_persistence_threshold": 0, **zero}
        config = {"zero_optimization": section, **({"bf16": {"enabled": False}} if engine == "fp32" else {}), **config}
        flag = options.pop("zero3_init_flag", None)
        options["deepspeed_plugin"] = DeepSpeedPlugin(hf_ds_config=config, zero3_init_flag=flag)
    options.setdefault("mixed_precision", "fp8")
    if options["mixed_precision"] == "fp8":
        options["recipe"] = recipe
    return Accelerator(cpu=True, gradient_accumulation_steps=MICRO_BATCHES, **options)


class Training:
    """One training with everything that a script prepares; ``run`` gives what happened.

    optimizer: ``sgd`` moves by the size of a gradient, which ``adamw`` normalises away. pace: a schedule moves once for
        each process in a step, so one process that stands for several moves as often.
    """

    def __init__(
        self, accelerator: Accelerator, kind: str, *, optimizer: str = "sgd", pace: int | None = 1, model: Any = None
    ) -> None:
        self.accelerator = accelerator
        model = make_model(kind) if model is None else model
        rest = ("norm", "bias", "scale")
        decayed = {name: not any(word in name for word in rest) for name, _ in model.named_parameters()}
        groups = [
            {"params": [p for name, p in model.named_parameters() if decayed[name]]},
            {"params": [p for name, p in model.named_parameters() if not decayed[name]], "weight_decay": 0.0},
        ]
        if optimizer == "sgd":
            made: torch.optim.Optimizer = torch.optim.SGD(groups, lr=10 * LR, momentum=0.9, weight_decay=0.1)
        else:
            made = torch.optim.AdamW(groups, lr=LR, weight_decay=0.1)
        self.model, self.optimizer = accelerator.prepare(model, made)
        self.scheduler = None
        if pace is not None:
            slower = torch.optim.lr_scheduler.LambdaLR(made, lambda step: 1 / (1 + 0.2 * pace * step))
            self.scheduler = accelerator.prepare(slower)

    def micro_batch(self, x: Tensor, target: Tensor, norms: list[float] | None = None) -> float:
        accelerator = self.accelerator
        with accelerator.accumulate(self.model):
            loss = loss_of(self.model, x, target)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(self.model.parameters(), CLIP)
                if norms is not None:
                    norms.append(float(norm))
            self.optimizer.step()
            if self.scheduler is not None:
                self.scheduler.step()
            self.optimizer.zero_grad()
        return loss.item()

    def run(self, data: list[list[tuple[Tensor, Tensor]]], rank: int | None) -> Facts:
        """``rank`` None trains on all ranks' samples in one batch."""
        losses: list[float] = []
        norms: list[float] = []
        for of_ranks in data:
            x, target = of_ranks[rank] if rank is not None else map(torch.cat, zip(*of_ranks, strict=True))
            losses.append(self.micro_batch(x, target, norms))
        return {"losses": losses, "norms": norms, "lr": [group["lr"] for group in self.optimizer.param_groups]}

    def weights(self) -> dict[str, Tensor]:
        """Whole FP32 weights and buffers; of ZeRO on process 0 only."""
        state = self.accelerator.strategy.model_state(self.model)
        return {name: value.clone() for name, value in state.items()}

    def states(self) -> dict[str, Any]:
        """The optimizer's whole state."""
        return copy.deepcopy(self.accelerator.strategy.optimizer_state(self.optimizer.optimizer))

    def load(self, weights: dict[str, Any], states: dict[str, Any]) -> None:
        """Put whole states in; of ZeRO those of process 0 count."""
        strategy = self.accelerator.strategy
        strategy.load_model_state(self.model, weights, lambda model, state: model.load_state_dict(state))
        strategy.load_optimizer_state(self.optimizer.optimizer, states)


def message_of(call: Callable[[], Any]) -> str:
    """The error of a call."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"
