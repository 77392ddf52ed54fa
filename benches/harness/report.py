"""Writes tables in Markdown, and inserts them into documents between two marks."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def line(cells: Iterable[object]) -> str:
    """Formats a line of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def head(cells: Iterable[object]) -> str:
    """Formats the first two lines of a table."""
    cells = list(cells)
    return f"{line(cells)}\n{'|---' * len(cells)}|"


def us(value: float | None) -> str:
    """Formats microseconds, with one decimal below 1,000; "-" for None."""
    return "-" if value is None else f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def around(path: Path, mark: str) -> tuple[str, str]:
    """Returns the text before the first and after the second mark of a document.

    Raises:
        ValueError: the document does not have exactly two marks.
    """
    parts = path.read_text().split(mark)
    if len(parts) != 3:
        raise ValueError(f"{path} must have the mark {mark} twice, around the text to replace, got {len(parts) - 1}")
    return parts[0], parts[2]


def write(path: Path, text: str, mark: str) -> None:
    """Replaces the text between the two marks of a document."""
    before, after = around(path, mark)
    path.write_text(f"{before}{mark}\n\n{text}\n\n{mark}{after}")
