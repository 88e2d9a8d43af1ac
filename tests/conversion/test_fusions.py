"""What a plan fuses: found by structure in models of others, and not in what only looks like it."""

from __future__ import annotations

import copy
import json
import random
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import acceler8
from acceler8 import recipes
from acceler8.conversion import Plan, fusions
from acceler8.conversion.find_mlp import GatedMLP, find_mlp, recognise
from acceler8.errors import PlanError, VerifyError
from acceler8.functional import LinearSlots
from acceler8.nn import FusedMLP, NormKind, state_of
from acceler8.scaling import LINE, AmaxSlot
from tests.models import batch

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def hf(kind: str, **options: object) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **options})
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def said(model: nn.Module, *args: object, **kwargs: object) -> dict[str, int]:
    """How often each fusion is planned, by kind and parts."""
    counts: dict[str, int] = {}
    for fusion in acceler8.plan(model, *args, **kwargs).fusions:
        key = f"{fusion.kind}: {' '.join(fusion.parts)}"
        counts[key] = counts.get(key, 0) + 1
    return counts


def norms(model: nn.Module, *args: object, **kwargs: object) -> dict[str, NormKind | None]:
    plan = acceler8.plan(model, *args, **kwargs)
    return {fusion.name: fusion.norm for fusion in plan.fusions if fusion.kind == "norm"}


def mlps(model: nn.Module, *args: object, **kwargs: object) -> list[str]:
    return [fusion.name for fusion in acceler8.plan(model, *args, **kwargs).fusions if fusion.kind == "gated MLP"]


LLAMA = NormKind("rms", weight_offset=0.0, cast_before_weight=True, autocasts=False, eps="variance_epsilon")
OF_LLAMA = [
    *(f"model.layers.{i}.{name}" for i in range(2) for name in ("input_layernorm", "post_attention_layernorm")),
    "model.norm",
]


class Gated(nn.Module):
    def __init__(self, width: int = 32, hidden: int = 128, *, bias: bool = False) -> None:
        super().__init__()
        self.a = nn.Linear(width, hidden, bias=bias)
        self.b = nn.Linear(width, hidden, bias=bias)
        self.c = nn.Linear(hidden, width, bias=bias)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.act(self.a(x)) * self.b(x))


# ------------------------------------------------------------------------------------------------------ where found


@pytest.mark.parametrize(
    ("kind", "activation"),
    [("Llama", "silu"), ("Mistral", "silu"), ("Qwen2", "silu"), ("Qwen3", "silu"), ("Gemma", "gelu_tanh")],
)
def test_llama_like(kind, activation):
    model = hf(kind)
    assert said(model) == {
        "merged linears: q_proj k_proj v_proj": 2,
        f"gated MLP: gate_proj up_proj down_proj {activation}": 2,
        "norm: RMSNorm": 5,
    }
    gemma = NormKind("rms", weight_offset=1.0, cast_before_weight=False, autocasts=False, eps="eps")
    assert norms(model) == dict.fromkeys(OF_LLAMA, gemma if kind == "Gemma" else LLAMA)  # not those of Qwen3's heads


def test_smollm_like():
    """Llama with tied embeddings and grouped queries."""
    model = hf("Llama", tie_word_embeddings=True, num_attention_heads=4, num_key_value_heads=1, head_dim=8)
    assert said(model) == {  # 8 values of one head: k and v stay in high precision
        "gated MLP: gate_proj up_proj down_proj silu": 2,
        "norm: RMSNorm": 5,
    }
    assert norms(model) == dict.fromkeys(OF_LLAMA, LLAMA)


def test_phi3():
    model = hf("Phi3")
    assert said(model) == {"gated MLP: gate_up_proj down_proj silu": 2, "norm: RMSNorm": 5}
    assert norms(model) == dict.fromkeys(OF_LLAMA, LLAMA)


