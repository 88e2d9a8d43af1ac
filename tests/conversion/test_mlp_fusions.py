"""MLPs without a gate: found by structure in models of others, and not in what only looks like it."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import acceler8
from acceler8 import recipes
from acceler8.conversion.find_mlp import MLP, OnlyInEval, find_mlp
from acceler8.errors import PlanError, VerifyError
from acceler8.nn import FusedMLP
from tests.models import batch

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


def mlps(model: nn.Module, *args: object, **kwargs: object) -> dict[str, str]:
    """Activations by the names of the MLPs that the plan fuses."""
    plan = acceler8.plan(model, *args, **kwargs)
    return {fusion.name: fusion.activation for fusion in plan.fusions if fusion.kind == "MLP"}


def notes(model: nn.Module, *args: object, **kwargs: object) -> list[str]:
    return [note for note in acceler8.plan(model, *args, **kwargs).notes if "MLP" in note]


@pytest.mark.parametrize(
    ("kind", "activation", "options"),
    [
        ("CLIPVision", "quick_gelu", {"image_size": 32, "patch_size": 16}),
        ("SiglipVision", "gelu_tanh", {"image_size": 32, "patch_size": 16}),
        ("GPTNeoX", "gelu", {"vocab_size": 64}),
        ("Phi", "gelu_tanh", {"vocab_size": 64}),
        ("Bert", None, {}),  # its layers lie in two modules
    ],
)
def test_models_of_others(kind, activation, options):
    import transformers

    model = getattr(transformers, f"{kind}Model")(getattr(transformers, f"{kind}Config")(**SIZES, **options))
    found = mlps(model)
    if activation is None:
        assert found == {}
    else:
        assert set(found.values()) == {activation}
        assert len([name for name in found if "layers." in name]) == 2


class Ungated(nn.Module):
    """As nanoGPT has it."""

    def __init__(self, width: int = 32, hidden: int = 128, *, bias: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.a = nn.Linear(width, hidden, bias=bias)
        self.act = nn.GELU()
        self.b = nn.Linear(hidden, width, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.b(self.act(self.a(x))))


class TimmLike(nn.Module):
    """The children and the forward of timm's ``Mlp``."""

    def __init__(self, drop: float = 0.0, norm: type[nn.Module] = nn.Identity) -> None:
        super().__init__()
        self.fc1 = nn.Linear(32, 128)
        self.act = nn.GELU()
        self.drop1 = nn.Dropout(drop)
        self.norm = norm(128) if norm is nn.LayerNorm else norm()
        self.fc2 = nn.Linear(128, 32)
        self.drop2 = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop1(self.act(self.fc1(x)))
        return self.drop2(self.fc2(self.norm(x)))


class TorchvisionLike(nn.Sequential):
    """The children of torchvision's ``MLPBlock``."""

    def __init__(self, dropout: float = 0.0) -> None:
        parts = [nn.Linear(32, 128), nn.GELU(), nn.Dropout(dropout), nn.Linear(128, 32), nn.Dropout(dropout)]
        super().__init__(*parts)


class WrittenOut(Ungated):
    def forward(self, x):
        h = self.a(x)
        return self.b(h * torch.sigmoid(1.702 * h))


class Function(Ungated):
    def forward(self, x):
        return F.dropout(self.b(F.dropout(F.relu(self.a(x)), 0.0, self.training)), p=0.0, training=self.training)


class Methods(Ungated):
    def forward(self, x):
        h = self.a(x)
        return self.b(h.sigmoid().mul(h))


class InPlace(Ungated):
    def __init__(self):
        super().__init__()
        self.act = nn.ReLU(inplace=True)


FOUND = [
    (Ungated, ("a", "b"), "gelu"), (TimmLike, ("fc1", "fc2"), "gelu"), (TorchvisionLike, ("0", "3"), "gelu"),
    (WrittenOut, ("a", "b"), "quick_gelu"), (Function, ("a", "b"), "relu"), (Methods, ("a", "b"), "silu"),
    (InPlace, ("a", "b"), "relu"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "layers", "activation"), FOUND, ids=[kind.__name__ for kind, _, _ in FOUND])
