"""Every setting can be reached on every route, by a name of its own."""

from __future__ import annotations

from collections import Counter

import pytest

from acceler8.cli.launch import OPTIONS, SWITCHES
from acceler8.config import ENTRIES
from acceler8.config.flags import _ENGINES as FLAG_ENGINES
from acceler8.config.registry import BY_ENV, BY_FLAG, DEAD_ENV, SECTIONS, find
from acceler8.config.resolve import find_key
from acceler8.config.yaml_file import IGNORED
from acceler8.errors import ConfigError


def twice(names: list[str]) -> list[str]:
    return [name for name, count in Counter(names).items() if count > 1]


@pytest.mark.parametrize("path", ENTRIES)
def test_each_setting_has_one_variable_and_a_flag(path: str):
    setting = ENTRIES[path].setting
    assert len(setting.env) == (3 if path.endswith("override_linear_precision") else 1)
    assert setting.flags
    assert all(name == name.upper() for name in setting.env)
    assert all(name == name.lower() and "-" not in name for name in setting.flags)
    assert setting.help.endswith(".")
    assert "\n" not in setting.help


def test_no_name_means_two_settings():
    assert not twice([name for e in ENTRIES.values() for name in e.setting.env] + list(DEAD_ENV))
    assert not twice(
        [name for e in ENTRIES.values() for name in e.setting.flags]
        + [*FLAG_ENGINES, *SWITCHES, *OPTIONS, "json", "all", "to", "from", "yes", "set", "defaults"]
    )
    keys = [
        (e.section, name)
        for e in ENTRIES.values()
        for name in {e.key, *e.setting.aliases, *([f"fp8_{e.key}"] if e.is_fp8 else [])}
    ]
    assert not twice(keys + [("", name) for name in (*SECTIONS, *IGNORED)])


def test_a_bare_key_means_one_setting():
    assert not twice([e.key for e in ENTRIES.values()])
    for path, entry in ENTRIES.items():
        assert find_key(path, "x") is entry
        assert find_key(entry.key, "x") is entry


def test_lookups_cover_every_setting():
    assert {e.path for e in BY_ENV.values()} == set(ENTRIES) == {e.path for e in BY_FLAG.values()}


@pytest.mark.parametrize(
    ("section", "key", "path"),
    [
        ("fp8_config", "fp8_margin", "fp8_config.margin"),
        ("fp8_config", "fp8_format", "fp8_config.fp8_format"),
        ("fp8_config", "format", "fp8_config.fp8_format"),
        ("fp8_config", "amax_history_length", "fp8_config.amax_history_len"),
        ("fp8_config", "amax_compute_algorithm", "fp8_config.amax_compute_algo"),
        ("fp8_config", "optimization_level", "fp8_config.opt_level"),
        ("fsdp_config", "fsdp_backward_prefetch_policy", "fsdp_config.fsdp_backward_prefetch"),
    ],
)
def test_other_spellings(section: str, key: str, path: str):
    assert find(section, key, "x")[0].path == path


@pytest.mark.parametrize(
    ("section", "key", "near"), [("", "mixed_precison", "mixed_precision"), ("fp8_config", "margn", "margin")]
)
def test_an_unknown_key_names_the_nearest(section: str, key: str, near: str):
    with pytest.raises(ConfigError, match=f"run.yaml:3: unknown key.*{key}.*did you mean '{near}'"):
        find(section, key, "run.yaml:3")
