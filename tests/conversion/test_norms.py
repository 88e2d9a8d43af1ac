"""Which modules a plan takes for norms: by what they compute, and none that only looks like one."""

from __future__ import annotations

import copy
import json
import random

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import acceler8
from acceler8.conversion import Plan
from acceler8.errors import PlanError, VerifyError
from acceler8.nn import FusedNorm, NormKind, fused_norms
from acceler8.nn.find_norm import find_norm
from tests.models import Mlp, assert_equal, batch, outcome


class Own(nn.Module):
    """An RMSNorm as users write it: the weight times the value in x's dtype."""

    def __init__(self, width: int = 32, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def normal(self, x: Tensor) -> Tensor:
        wide = x.float()
        return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * self.normal(x).to(x.dtype)


class InFp32(Own):
    def forward(self, x):
        return (self.normal(x) * self.weight.float()).to(x.dtype)


class Offset(Own):
    def forward(self, x):
        return (self.normal(x) * (1.0 + self.weight.float())).type_as(x)


class OwnLayerNorm(nn.LayerNorm):
    """In FP32 inside and back: autocast changes nothing of it."""

    def forward(self, x):
        bias = None if self.bias is None else self.bias.float()
        return F.layer_norm(x.float(), self.normalized_shape, self.weight.float(), bias, self.eps).to(x.dtype)


FOUND = [
    (Own, NormKind("rms", 0.0, True, False, "eps")),
    (InFp32, NormKind("rms", 0.0, False, False, "eps")),
    (Offset, NormKind("rms", 1.0, False, False, "eps")),
    (lambda: OwnLayerNorm(32), NormKind("layer", 0.0, False, False, "eps")),
    (lambda: nn.LayerNorm(32), NormKind("layer", 0.0, False, True, "eps")),
    (lambda: nn.LayerNorm(32, bias=False, eps=1e-3), NormKind("layer", 0.0, False, True, "eps")),
    (lambda: nn.RMSNorm(32, eps=1e-6), NormKind("rms", 0.0, False, True, "eps")),
    (lambda: nn.RMSNorm(32), NormKind("rms", 0.0, False, True, "eps")),
    (lambda: Own(17), NormKind("rms", 0.0, True, False, "eps")),
    (lambda: Own().bfloat16().requires_grad_(False), NormKind("rms", 0.0, True, False, "eps")),
]


@pytest.mark.parametrize(("make", "kind"), FOUND)
@pytest.mark.parametrize("training", [True, False])
def test_found_by_what_it_computes(make, kind, training):
    assert find_norm(make().train(training)) == kind
    with torch.device("meta"):
        assert find_norm(make()) == kind
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert find_norm(make()) == kind


# ------------------------------------------------------------------------------------------------------ near misses


class Dropped(Own):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.1, self.training)


class Notes(Own):
    def forward(self, x):
        self.seen = x.shape
        return super().forward(x)


class Keeps(Own):
    def __init__(self):
        super().__init__()
        self.kept = []

    def forward(self, x):
        self.kept.append(x.amax())
        return super().forward(x)


class DetachedScale(Own):
    def normal(self, x):
        wide = x.float()
        return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps).detach()


class DetachedWeight(Own):
    def forward(self, x):
        return self.weight.detach() * self.normal(x).to(x.dtype)


class EpsOutside(Own):
    def normal(self, x):
        wide = x.float()
        return wide / (wide.pow(2).mean(-1, keepdim=True).sqrt() + self.eps)


class Unbiased(Own):
    def normal(self, x):
        return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) / (x.shape[-1] - 1) + self.eps)


class Narrow(Own):
    """Not in FP32 inside: another result in BF16 only."""

    def normal(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class Clamped(Own):
    def forward(self, x):
        return super().forward(x.clamp(-1000, 1000))


class OfMagnitude(Own):
    def forward(self, x):
        return self.weight.abs() * self.normal(x).to(x.dtype)


class Flat(Own):
    def forward(self, x):
        return super().forward(x).reshape(-1, x.shape[-1])


class InTraining(Own):
    def forward(self, x):
        return super().forward(x) * (1.5 if self.training else 1.0)


class Twice(Own):
    def forward(self, x):
        return super().forward(x), x


class AutocastInside(Own):
    """PyTorch's own norm before the weight: autocast would keep it from being rounded."""

    def forward(self, x):
        return self.weight * F.rms_norm(x, (32,), eps=self.eps)


class TwoEps(Own):
    def __init__(self):
        super().__init__()
        self.other_eps = 1e-5


class Buffered(Own):
    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros(1))


class Patched(Own):
    def __init__(self):
        super().__init__()
        self.forward = lambda x: x


class OwnDefault(Own):
    """None stands for another number than PyTorch's."""

    def __init__(self):
        super().__init__()
        self.eps = None

    def normal(self, x):
        wide = x.float()
        return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + torch.finfo(torch.bfloat16).eps)


class NoEps(OwnDefault):
    def normal(self, x):
        wide = x.float()
        return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True))


class TwoDefaults(OwnDefault):
    def __init__(self):
        super().__init__()
        self.other_eps = None


def subclassed() -> nn.Module:
    norm = Own()
    norm._parameters["weight"] = nn.Parameter(torch.ones(32).as_subclass(type("Sharded", (Tensor,), {})))
    return norm


