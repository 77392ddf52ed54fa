"""Writes the demo's table into README.md, as benches/compare.py writes its own."""

from __future__ import annotations

from pathlib import Path

from rustloader.tools.harness import report

__all__ = ["check", "write"]

README = Path(__file__).resolve().parents[3] / "README.md"
MARK = "<!-- demo -->"


def check() -> None:
    """Raises ValueError if README.md does not have the mark twice."""
    report.around(README, MARK)


def write(table: str) -> None:
    """Replaces the text between the two marks with the table."""
    report.write(README, table, MARK)
    print(f"Wrote the table into {README}.")
