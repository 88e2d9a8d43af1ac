"""Enums that scripts compare against."""

from __future__ import annotations

import json

import pytest

from acceler8.config.enums import DistributedType, DynamoBackend, FP8BackendType, PrecisionType
from acceler8.config.schema import BACKENDS, DISTRIBUTED_TYPES, DYNAMO_BACKENDS, PRECISIONS
from acceler8.errors import ConfigError


@pytest.mark.parametrize(
    ("enum", "words"),
    [
        (PrecisionType, PRECISIONS),
        (FP8BackendType, (*BACKENDS, "NO")),
        (DynamoBackend, DYNAMO_BACKENDS),
        (DistributedType, DISTRIBUTED_TYPES),
    ],
)
def test_members_are_the_schemas_words(enum, words) -> None:
    assert set(words) <= set(enum.list())
    if enum is not DistributedType:  # which has more, to compare against
        assert set(words) == set(enum.list())
    for word in words:
        member = enum(word.swapcase())
        assert str(member) == f"{member}" == member == member.value == word
        assert json.dumps(member) == f'"{word}"'
        assert word.lower() in enum


def test_membership_and_other_spellings() -> None:
    assert FP8BackendType("torchao") is FP8BackendType.AO
    assert FP8BackendType("Transformer_Engine") is FP8BackendType.TE
    assert "te" in FP8BackendType
    assert FP8BackendType.TE in FP8BackendType
    assert "cuda" not in FP8BackendType
    assert 3 not in PrecisionType
    assert DistributedType("xla") is DistributedType.XLA != DistributedType.NO


def test_an_unknown_word_lists_the_valid_ones() -> None:
    with pytest.raises(ValueError, match="unknown FP8BackendType 'xx'; valid: AO, MSAMP, NATIVE, NO, TE"):
        FP8BackendType("xx")
    with pytest.raises(ConfigError, match="did you mean 'fp8'"):
        PrecisionType("fp9")


def test_accelerates_members_are_all_here() -> None:
    theirs = pytest.importorskip("accelerate.utils.dataclasses")
    for ours in (PrecisionType, FP8BackendType, DistributedType):
        missing = {m.name: m.value for m in getattr(theirs, ours.__name__)}.items() - {
            m.name: m.value for m in ours
        }.items()
        assert not missing
