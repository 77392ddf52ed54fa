"""The content of the documentation: the README's length, search terms, every public name, plain English."""

import ast
import importlib
import inspect
import re
import sys
import tomllib

import pytest
import torch.utils.data
import yaml
from support import run_script
from test_docs import PAGES, ROOT, blocks, known_options

import rustloader
from rustloader.tools.harness import report

pytestmark = pytest.mark.ours

README = PAGES["README.md"]
SITE_PAGES = [name for name in PAGES if name.startswith("docs/")]
# Terms that users search for.
TERMS = ["conda", "uv", "Docker", "Slurm", "Colab", "Jupyter", "memory leak", "benchmark", "free-threaded", "/dev/shm"]
# House words: phrases that are not idiomatic English, and rates such as "5 us a batch".
HOUSE_WORDS = re.compile(
    r"\bso (?:long|many|often|much)\b|\bwhat is said\b|\b(?:is|can be|to be|cannot be) had\b|\bwhoever\b"
    r"|\b(?:no|some|any)body\b|\bat the most\b|\bof (?:ours|theirs)\b"
    r"|\b(?:us|ms|s|microseconds|calls|copy|time) a batch\b|\ba (?:line|thread|bar|row|file) a (?:worker|row|tensor)\b",
    re.IGNORECASE,
)


def table_rows(text):
    """The cells of each row of the Markdown tables, without the rows of dashes."""
    rows = [re.split(r"\s*(?<!\\)\|\s*", line.strip())[1:-1] for line in text.splitlines() if line.startswith("|")]
    return [cells for cells in rows if not all(re.fullmatch(r":?-+:?", cell) for cell in cells)]


def section(page, heading):
    text = PAGES[page].read_text()
    return re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#+ |\Z)", text, re.MULTILINE | re.DOTALL)[1]


# README


def test_the_readme_is_short():
    assert len(README.read_text().splitlines()) <= 120


def test_the_readme_begins_with_what_it_is_then_shows_it():
    text = README.read_text()
    order = ["# rustloader", "![", "<!-- demo -->", "## Install", "## Use", "## Try it", "## When it helps"]
    order += ["## What it does that torch does not", "## Proof", "## Limits", "## Links"]
    positions = [text.index(part) for part in order]
    assert positions == sorted(positions)
    assert text.count("<!-- demo -->") == 2
    assert re.search(r"torch(?:,? no| without) workers", text.split("<!-- demo -->")[1])


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


# Search, nav, words


@pytest.mark.parametrize("term", TERMS)
def test_a_search_finds(term):
    pattern = re.compile(rf"(?<![\w-]){re.escape(term)}(?![\w-])", re.IGNORECASE)
    pages = [name for name in SITE_PAGES if name != "docs/changelog.md" and pattern.search(PAGES[name].read_text())]
    assert pages, f"no page of docs/ says {term!r}"


def test_every_page_stands_in_one_of_the_four_groups():
    nav = yaml.load((ROOT / "mkdocs.yml").read_text(), yaml.SafeLoader)["nav"]
    assert [name for group in nav for name in group] == ["Start", "Guide", "Reference", "Internals"]
    pages = [file for group in nav for entries in group.values() for entry in entries for file in entry.values()]
    assert sorted(pages) == sorted(name.removeprefix("docs/") for name in SITE_PAGES)


def test_the_index_of_examples_names_each_program():
    folder = ROOT / "examples"
    programs = [path for path in folder.glob("*/*.py") if "__main__" in path.read_text()]
    programs += [path.parent for path in folder.glob("*/*/__main__.py")]
    linked = re.findall(r"^\| \[`([^`]*)`\]\(([^)]*)\) \|", PAGES["examples/README.md"].read_text(), re.MULTILINE)
    assert all(title == target for title, target in linked)
    assert sorted(target for _, target in linked) == sorted(str(path.relative_to(folder)) for path in programs)


@pytest.mark.parametrize("page", PAGES)
def test_plain_english(page):
    lines = enumerate(PAGES[page].read_text().splitlines(), 1)
    matches = [f"{page}:{number}: {match[0]!r}" for number, line in lines for match in HOUSE_WORDS.finditer(line)]
    assert not matches, matches


