"""Models of transformers and PEFT under FSDP2 against replicas: slow, for their imports take seconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

import acceler8
from acceler8 import Accelerator, verify
from tests.accelerator.fsdp_support import fp8, in_fp32, make_optimizer, parameters


def llama(*, tied: bool) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=tied,
    )  # fmt: skip
    model: nn.Module = LlamaForCausalLM(config)
    return model


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(3)
    config = BertConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model: nn.Module = BertForSequenceClassification(config)
    return model


def lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    model: nn.Module = get_peft_model(llama(tied=False), LoraConfig(r=8, target_modules=["q_proj", "down_proj"]))
    return model


def ids(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randint(0, 128, (4, 16), generator=generator)


def train(accelerator: Accelerator, model: nn.Module, *, classes: bool = False) -> tuple[list[float], nn.Module, Any]:
    trained = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = accelerator.prepare(model, make_optimizer(trained))
    losses = []

    def step(number: int = 2) -> None:
        x = ids(number)
        loss = model(input_ids=x, labels=x[:, 0] % 2 if classes else x).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    for number in range(2):
        step(number)
    report = verify(model, optimizer, step=step)
    return losses, model, report


def equals_replicas(make: Callable[[], nn.Module], ways: list[dict[str, Any]], **options: Any) -> list[nn.Module]:
    """Each way of sharding gives what replicas give, bit for bit, for nothing is clipped."""
    want, replica, _ = train(fp8(), make(), **options)
    ends = parameters(replica)
    models = []
    for way in ways:
        got, model, _ = train(fp8(fsdp_plugin=in_fp32(**way)), make(), **options)
        assert got == want, way
        for name, value in parameters(model).items():
            assert torch.equal(value, ends[name]), (name, way)
        models.append(model)
    return models


def causal_models() -> None:
    ways: list[dict[str, Any]] = [{}, {"activation_checkpointing": True}, {"cpu_ram_efficient_loading": True}]
    first, checkpointed, _ = equals_replicas(lambda: llama(tied=False), ways)
    units = [name for name, module in first.named_modules() if isinstance(module, FSDPModule)]
    assert units == ["", *(f"model.{n}" for n in ("embed_tokens", "layers.0", "layers.1", "norm")), "lm_head"]
    assert checkpointed.model.layers[0].gradient_checkpointing
    generates(first)


def generates(model: Any) -> None:
    """Shards generate, in step on all processes, what the whole model does."""
    whole: Any = llama(tied=False)
    whole.load_state_dict(parameters(model))
    prompt = torch.arange(8).view(1, 8)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        want = whole.eval().generate(prompt, max_new_tokens=4, do_sample=False)
    with torch.no_grad():
        got = model.eval().generate(prompt, max_new_tokens=4, do_sample=False)
    assert got.tolist() == want.tolist()


def tied_models() -> None:
    """One weight in one unit, also where the head's loss is computed without its logits.

    Its two gradients add up in another order than in a replica, and AdamW makes that a step as large as any other.
    """
    want, _, _ = train(fp8(), llama(tied=True))
    for fused in (False, True):
        model: Any = llama(tied=True)
        if fused:
            acceler8.fused_head_loss(model)
        got, model, report = train(fp8(fsdp_plugin=in_fp32()), model)
        assert report.checks["ties"] == "1 ties"
        assert model.lm_head.weight is model.model.embed_tokens.weight
        torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=2e-2, atol=0)
        assert not fused or model.head_loss_reasons == ()


def encoder() -> None:
    equals_replicas(bert, [{}, {"activation_checkpointing": True}], classes=True)


def adapters() -> None:
    """LoRA: a frozen base in FP8 and adapters that are trained, sharded alike."""
    (model, *_) = equals_replicas(lora, [{}, {"cpu_ram_efficient_loading": True}])
    assert sum(p.requires_grad for p in model.parameters()) == 8


SCENARIOS = {check.__name__: check for check in (causal_models, tied_models, encoder, adapters)}
