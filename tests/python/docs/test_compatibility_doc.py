"""docs/compatibility.md is accurate: each library of `make ecosystem` has a row, and each row an example and a test."""

import ast
import re

import pytest
from support import ROOT

pytestmark = pytest.mark.ours

DOCUMENT = (ROOT / "docs" / "compatibility.md").read_text()
REQUIREMENTS = (ROOT / "tests" / "ecosystem" / "requirements.txt").read_text()
TESTS = ast.parse((ROOT / "tests" / "ecosystem" / "test_examples.py").read_text())

# The decorators of tests, and the ways to switch that they cover.
WAYS = {"ways": "install, run", "ways_and_import": "import, install, run"}


def rows():
    """The cells of each row of the first table; where the first is empty, each empty cell repeats the one above it."""
    table = re.search(r"^\| library \|.*\n\|---.*\n((?:\|.*\n)+)", DOCUMENT, re.MULTILINE)[1]
    above = None
    for line in table.splitlines():
        cells = re.split(r"\s*\|\s*", line)[1:-1]
        assert len(cells) == 6, line
        above = cells if cells[0] else [cell or inherited for cell, inherited in zip(cells, above, strict=True)]
        yield above


ROWS = list(rows())


def is_comparison(node):
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "compare"


def test_every_library_has_a_row_with_its_version():
    libraries = set(re.findall("(?m)^[a-z].*", REQUIREMENTS)) - {"pytest", "pytest-timeout"}
    assert {first.split()[0] for first, *_ in ROWS} == libraries | {"torch"}
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", version) for _, _, version, *_ in ROWS)


def test_every_row_names_an_example_and_its_test():
    calls = {}
    for node in TESTS.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            (way,) = [WAYS[name.id] for name in node.decorator_list if isinstance(name, ast.Name)]
            (call,) = [call for call in ast.walk(node) if is_comparison(call)]
            example = f"{call.args[0].value}.py"
            if example == "own_loop.py":
                example += f" {call.args[2].elts[0].value}"
            calls[node.name] = (f"`{example}`", way)
    assert {test: (example, way) for _, way, _, example, _, test in ROWS} == calls
    examples = {example.strip("`").split()[0] for _, _, _, example, _, _ in ROWS}
    assert all((ROOT / "examples" / "frameworks" / example).exists() for example in examples)
