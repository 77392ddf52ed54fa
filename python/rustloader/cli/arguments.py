"""Argument types of the command line, whose errors say what is expected and what was given; flags of ``Options``."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

from rustloader.options import Option, Options, option_of

__all__ = ["add_options", "counts", "positive_int", "positive_seconds", "seconds", "seed", "valued_flags"]

# A year. Clocks and waits of the system take no more than a few hundred.
_MOST_SECONDS = 366 * 86400
# Processes that a sweep starts at a time.
_MOST_WORKERS = 1024


def seed(text: str) -> int:
    """An integer that ``torch.manual_seed`` takes."""
    number = _integer(text)
    if number is None or not -(2**63) <= number < 2**64:
        raise _error("an integer of 64 bits", text)
    return number


def positive_int(text: str) -> int:
    """An integer of 1 or more."""
    number = _integer(text)
    if number is None or number < 1:
        raise _error("a positive integer", text)
    return number


def seconds(text: str) -> float:
    """A duration in seconds, from 0 to a year."""
    number = _seconds(text)
    if number is None or number < 0:
        raise _error("a number of seconds from 0 to a year", text)
    return number


def positive_seconds(text: str) -> float:
    """A duration in seconds, greater than 0, up to a year."""
    number = _seconds(text)
    if number is None or number <= 0:
        raise _error("a positive number of seconds, up to a year", text)
    return number


def counts(text: str) -> list[int]:
    """A comma-separated list of integers from 0 to 1,024, sorted, each once: ``"4,0,2"`` is ``[0, 2, 4]``."""
    numbers = [_integer(part) for part in text.split(",")]
    if any(number is None or not 0 <= number <= _MOST_WORKERS for number in numbers):
        raise _error(f"a comma-separated list of integers, each from 0 to {_MOST_WORKERS:,} (such as 0,2,4)", text)
    return sorted({number for number in numbers if number is not None})


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for each field of ``Options``; where it is missing, the field is None."""
    for name in Options.__dataclass_fields__:
        option = option_of(name)
        if option.metavar:
            parser.add_argument(option.flag, dest=name, type=_parser(option), metavar=option.metavar, help=option.help)
        else:
            parser.add_argument(option.flag, dest=name, action="store_const", const=option.flag_value, help=option.help)


def valued_flags() -> set[str]:
    """The flags of ``Options`` whose value is the next argument."""
    return {option.flag for option in map(option_of, Options.__dataclass_fields__) if option.metavar}


def _parser(option: Option) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            return option.parse(text)
        except ValueError:
            raise _error(option.expected, text) from None

    return parse


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


def _seconds(text: str) -> float | None:
    number = _finite(text)
    return None if number is None or number > _MOST_SECONDS else number


def _error(expected: str, text: str) -> argparse.ArgumentTypeError:
    # A number stands as it was given; quotes show what is empty or no number.
    given = text if _finite(text) is not None else repr(text)
    return argparse.ArgumentTypeError(f"must be {expected}, got {given}")
