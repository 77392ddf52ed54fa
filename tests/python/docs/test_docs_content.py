"""The documentation names what exists: commands and their options, public names, examples."""

import ast
import importlib
import inspect
import re
import sys

import pytest
import torch.utils.data
from test_docs import PAGES, ROOT, known_options

import rustloader

pytestmark = pytest.mark.ours

README = PAGES["README.md"]


def table_rows(text):
    """The cells of each row of the Markdown tables, without the rows of dashes."""
    rows = [re.split(r"\s*(?<!\\)\|\s*", line.strip())[1:-1] for line in text.splitlines() if line.startswith("|")]
    return [cells for cells in rows if not all(re.fullmatch(r":?-+:?", cell) for cell in cells)]


def test_the_package_index_gets_absolute_links():
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        absolute = importlib.import_module("index_readme").absolute
    finally:
        sys.path.remove(str(ROOT / "scripts"))
    text = README.read_text()
    result = absolute(text, "https://host.example/owner/name/", "v0.1.0")
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    assert all((ROOT / target.partition("#")[0]).exists() for target in targets if not target.startswith("http"))
    assert re.findall(r"\]\((?!https://)([^)]*)\)", result) == []
    assert "](https://host.example/owner/name/blob/v0.1.0/docs/installing.md)" in result
    assert re.search(r"!\[[^]]*\]\(https://host\.example/owner/name/raw/v0\.1\.0/docs/demo\.png\)", result)
    assert absolute(result, "https://elsewhere.example/x/y", "main") == result
    unchanged = "[a](#anchor) [b](https://host.example/) [c](mailto:a@host.example)"
    assert absolute(unchanged, "https://host.example/owner/name", "main") == unchanged
    # HTML would not be rewritten.
    assert not re.search(r"<(?:img|a)\s", text)


def test_the_index_of_examples_names_each_file():
    folder = ROOT / "examples"
    programs = [path for path in folder.glob("*/*.py") if "__main__" in path.read_text()]
    programs += [path.parent for path in folder.glob("*/*/__main__.py")] + list(folder.glob("*/*.json"))
    linked = re.findall(r"^\| \[`([^`]*)`\]\(([^)]*)\) \|", PAGES["examples/README.md"].read_text(), re.MULTILINE)
    assert all(title == target for title, target in linked)
    assert sorted(target for _, target in linked) == sorted(str(path.relative_to(folder)) for path in programs)


# The command line


@pytest.mark.parametrize("command", ["doctor", "check", "bench", "top", "trace"])
def test_the_page_of_the_command_line_has_every_option_and_no_other(command):
    text = re.search(rf"^## `{command}`\n(.*?)(?=^## |\Z)", PAGES["docs/cli.md"].read_text(), re.M | re.S)[1]
    tables = "\n".join("|".join(cells) for cells in table_rows(text) if cells[0].startswith("`--"))
    documented = set(re.findall(r"^`(--[a-z-]+)", tables, re.M)) or set(re.findall(r"`(--[a-z-]+)`", text))
    existing = {option for option in known_options("rustloader", command) if option.startswith("--")} - {"--help"}
    assert documented == existing


def test_the_page_of_the_command_line_has_every_command():
    commands = {cells[0] for cells in table_rows(PAGES["docs/cli.md"].read_text().partition("\n## ")[0])[1:]}
    assert commands == {f"`{name}`" for name in ("doctor", "check", "bench", "top", "trace", "run")}


# The API


def test_every_public_name_is_on_the_api_page():
    public = {name for name in rustloader._OURS if not name.startswith("_")}
    documented = {path.rpartition(".")[2] for path in re.findall(r"^::: (\S+)", PAGES["docs/api.md"].read_text(), re.M)}
    assert public <= documented, public - documented


def test_every_object_of_the_api_page_exists():
    for path in re.findall(r"^::: (\S+)", PAGES["docs/api.md"].read_text(), re.MULTILINE):
        module, _, name = path.rpartition(".")
        assert hasattr(importlib.import_module(module), name), path


def torch_parameters():
    parameters = dict(inspect.signature(torch.utils.data.DataLoader.__init__).parameters)
    del parameters["self"]
    return parameters


def test_the_site_shows_the_loaders_signature():
    """Reads the source of scripts/docs_signature.py: griffe, which it imports, is not installed here."""
    source = (ROOT / "scripts" / "docs_signature.py").read_text()
    namespace = {}
    signature = ast.literal_eval(re.search(r'SIGNATURE = (""".*?""")', source, re.DOTALL)[1])
    exec(f"from __future__ import annotations\n{signature}", namespace)
    shown = dict(inspect.signature(namespace["__init__"]).parameters)
    del shown["self"]
    expected = torch_parameters()
    if "in_order" not in expected:
        del shown["in_order"]
    assert [(name, parameter.default, parameter.kind) for name, parameter in shown.items()] == [
        (name, parameter.default, parameter.kind) for name, parameter in expected.items()
    ]


def test_the_site_shows_what_the_stateful_loader_has_besides():
    source = (ROOT / "scripts" / "docs_signature.py").read_text()
    own = ast.literal_eval(re.search(r"^STATEFUL = (.*)", source, re.MULTILINE)[1])
    namespace = {}
    exec(f"from __future__ import annotations\ndef shown(*, {own}): ...", namespace)
    plain = inspect.signature(rustloader.DataLoader).parameters
    stateful = inspect.signature(rustloader.StatefulDataLoader).parameters
    shown = inspect.signature(namespace["shown"]).parameters
    assert {name: (parameter.default, parameter.kind) for name, parameter in shown.items()} == {
        name: (parameter.default, parameter.kind) for name, parameter in stateful.items() if name not in plain
    }
