"""Which norms TransformerEngine takes, and why it leaves the others."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from acceler8 import backends, recipes
from acceler8.backends.transformer_engine import TransformerEngineOptions
from acceler8.backends.transformer_engine.norms import find_norms

TE = backends.find("transformer_engine")


class Root(nn.Module):
    """A norm that divides by something else: none of TransformerEngine's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(32)), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / (x.abs().mean(-1, keepdim=True) + self.eps) * self.weight


class Offset(nn.Module):
    """As Gemma's: the weight is an offset from one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(32)), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return (y * (1.0 + self.weight.float())).type_as(x)


@pytest.mark.parametrize(
    ("make", "kind", "said"),
    [
        (lambda: nn.LayerNorm(32), "layer", None),
        (lambda: nn.RMSNorm(32, eps=1e-6), "rms", None),
        (Offset, "rms", None),
        (lambda: nn.LayerNorm(32, bias=False), "layer", "no bias"),
        (lambda: nn.LayerNorm(32, elementwise_affine=False), None, "no weight"),
        (lambda: nn.RMSNorm(32, elementwise_affine=False, eps=1e-6), None, "no weight"),
        (lambda: nn.LayerNorm((4, 8)), None, "norm over 2 dimensions"),
        (lambda: nn.RMSNorm(32), "rms", "eps is None"),
    ],
)
def test_norms(make, kind, said):
    (found,) = find_norms(nn.ModuleDict({"norm": make()}))
    assert found.name == "norm"
    assert (found.kind.kind if found.kind else None) == kind
    assert found.refusal is None if said is None else said in str(found.refusal)


def test_gemmas_offset_is_seen():
    (found,) = find_norms(nn.Sequential(Offset()))
    assert found.kind is not None
    assert found.kind.weight_offset == 1.0


def test_what_is_no_norm_is_not_listed():
    assert find_norms(nn.Sequential(Root(), nn.Linear(32, 32), nn.BatchNorm1d(32), nn.PReLU(32))) == []


def test_a_hidden_forward_stays():
    norm = nn.LayerNorm(32)
    norm.forward = lambda x: x
    (found,) = find_norms(nn.Sequential(norm, nn.LayerNorm(32)))[:1]
    assert found.refusal is not None


def test_every_module_once_with_one_look_at_each_kind():
    shared = nn.LayerNorm(32)
    names = [norm.name for norm in find_norms(nn.Sequential(shared, nn.LayerNorm(32), shared))]
    assert names == ["0", "1"]


def test_the_plan_is_told():
    model = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.LayerNorm(32, bias=False))
    told = {also.name: also.refusal for also in TE.also_converts(model, recipes.get("tensorwise"))}
    assert told == {"0": None, "2": "no bias, and TransformerEngine's LayerNorm always has one"}
    off = TransformerEngineOptions(convert_norms=False)
    told = {also.name: also.refusal for also in TE.also_converts(model, recipes.get("tensorwise"), off)}
    assert told["0"] == "convert_norms is off"


def test_norms_of_transformers():
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

    model = nn.ModuleDict({"llama": modeling.LlamaRMSNorm(32), "gemma": GemmaRMSNorm(32)})
    found = {norm.name: norm for norm in find_norms(model)}
    assert found["llama"].refusal is None
    assert found["gemma"].refusal is None
    assert found["gemma"].kind.weight_offset == 1.0
