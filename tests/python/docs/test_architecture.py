"""ARCHITECTURE.md names every module and folder of the package and the crate, and no file that does not exist."""

import itertools
import re
from pathlib import Path

import pytest
from support import ROOT

PACKAGE, CRATE = ROOT / "python" / "rustloader", ROOT / "src"
TEXT = (ROOT / "ARCHITECTURE.md").read_text()


def parts(folder: Path, suffix: str, ignored: set[str]) -> set[str]:
    """The modules of a folder, and its subfolders, with a trailing slash."""
    folders = {f"{p.name}/" for p in folder.iterdir() if p.is_dir() and any(p.rglob(f"*{suffix}"))}
    return (folders | {p.stem for p in folder.glob(f"*{suffix}")}) - ignored


def columns() -> tuple[str, str]:
    """The columns of the map, without their headings."""
    headings, *lines = TEXT.split("```text\n", 1)[1].split("```", 1)[0].splitlines()
    middle = headings.index("src/")
    return "\n".join(line[:middle] for line in lines), "\n".join(line[middle:] for line in lines)


@pytest.mark.parametrize(
    ("column", "expected"),
    [(0, parts(PACKAGE, ".py", {"__init__", "__main__"})), (1, parts(CRATE, ".rs", {"lib"}))],
    ids=["python", "rust"],
)
def test_the_map_names_every_part(column, expected):
    assert len(expected) > 12
    # A line begins with names, separated by single spaces; two spaces end the list.
    named = {name for line in columns()[column].splitlines() for name in re.split(r" {2,}", line.strip())[0].split(" ")}
    assert expected <= named, expected - named
    stale = {name for name in named if name.endswith("/")} - expected
    assert not stale


def expanded(path: str) -> list[str]:
    """Expands braces, as a shell does."""
    pieces = [piece.split(",") for piece in re.split(r"[{}]", path)]
    return ["".join(choice) for choice in itertools.product(*pieces)]


def is_found(path: str) -> bool:
    """Finds a path in the repository, the package or the crate; a bare file name may be in any folder."""
    if "/" in path:
        return any((folder / path).exists() for folder in (ROOT, PACKAGE, CRATE))
    return (ROOT / path).exists() or any(next(folder.rglob(path), None) for folder in (PACKAGE, CRATE, ROOT / "tests"))


def test_paths_lead_to_files():
    paths = [path for text in re.findall(r"`([\w./{},]+)`", TEXT) for path in expanded(text)]
    paths = [path for path in paths if re.search(r"\.(py|rs|toml|md)$", path) or path.startswith(("src/", "tests/"))]
    assert len(paths) > 80
    assert not [path for path in paths if not is_found(path)]