@pytest.mark.parametrize("name", ["Bert", "ViT"])
def test_encoders(name):
    import transformers

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**sizes))
    counts = said(model)
    assert counts.pop("norm: LayerNorm") == 5
    if "MLP: fc1 fc2 gelu" in counts:  # Transformers' newer ViT has its MLP in one module
        assert counts.pop("MLP: fc1 fc2 gelu") == 2
    (key,) = counts
    assert key in ("merged linears: query key value", "merged linears: q_proj k_proj v_proj")
    assert counts[key] == 2
    layer_norm = NormKind("layer", weight_offset=0.0, cast_before_weight=False, autocasts=True, eps="eps")
    every = [module_name for module_name, module in model.named_modules() if isinstance(module, nn.LayerNorm)]
    assert norms(model) == dict.fromkeys(every, layer_norm)


class Function(Gated):
    def forward(self, x):
        return self.c(torch.mul(self.b(x), F.gelu(self.a(x), approximate="tanh")))


class Attribute(Gated):
    def __init__(self):
        super().__init__()
        self.act = None
        self.function = F.relu

    def forward(self, hidden_states):
        gate = self.function(self.a(hidden_states))
        return self.c(gate * self.b(hidden_states))


class Wrapped(Gated):
    def __init__(self):
        super().__init__()
        self.act = nn.Sequential(nn.GELU(), nn.Dropout(0.0))


FOUND = [(Gated, "silu"), (Function, "gelu_tanh"), (Attribute, "relu"), (Wrapped, "gelu")]


@pytest.mark.parametrize(("kind", "activation"), FOUND, ids=[kind.__name__ for kind, _ in FOUND])
@pytest.mark.parametrize("training", [True, False])
def test_found_whatever_it_is_called(kind, activation, training):
    assert find_mlp(kind().train(training)) == GatedMLP(("a", "b", "c"), activation)


# ------------------------------------------------------------------------------------------------------ near misses


class Dropped(Gated):
    def forward(self, x):
        return self.c(F.dropout(self.act(self.a(x)) * self.b(x), 0.1, self.training))


class DroppedInTraining(Gated):
    def forward(self, x):
        h = self.act(self.a(x)) * self.b(x)
        if self.training:
            h = F.dropout(h, 0.1)
        return self.c(h)


class DroppedByActivation(Gated):
    def __init__(self):
        super().__init__()
        self.act = nn.Sequential(nn.SiLU(), nn.Dropout(0.1))


class Residual(Gated):
    def forward(self, x):
        return x + self.c(self.act(self.a(x)) * self.b(x))


class BothActivated(Gated):
    def forward(self, x):
        return self.c(self.act(self.a(x)) * self.act(self.b(x)))


class UpScaled(Gated):
    def forward(self, x):
        return self.c(self.act(self.a(x)) * (0.5 * self.b(x)))


class UpAgain(Gated):
    def forward(self, x):
        up = self.b(x)
        return self.c(self.act(self.a(x)) * up) + up.mean()


class OtherInput(Gated):
    def forward(self, x):
        return self.c(self.act(self.a(x)) * self.b(x * 1.0))


class TwoInputs(Gated):
    def forward(self, x, z=None):
        return self.c(self.act(self.a(x)) * self.b(x))


class Loop(Gated):
    def forward(self, x):
        for _ in range(2):
            x = self.c(self.act(self.a(x)) * self.b(x))
        return x


class DownTwice(Gated):
    def forward(self, x):
        h = self.act(self.a(x)) * self.b(x)
        return self.c(h) + self.c(h)


class SameTwice(Gated):
    def forward(self, x):
        return self.c(self.act(self.a(x)) * self.a(x))


class Unknown(Gated):
    def forward(self, x):
        return self.c(torch.tanh(self.a(x)) * self.b(x))


class Clipped(Gated):
    """Beyond what activations usually see."""

    def forward(self, x):
        return self.c(F.silu(self.a(x)).clamp(max=20.0) * self.b(x))


