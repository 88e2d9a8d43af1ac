"""The compatibility table against the installed Accelerate and our own class."""

from __future__ import annotations

import copy
import inspect
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import accelerate
import pytest

from acceler8 import Accelerator
from acceler8.compat import ACCELERATE, ARGUMENTS, DIFFERS, MEMBERS, MISSING, SUPPORTED, Entry, main, page
from acceler8.errors import NotInThisVersionError

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
TAKES_NAMES = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@cache
def theirs() -> Any:
    return accelerate.Accelerator(cpu=True)


@cache
def ours() -> Accelerator:
    return Accelerator(cpu=True)


def parameters(function: Any) -> dict[str, inspect.Parameter]:
    found = inspect.signature(function).parameters
    return {name: p for name, p in found.items() if p.kind in TAKES_NAMES and name != "self"}


def of(entries: list[Entry], *statuses: str) -> list[Any]:
    return [pytest.param(entry.name, id=entry.name) for entry in entries if entry.status in statuses]


def test_the_table_is_about_the_installed_accelerate():
    assert accelerate.__version__.startswith(ACCELERATE)


def test_every_public_member_is_listed_once():
    public = {name for name in dir(theirs()) if not name.startswith("_")}
    listed = [entry.name for entry in MEMBERS]
    assert sorted(public - set(listed)) == []
    assert sorted(set(listed) - public) == []
    assert len(listed) == len(set(listed))


def test_every_argument_of_the_constructor_is_listed_once():
    assert [entry.name for entry in ARGUMENTS] == sorted(parameters(accelerate.Accelerator.__init__))


def test_every_entry_that_is_not_the_same_says_how():
    for entry in (*MEMBERS, *ARGUMENTS):
        assert entry.status in (SUPPORTED, DIFFERS, MISSING)
        assert bool(entry.note) == (entry.status != SUPPORTED), entry


@pytest.mark.parametrize("name", of(MEMBERS, SUPPORTED, DIFFERS))
def test_a_member_is_here_and_of_its_kind(name: str):
    static = inspect.getattr_static(accelerate.Accelerator, name, None)
    is_method = static is not None and not isinstance(static, property)
    assert callable(getattr(ours(), name)) == is_method
    is_settable = static is None or (isinstance(static, property) and static.fset is not None)
    own = inspect.getattr_static(Accelerator, name, None)
    if isinstance(static, property) and is_settable:
        assert not isinstance(own, property) or own.fset is not None, f"{name} is settable in Accelerate"


@pytest.mark.parametrize("name", [p for p in of(MEMBERS, SUPPORTED) if callable(getattr(ours(), p.values[0]))])
def test_a_supported_method_takes_their_parameters(name: str):
    wanted, found = parameters(getattr(accelerate.Accelerator, name)), parameters(getattr(Accelerator, name))
    assert list(found)[: len(wanted)] == list(wanted)
    for parameter in wanted.values():
        own = found[parameter.name]
        assert own.kind is parameter.kind
        if parameter.default is not inspect.Parameter.empty:
            assert own.default == parameter.default
    assert all(own.default is not inspect.Parameter.empty for key, own in found.items() if key not in wanted)


@pytest.mark.parametrize("name", of(MEMBERS, MISSING))
def test_an_absent_member_raises_and_names_what_to_do(name: str):
    note = next(entry.note for entry in MEMBERS if entry.name == name)
    with pytest.raises(AttributeError, match=f"Accelerator has no {name}: {note}"):
        getattr(ours(), name)
    assert not hasattr(ours(), name)


def test_other_names_fail_as_usual(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(AttributeError, match="'Accelerator' object has no attribute 'acumulate'"):
        _ = ours().acumulate
    monkeypatch.setattr(Accelerator, "plan", property(lambda self: self.nothing_of_that_name))
    with pytest.raises(AttributeError, match="nothing_of_that_name"):
        _ = ours().plan
    assert not hasattr(copy.copy(ours()), "lomo_backward")


@pytest.mark.parametrize("name", of(ARGUMENTS, SUPPORTED, DIFFERS))
def test_an_argument_is_taken(name: str):
    wanted, found = (parameters(cls.__init__)[name] for cls in (accelerate.Accelerator, Accelerator))
    assert found.default is not inspect.Parameter.empty
    if name != "gradient_accumulation_steps" and isinstance(wanted.default, bool | str | int):
        assert found.default == wanted.default


@pytest.mark.parametrize("name", of(ARGUMENTS, MISSING))
def test_an_absent_argument_is_refused(name: str):
    with pytest.raises(NotInThisVersionError, match=name):
        Accelerator(cpu=True, **{name: object()})


def test_the_page_is_fresh(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m acceler8.compat --write docs/compatibility.md"
    copied = tmp_path / "page.md"
    assert main(["--check", str(copied)]) == 1
    assert "is stale; run python -m acceler8.compat --write" in capsys.readouterr().err
    assert main(["--write", str(copied)]) == 0
    assert main(["--check", str(copied)]) == 0
    copied.write_text(page().replace("supported", "absent", 1), encoding="utf-8")
    assert main(["--check", str(copied)]) == 1


def test_the_module_prints_the_tables():
    command = [sys.executable, "-m", "acceler8.compat"]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    for entry in (*MEMBERS, *ARGUMENTS):
        assert any(line.split()[:2] == [entry.name, entry.status] for line in out), entry