@pytest.mark.parametrize("training", [True, False])
def test_found_whatever_it_is_called(kind, layers, activation, training):
    assert find_mlp(kind().train(training)) == MLP(layers, activation)
    model = nn.Sequential(kind())
    plan = acceler8.plan(model)
    assert f"fused: 1 x MLP ({', '.join((*layers, activation))}), such as 0" in str(plan)
    acceler8.convert(model, plan)
    assert isinstance(model[0], FusedMLP)
    model(batch()).sum().backward()
    assert model[0]._acceler8_fusion.why_not is None


# --------------------------------------------------------------------------------------------------------- dropout


class DroppedBetween(Ungated):
    def forward(self, x):
        return self.b(F.dropout(self.act(self.a(x)), 0.1, self.training))


class DroppedByActivation(Ungated):
    def __init__(self):
        super().__init__()
        self.act = nn.Sequential(nn.GELU(), nn.Dropout(0.3))


DROPPED = [
    (lambda: Ungated(dropout=0.1), "dropout (p = 0.1)"), (lambda: TimmLike(0.2), "dropout (p = 0.2)"),
    (lambda: TorchvisionLike(0.25), "dropout (p = 0.25)"), (DroppedBetween, "dropout"),
    (DroppedByActivation, "dropout (p = 0.3)"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "what"), DROPPED, ids=[what for _, what in DROPPED])
@pytest.mark.parametrize("training", [True, False])
def test_dropout_in_training_is_said(make, what, training):
    model = nn.ModuleList([make().train(training), make().train(training)])
    found = find_mlp(model[0])
    assert isinstance(found, OnlyInEval)
    assert mlps(model) == {}
    assert notes(model) == [
        f"2 MLPs, such as 0, could run as one operation but for {what} in training; layer by layer instead. Set it to 0"
        " if the training allows that"
    ]
    assert notes(model, fuse=False) == []
    assert notes(model, "activations_only") == []
    assert notes(model, skip=[found.found.layers[0]]) == []


# ------------------------------------------------------------------------------------------------------ near misses


class Residual(Ungated):
    def forward(self, x):
        return x + self.b(self.act(self.a(x)))


class HiddenAgain(Ungated):
    def forward(self, x):
        h = self.a(x)
        return self.b(self.act(h)) + h.mean()


class InputAgain(Ungated):
    def forward(self, x):
        h = self.a(x)
        return self.b(self.act(h) + x.mean())


class Scaled(Ungated):
    def forward(self, x):
        return 0.5 * self.b(self.act(self.a(x)))


class ScaledBetween(Ungated):
    def forward(self, x):
        return self.b(0.5 * self.act(self.a(x)))


class InputChanged(Ungated):
    def forward(self, x):
        return self.b(self.act(self.a(x * 1.0)))


class Unknown(Ungated):
    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


class Squared(Ungated):
    def forward(self, x):
        return self.b(F.relu(self.a(x)).square())


class NoActivation(Ungated):
    def forward(self, x):
        return self.b(self.a(x))


class SameTwice(Ungated):
    def __init__(self):
        super().__init__(32, 32)

    def forward(self, x):
        return self.a(self.act(self.a(x)))


class ThreeTimes(Ungated):
    def __init__(self):
        super().__init__(32, 32)

    def forward(self, x):
        return self.b(self.act(self.a(self.act(self.a(x)))))


class TwoInputs(Ungated):
    def forward(self, x, z=None):
        return self.b(self.act(self.a(x)))


class Tuple(Ungated):
    def forward(self, x):
        return self.b(self.act(self.a(x))), None


class FirstTokens(Ungated):
    """A slice that changes nothing of the few numbers on which the activation is recognised."""

    def forward(self, x):
        return self.b(self.act(self.a(x)[:4096]))


class FirstTokensOfAll(Ungated):
    def forward(self, x):
        return self.b(self.act(self.a(x)))[:4096]


class Learned(Ungated):
    def __init__(self):
        super().__init__()
        self.slope = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.b(self.act(self.a(x)) * self.slope)


class LearnedInside(Ungated):
    def __init__(self):
        super().__init__()
        self.act = nn.PReLU(init=0.0)


class Aside(Ungated):
    def forward(self, x):
        h = self.act(self.a(x))
        torch.zeros_like(h)
        return self.b(h)


class WithoutGrad(Ungated):
    def forward(self, x):
        with torch.no_grad():
            h = self.a(x)
        return self.b(self.act(h))


