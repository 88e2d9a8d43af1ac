"""Leaving a region updates no scales of the process. TransformerEngine's context does that where gradients are on."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from acceler8.backends.transformer_engine import region


class Context:
    """Stands for ``te.autocast``, of which only the end matters here: it reads whether gradients are on."""

    updates = 0

    def __init__(self, **arguments: object) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        Context.updates += torch.is_grad_enabled()


class Manager:
    """Of versions that give their state to nobody."""

    @staticmethod
    def is_first_fp8_module() -> bool:
        return True


class NewerManager(Manager):
    @staticmethod
    def get_autocast_state() -> str:
        return "inside"

    @staticmethod
    def set_autocast_state(state: str) -> None:
        pass


@pytest.mark.parametrize("manager", [Manager, NewerManager])
def test_gradients_are_off_when_it_is_left_and_on_inside(manager, monkeypatch):
    monkeypatch.setattr(region.library, "load", lambda: SimpleNamespace(autocast=Context))
    monkeypatch.setattr(region, "state_manager", lambda: manager)
    monkeypatch.setattr(Context, "updates", 0)
    made = region.Region(None)
    with made:
        assert torch.is_grad_enabled()
        with made:
            pass
    assert torch.is_grad_enabled()
    assert Context.updates == 0
    with region.autocast(None):
        pass
    assert Context.updates == 1
