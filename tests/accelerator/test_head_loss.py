"""A prepared Hugging Face model whose loss is computed without logits: the same training as with them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import acceler8
from acceler8 import Accelerator
from acceler8.nn import DeferredLogits, Fp8Linear

transformers = pytest.importorskip("transformers")
CONFIG = {
    "vocab_size": 101, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "attn_implementation": "eager",
}  # fmt: skip


def make() -> nn.Module:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)).train()


def train(precision: str, fuse: str, steps: int = 3) -> tuple[list[float], nn.Module, object]:
    """Losses of a few steps of two micro-batches; ``fuse`` before or after prepare, or not at all."""
    accelerator = Accelerator(mixed_precision=precision, cpu=True, gradient_accumulation_steps=2)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if fuse == "before":
        acceler8.fused_head_loss(model)
    model, optimizer = accelerator.prepare(model, optimizer)
    if fuse == "after":
        acceler8.fused_head_loss(model)
    ids = torch.randint(0, 101, (4, 9), generator=torch.Generator().manual_seed(1))
    losses, out = [], None
    for step in range(2 * steps):
        half = ids[2 * (step % 2) :][:2]
        with accelerator.accumulate(model):
            out = model(input_ids=half, labels=half)
            accelerator.backward(out.loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(out.loss.item())
    return losses, model, out


@pytest.mark.parametrize("fuse", ["before", "after"])
@pytest.mark.parametrize("precision", ["no", "bf16", "fp8"])
def test_prepared_before_or_after(precision, fuse):
    want, _, plain = train(precision, "")
    got, model, out = train(precision, fuse)
    # gradients differ by a rounding; AdamW's first steps turn those of small elements into steps of lr
    assert got == pytest.approx(want, rel=1e-5 if precision == "no" else 1e-2)
    assert got[0] == pytest.approx(want[0], rel=1e-3)
    assert isinstance(out.logits, DeferredLogits)
    assert out.loss.dtype == out.logits.dtype == plain.logits.dtype == torch.float32  # raised, as outputs are
    model.eval()  # where logits are read without a word
    assert out.logits.detach().numpy().dtype == "float32"
    assert any(isinstance(m, Fp8Linear) for m in model.modules()) == (precision == "fp8")
    assert model.head_loss_reasons == ()


def test_unwrapped_it_is_the_model_with_the_switch_on():
    accelerator = Accelerator(mixed_precision="fp8", cpu=True)
    model = accelerator.prepare(acceler8.fused_head_loss(make()))
    plain = accelerator.unwrap_model(model)
    assert isinstance(plain, transformers.LlamaForCausalLM)
    ids = torch.arange(9)[None]
    assert isinstance(plain(input_ids=ids, labels=ids).logits, DeferredLogits)