class ClippedInside(Gated):
    def __init__(self):
        super().__init__()
        self.act = type("Act", (nn.Module,), {"forward": lambda self, x: F.silu(x).clamp(max=20.0)})()


class WithoutGrad(Gated):
    def forward(self, x):
        with torch.no_grad():
            up = self.b(x)
        return self.c(self.act(self.a(x)) * up)


class WithoutAutocast(Gated):
    def forward(self, x):
        up = self.b(x)
        with torch.autocast("cpu", enabled=False):
            return self.c(self.act(self.a(x)) * up)


class InAutocast(Gated):
    def forward(self, x):
        up = self.b(x)
        with torch.autocast("cpu", torch.bfloat16):
            return self.c(self.act(self.a(x)) * up)


class Notes(Gated):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return self.c(self.act(self.a(x)) * self.b(x))


class Keeps(Gated):
    def __init__(self):
        super().__init__()
        self.kept = []

    def forward(self, x):
        h = self.act(self.a(x)) * self.b(x)
        self.kept.append(h)
        return self.c(h)


class Dice(Gated):
    def forward(self, x):
        if random.random() < 0.0 or torch.rand(()) < 0.0:
            return x
        return self.c(self.act(self.a(x)) * self.b(x))


class Aside(Gated):
    def forward(self, x):
        out = self.c(self.act(self.a(x)) * self.b(x))
        torch.zeros_like(out)
        return out


class UpLeft(nn.Module):
    """Halves the other way round."""

    def __init__(self):
        super().__init__()
        self.ab = nn.Linear(32, 256, bias=False)
        self.c = nn.Linear(128, 32, bias=False)

    def forward(self, x):
        up, gate = self.ab(x).chunk(2, dim=-1)
        return self.c(F.silu(gate) * up)


class Thirds(UpLeft):
    def forward(self, x):
        gate, up = self.ab(x).chunk(2, dim=0)
        return self.c(F.silu(gate) * up)


MISSES: list[Callable[[], nn.Module]] = [
    Dropped, DroppedInTraining, DroppedByActivation, Residual, BothActivated, UpScaled, UpAgain, OtherInput, TwoInputs,
    Loop, DownTwice, SameTwice, Unknown, Clipped, ClippedInside, WithoutGrad, WithoutAutocast, InAutocast, Notes,
    Keeps, Dice, Aside, UpLeft, Thirds,
]  # fmt: skip


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", MISSES, ids=lambda kind: kind.__name__)
def test_near_misses(kind, training):
    model = kind().train(training)
    assert not isinstance(find_mlp(model), GatedMLP)
    assert mlps(model) == []
    assert vars(model).get("calls", 0) == 0
    assert vars(model).get("kept", []) == []


def test_what_recipes_and_shapes_rule_out():
    assert mlps(Gated()) == [""]
    assert mlps(Gated(bias=True)) == []
    assert mlps(Gated(hidden=48)) == [""]
    assert mlps(Gated(hidden=48), "mxfp8") == []
    assert mlps(Gated(hidden=96), "blockwise") == []
    assert mlps(Gated(hidden=128), "blockwise") == [""]
    assert mlps(Gated(), recipes.get("rowwise").with_gemms(wgrad=False)) == []
    assert mlps(Gated(), {"c": "tensorwise", "*": "rowwise"}) == []
    assert mlps(Gated(), skip=["b"]) == []
    assert mlps(Gated(), fuse=False) == []
    patched = Gated()
    patched.forward = lambda x: x
    assert mlps(patched) == []


