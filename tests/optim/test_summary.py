"""What summary() says against what the state takes, and the sizes that are promised."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from acceler8.kernels.adam import MASTER_FORMATS, MOMENT_FORMATS
from acceler8.optim import AdamW, parameter_groups
from tests.optim.support import Net, train

B = torch.bfloat16


@pytest.mark.parametrize("moments", MOMENT_FORMATS)
@pytest.mark.parametrize("master", MASTER_FORMATS)
@pytest.mark.parametrize("quantize", ["matrices", "all", "none"])
def test_bytes_are_those_of_the_tensors_and_known_before_the_first_step(moments, master, quantize):
    net = Net(dtype=B)
    optimizer = AdamW(net.named_parameters(), moments=moments, master=master, quantize=quantize)
    promised = optimizer.summary()
    train(net, optimizer, range(1))
    held = sum(
        t.numel() * t.element_size() for s in optimizer.state.values() for key, t in s.items() if key != "step"
    )  # fmt: skip
    assert promised.state_bytes == held == optimizer.summary().state_bytes
    assert sum(row.parameters for row in promised.rows) == sum(p.numel() for p in net.parameters())
    assert sum(row.tensors for row in promised.rows) == len(list(net.parameters()))


@pytest.mark.parametrize(("master", "most"), [("none", 2.1), ("bf16_remainder", 6.1 - 2), ("fp16", 4.1)])
def test_sizes_of_quantised_parameters(master, most):
    """Moments; with an FP16 master; with an exact master, of which the parameter is 2 bytes."""
    p = nn.Parameter(torch.zeros(4096, 512, dtype=B))
    (row,) = AdamW([p], moments="fp8", master=master).summary().rows
    assert row.moment_bytes_per_parameter + row.master_bytes_per_parameter <= most
    assert row.moment_bytes_per_parameter <= 2.1


def test_the_text_names_formats_blocks_and_reasons():
    net = Net(dtype=B)
    text = str(AdamW(parameter_groups(net), moments="fp8", master="bf16_remainder").summary())
    assert "E4M3 / 128" in text
    assert "UE5M3 / 128" in text
    assert "bf16_remainder" in text
    assert "2.06 + 2.00" in text
    assert "vector" in text
    assert "kept by its group" in text
    assert "Names are not known" not in text
    unnamed = str(AdamW(net.parameters(), moments="fp8").summary())
    assert "build the optimizer from acceler8.optim.parameter_groups(model)" in unnamed.replace("\n", " ")
    named = str(AdamW(net.named_parameters(), moments="fp8").summary())
    assert "embedding" in named
    assert "output head" in named