MISSES = [
    Dropped, Notes, Keeps, DetachedScale, DetachedWeight, EpsOutside, Unbiased, Narrow, Clamped, OfMagnitude, Flat,
    InTraining, Twice, AutocastInside, TwoEps, Buffered, Patched, subclassed,
    OwnDefault, NoEps, TwoDefaults, lambda: nn.LayerNorm(32, elementwise_affine=False), lambda: nn.LayerNorm((4, 32)),
    lambda: nn.GroupNorm(1, 32), lambda: nn.BatchNorm1d(32), lambda: Own(eps=0.5), lambda: Own(16385),
    lambda: nn.Linear(32, 32), lambda: nn.Embedding(32, 32),
]  # fmt: skip


@pytest.mark.parametrize("make", MISSES)
@pytest.mark.parametrize("training", [True, False])
def test_near_misses(make, training):
    norm = make().train(training)
    before = copy.copy(vars(norm))
    state, dice = torch.get_rng_state(), random.getstate()
    assert find_norm(norm) is None
    assert vars(norm) == before
    assert vars(norm).get("kept", []) == []
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == dice


# ---------------------------------------------------------------------------------------------------------- the plan


class Inside(nn.Module):
    """A norm in a module of its own, as adapters and wrappers make them."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.mlp = Mlp(seed)
        self.mlp.norm = nn.Sequential(self.mlp.norm)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x)


def model_of(*blocks: nn.Module) -> nn.Sequential:
    return nn.Sequential(*blocks)


def norms(plan: Plan) -> list[str]:
    return [fusion.name for fusion in plan.fusions if fusion.kind == "norm"]


def test_only_norms_beside_fp8_layers():
    model = model_of(Mlp(0), Mlp(1), Inside(2), Inside(3), nn.LayerNorm(32), nn.LayerNorm(48))
    plan = acceler8.plan(model, {"1": None, "2": None, "*": "rowwise"})
    assert norms(plan) == ["0.norm", "3.mlp.norm.0", "4"]  # 48 is a width that no FP8 layer reads
    assert norms(acceler8.plan(model, fuse=False)) == []
    acceler8.convert(model, plan)
    for block, plain in ((model[1], Mlp(1)), (model[2], Inside(2))):
        assert_equal(outcome(block, batch()), outcome(plain, batch()))


@pytest.mark.parametrize("setting", [{"fp8_last_layers": "0:1,1:all"}, {"fp8_steps": "1:"}])
def test_norms_in_high_precision_are_the_authors(setting):
    model = acceler8.convert(nn.ModuleList([Inside(0), Inside(1)]), "rowwise", **setting)
    plain = nn.ModuleList([Inside(0), Inside(1)])
    late = 1 if "fp8_last_layers" in setting else 2
    for block, its in list(zip(model, plain, strict=True))[:late]:
        assert_equal(outcome(block, batch()), outcome(its, batch()))
        assert block.mlp.norm[0]._acceler8_norm.why_not == "high precision"
    acceler8.step(model)
    for block in model:
        outcome(block, batch())
        assert block.mlp.norm[0]._acceler8_norm.why_not is None


def test_said_in_the_plan_and_kept_in_json():
    plan = acceler8.plan(model_of(Mlp(), Mlp()))
    assert "fused: 2 x norm (LayerNorm), such as 0.norm" in str(plan)
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    data = plan.to_dict()
    data["fusions"][0]["norm"].pop("eps")
    with pytest.raises(PlanError, match="or a fusion, are not as Plan"):
        Plan.from_dict(data)


def other_class(model: nn.Module) -> None:
    model[0].norm = Own()


def other_formula(model: nn.Module) -> None:
    model[0].norm = Dropped()


def no_norm(model: nn.Module) -> None:
    model[0].norm = nn.Identity()


@pytest.mark.parametrize("change", [other_class, other_formula, no_norm])
def test_a_norm_that_is_not_the_planned_one(change):
    plan, model = acceler8.plan(model_of(Mlp())), model_of(Mlp())
    change(model)
    with pytest.raises(PlanError, match=r"the plan runs LayerNorm of '0.norm' in one kernel \(norm\), which this Seq"):
        acceler8.convert(model, plan)
    assert type(model[0].up) is nn.Linear


def test_a_hook_between_plan_and_conversion_is_no_other_norm():
    model = model_of(Mlp())
    plan, calls = acceler8.plan(model), []
    model[0].norm.register_forward_hook(lambda *_: calls.append(1))
    acceler8.convert(model, plan)
    assert not calls
    assert isinstance(model[0].norm, FusedNorm)
    model(batch())
    assert len(calls) == 1


# ------------------------------------------------------------------------------------------------------------ verify


def verified(model: nn.Module) -> dict[str, str]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    acceler8.attach(model, optimizer)

    def step() -> None:
        optimizer.zero_grad()
        model(batch()).square().mean().backward()
        optimizer.step()

    return acceler8.verify(model, optimizer, step=step).checks


def test_verify_says_which_ran_and_finds_another_formula():
    model = acceler8.convert(model_of(Mlp(), Mlp(1), Mlp(2)), "rowwise")
    model[1].norm.eps = 0.01
    said = "2 of 3 norms ran in one kernel; 1 did not, such as 1.norm: eps is not what it was at conversion"
    assert verified(model)["fused"] == said
    model = acceler8.convert(model_of(Mlp()), "rowwise")
    state = dict(fused_norms(model))["0.norm"]._acceler8_norm
    state.kind = NormKind("rms", 0.0, False, True, "eps")
    with pytest.raises(VerifyError, match=r"fused: 0\.norm in one kernel differs from its own forward by "):
        verified(model)