def test_alike_modules_that_are_not():
    """One is traced for those that are alike: not for one with another private attribute, activation or parameter."""

    class Private(Gated):
        def __init__(self, factor):
            super().__init__()
            self._factor = factor

        def forward(self, x):
            h = self.act(self.a(x)) * self.b(x)
            return self.c(h if self._factor is None else h * self._factor)

    class Act(nn.Module):
        def __init__(self, slope):
            super().__init__()
            self.slope = slope

        def forward(self, x):
            return x * torch.sigmoid(self.slope * x)

    def with_act(slope):
        made = Gated()
        made.act = Act(slope)
        return made

    model = nn.Sequential(Private(None), Private(0.5), with_act(1.0), with_act(1.702), with_act(1.5))
    assert mlps(model) == ["0", "2", "3"]


def test_activations_by_their_values():
    assert recognise(nn.SiLU(inplace=True)) == "silu"
    assert recognise(lambda t: t * torch.sigmoid(1.702 * t)) == "quick_gelu"
    assert recognise(lambda t: t * torch.sigmoid(1.7 * t)) is None
    assert recognise(lambda t: F.relu(t).square()) is None
    assert recognise(lambda t: t[0]) is None
    assert recognise(lambda t: None) is None
    with torch.device("meta"):
        assert recognise(F.silu) == "silu"


# ---------------------------------------------------------------------------------------------------------- the plan


def test_said_in_the_plan_and_kept_in_json():
    plan = acceler8.plan(hf("Llama"))
    text = str(plan)
    assert "fused: 2 x gated MLP (gate_proj, up_proj, down_proj, silu), such as model.layers.0.mlp" in text
    assert "fused: 2 x merged linears (q_proj, k_proj, v_proj), such as model.layers.0.self_attn" in text
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    old = {key: value for key, value in plan.to_dict().items() if key != "fusions"}
    assert Plan.from_dict(old).fusions == ()
    assert acceler8.convert(hf("Llama"), Plan.from_dict(old)) is not None
    assert "fused" not in str(acceler8.plan(hf("Llama"), fuse=False))
    data = plan.to_dict()
    data["fusions"][0]["kind"] = "gated mlp"
    with pytest.raises(PlanError, match="unknown kind of fusion 'gated mlp'; did you mean 'gated MLP'"):
        Plan.from_dict(data)


def renamed(model: nn.Module) -> None:
    model[0].__class__ = UpScaled


def activation(model: nn.Module) -> None:
    model[0].act = nn.GELU()


def gone(plan: Plan) -> Plan:
    data = plan.to_dict()
    data["fusions"][0]["name"] = "7"
    return Plan.from_dict(data)


@pytest.mark.parametrize("change", [renamed, activation])
def test_a_model_that_is_not_the_planned_one(change):
    plan, other = acceler8.plan(nn.Sequential(Gated())), nn.Sequential(Gated())
    change(other)
    with pytest.raises(PlanError, match=r"the plan runs a, b, c, silu of '0' together \(gated MLP\), which this Seq"):
        acceler8.convert(other, plan)
    assert type(other[0].a) is nn.Linear
    acceler8.convert(nn.Sequential(Gated()), plan)


def test_a_plan_whose_module_is_gone():
    model = nn.Sequential(Gated())
    with pytest.raises(PlanError, match="of '7' together"):
        acceler8.convert(model, gone(acceler8.plan(model)))
    assert type(model[0]) is Gated


def test_on_the_meta_device():
    with torch.device("meta"):
        model = nn.Sequential(Gated(), Gated())
        assert mlps(model) == ["0", "1"]
    assert mlps(model) == ["0", "1"]


