"""The mutants of tests/mutants still apply after renames and reformats. `make lint` checks that each applies now."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support import ROOT

FOLDER = ROOT / "tests" / "mutants"

sys.path.insert(0, str(FOLDER))
try:
    import run
    import sources
    import syntax
    from sources import PYTHON, RUST
finally:
    sys.path.remove(str(FOLDER))

MUTANTS = run.table()
LANGUAGES = [PYTHON, RUST]


def only(dialect: sources.Dialect) -> list[run.Mutant]:
    return [m for m in MUTANTS if m.dialect is dialect]


def copy_of_sources(dialect: sources.Dialect, root: Path) -> list[Path]:
    shutil.copytree(ROOT / dialect.folder, root / dialect.folder, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return sorted((root / dialect.folder).rglob(f"*{dialect.suffix}"))


def with_renamed_locals(dialect: sources.Dialect, code: str, rename: Callable[[str], str]) -> str:
    """The source with all locals of its functions renamed."""
    root = dialect.parser.parse(code.encode()).root_node
    functions = [n for n in sources.walk(root) if n.type in sources.FUNCTIONS and sources.function_around(n) is None]
    places = {}
    for function in functions:
        known = sources.locals_of(function)
        for name in sources.identifiers(function):
            if sources.text_of(name) in known:
                places[name.start_byte] = name
    out = code.encode()
    for begin in sorted(places, reverse=True):
        name = places[begin]
        out = out[:begin] + rename(sources.text_of(name)).encode() + out[name.end_byte :]
    return out.decode()


def first_line(change: syntax.Change) -> tuple[str, int]:
    pairs = zip(change.before.splitlines(), change.after.splitlines(), strict=False)
    return change.path, next(number for number, (before, after) in enumerate(pairs, 1) if before != after)


@pytest.mark.parametrize("dialect", LANGUAGES, ids=lambda d: d.folder)
def test_a_rename_of_all_locals_leaves_each_mutant_at_its_place(dialect, tmp_path):
    renamed = 0
    for path in copy_of_sources(dialect, tmp_path):
        code = path.read_text()
        other = with_renamed_locals(dialect, code, lambda name: f"{name}_renamed")
        renamed += other.count("_renamed")
        path.write_text(other)
    assert renamed > 3000
    for mutant in only(dialect):
        assert first_line(mutant.change_in(tmp_path)) == first_line(mutant.change), mutant.name


def formatters(dialect: sources.Dialect) -> list[str]:
    if dialect is PYTHON:
        return [str(Path(sys.executable).parent / "ruff"), "format", "--isolated", "--line-length", "60"]
    return ["rustfmt", "--edition", "2024", "--config", "max_width=76,use_small_heuristics=Off,skip_children=true"]


@pytest.mark.parametrize("dialect", LANGUAGES, ids=lambda d: d.folder)
def test_a_reformat_leaves_each_mutant_applicable(dialect, tmp_path):
    command = formatters(dialect)
    if shutil.which(command[0]) is None:
        (pytest.fail if os.environ.get("RUSTLOADER_REQUIRE_ALL") else pytest.skip)(f"{command[0]} is not installed")
    files = copy_of_sources(dialect, tmp_path)
    before = {path: path.read_text() for path in files}
    subprocess.run([*command, *files], check=True, capture_output=True)
    assert sum(path.read_text() != text for path, text in before.items()) > len(files) / 2
    broken = {}
    for mutant in only(dialect):
        try:
            mutant.change_in(tmp_path)
        except sources.NotFound as error:
            broken[mutant.name] = str(error)
    assert not broken


def test_a_function_is_found_in_whatever_file_it_is(tmp_path):
    (path,) = [p for p in copy_of_sources(RUST, tmp_path) if p.as_posix().endswith("src/scheduler/workers.rs")]
    path.rename(tmp_path / "src" / "elsewhere.rs")
    change = syntax.drop(RUST, "Workers::begin_epoch", "self.cursor = 0", tmp_path)
    assert change.path == "src/elsewhere.rs"


EXAMPLE = {
    "python/rustloader/shop.py": """\
