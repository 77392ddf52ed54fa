"""Formats numbers, aligned columns, and lines that fit a terminal."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

# Maximum width of the output, in columns.
WIDTH = 100
_OPTION = re.compile(r"(--[a-z]+) ")


def listed(items: Sequence[object], last: str = "and") -> str:
    """Joins items for a sentence: "1, 2 and 4"."""
    *others, end = map(str, items)
    return f"{', '.join(others)} {last} {end}" if others else end


def number(value: float) -> str:
    """Formats a number with fewer decimals the larger it is: "0.123", "4.00", "12.3", "1,200"."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.{3 if value < 1 else 2 if value < 10 else 1}f}"


def times(ratio: float | None) -> str:
    """Formats a ratio: "1.37x"; "-" for None."""
    return "-" if ratio is None else f"{ratio:.2f}x" if ratio < 10 else f"{ratio:.1f}x"


def aligned(rows: Sequence[Sequence[str]], left: int = 1, gap: int = 3) -> str:
    """Formats rows as columns, ``gap`` spaces apart. Aligns the first ``left`` columns left, and the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    form = (" " * gap).join(f"{{:{'<' if k < left else '>'}{width}}}" for k, width in enumerate(widths))
    return "\n".join(form.format(*row).rstrip() for row in rows)


def wrapped(text: str, indent: str = "") -> str:
    """Wraps a paragraph. All lines except the first begin with ``indent``."""
    joined = _OPTION.sub("\\1\0", text)  # keeps an option and its value on one line
    lines = textwrap.wrap(joined, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace("\0", " ")
