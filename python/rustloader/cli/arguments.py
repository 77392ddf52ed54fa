"""Argument types of the command line, and the flags for ``Options``."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Callable
from typing import Any, TypeVar

from rustloader.options import Option, Options, option_of

__all__ = ["add_options", "counts", "positive_int", "positive_seconds", "seconds", "seed", "valued_flags"]

# Upper limit of a duration, in seconds: a year. Clocks and waits of the system overflow after a few hundred years.
_MOST_SECONDS = 366 * 86400
# Upper limit of workers in a sweep.
_MOST_WORKERS = 1024
_Number = TypeVar("_Number", int, float)


def seed(text: str) -> int:
    """An integer that ``torch.manual_seed`` accepts."""
    return _number(int, text, lambda it: -(2**63) <= it < 2**64, "an integer of 64 bits")


def positive_int(text: str) -> int:
    """An integer of 1 or more."""
    return _number(int, text, lambda it: it >= 1, "a positive integer")


def seconds(text: str) -> float:
    """A duration in seconds, from 0 to a year."""
    return _number(float, text, lambda it: 0 <= it <= _MOST_SECONDS, "a number of seconds from 0 to a year")


def positive_seconds(text: str) -> float:
    """A duration in seconds, greater than 0, up to a year."""
    return _number(float, text, lambda it: 0 < it <= _MOST_SECONDS, "a positive number of seconds, up to a year")


def counts(text: str) -> list[int]:
    """A comma-separated list of integers from 0 to 1,024, sorted, without duplicates: ``"4,0,2"`` is ``[0, 2, 4]``."""
    expected = f"a comma-separated list of integers, each from 0 to {_MOST_WORKERS:,} (such as 0,2,4)"
    try:
        return sorted({_number(int, part, lambda it: 0 <= it <= _MOST_WORKERS, "") for part in text.split(",")})
    except argparse.ArgumentTypeError:
        raise _error(expected, text) from None


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for each field of ``Options``; the default is None."""
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


def _number(kind: Callable[[str], _Number], text: str, valid: Callable[[_Number], bool], expected: str) -> _Number:
    with contextlib.suppress(ValueError):
        if valid(number := kind(text)):
            return number
    raise _error(expected, text)


def _error(expected: str, text: str) -> argparse.ArgumentTypeError:
    given = repr(text)
    with contextlib.suppress(ValueError):
        if math.isfinite(float(text)):
            given = text
    return argparse.ArgumentTypeError(f"must be {expected}, got {given}")