LIMIT = 10

class Shop:
    def price(self, item, count):
        if count > LIMIT and item is not None:
            warn(item, level=2)
        total = self.table[item] * count
        return round(total)

    def refund(self, item):
        self.close()
        self.open = False
        return round(self.table[item])
""",
    "src/shop.rs": """\
impl<T> Shop<T> {
    pub fn price(&self, item: &T, count: u32) -> u32 {
        match self.table.get(item) {
            Some(price) if count > LIMIT => price * count,
            None => 0,
        }
    }
}
#[cfg(test)]
mod tests {
    fn price() { assert_eq!(price * count, 0); }
}
""",
}


@pytest.fixture
def shop(tmp_path):
    for name, code in EXAMPLE.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_text(code)
    return tmp_path


@pytest.mark.parametrize(
    ("dialect", "at", "find", "put", "line"),
    [
        (PYTHON, "Shop.price", "$n > LIMIT", "$n >= LIMIT", "        if count >= LIMIT and item is not None:"),
        (PYTHON, "shop.LIMIT", "10", "11", "LIMIT = 11"),
        (PYTHON, "price", "warn(..., level=2)", "warn(..., level=3)", "            warn(item, level=3)"),
        (PYTHON, "price", "$t[$i] * $n", "$n", "        total = count"),
        (PYTHON, "price", "level=2", "level=1", "            warn(item, level=1)"),
        (RUST, "Shop::price", "$n > LIMIT", "true", "            Some(price) if true => price * count,"),
        (RUST, "price", "None => 0", "None => 1", "            None => 1,"),
        (RUST, "price", "$a * $b", "$b", "            Some(price) if count > LIMIT => count,"),
    ],
)
def test_what_a_pattern_finds_is_replaced(shop, dialect, at, find, put, line):
    change = syntax.replace(dialect, at, find, put, shop)
    assert set(change.after.splitlines()) - set(change.before.splitlines()) == {line}


def test_statements_are_dropped_and_swapped(shop):
    change = syntax.drop(PYTHON, "refund", "self.close()", shop)
    assert "        pass\n        self.open = False\n" in change.after
    change = syntax.replace(PYTHON, "refund", "self.close()\nself.open = $x", "self.open = $x\nself.close()", shop)
    assert "        self.open = False\n        self.close()\n" in change.after


@pytest.mark.parametrize(
    ("at", "find", "put", "text"),
    [
        ("Shop.prize", "$n > LIMIT", "", "similar names: rustloader.shop.Shop.price"),
        ("Shop.price", "$n < LIMIT", "", "nothing in Shop.price fits"),
        ("Shop", "round($x)", "", r"2 places in Shop fit .*shop.py:8, .*shop.py:13\): let it cover more code"),
        ("Shop.price", "count > LIMIT", "", r"names a local: put a hole in its place \(\$count\)"),
        ("Shop.price", "$n > LIMIT", "total", r"names a local: put a hole in its place \(\$total\)"),
        ("Shop.price", "$n > LIMIT", "$m", "has a hole that"),
        ("Shop.price", "if (", "", "is no code"),
    ],
)
def test_an_error_says_how_to_mend_the_pattern(shop, at, find, put, text):
    with pytest.raises(sources.NotFound, match=text):
        syntax.replace(PYTHON, at, find, put, shop)


def test_a_change_that_leaves_no_code_is_an_error(shop):
    mutant = run.Mutant("half", PYTHON, "", find="$n > LIMIT", put="$n >", at="Shop.price")
    with pytest.raises(sources.NotFound, match="no code"):
        mutant.change_in(shop)


def test_a_list_shows_each_mutant_as_a_diff():
    listed = subprocess.run(
        [sys.executable, FOLDER / "run.py", "--list", "--only", "cursor-not-reset"], capture_output=True, text=True
    )
    assert re.search(r"^not run +cursor-not-reset|^caught +cursor-not-reset", listed.stdout, re.MULTILINE)
    assert re.search(r"^- +self\.cursor = 0;$", listed.stdout, re.MULTILINE)
