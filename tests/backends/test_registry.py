"""Backends by name: short names, unknown ones, and one that another package registers, with every hook at work."""

from __future__ import annotations

import copy
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from importlib import invalidate_caches
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import acceler8
from acceler8 import backends, recipes
from acceler8.accelerator import Accelerator
from acceler8.backends import registry
from acceler8.backends.capability import lacking
from acceler8.errors import PlanError, VerifyError
from acceler8.nn import state_of

PACKAGE = Path(__file__).parent / "toy_backend"


def test_names():
    assert backends.names()[:3] == ("native", "torchao", "transformer_engine")
    words = {"NATIVE": "native", "AO": "torchao", "te": "transformer_engine", "torchao": "torchao"}
    assert {word: backends.full_name(word) for word in words} == words
    assert backends.get("native") is backends.find("NATIVE")
    with pytest.raises(PlanError, match="unknown backend 'nativ'; did you mean 'native'"):
        backends.get("nativ")


def test_a_backend_that_cannot_be_used_says_why(monkeypatch):
    monkeypatch.setattr(backends.get("native"), "unavailable", lambda: "needs a library; pip install it")
    with pytest.raises(PlanError, match="backend 'native' cannot be used: needs a library; pip install it"):
        backends.get("native")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package toy_backend, installed by pip from its own pyproject.toml."""
    source, target = tmp_path_factory.mktemp("source") / "toy", tmp_path_factory.mktemp("target")
    shutil.copytree(PACKAGE, source, ignore=shutil.ignore_patterns("__pycache__"))
    options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(target), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture
def toy(installed: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.syspath_prepend(str(installed))
    invalidate_caches()
    yield "toy"
    registry._made.pop("toy", None)
    sys.modules.pop("toy_backend", None)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.plain_norm = nn.LayerNorm(32, bias=False), nn.LayerNorm(32)
        self.up, self.down, self.lm_head = nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(self.up(self.norm(x)).relu())
        return self.lm_head(self.plain_norm(x))


def step_of(model: nn.Module, optimizer: Any) -> Any:
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(1))

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def test_a_package_registers_a_backend(toy):
    assert backends.registered() == ("toy",)
    assert "toy" in backends.names()
    model = Net()
    plain, parameters = copy.deepcopy(model), list(model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    plan = acceler8.plan(model, "tensorwise", "toy")
    assert plan.fp8_names == ("up", "down")
    assert [(row.name, row.reason) for row in plan.also] == [("norm", ""), ("plain_norm", "has a bias")]
    assert "also by toy: 1 x LayerNorm, such as norm\n" in f"{plan}\n"
    assert "left: 1 x LayerNorm, such as plain_norm: has a bias" in str(plan)
    assert acceler8.Plan.from_dict(plan.to_dict()) == plan
    acceler8.convert(model, plan)
    assert model.norm.__dict__["toy"]
    assert list(map(id, model.parameters())) == list(map(id, parameters))
    acceler8.attach(model, optimizer)
    acceler8.verify(model, optimizer, step=step_of(model, optimizer))
    assert model.__dict__["toy_steps"] == 2
    other = copy.deepcopy(model)
    acceler8.step(other)
    assert (model.__dict__["toy_steps"], other.__dict__["toy_steps"]) == (2, 3)  # a copy has its own clock
    acceler8.restore(model)
    assert set(map(type, model.children())) == set(map(type, plain.children()))
    assert "toy" not in model.norm.__dict__


def test_its_layers_follow_the_evaluation_policy(toy):
    model, x = Net(), torch.randn(8, 32)
    expected = model.eval()(x)
    acceler8.convert(model, acceler8.plan(model, "tensorwise", "toy"))
    assert torch.equal(model(x), expected)
    with acceler8.evaluate_in_fp8(model):
        with acceler8.evaluate_in_fp8(model):
            pass
        assert not torch.equal(model(x), expected)
    assert torch.equal(model(x), expected)


def test_its_windows_are_opened_and_closed(toy):
    model = Net()
    acceler8.convert(model, acceler8.plan(model, "tensorwise", "toy"))
    (window,) = state_of(model).codes
    with acceler8.window(model):
        acceler8.step(model)
    assert window.calls == ["open", "drop", "close"]


def test_a_recipe_that_it_lacks_is_refused_with_those_that_it_has(toy):
    with pytest.raises(PlanError, match=r"backend 'toy' has no recipe mxfp8; allowed there: tensorwise; choose"):
        acceler8.plan(Net(), "mxfp8", "toy")
    message = (
        r"does not run recipe rowwise on the CPU \(it needs a GPU from compute capability 99.0\); allowed there: t"
    )
    with pytest.raises(PlanError, match=message):
        acceler8.plan(Net(), {"up": "rowwise"}, "toy")
    with pytest.raises(PlanError, match="does not run recipe tensorwise under fsdp2; allowed there: none"):
        acceler8.plan(Net(), "tensorwise", "toy", strategy="fsdp2")
    with pytest.raises(PlanError, match=r"got options BackendOptions; allowed: None"):
        acceler8.plan(Net(), "tensorwise", "toy", options=backends.BackendOptions())


def test_an_accelerator_takes_its_default_recipe(toy, monkeypatch):
    monkeypatch.setattr(type(backends.find("toy")), "default_recipe", "tensorwise")
    accelerator = Accelerator(mixed_precision="fp8", backend="toy", skip=["norm"], cpu=True)
    assert (accelerator.recipe.name, accelerator.recipe.skip) == ("tensorwise", ("norm",))
    accelerator.prepare(Net())
    assert accelerator.plan.recipe.name == "tensorwise"
    assert Accelerator(mixed_precision="fp8", recipe="rowwise", backend="toy", cpu=True).recipe.name == "rowwise"


def test_verify_finds_a_layer_that_is_none_of_its_own(toy):
    model = Net()
    acceler8.convert(model, acceler8.plan(model, "tensorwise", "toy"))
    del model.up.__dict__["_acceler8_layer"]
    with pytest.raises(VerifyError, match="layer 'up' is planned FP8 but is not"):
        acceler8.verify(model)


def test_verify_finds_codes_of_an_older_weight(toy, monkeypatch):
    model = Net()
    acceler8.convert(model, acceler8.plan(model, "tensorwise", "toy"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    stale = model.up.weight.detach().clone()

    own = type(model.up).forward

    def forward(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        if layer is not model.up:
            return own(layer, x)
        return nn.functional.linear(x, layer.weight + (stale - layer.weight).detach(), layer.bias)

    monkeypatch.setattr(type(model.up), "forward", forward)
    with pytest.raises(VerifyError, match="up: its forward after the step used codes of an older weight"):
        acceler8.verify(model, optimizer, step=step_of(model, optimizer))


def test_its_state_is_in_checkpoints(toy, tmp_path):
    def run(backend: str = "toy") -> tuple[Accelerator, nn.Module, Any]:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            accelerator = Accelerator(mixed_precision="fp8", recipe="tensorwise", backend=backend, cpu=True)
        assert accelerator.backend == backend
        model = Net()
        return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))

    accelerator, model, optimizer = run()
    assert accelerator.plan is not None
    assert accelerator.plan.backend == "toy"
    step_of(model, optimizer)()
    accelerator.save_state(str(tmp_path / "state"))
    accelerator, model, _ = run()
    report = accelerator.load_state(str(tmp_path / "state"))
    assert not report.reset
    assert model.__dict__["toy_steps"] == 1

    other, native, _ = run("native")  # the same recipe and layers, and nothing of what the toy keeps
    other.save_state(str(tmp_path / "native"))
    report = accelerator.load_state(str(tmp_path / "native"))
    assert any("backend was native, now toy" in line for line in report.reset)
    assert model.__dict__["toy_steps"] == 0
    other.load_state(str(tmp_path / "state"))
    acceler8.verify(native)


BROKEN = {
    "cannot be loaded: ModuleNotFoundError: No module named 'absent_library'": "import absent_library",
    "is registered as 3; allowed: a subclass of acceler8.backends.Backend": "ToyBackend = 3",
    "is named 'other'; give the entry point and the class one name": (
        "from acceler8.backends import Backend\nclass ToyBackend(Backend):\n    name = 'other'"
    ),
}


@pytest.mark.parametrize("message", BROKEN)
def test_a_package_that_is_broken_is_said(installed, monkeypatch, tmp_path, message):
    shutil.copytree(installed, tmp_path / "copy")
    (tmp_path / "copy" / "toy_backend.py").write_text(BROKEN[message])
    monkeypatch.syspath_prepend(str(tmp_path / "copy"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    invalidate_caches()
    try:
        with pytest.raises(PlanError, match=message):
            backends.get("toy")
    finally:
        registry._made.pop("toy", None)
        sys.modules.pop("toy_backend", None)


def test_the_table_of_the_documentation_is_that_of_the_backends():
    text = (Path(__file__).parents[2] / "docs" / "backends.md").read_text(encoding="utf-8")
    rows = {line.split("`")[1]: line.split("|")[2:5] for line in text.splitlines() if line.startswith("| `")}
    assert set(rows) == set(recipes.names())
    for name, cells in rows.items():
        for backend, cell in zip(("native", "torchao", "transformer_engine"), cells, strict=True):
            found = [row for row in backends.find(backend).capabilities() if row.recipe == name]
            assert (cell.strip() == "refused") is not bool(found), (name, backend)
            least = [".".join(map(str, row.compute)) for row in found if row.compute]
            assert all(word in cell or "the same" in cell for word in least), (name, backend)


@pytest.mark.parametrize(
    ("found", "runs"),
    [((8, 0), ("activations_only",)), ((8, 9), ("tensorwise", "delayed")), ((10, 0), ("tensorwise", "mxfp8"))],
)
def test_capabilities_by_gpu(monkeypatch, found, runs):
    """A GPU before Ada went on as FP8, with layers converted, where the constructor asked for it."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: found)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "a GPU")
    gpu, word = torch.device("cuda"), f"sm_{found[0]}{found[1]}"
    table = [
        backends.Capability(recipe="tensorwise", compute=(8, 9), on_cpu=True),
        backends.Capability(recipe="delayed", compute=(8, 9), below=(10, 0)),
        backends.Capability(recipe="mxfp8", compute=(10, 0)),
        backends.Capability(recipe="activations_only"),
    ]
    for name in ("tensorwise", "delayed", "mxfp8", "activations_only"):
        why = lacking("some", table, recipes.get(name), gpu, "single")
        if name == "activations_only" or name in runs:
            assert why is None
        else:
            assert why is not None
            assert f"on a GPU ({word})" in why
            assert "activations_only" in why.partition("allowed there:")[2]
    assert lacking("some", table, recipes.get("tensorwise"), torch.device("cpu"), "single") is None
    assert lacking("some", table, recipes.get("delayed"), torch.device("cpu"), "single") is not None
