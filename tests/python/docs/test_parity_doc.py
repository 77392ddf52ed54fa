"""docs/parity.md is accurate: every ID has one row, every row has a status and tests, and every test exists."""

import ast
import re

import pytest
from support import ROOT

pytestmark = pytest.mark.ours

DOCUMENT = (ROOT / "docs" / "parity.md").read_text()
IDS = {f"{kind}{n}" for kind, count in (("P", 27), ("S", 9), ("T", 33)) for n in range(1, count + 1)}
STATUS = {"same", "better", "fallback"}


def rows():
    """(first cell, status, last cell) of each row of the tables. Options beyond torch's have no status."""
    has_status = True
    for line in DOCUMENT.splitlines():
        cells = re.split(r"\s*\|\s*", line)[1:-1]
        if line.startswith("|") and cells[-1] == "tests":
            has_status = cells[1] == "status"
        elif line.startswith("|") and not line.startswith("|---"):
            assert len(cells) == 4, line
            yield cells[0], cells[1] if has_status else None, cells[3]


def names_in(path):
    tree = ast.parse(path.read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


ROWS = list(rows())
TESTS = {f"{path.name}::{name}" for path in (ROOT / "tests" / "python").rglob("test_*.py") for name in names_in(path)}


def test_every_id_has_one_row():
    listed = [first for first, _, _ in ROWS if re.fullmatch(r"[PST]\d+", first)]
    assert sorted(listed) == sorted(IDS)


def test_every_row_has_a_status_and_tests_that_exist():
    for first, status, last in ROWS:
        assert status is None or status in STATUS, first
        tests = last.split(", ")
        assert set(tests) <= TESTS, (first, set(tests) - TESTS)
        if first in IDS:
            assert any(re.search(rf"_{first.lower()}_", name) for name in tests), f"{first}: no test names the id"


def test_every_id_that_a_test_names_is_one():
    named = {id_.upper() for name in TESTS for id_ in re.findall(r"_([pst]\d+)(?=_)", name)}
    assert named == IDS
