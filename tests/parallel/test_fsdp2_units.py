"""Which modules become units, without processes: the model is not sharded here."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import acceler8
from acceler8.errors import ConfigError
from acceler8.parallel.fsdp2_units import NOTHING, SIZE, TRANSFORMER, WrapPolicy, find_units


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.norm = nn.LayerNorm(32)


class Language(nn.Module):
    """As transformers' models are: a base model, an embedding and a head that it is asked for."""

    base_model_prefix = "model"

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.model = Base()
        self.lm_head = nn.Linear(32, 64, bias=False)
        if tied:
            self.lm_head.weight = self.model.embed.weight

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError


LAYERS = [["model.layers.0"], ["model.layers.1"], ["model.layers.2"]]


def names(model: nn.Module, **policy: object) -> list[list[str]]:
    return [unit.names for unit in find_units(model, WrapPolicy(**policy))]  # type: ignore[arg-type]


def test_blocks_embedding_and_tail():
    units = find_units(Language(), WrapPolicy())
    assert [unit.names for unit in units] == [*LAYERS, ["model.embed"], ["model.norm", "lm_head"]]
    assert [unit.is_tail for unit in units] == [False] * 4 + [True]


def test_a_tied_head_is_in_the_unit_of_its_embedding():
    (*blocks, last) = find_units(Language(tied=True), WrapPolicy())
    assert [unit.names for unit in blocks] == LAYERS
    assert last.names == ["model.embed", "model.norm", "lm_head"]
    assert last.is_tail


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ({"kind": NOTHING}, []),
        ({"kind": TRANSFORMER, "class_names": ("Layer",)}, LAYERS),
        ({"kind": TRANSFORMER}, LAYERS),  # the model names none
        ({"kind": SIZE, "min_num_params": 2100}, [*LAYERS, ["model"]]),
        ({"kind": SIZE, "min_num_params": 10**6}, []),
        ({"wants": lambda module: isinstance(module, Layer)}, LAYERS),
    ],
)
def test_policies(policy, expected):
    found = names(Language(), **policy)
    ends = [["model.embed"], ["model.norm", "lm_head"]]
    if ["model"] in expected:  # its embedding and norm are taken
        ends = [["lm_head"]]
    assert found == [*expected, *ends]


def test_a_model_may_name_its_blocks():
    model = Language()
    model._no_split_modules = ["Layer"]
    assert names(model, kind=TRANSFORMER)[:3] == LAYERS
    model._no_split_modules = ["Linear"]
    assert names(model, kind=TRANSFORMER)[0] == ["model.layers.0.a"]
    with pytest.raises(ConfigError, match="got 'Lair', which this Language does not have; allowed: Base, Embedding, L"):
        names(model, kind=TRANSFORMER, class_names=("Lair",))


def test_converted_layers_are_named_by_their_author():
    model = Language()
    acceler8.convert(model, acceler8.plan(model))
    assert names(model, kind=TRANSFORMER, class_names=("Layer",))[:3] == LAYERS
    assert names(model)[:3] == LAYERS


def test_blocks_that_share_a_parameter_are_one_unit():
    model = Language()
    layers = model.model.layers
    layers[2].a.weight = layers[0].a.weight
    assert names(model)[:2] == [["model.layers.0", "model.layers.2"], ["model.layers.1"]]


def test_a_block_that_shares_with_the_root_is_part_of_it():
    model = Language()
    model.extra = nn.Linear(32, 32)
    model.extra.weight = model.model.layers[1].b.weight
    assert names(model)[:2] == [["model.layers.0"], ["model.layers.2"]]


def test_a_head_whose_loss_is_fused_stays_with_the_root():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    for tied in (False, True):
        config.tie_word_embeddings = tied
        model = transformers.LlamaForCausalLM(config)
        assert [u.names for u in find_units(model, WrapPolicy())][-1][-1] == "lm_head"
        acceler8.fused_head_loss(model)
        found = [name for unit in find_units(model, WrapPolicy()) for name in unit.names]
        assert "lm_head" not in found
        assert ("model.embed_tokens" in found) is not tied


def test_units_without_parameters_of_their_own_are_left_out():
    model = Language()
    ignored = [*model.model.layers[1].parameters(), *model.model.embed.parameters()]
    found = [unit.names for unit in find_units(model, WrapPolicy(), ignored)]
    assert found == [["model.layers.0"], ["model.layers.2"], ["model.norm", "lm_head"]]
    assert all(p.device == torch.device("cpu") for p in ignored)
