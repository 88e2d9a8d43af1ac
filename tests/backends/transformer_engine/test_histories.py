"""Whose the histories of delayed scaling are: found in the model, not held by each layer. Its kernel needs a GPU."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from types import SimpleNamespace

from torch import nn

from acceler8.backends.transformer_engine.histories import AmaxHistories


def model_with(histories: AmaxHistories, layers: int = 4) -> nn.Module:
    """Layers of two owners in turn; they stand for TransformerEngine's before their first forward."""
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(layers)])
    for number, layer in enumerate(model):
        own = histories if number % 2 == 0 else AmaxHistories(1)
        layer.__dict__["_acceler8_layer"] = SimpleNamespace(name=f"layer{number}", histories=own)
        layer.fp8_initialized = False
    return model


def test_layers_are_those_of_the_model_that_is_asked():
    histories = AmaxHistories(2)
    model = model_with(histories)
    expected = [("layer0", model[0]), ("layer2", model[2])]
    assert histories.layers(model) == expected == histories.layers(model)
    histories.update(model)
    twin = copy.deepcopy(model)
    own = twin[0]._acceler8_layer.histories
    assert own is not histories
    assert own.layers(twin) == [("layer0", twin[0]), ("layer2", twin[2])]
    assert histories.layers(model) == expected
    assert (own.steps, own.interval) == (1, 2)


def test_one_layer_carries_no_other():
    histories = AmaxHistories(1)
    model = model_with(histories)
    assert len(histories.layers(model)) == 2
    assert len(pickle.dumps(model[0])) < 1.5 * len(pickle.dumps(nn.Linear(64, 64)))
    gone, kept = weakref.ref(model[2]), model[0]
    del model
    gc.collect()
    assert gone() is None
    assert kept._acceler8_layer.histories.layers(nn.Sequential(kept)) == [("layer0", kept)]
