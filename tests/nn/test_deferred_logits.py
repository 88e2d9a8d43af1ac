"""Logits that nobody reads are not computed; whoever reads them gets what the head would have given."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from acceler8.nn import DeferredLogits


def make(autocast: bool = False) -> tuple[DeferredLogits, torch.Tensor, list[str]]:
    """Deferred logits, the same computed, and the list of what was read."""
    torch.manual_seed(0)
    head, hidden = nn.Linear(8, 13), torch.randn(2, 5, 8)
    read: list[str] = []
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = DeferredLogits(hidden, head, torch.bfloat16 if autocast else torch.float32, (), read.append)
        return logits, head(hidden), read


STEPS = {
    "granite": (lambda z: z / 4.0, (0.25, None)),
    "cohere": (lambda z: 0.3 * z, (0.3, None)),
    "gemma": (lambda z: torch.tanh(z / 3.0) * 3.0, (1.0, 3.0)),
    "both": (lambda z: (torch.div(z.float(), 2) / 5).tanh() * 5, (0.5, 5.0)),
    "functions": (lambda z: torch.mul(2.0, torch.tanh(torch.mul(z, 3))).float().contiguous(), (6.0, 2.0)),
    "unchanged": (lambda z: z.to(torch.float32).to("cpu"), (1.0, None)),
    "in place": (lambda z: z.__mul__(2), (2.0, None)),
}


@pytest.mark.parametrize("name", STEPS)
def test_steps_on_the_way_to_the_loss_are_noted(name):
    steps, (scale, cap) = STEPS[name]
    logits, plain, read = make()
    after = steps(logits)
    assert isinstance(after, DeferredLogits)
    got = after.scale()
    assert got.scale == pytest.approx(scale, rel=1e-12)
    assert got.cap == cap
    assert read == []
    assert torch.equal(after.compute(), steps(plain))
    assert read == ["compute"]


def test_what_a_loss_kernel_does_not_do_is_no_scale():
    logits, plain, _ = make()
    twice = torch.tanh(torch.tanh(logits))
    assert twice.scale() is None
    assert torch.equal(twice.compute(), plain.tanh().tanh())
    assert (torch.tanh(logits) * 0).scale() is None


READS = {
    "index": lambda z: z[..., :-1, :],
    "argmax": lambda z: z.argmax(-1),
    "function": lambda z: torch.softmax(z, -1),
    "cross_entropy": lambda z: F.cross_entropy(z.view(-1, 13), torch.zeros(10, dtype=torch.int64)),
    "minus": lambda z: 1 - z,
    "comparison": lambda z: z > 0.1,
    "equality": lambda z: z == z,
    "tensor factor": lambda z: z * torch.tensor(2.0),
    "factor of a tensor": lambda z: torch.ones(13) * z,
    "half": lambda z: z.to(torch.float16),
    "list": lambda z: torch.stack([*z]),
    "detach": lambda z: z.detach(),
    "cat": lambda z: torch.cat([z, z]),
    "after a cap": lambda z: (torch.tanh(z) + 1)[0],
}


@pytest.mark.parametrize("name", READS)
def test_reading_computes_them(name):
    logits, plain, read = make()
    assert torch.equal(READS[name](logits), READS[name](plain))
    assert read


def test_numpy_copies_and_pickles():
    logits, plain, _ = make()
    plain = plain.detach()
    assert (torch.as_tensor(logits.detach().numpy()) == plain).all()
    assert torch.equal(copy.deepcopy(logits), plain)
    assert torch.equal(pickle.loads(pickle.dumps(logits)), plain)


def test_facts_are_known_without_reading():
    logits, plain, read = make()
    assert (logits.shape, logits.size(-1), logits.size(), logits.dim(), logits.ndim, logits.device, logits.dtype) == (
        plain.shape, 13, plain.size(), 3, 3, plain.device, plain.dtype,
    )  # fmt: skip
    assert repr(logits) == "DeferredLogits(shape=(2, 5, 13), dtype=torch.float32; computed when they are read)"
    assert not hasattr(logits, "no_such_thing")
    assert not hasattr(logits, "__dataclass_fields__")
    assert read == []


def test_autocast_of_the_forward_holds():
    logits, plain, _ = make(autocast=True)
    assert plain.dtype == logits.dtype == torch.bfloat16
    assert torch.equal(logits.compute(), plain)
    assert logits.float().dtype == torch.float32
    assert torch.equal(logits.float().compute(), plain.float())


def test_gradients_flow_through_logits_that_were_read():
    logits, _, _ = make()
    logits.sum().backward()
    assert logits.head.weight.grad is not None
