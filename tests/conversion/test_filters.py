"""Names, globs and what counts as an output head."""

from __future__ import annotations

import pytest
from torch import nn

import acceler8
from acceler8.conversion.filters import matches, output_heads, tied_names
from acceler8.errors import PlanError


@pytest.mark.parametrize(
    ("name", "pattern", "fits"),
    [
        ("lm_head", "lm_head", True),
        ("model.lm_head", "lm_head", True),
        ("my_lm_head", "lm_head", False),
        ("lm_head.0", "lm_head", True),
        ("model.layers.1.mlp.up", "model.layers.1", True),
        ("model.layers.10.mlp.up", "model.layers.1", False),
        ("model.layers.1.mlp.up", "mlp.up", True),
        ("model.layers.1.mlp.up", "mlp", False),
        ("model.layers.1.mlp.up", "*.mlp.*", True),
        ("model.layers.1.mlp.up", "model.layers.[12].*", True),
        ("model.layers.3.mlp.up", "model.layers.[12].*", False),
        ("model.layers.3.mlp.up", "model.layers.?.mlp.up", True),
        ("UP", "up", False),
    ],
)
def test_matches(name, pattern, fits):
    assert matches(name, pattern) is fits


class Lm(nn.Module):
    def __init__(self, vocabulary: int, wide_layers: int, head: str | None) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 32)
        self.wide = nn.ModuleList(nn.Linear(32, 128) for _ in range(wide_layers))
        self.narrow = nn.Linear(128, 32)
        if head:
            self.add_module(head, nn.Linear(32, vocabulary))


def heads(model: nn.Module) -> dict[str, str]:
    found = output_heads(model)
    return {name: found[id(m)] for name, m in model.named_modules() if id(m) in found}


def test_a_head_is_known_by_name_or_else_by_shape():
    assert heads(Lm(128, 2, "lm_head")) == {"lm_head": "output head (by its name)"}
    assert heads(Lm(64, 2, "to_logits")) == {"to_logits": "output head (as wide as the vocabulary)"}
    assert heads(Lm(64, 2, None)) == {}


def test_an_mlp_as_wide_as_the_vocabulary_is_no_head():
    """A byte-level model of width 64 has MLPs of width 256."""
    assert heads(Lm(128, 3, "to_logits")) == {}
    assert heads(Lm(128, 1, "lm_head")) == {"lm_head": "output head (by its name)"}


def test_the_model_is_asked_also_inside_a_wrapper():
    class Asked(Lm):
        def get_output_embeddings(self) -> nn.Module:
            return self.unusual

    class Headless(Lm):
        def get_output_embeddings(self) -> None:
            return None

    want = "output head (get_output_embeddings)"
    assert heads(Asked(64, 1, "unusual")) == {"unusual": want}
    assert heads(nn.ModuleDict({"a": Asked(64, 1, "unusual"), "b": Headless(64, 1, None)})) == {"a.unusual": want}


def test_tied_names():
    model = nn.ModuleDict({"a": nn.Linear(16, 16), "b": nn.Linear(16, 16), "c": nn.Linear(16, 16)})
    assert tied_names(model) == []
    model["c"].weight = model["a"].weight
    assert tied_names(model) == [("a.weight", "c.weight")]


@pytest.mark.parametrize("filter_fn", ["mlp", ["*.mlp.*"]])
def test_a_filter_that_is_no_function_is_said(filter_fn):
    with pytest.raises(PlanError, match=r"filter_fn got a (str|list); allowed: a function \(name, module\) -> bool"):
        acceler8.plan(nn.Sequential(nn.Linear(32, 32)), filter_fn=filter_fn)