@pytest.mark.parametrize("text", ["for so long as", "no seals can be had", "12 us a batch", "whoever builds it"])
def test_house_words_are_found(text):
    assert HOUSE_WORDS.search(text)


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


def test_the_migration_table_has_every_argument_with_its_default():
    rows = table_rows(section("docs/migration.md", "Arguments"))[1:]
    documented = {name.strip("`"): default.strip("`") for name, _, _, default in rows}
    defaults = {
        name: "required" if parameter.default is inspect.Parameter.empty else repr(parameter.default)
        for name, parameter in torch_parameters().items()
    }
    if "in_order" not in defaults:  # new in torch 2.6
        del documented["in_order"]
    assert documented == defaults


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


# Figures


def test_the_users_page_quotes_the_performance_log():
    """The figures are the log's, unrounded: both loaders with persistent workers, and their ratio."""
    compared = {cells[0]: cells for cells in table_rows(section("docs/performance-log.md", "The comparison"))}
    goals = {cells[0]: cells for cells in table_rows(section("docs/performance-log.md", "Against the goals"))}
    head, *rows = table_rows(section("docs/performance.md", "Some figures"))
    ratios = ["over torch with workers", "over the faster torch"]
    assert head == ["batch", "torch without workers", "torch", "rustloader", *ratios] and len(rows) > 4
    for batch, *figures, ratio, over_faster in rows:
        without_workers, with_workers, own = figures
        assert [f"{with_workers} us", f"{own} us", ratio] == compared[batch][5:8]
        assert without_workers == goals[batch][-1]
        *torch_times, own_time = (float(figure.replace(",", "")) for figure in figures)
        assert over_faster == f"{min(torch_times) / own_time:.1f}x"


def test_the_comparison_writes_into_the_performance_log(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benches"))
    compare = importlib.import_module("compare")
    page = tmp_path / "page.md"
    page.write_text(PAGES["docs/performance-log.md"].read_text())
    before, _, after = page.read_text().split(compare.MARK)
    result = {"row": "scalar", "what": "one scalar", "persistent": True, "ratio": 2.0, "cpu_ratio": 1.5}
    report.write(page, compare.table([result | {"torch_us": 10.0, "ours_us": 5.0}]), compare.MARK)
    assert page.read_text().startswith(before) and page.read_text().endswith(after)
    assert "| one scalar |  |  |  |  | 10.0 us | 5.0 us | 2.0x | 1.5x |" in page.read_text()
    source = (ROOT / "benches" / "compare.py").read_text()
    assert '"performance-log.md"' in source and "README" not in source


# The rest


def test_the_citation_is_valid():
    """It has the fields that Citation File Format 1.2.0 requires, and otherwise only the fields listed here."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation.keys() >= {"cff-version", "message", "title", "authors"}
    allowed = {"cff-version", "message", "type", "title", "abstract", "authors", "license", "keywords"}
    assert citation.keys() <= allowed
    assert citation["cff-version"] == "1.2.0" and citation["type"] == "software"
    assert all(author.keys() == {"name"} for author in citation["authors"])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert citation["title"] == project["name"]
    assert " OR ".join(citation["license"]) == project["license"]
    assert citation["abstract"].removesuffix(".") == project["description"]


def test_the_support_policy_names_what_the_package_asks_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = PAGES["docs/support.md"].read_text()
    (oldest,) = (re.search(r"torch>=(\S+)", one)[1] for one in project["dependencies"] if one.startswith("torch"))
    assert f"| torch | {oldest} to " in text
    assert f"| Python | CPython {project['requires-python'].removeprefix('>=')} and newer" in text


def test_the_quick_start_runs_twice_in_one_namespace():
    """As in a notebook whose cells are run again from the top."""
    text = "\n".join(b.text for b in blocks("docs/quick-start.md") if b.language == "python" and b.not_run is None)
    page = ROOT / "docs" / "quick-start.md"
    status, _, err = run_script(f"""
        code = compile({text!r}, {str(page)!r}, "exec")
        namespace = {{"__name__": "__main__"}}
        for _ in range(2):
            exec(code, namespace)
    """)
    assert (status, err) == (0, "")
