"""TransformerEngine under Accelerate's names, where it is not installed: ImportErrors that say what to do."""

from __future__ import annotations

import pytest
from torch import nn

import acceler8.utils
from acceler8.backends.transformer_engine import library

CALLS = {
    "convert_model": lambda f: f(nn.Linear(16, 16)),
    "has_transformer_engine_layers": lambda f: f(nn.Linear(16, 16)),
    "contextual_fp8_autocast": lambda f: f(nn.Linear(16, 16).forward, None),
    "apply_fp8_autowrap": lambda f: f(nn.Linear(16, 16), None),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_names_are_there(name):
    assert name in acceler8.utils.__all__
    assert callable(getattr(acceler8.utils, name))


@pytest.mark.skipif(library.unavailable() is None, reason="TransformerEngine works here")
@pytest.mark.parametrize("name", CALLS)
def test_without_the_library_they_raise_import_errors(name):
    with pytest.raises(ImportError, match="TransformerEngine"):
        CALLS[name](getattr(acceler8.utils, name))
