"""What is said where TransformerEngine is missing, too old, of mixed versions, or does not load: found and needed."""

from __future__ import annotations

import ctypes
import importlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from acceler8 import backends
from acceler8.backends.transformer_engine import library
from acceler8.backends.transformer_engine.library import Versions, cannot_load, explain, wrong_versions
from acceler8.errors import PlanError

FOUND = Versions(
    package="2.20.2",
    core=("transformer-engine-cu13", "2.20.2"),
    extension="2.20.2",
    torch="2.11.0",
    cuda="13.0",
    cublas="13.1.0.3",
    cudnn="9.15.1.9",
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("2.20.2", (2, 20, 2)), ("2.9", (2, 9)), ("2.5.0+4d1b2", (2, 5, 0)), ("1.13.0.dev0", (1, 13, 0))],
)
def test_numbers_of_a_version(text, expected):
    assert library.numbers(text) == expected


def test_versions_that_fit_are_not_complained_about():
    assert wrong_versions(FOUND) is None
    older = replace(FOUND, package="2.5.0+abc", core=("transformer-engine-cu12", "2.5.0"), extension=None)
    assert wrong_versions(older) is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"package": None}, "TransformerEngine is not installed; needed: 2.5 or newer; pip install"),
        ({"package": "1.13.0"}, "TransformerEngine 1.13.0 is installed; needed: 2.5 or newer; pip install -U"),
        ({"package": "2.4.1"}, "TransformerEngine 2.4.1 is installed; needed: 2.5 or newer"),
        ({"core": ("transformer-engine-cu12", "2.19.0")}, "different versions (found: transformer-engine 2.20.2,"),
        ({"extension": "2.19.0"}, "transformer-engine-torch 2.19.0, torch 2.11.0 for CUDA 13.0"),
    ],
)
def test_wrong_versions_are_named_before_anything_is_imported(changes, said):
    reason = wrong_versions(replace(FOUND, **changes))
    assert reason is not None
    assert said in reason


NO_OBJECT = "Could not find shared object file for Transformer Engine"
LINKER = "/x/libtransformer_engine.so: undefined symbol: cublasLtGroupedMatrixLayoutInit_internal"


@pytest.mark.parametrize(
    ("error", "what", "needed"),
    [
        (OSError(LINKER), "asks cuBLAS for cublasLtGroupedMatrixLayoutInit_internal", "a newer cuBLAS, or an older"),
        (
            ImportError("te.so: undefined symbol: _ZN3c104cuda9Set"),
            "was built for another",
            "FORCE_BUILD=TRUE",
        ),
        (
            OSError("libcudnn.so.9: cannot open shared object file"),
            "libcudnn.so.9 cannot be opened",
            "path",
        ),
        (
            OSError("/l/libc.so.6: version `GLIBC_2.38' not found (required by te.so)"),
            "GLIBC_2.38",
            "that TransformerEngine was built for",
        ),
        (
            FileNotFoundError("Could not find shared object file for Transformer Engine core lib."),
            "core library",
            "==2.20.2",
        ),
        (
            FileNotFoundError("Could not find shared object file for Transformer Engine torch lib."),
            "PyTorch ext",
            "==2.20.2",
        ),
        (RuntimeError("Found empty `transformer-engine` meta package installed."), "is missing", "==2.20.2"),
        (RuntimeError("Transformer Engine requires cuDNN 9.12.0 or later, but it is 9.1.0."), "cuDNN 9.12.0", "cudnn"),
        (
            ModuleNotFoundError("No module named 'einops'", name="einops"),
            "module einops is missing",
            "pip install einops",
        ),
        (AssertionError("out of sync"), "AssertionError: out of sync", "==2.20.2"),
    ],
)
def test_a_failed_import_is_one_sentence_with_versions_found_and_needed(error, what, needed):
    said = explain(error, FOUND)
    assert said.startswith("TransformerEngine does not load: ")
    assert what in said
    assert needed in said.partition("needed: ")[2]
    assert "found: transformer-engine 2.20.2, transformer-engine-cu13 2.20.2, transformer-engine-torch 2.20.2" in said
    assert "torch 2.11.0 for CUDA 13.0, cuBLAS 13.1.0.3, cuDNN 9.15.1.9" in said
    assert "\n" not in said


def test_a_library_of_the_machines_own_linker_is_explained():
    with pytest.raises(OSError, match="cannot open shared object") as found:
        ctypes.CDLL("libthat_nobody_has.so.3")
    assert "libthat_nobody_has.so.3 cannot be opened" in explain(found.value, FOUND)


def test_a_long_message_is_cut():
    assert len(explain(RuntimeError("word " * 1000), FOUND)) < 800


def put(folder: Path, body: str) -> None:
    """A package of this name on the path, whose import does what a broken installation's does."""
    package = folder / "transformer_engine" / "pytorch"
    package.mkdir(parents=True)
    (folder / "transformer_engine" / "__init__.py").write_text("")
    (package / "__init__.py").write_text(body)


@pytest.fixture
def forget(monkeypatch):
    """TransformerEngine is looked for anew, before and behind the test."""
    for name in [name for name in sys.modules if name.split(".")[0] == "transformer_engine"]:
        monkeypatch.delitem(sys.modules, name)
    library.load.cache_clear()
    library.unavailable.cache_clear()
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "transformer_engine"]:
        del sys.modules[name]
    library.load.cache_clear()
    library.unavailable.cache_clear()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("import ctypes\nctypes.CDLL('libtransformer_engine_that_is_not.so')", "cannot be opened"),
        ("raise RuntimeError('Transformer Engine requires cuDNN 9.12.0 or later')", "requires cuDNN 9.12.0"),
        ("import a_module_that_nobody_has", "the module a_module_that_nobody_has is missing"),
        ("assert False, 'Minimum torch version 2.99 required.'", "Minimum torch version 2.99"),
    ],
)
def test_whatever_the_import_raises_is_caught(tmp_path, monkeypatch, forget, body, said):
    put(tmp_path, body)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    reason = cannot_load(FOUND)
    assert reason is not None
    assert said in reason
    assert "needed: " in reason


def test_an_import_that_works_is_no_failure(tmp_path, monkeypatch, forget):
    put(tmp_path, "import warnings\nwarnings.warn('optional part missing')")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    assert cannot_load(FOUND) is None


@pytest.mark.skipif(library.found_versions().package is not None, reason="TransformerEngine is installed here")
def test_without_it_the_backend_says_so_and_plans_do():
    import torch

    import acceler8

    reason = "TransformerEngine is not installed; needed: 2.5 or newer; pip install --no-build-isolation"
    assert reason in str(backends.find("transformer_engine").unavailable())
    for name in ("transformer_engine", "TE", "te"):
        with pytest.raises(PlanError, match="'transformer_engine' cannot be used: TransformerEngine is not inst"):
            acceler8.plan(torch.nn.Sequential(torch.nn.Linear(16, 16)), "delayed", name)


def test_naming_the_backend_imports_nothing_of_it():
    code = (
        "import sys; from acceler8 import backends; b = backends.find('te'); b.capabilities(); b.unavailable;"
        "sys.exit(any(n.split('.')[0] in ('transformer_engine', 'transformer_engine_torch') for n in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
