"""The routes are equal: what one writes, each other reads as the same values."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as examples

from acceler8.config import (
    ENTRIES,
    Effective,
    Precedence,
    RouteValues,
    merge,
    parse_flags,
    read_environment,
    read_yaml,
    to_flags,
    to_yaml,
    write_environment,
)
from acceler8.config import handlers as handler_module
from acceler8.config import plugins as plugin_module
from acceler8.config.code import sort_handlers, to_python, values_from_code
from acceler8.config.files import write_file
from acceler8.config.resolve import contradictions
from acceler8.errors import ConfigError
from tests.config.support import effective_of, settings


def by_flags(effective: Effective, folder: Path) -> RouteValues:
    parsed = parse_flags([*to_flags(effective), "train.py", "--margin"])
    assert parsed.rest == ["train.py", "--margin"]
    return parsed.route


def by_dashed_flags(effective: Effective, folder: Path) -> RouteValues:
    words = []
    for word in to_flags(effective):
        name, _, value = word.partition("=")
        words.append(f"--{name[2:].replace('_', '-')}={value}")
    return parse_flags(words).route


def by_environment(effective: Effective, folder: Path) -> RouteValues:
    return read_environment(write_environment(effective) | {"PATH": "/bin"})


def by_yaml(effective: Effective, folder: Path) -> RouteValues:
    path = folder / "run.yaml"
    path.write_text(to_yaml(effective), encoding="utf-8")
    return read_yaml(path)


def by_json(effective: Effective, folder: Path) -> RouteValues:
    write_file(folder / "run.json", effective)
    return read_yaml(folder / "run.json")


ROUTES = (by_flags, by_dashed_flags, by_environment, by_yaml, by_json)


@pytest.mark.parametrize("route", ROUTES)
@given(values=settings())
@examples(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_a_route_writes_it_reads_back(route: Callable[..., RouteValues], tmp_path: Path, values: dict[str, Any]):
    effective = effective_of(values)
    assert effective.given() == values
    back = merge([route(effective, tmp_path)])
    assert back.given() == values
    assert not back.notes


@given(values=settings())
@examples(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_chain_of_routes_keeps_the_values(tmp_path: Path, values: dict[str, Any]):
    effective = effective_of(values)
    for route in (*ROUTES, *reversed(ROUTES)):
        effective = merge([route(effective, tmp_path)])
    assert effective.given() == values


def by_python(source: str) -> RouteValues:
    """What the script says to ``Accelerator``, without making one."""
    heard: list[RouteValues] = []

    def accelerator(kwargs_handlers: Any = None, **arguments: Any) -> None:
        heard.append(values_from_code(handlers=sort_handlers(kwargs_handlers), **arguments))

    names = {**vars(handler_module), **vars(plugin_module), "Accelerator": accelerator}
    exec(re.sub(r"^from .*$", "", source, flags=re.MULTILINE), names)
    return heard[0]


ZERO3_INIT = "deepspeed_config.zero3_init_flag"


@given(values=settings())
@examples(max_examples=100, deadline=None)
def test_python_says_the_same_or_names_what_it_leaves_out(values: dict[str, Any]):
    effective = effective_of(values)
    source, unexpressed = to_python(effective)
    left_out = {line.partition("=")[0] for line in unexpressed}
    assert left_out <= set(values)
    refusal: Exception | None = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # zero3_init_flag with a lower stage, which turns it off
            heard = by_python(source)
    except (ConfigError, NotImplementedError) as error:
        refusal = error
    if refusal:
        assert list(contradictions(effective)), f"code refuses what check takes: {refusal}"
        return
    said = {path: value.value for path, value in heard.values.items() if value.source.precedence is Precedence.CODE}
    if values.get("deepspeed_config.zero_stage") != 3:
        left_out.add(ZERO3_INIT)
    expected = {path: value for path, value in values.items() if path not in left_out}
    assert {path: said.get(path) for path in expected} == expected
    added = set(said) - set(values) - {"fp8_config.backend"}  # a recipe's class names its backend
    assert not added


@given(low=settings(), middle=settings(), high=settings())
@examples(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_flag_before_environment_before_yaml(
    tmp_path: Path, low: dict[str, Any], middle: dict[str, Any], high: dict[str, Any]
):
    layers = [
        parse_flags(to_flags(effective_of(high))).route,
        by_yaml(effective_of(low), tmp_path),
        read_environment({k: v for k, v in write_environment(effective_of(middle)).items() if "SOURCES" not in k}),
    ]
    merged = merge(layers)
    assert merged.given() == {path: (low | middle | high)[path] for path in ENTRIES if path in low | middle | high}
    for path in merged.values:
        won = Precedence.FLAG if path in high else Precedence.ENVIRONMENT if path in middle else Precedence.YAML
        assert merged.source(path).precedence is won


@given(values=settings())
@examples(max_examples=30, deadline=None)
def test_a_worker_still_knows_who_won(values: dict[str, Any]):
    effective = effective_of(values, Precedence.YAML)
    assert read_environment(write_environment(effective)).values == dict(effective.values)