class InAutocast(Ungated):
    def forward(self, x):
        h = self.a(x)
        with torch.autocast("cpu", torch.bfloat16):
            return self.b(self.act(h))


class Cast(Ungated):
    def forward(self, x):
        return self.b(self.act(self.a(x).float()))


class OtherInTraining(Ungated):
    def forward(self, x):
        h = self.act(self.a(x))
        return self.b(h) if self.training else self.b(F.relu(h))


class Notes(Ungated):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return self.b(self.act(self.a(x)))


class Dice(Ungated):
    def forward(self, x):
        if random.random() < 0.0:
            return x
        return self.b(self.act(self.a(x)))


MISSES = [
    Residual, HiddenAgain, InputAgain, Scaled, ScaledBetween, InputChanged, Unknown, Squared, NoActivation, SameTwice,
    ThreeTimes, TwoInputs, Tuple, FirstTokens, FirstTokensOfAll, Learned, LearnedInside, Aside, WithoutGrad,
    InAutocast, Cast, OtherInTraining, Notes, Dice, lambda: TimmLike(norm=nn.LayerNorm),
]  # fmt: skip


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", MISSES, ids=lambda kind: kind.__name__)
def test_near_misses(kind, training):
    model = kind().train(training)
    assert find_mlp(model) is None
    assert mlps(model) == {}
    assert vars(model).get("calls", 0) == 0


def test_what_recipes_and_shapes_rule_out():
    assert mlps(Ungated()) == mlps(Ungated(bias=False)) == {"": "gelu"}
    assert mlps(Ungated(hidden=48), "mxfp8") == mlps(Ungated(hidden=48), "blockwise") == {"": "gelu"}
    assert mlps(Ungated(hidden=40)) == {}
    assert mlps(Ungated(), recipes.get("rowwise").with_gemms(wgrad=False)) == {}
    assert mlps(Ungated(), {"b": "tensorwise", "*": "rowwise"}) == {}
    assert mlps(Ungated(), skip=["b"]) == {}
    assert mlps(Ungated(), fuse=False) == {}
    with torch.device("meta"):
        assert mlps(nn.Sequential(Ungated(), Ungated())) == {"0": "gelu", "1": "gelu"}


def test_a_model_that_is_not_the_planned_one():
    plan, other = acceler8.plan(nn.Sequential(Ungated())), nn.Sequential(Ungated(dropout=0.5))
    with pytest.raises(PlanError, match=r"the plan runs a, b, gelu of '0' together \(MLP\), which this Seq"):
        acceler8.convert(other, plan)
    assert type(other[0].a) is nn.Linear
    again = acceler8.Plan.from_dict(plan.to_dict())
    assert again == plan
    assert isinstance(acceler8.convert(nn.Sequential(Ungated()), again)[0], FusedMLP)


# ------------------------------------------------------------------------------------------------------------ verify


def training(recipe: str = "rowwise"):
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(Ungated(), Ungated())
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * p.shape[-1] ** -0.5)
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
    assert report.checks["fused"] == "2 of 2 MLPs ran as one operation"
    twin_step()
    twin_step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)
    for name, value in acceler8.fp8_state_dict(twin).items():
        assert torch.equal(acceler8.fp8_state_dict(model)[name], value)


def test_verify_says_which_did_not_run_as_one():
    model, optimizer, step = training()
    model[1].b.register_forward_hook(lambda *_: None)
    said = acceler8.verify(model, optimizer, step=step).checks["fused"]
    assert said == "1 of 2 MLPs ran as one operation; 1 did not, such as 1: b has a hook"


def test_verify_finds_another_activation():
    model, optimizer, step = training()
    model[1]._acceler8_fusion.activation = "relu"
    with pytest.raises(VerifyError, match=r"fused: 1 as one operation differs from its layers one by one by [\d.]+%"):
        acceler8.verify(model, optimizer, step=step)


def test_verify_finds_a_step_that_goes_on_with_old_codes():
    model, _, _ = training()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        model(batch()).square().mean().backward()
        optimizer.step()

    with acceler8.window(model), pytest.raises(VerifyError, match="0: its forward after the step used codes of an old"):
        acceler8.verify(model, optimizer, step=step, ignore=("codes",))
