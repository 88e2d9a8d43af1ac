"""Valid values of every kind, from the schema itself, and effective values made of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from acceler8.config import ENTRIES, Effective, Precedence, RouteValues, Source, merge
from acceler8.config.kinds import (
    NOTHING,
    Bool,
    Choice,
    GpuIds,
    Host,
    Int,
    LayerPatterns,
    Names,
    Number,
    Stages,
    Steps,
    Table,
    Text,
    ThreeBools,
    Variables,
    Words,
)
from acceler8.errors import ConfigError

# one line that an environment variable can hold
LINES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n\r\0"), max_size=12)
ODD_NAMES = st.sampled_from(["none", "~", "[01]*", "(a)", '"a"', "'", "layers.[ab].*", "no", "a=b", "--x", "#", ": "])


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Values as ``kind.parse`` gives them."""
    match kind:
        case Bool():
            return st.booleans()
        case Int():
            least = -(10**6) if kind.least is None else kind.least
            return st.integers(least, 10**9 if kind.most is None else kind.most)
        case Number():
            return st.floats(kind.least, allow_nan=False, allow_infinity=False)
        case Choice():
            return st.sampled_from(kind.words)
        case Host():
            return st.sampled_from(["node0", "node-1.cluster", "10.0.0.1", "fe80::1", "localhost"])
        case GpuIds():
            return st.just("all") | st.lists(st.integers(0, 15), min_size=1, max_size=4, unique=True).map(
                lambda numbers: ",".join(map(str, numbers))
            )
        case Text():
            return LINES.map(str.strip).filter(lambda text: text.lower() not in NOTHING)
        case Names():
            names = (LINES | ODD_NAMES).map(lambda name: name.replace(",", "").strip()).filter(bool)
            return st.lists(names, max_size=3).map(tuple)
        case LayerPatterns():
            patterns = (LINES | ODD_NAMES).map(lambda name: name.replace(",", "").strip()).filter(bool)
            pairs = st.tuples(patterns, st.sampled_from(kind.recipes))
            return st.lists(pairs, max_size=3, unique_by=lambda pair: pair[0]).map(
                lambda found: tuple(f"{pattern}={recipe}" for pattern, recipe in found)
            )
        case Steps():
            ends = st.none() | st.integers(1, 10**9)
            windows = st.tuples(ends, ends).filter(lambda w: None in w or w[0] < w[1])
            return windows.map(lambda w: ":".join("" if end is None else str(end) for end in w))
        case Stages():
            return st.tuples(
                st.lists(st.integers(0, 10**9), min_size=1, max_size=3, unique=True).map(sorted),
                st.lists(st.integers(1, 10**6), min_size=3, max_size=3, unique=True).map(sorted),
                st.booleans(),
            ).map(_stages)
        case Words():
            return st.permutations(kind.words).flatmap(
                lambda words: st.integers(1, len(words)).map(lambda count: tuple(words[:count]))
            )
        case ThreeBools():
            return st.tuples(st.booleans(), st.booleans(), st.booleans())
        case Variables():
            names = st.sampled_from(["NCCL_DEBUG", "NCCL_A", "GLOO_SOCKET_IFNAME", "TORCH_LOGS", "MKL_NUM_THREADS"])
            return st.dictionaries(names, LINES, max_size=3)
        case Table():
            return st.dictionaries(LINES, LINES, max_size=3)
    raise AssertionError(f"no values for {kind}")


def settings(paths: Any = tuple(ENTRIES)) -> st.SearchStrategy[dict[str, Any]]:
    """Any valid set of settings, by path, in the order of the schema."""
    some = st.fixed_dictionaries({}, optional={path: values_of(ENTRIES[path].setting.kind) for path in paths})
    return some.map(lambda found: {path: found[path] for path in ENTRIES if path in found})


def effective_of(values: dict[str, Any], precedence: Precedence = Precedence.CODE) -> Effective:
    """Effective values with one source."""
    layer = RouteValues()
    for path, value in values.items():
        layer.put(path, value, Source(precedence, "test"))
    return merge([layer])


def refusal(call: Callable[[], Any]) -> str | None:
    """The message of the ConfigError that a call raises; None if it raises nothing."""
    try:
        call()
    except ConfigError as error:
        return str(error)
    return None


def _stages(parts: tuple[list[int], list[int], bool]) -> str:
    steps, counts, ends_in_all = parts
    found = [str(count) for count in counts[: len(steps)]]
    found[-1:] = ["all"] if ends_in_all else found[-1:]
    return ",".join(f"{step}:{count}" for step, count in zip(steps, found, strict=True))
