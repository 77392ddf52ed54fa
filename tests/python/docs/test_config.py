"""Limits and environment variables are defined in one place, and copies of them agree with it."""

import re
import tomllib

import lanes
import pytest
from support import config_of, run_script, rustloader
from test_docs import PAGES, ROOT, known_variables

from rustloader import _core
from rustloader.installation.environment import INSTALL
from rustloader.settings import limits as config

pytestmark = pytest.mark.ours

NAMES = [
    INSTALL,
    config.FORKSERVER_PRELOAD.name,
    config.NUMPY_ARENA.name,
    *(variable.name for variable in config.SECONDS),
]
TEST_VARIABLES = {"RUSTLOADER_FAILPOINT", "RUSTLOADER_MEMORY_ROOT"}


def test_the_page_lists_every_variable_with_its_default():
    rows = re.findall(r"^\| `(RUSTLOADER_\w+)` \| (\S+) \|", PAGES["docs/options.md"].read_text(), re.MULTILINE)
    assert dict(rows) == {
        INSTALL: "unset",
        config.FORKSERVER_PRELOAD.name: "1",
        config.NUMPY_ARENA.name: "1",
    } | {variable.name: f"{variable.default:g}" for variable in config.SECONDS}


def test_the_sources_name_no_other_variable():
    """The Rust core names variables too, in messages."""
    assert known_variables() - TEST_VARIABLES == set(NAMES)


@pytest.mark.parametrize("variable", config.SECONDS, ids=lambda variable: variable.name)
@pytest.mark.parametrize("text, value", [(None, ...), ("", ...), ("0", 0.0), ("2.5", 2.5), ("inf", float("inf"))])
def test_a_number_of_seconds(variable, text, value, monkeypatch):
    monkeypatch.delenv(variable.name, raising=False)
    if text is not None:
        monkeypatch.setenv(variable.name, text)
    assert variable.get() == (variable.default if value is ... else value)


@pytest.mark.parametrize("text", ["soon", "-1", "nan"])
def test_what_is_no_number_of_seconds(text, monkeypatch):
    monkeypatch.setenv(config.SIGTERM.name, text)
    with pytest.raises(
        ValueError, match=f"^{config.SIGTERM.name} must be a number of seconds, 0 or more, got '{text}'"
    ):
        config.SIGTERM.get()


def test_stall_limits_reach_the_engine_by_name(monkeypatch):
    for variable, text in zip(config.SECONDS, "123", strict=False):
        monkeypatch.setenv(variable.name, text)
    assert config.stall_limits() == config.StallLimits(start_seconds=1.0, item_seconds=2.0, stack_seconds=3.0)
    with pytest.raises((TypeError, AttributeError), match="start_seconds"):
        _core.Engine(config_of(num_workers=1), (1.0, 2.0, 3.0), *[print] * 4)


def test_the_supported_versions_of_torch_are_the_same_everywhere():
    oldest, newest = (".".join(map(str, version)) for version in config.TORCH_VERSIONS)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"torch>={oldest}" in project["dependencies"]
    for page in ("README.md", "CONTRIBUTING.md"):
        assert f"torch {oldest} to {newest} and Python" in PAGES[page].read_text(), page
    assert f"| torch | {oldest} to {newest} |" in PAGES["docs/support.md"].read_text()


def test_the_configuration_needs_neither_torch_nor_the_extension():
    source = """
        import sys
        import rustloader.settings.limits
        print([name for name in ("torch", "rustloader._core") if name in sys.modules])
    """
    status, out, err = run_script(source, head="")
    assert (status, out) == (0, "[]\n"), err
    assert rustloader.settings.limits is config


def test_each_recorded_duration_is_of_a_test_that_exists():
    assert lanes.read().keys() - lanes.existing(lanes.read()) == set()
