"""ARCHITECTURE.md and the READMEs beside the code name no file that does not exist."""

import itertools
import re

import pytest
from support import ROOT

PACKAGE, CRATE = ROOT / "python" / "rustloader", ROOT / "src"
PAGES = [ROOT / "ARCHITECTURE.md", *PACKAGE.rglob("*.md"), *CRATE.rglob("*.md")]


def expanded(path: str) -> list[str]:
    """Expands braces, as a shell does."""
    pieces = [piece.split(",") for piece in re.split(r"[{}]", path)]
    return ["".join(choice) for choice in itertools.product(*pieces)]


def is_found(path: str) -> bool:
    """Finds a path in the repository, the package or the crate; a bare file name may be in any folder."""
    if "/" in path:
        return any((folder / path).exists() for folder in (ROOT, PACKAGE, CRATE))
    return (ROOT / path).exists() or any(next(folder.rglob(path), None) for folder in (PACKAGE, CRATE, ROOT / "tests"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_lead_to_files(page):
    paths = [path for text in re.findall(r"`([\w./{},]+)`", page.read_text()) for path in expanded(text)]
    paths = [path for path in paths if re.search(r"\.(py|rs|toml|md)$", path) or path.startswith(("src/", "tests/"))]
    assert paths
    assert not [path for path in paths if not is_found(path)]
