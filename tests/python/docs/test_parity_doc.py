"""docs/parity.md has a row for each ID, with a status; tests/README.md names the tests of each row, which exist."""

import ast
import re

import pytest
from support import ROOT

pytestmark = pytest.mark.ours

IDS = {f"{kind}{n}" for kind, count in (("P", 27), ("S", 9), ("T", 32)) for n in range(1, count + 1)}
STATUS = {"same", "better", "fallback"}


def rows(path):
    """The cells of each row of the page's tables, without headings."""
    above = []
    for line in (ROOT / path).read_text().splitlines():
        cells = re.split(r"\s*(?<!\\)\|\s*", line)[1:-1]
        if above and not all(re.fullmatch(r":?-+:?", cell) for cell in cells):
            yield cells
        above = cells if line.startswith("|") else []


def names_in(path):
    tree = ast.parse(path.read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


PAGES = ("docs/parity.md", "python/rustloader/iterator/README.md")
ROWS = {cells[0]: cells[1:] for page in PAGES for cells in rows(page)}
PROOFS = {cells[0]: cells[1].split(", ") for cells in rows("tests/README.md")}
FILES = {path.name: names_in(path) for path in (ROOT / "tests" / "python").rglob("test_*.py")}
TESTS = {f"{file}::{name}" for file, names in FILES.items() for name in names}


def test_every_id_has_a_row_and_a_test_that_names_it():
    assert {first for first in ROWS if re.fullmatch(r"[PST]\d+", first)} == IDS
    assert all(ROWS[first][0] in STATUS for first in IDS)
    assert not {id_ for id_ in IDS if not any(re.search(rf"_{id_.lower()}_", name) for name in PROOFS[id_])}
    assert {id_.upper() for name in TESTS for id_ in re.findall(r"_([pst]\d+)(?=_)", name)} == IDS


def test_every_row_has_tests_that_exist():
    assert ROWS.keys() <= PROOFS.keys(), ROWS.keys() - PROOFS.keys()
    named = {name for tests in PROOFS.values() for name in tests if name.startswith("test_")}
    assert not {name for name in named if name not in TESTS and name not in FILES}
