"""The cost table: exact for power laws, silent outside of its grid, the user's own before a shipped one."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch

from acceler8.costs import BF16, CostTable, file_name, gpu_of, known_gpus, user_folder
from acceler8.errors import RunError

GRID = list(itertools.product((512, 2048, 8192), (512, 1024, 4096), (512, 4096)))


def power_law(m: int, k: int, n: int, factor: float) -> float:
    return factor * m**0.9 * k**0.8 * n**0.7 * 1e-8


def synthetic(**changes) -> CostTable:
    entries = {name: {s: power_law(*s, factor) for s in GRID} for name, factor in ((BF16, 2.0), ("rowwise", 1.5))}
    facts = {"gpu": "Some GPU", "torch": "2.11.0", "date": "2026-11-30", "commit": "abc", "source": "derived"}
    return CostTable(**(facts | {"entries": entries} | changes))


def test_a_table_comes_back_as_it_was_written(tmp_path: Path):
    exact = {BF16: {(512, 512, 512): 0.125}, "rowwise": {(512, 512, 512): 0.25}}
    table = synthetic(entries=exact)
    table.save(tmp_path / "deep" / "table.json")
    loaded = CostTable.load(tmp_path / "deep" / "table.json")
    assert loaded == table
    assert loaded.path == tmp_path / "deep" / "table.json"
    assert loaded.timing == "graph"
    synthetic(timing="eager").save(tmp_path / "calls.json")
    assert CostTable.load(tmp_path / "calls.json").timing == "eager"
    assert loaded.recipes == ("rowwise",)
    data = json.loads((tmp_path / "deep" / "table.json").read_text())
    assert (data["format"], data["version"], data["source"]) == ("acceler8-costs", 1, "derived")
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["table.json"]


@pytest.mark.parametrize("shape", [(512, 512, 512), (8192, 4096, 4096), (700, 600, 513), (4096, 3000, 4000)])
def test_a_power_law_is_met_exactly(shape: tuple[int, int, int]):
    bf16, fp8 = synthetic().predict(*shape, "rowwise")
    assert bf16 == pytest.approx(power_law(*shape, 2.0), rel=1e-9)
    assert fp8 == pytest.approx(power_law(*shape, 1.5), rel=1e-9)


@pytest.mark.parametrize("shape", [(511, 512, 512), (8193, 512, 512), (512, 4097, 512), (512, 512, 256)])
def test_outside_of_the_grid_there_is_no_answer(shape: tuple[int, int, int]):
    assert synthetic().predict(*shape, "rowwise") is None


def test_without_a_corner_there_is_no_answer():
    table = synthetic()
    entries = {name: dict(by_shape) for name, by_shape in table.entries.items()}
    del entries["rowwise"][8192, 4096, 4096]
    table = synthetic(entries=entries)
    assert table.predict(8000, 4000, 4000, "rowwise") is None
    assert table.predict(1000, 1000, 1000, "rowwise") is not None
    assert table.predict(2048, 1024, 512, "rowwise") is not None
    assert table.predict(1000, 1000, 1000, "tensorwise") is None


def test_the_users_own_table_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    own, shipped = tmp_path / "own", tmp_path / "shipped"
    assert CostTable.for_this_gpu("Some GPU", [own, shipped]) is None
    synthetic(commit="shipped").save(shipped / file_name("Some GPU"))
    found = CostTable.for_this_gpu("Some GPU", [own, shipped])
    assert found is not None
    assert found.commit == "shipped"
    synthetic(commit="own").save(own / file_name("Some GPU"))
    found = CostTable.for_this_gpu("Some GPU", [own, shipped])
    assert found is not None
    assert found.commit == "own"
    assert CostTable.for_this_gpu("Another GPU", [own, shipped]) is None
    synthetic(commit="measured anew").save(own / file_name("Some GPU"))
    found = CostTable.for_this_gpu("Some GPU", [own, shipped])
    assert found is not None
    assert found.commit == "measured anew"
    assert found is CostTable.for_this_gpu("Some GPU", [own, shipped])  # read once
    assert CostTable.for_this_gpu("some-gpu", [own, shipped]) is None  # the same file name, another GPU
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert user_folder() == tmp_path / "acceler8" / "cost_tables"
    monkeypatch.setenv("XDG_DATA_HOME", "relative")
    assert user_folder() == Path.home() / ".local" / "share" / "acceler8" / "cost_tables"


def test_shipped_tables_are_sound():
    from acceler8.costs import SHIPPED

    for path in SHIPPED.glob("*.json"):
        table = CostTable.load(path)
        assert path.name == file_name(table.gpu)
        assert table.recipes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "allowed: 'acceler8-costs' version 1"),
        ({"version": 2}, "version 2; allowed"),
        ({"source": "guessed"}, "source 'guessed'; allowed: measured, derived"),
        ({"timing": "guessed"}, "timing 'guessed'; allowed: graph, eager"),
        ({"entries": [{"m": 1, "k": 1, "n": 1, "recipe": "bf16", "ms": 0}]}, "allowed: positive numbers"),
        ({"entries": [{"m": 1, "k": 1, "n": 1, "recipe": "bf16"}]}, "KeyError 'ms'"),
    ],
)
def test_a_damaged_table_says_what_to_do(tmp_path: Path, change: dict, message: str):
    path = tmp_path / "table.json"
    synthetic().save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(RunError, match="acceler8 bench gemm --save") as caught:
        CostTable.load(path)
    assert message in str(caught.value)


def test_a_file_that_is_none_is_refused(tmp_path: Path):
    with pytest.raises(RunError, match="cannot read the cost table"):
        CostTable.load(tmp_path / "absent.json")
    (tmp_path / "text.json").write_text("{")
    with pytest.raises(RunError, match="is not JSON"):
        CostTable.load(tmp_path / "text.json")


def test_a_derived_table_says_so_and_how(tmp_path: Path):
    derived = synthetic(derivation="from another, by hand")
    derived.save(tmp_path / "table.json")
    assert CostTable.load(tmp_path / "table.json").derivation == "from another, by hand"
    assert derived.said == "derived Some GPU table of 2026-11-30"
    measured = synthetic(source="measured")
    measured.save(tmp_path / "table.json")
    assert "derivation" not in json.loads((tmp_path / "table.json").read_text())
    assert measured.said == "Some GPU table of 2026-11-30"


def test_the_gpus_that_are_known(tmp_path: Path):
    for gpu in ("B GPU", "A GPU"):
        synthetic(gpu=gpu).save(tmp_path / file_name(gpu))
    (tmp_path / ".table.json.123").write_text("{")  # one that is being written
    assert known_gpus([tmp_path, tmp_path / "absent"]) == ("A GPU", "B GPU")
    assert {"NVIDIA H200", "NVIDIA H100 80GB HBM3"} <= set(known_gpus())


def test_a_cpu_is_no_gpu_even_beside_one(monkeypatch: pytest.MonkeyPatch):
    assert gpu_of(torch.device("cpu")) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # what a machine with a GPU would say
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Some GPU")
    assert gpu_of(torch.device("cpu")) is None
    assert gpu_of(torch.device("meta")) == "Some GPU"


@pytest.mark.requires(sm=80)
def test_the_gpu_of_a_device():
    name = torch.cuda.get_device_name(0)
    assert gpu_of(torch.device("cuda", 0)) == gpu_of(torch.device("cuda")) == gpu_of(torch.device("meta")) == name
