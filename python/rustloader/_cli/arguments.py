"""Argument types of the command line. Each error says what is expected and what was given."""

from __future__ import annotations

import argparse
import math

__all__ = ["counts", "integer", "positive_int", "positive_seconds", "seconds"]


def integer(text: str) -> int:
    """An integer, such as a seed."""
    number = _integer(text)
    if number is None:
        raise _error("an integer", text)
    return number


def positive_int(text: str) -> int:
    """An integer of 1 or more."""
    number = _integer(text)
    if number is None or number < 1:
        raise _error("a positive integer", text)
    return number


def seconds(text: str) -> float:
    """A duration in seconds, 0 allowed."""
    number = _finite(text)
    if number is None or number < 0:
        raise _error("a number of seconds, 0 or more", text)
    return number


def positive_seconds(text: str) -> float:
    """A duration in seconds, greater than 0."""
    number = _finite(text)
    if number is None or number <= 0:
        raise _error("a positive number of seconds", text)
    return number


def counts(text: str) -> list[int]:
    """A comma-separated list of integers of 0 or more, sorted, each once: ``"4,0,2"`` is ``[0, 2, 4]``."""
    numbers = [_integer(part) for part in text.split(",")]
    if any(number is None or number < 0 for number in numbers):
        raise _error("a comma-separated list of integers, each 0 or more (such as 0,2,4)", text)
    return sorted({number for number in numbers if number is not None})


def _integer(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None


def _finite(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _error(expected: str, text: str) -> argparse.ArgumentTypeError:
    # A number stands as it was given; quotes show what is empty or no number.
    given = text if _finite(text) is not None else repr(text)
    return argparse.ArgumentTypeError(f"must be {expected}, got {given}")
