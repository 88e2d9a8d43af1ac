"""What is installed is seen without importing it."""

from __future__ import annotations

import sys

import pytest
import torch

from acceler8 import utils
from acceler8.config.availability import installed_version, is_backend_available
from tests.config.packages import install


@pytest.mark.parametrize(("version", "expected"), [("0.6.0", False), ("0.6.1", True), ("0.18.0+cu128", True)])
def test_torchao_counts_from_its_least_version(monkeypatch, tmp_path, version: str, expected: bool) -> None:
    install(monkeypatch, tmp_path, "torchao", version)
    assert utils.is_torchao_available() is expected
    assert is_backend_available("AO") is expected
    assert "torchao" not in sys.modules


def test_transformer_engine_by_any_name_of_its_distribution(monkeypatch, tmp_path) -> None:
    assert not utils.is_transformer_engine_available()
    install(monkeypatch, tmp_path, "transformer_engine", "2.9.0", name="transformer-engine-cu12")
    assert utils.is_transformer_engine_available()
    assert "transformer_engine" not in sys.modules
    if not torch.cuda.is_available():
        assert not utils.is_transformer_engine_mxfp8_available()  # installed, and no GPU for it


def test_a_folder_of_that_name_is_not_the_package(monkeypatch, tmp_path) -> None:
    (tmp_path / "no_such_library").mkdir()
    (tmp_path / "no_such_library" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert installed_version("no_such_library") is None


def test_native_and_levels_need_nothing() -> None:
    assert utils.is_fp8_available()
    assert utils.is_msamp_available()
    assert is_backend_available("NATIVE")
    assert is_backend_available("MSAMP")


def test_capability_is_the_current_devices() -> None:
    if torch.cuda.is_available():
        assert utils.check_cuda_fp8_capability() == (torch.cuda.get_device_capability() >= (8, 9))
    else:
        assert utils.check_cuda_fp8_capability() is False


def test_small_readers(monkeypatch) -> None:
    assert utils.str_to_bool("Yes") == 1
    assert utils.str_to_bool("OFF", to_bool=True) is False
    with pytest.raises(ValueError, match="got 'maybe'; allowed: true, false"):
        utils.str_to_bool("maybe")
    monkeypatch.setenv("SOME_FLAG", "on")
    assert utils.parse_flag_from_env("SOME_FLAG")
    assert utils.parse_flag_from_env("NO_SUCH_FLAG", default=True)
    monkeypatch.setenv("SOME_FLAG", "2")
    with pytest.raises(ValueError, match="SOME_FLAG: got '2'"):
        utils.parse_flag_from_env("SOME_FLAG")


def test_every_public_name_is_there() -> None:
    assert all(hasattr(utils, name) for name in utils.__all__)