def test_planning_changes_nothing():
    model = nn.Sequential(Gated(), Dice(), Notes(), Keeps(), DroppedByActivation())
    calls: list[int] = []
    model[0].act.register_forward_hook(lambda *_: calls.append(1))
    model[0].a.register_forward_hook(lambda *_: calls.append(1))
    before = {name: copy.copy(vars(module)) for name, module in model.named_modules()}
    state, dice = torch.get_rng_state(), random.getstate()
    modes = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")
    acceler8.plan(model)
    assert {name: vars(module) for name, module in model.named_modules()} == before
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == dice
    assert modes == (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda"))
    assert not calls


def test_a_deep_model_is_traced_once(monkeypatch):
    traced: list[nn.Module] = []
    find = fusions.find_mlp
    monkeypatch.setattr(fusions, "find_mlp", lambda module: traced.append(module) or find(module))
    model = nn.Sequential(*(Gated(16, 16) for _ in range(100)))
    start = time.process_time()
    plan = acceler8.plan(model)
    took = time.process_time() - start
    assert len(traced) == 1
    assert len([fusion for fusion in plan.fusions if fusion.kind == "gated MLP"]) == 100
    assert took < 2
    acceler8.convert(model, plan)
    assert len(traced) == 2


# ------------------------------------------------------------------------------------------------------------ verify


def training(recipe: str = "rowwise", count: int = 2):
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(*(Gated() for _ in range(count)))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * p.shape[1] ** -0.5)
    acceler8.convert(model, recipe)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    acceler8.attach(model, optimizer)

    def step() -> None:
        optimizer.zero_grad()
        model(batch()).square().mean().backward()
        optimizer.step()

    return model, optimizer, step


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise", "mxfp8", "delayed"])
def test_verify_compares_and_disturbs_nothing(recipe):
    model, optimizer, step = training(recipe)
    twin, _, twin_step = training(recipe)
    report = acceler8.verify(model, optimizer, step=step)
    assert report.checks["fused"] == "2 of 2 gated MLPs ran as one operation"
    assert report.checks["moved and fresh"] == "6 parameters moved, 6 layers used codes of their new weight"
    twin_step()
    twin_step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)
    for name, value in acceler8.fp8_state_dict(twin).items():
        assert torch.equal(acceler8.fp8_state_dict(model)[name], value)
    assert "fused" not in acceler8.verify(model, optimizer).checks


def test_verify_says_which_did_not_run_as_one():
    model, optimizer, step = training()
    model[1].b.register_forward_hook(lambda *_: None)
    said = acceler8.verify(model, optimizer, step=step).checks["fused"]
    assert said == "1 of 2 gated MLPs ran as one operation; 1 did not, such as 1: b has a hook"


def test_verify_finds_another_activation():
    model, optimizer, step = training()
    model[1]._acceler8_fusion.activation = "relu"
    with pytest.raises(VerifyError, match=r"fused: 1 as one operation differs from its layers one by one by [\d.]+%"):
        acceler8.verify(model, optimizer, step=step)


@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_verify_compares_kept_codes_of_gate_and_up(recipe):
    model, _, _ = training(recipe)
    with acceler8.window(model):
        model(batch()).sum().backward()
        said = "7 live codes equal a fresh cast"  # two of each operand; no dgrad reads the first gate and up
        assert acceler8.verify(model).checks["codes"] == said
        model[1].b.weight.data.mul_(2)
        with pytest.raises(VerifyError) as error:
            acceler8.verify(model)
    assert [line[:22] for line in str(error.value).splitlines()] == ["codes: 1 (a and b).wei"[:22]] * 2


def test_verify_finds_a_step_that_goes_on_with_old_codes():
    model, _, _ = training()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        model(batch()).square().mean().backward()
        optimizer.step()

    with acceler8.window(model), pytest.raises(VerifyError, match="0: its forward after the step used codes of an old"):
        acceler8.verify(model, optimizer, step=step, ignore=("codes",))


def test_verify_finds_scales_that_are_not_shared():
    model, optimizer, _ = training("delayed")
    layer = model[0].b._acceler8_layer
    layer.slots = LinearSlots(*(AmaxSlot(state_of(model).amax, LINE + i) for i in range(3)))
    with pytest.raises(VerifyError, match="layers: gate and up of '0' have different amax slots and are cast as one"):
        acceler8.verify(model, optimizer)
    assert isinstance(model[0], FusedMLP)
