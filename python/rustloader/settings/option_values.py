"""The kinds of option values. Each kind checks values, parses them from strings, and raises errors for invalid ones.

For a new option, use one of these kinds, or add a class to this module.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import re
import sys
from multiprocessing.context import BaseContext
from typing import Any, ClassVar

# Strings that mean True and False in environment variables.
YES, NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
METHODS = multiprocessing.get_all_start_methods()
# Core numbers must be below this limit, which no machine reaches.
MAX_CORES = 8192
_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "ki": 1024, "mi": 1024**2, "gi": 1024**3}
_NAME = re.compile(r"[\w.:/+-](?:[\w.:/+ -]{0,98}[\w.:/+-])?")
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([kmg]i?|)b", re.IGNORECASE)


class Kind:
    """A kind of option values.

    Attributes:
        types: The types of valid values. True and False do not count as integers.
        described: The description of a valid value, in errors about a value that Python code passes.
        expected: The description of a valid string, in errors about environment variables and the command line.
    """

    types: ClassVar[tuple[type, ...]]
    described: str
    expected: str

    def is_kind(self, value: Any) -> bool:
        """Returns True if a value has a valid type. Otherwise, ``check`` raises TypeError."""
        return isinstance(value, self.types) and (bool in self.types or not isinstance(value, bool))

    def allows(self, value: Any) -> bool:
        """Returns True if a value of a valid type is itself valid. Otherwise, ``check`` raises ValueError."""
        return True

    def read(self, text: str) -> Any:
        """Converts a string to a value, which ``allows`` may still reject. Raises ValueError if that is impossible."""
        raise NotImplementedError

    def check(self, name: str, value: Any) -> None:
        """Raises TypeError or ValueError if a value is invalid. ``name`` is the option's name in the error message."""
        error = TypeError if not self.is_kind(value) else None if self.allows(value) else ValueError
        if error is not None:
            raise error(f"{name} must be {self.described}, got {value!r}")

    def parse(self, text: str) -> Any:
        """Converts a string from the environment or the command line to a value. Raises ValueError if it is invalid."""
        value = self.read(text)
        if not self.allows(value):
            raise ValueError(text)
        return value


class Bool(Kind):
    """True or False."""

    types: ClassVar[tuple[type, ...]] = (bool,)
    described, expected = "True or False", "1 or 0"

    def read(self, text: str) -> bool:
        if text.lower() not in YES + NO:
            raise ValueError(text)
        return text.lower() in YES


class Positive(Kind):
    """A positive integer."""

    types: ClassVar[tuple[type, ...]] = (int,)
    described = expected = "a positive integer"
    minimum: ClassVar[int] = 1

    def allows(self, value: int) -> bool:
        return value >= self.minimum

    def read(self, text: str) -> int:
        return int(text)


class Count(Positive):
    """A nonnegative integer."""

    described = expected = "a nonnegative integer"
    minimum = 0


class Seconds(Kind):
    """A positive, finite number of seconds."""

    types: ClassVar[tuple[type, ...]] = (int, float)
    described = expected = "a positive number of seconds"

    def allows(self, value: float) -> bool:
        return 0 < value < math.inf

    def read(self, text: str) -> float:
        return float(text)


class Choice(Kind):
    """One of several words. Subclasses also accept values that are not strings."""

    types: ClassVar[tuple[type, ...]] = (str,)

    def __init__(self, *choices: str) -> None:
        self.choices = choices
        self.described = _alternatives(*map(repr, choices))
        self.expected = _alternatives(*choices)

    def allows(self, value: Any) -> bool:
        return not isinstance(value, str) or value in self.choices

    def read(self, text: str) -> str:
        return text.lower()


class Policy(Choice):
    """One of several words, or a function."""

    def __init__(self, *choices: str, signature: str) -> None:
        super().__init__(*choices)
        self.described = ", ".join(f'"{choice}"' for choice in choices) + f" or a function of {signature}"

    def is_kind(self, value: Any) -> bool:
        return isinstance(value, str) or callable(value)


class Failures(Kind):
    """A limit on the samples that may fail: a number of samples, or a fraction of all samples."""

    types: ClassVar[tuple[type, ...]] = (int, float)
    described = "a nonnegative integer, or a fraction of the samples between 0.0 and 1.0"
    expected = "a nonnegative integer or a fraction"

    def allows(self, value: float) -> bool:
        return value >= 0 and not (isinstance(value, float) and value > 1)

    def read(self, text: str) -> int | float:
        return int(text) if text.isdecimal() else float(text)


class Name(Kind):
    """A readable name that is also valid as a label value of metrics."""

    types: ClassVar[tuple[type, ...]] = (str,)
    described = expected = "a name of 1 to 100 letters, digits, spaces and characters from _.:/+-"

    def allows(self, value: str) -> bool:
        return _NAME.fullmatch(value) is not None

    def read(self, text: str) -> str:
        return text


class StartMethod(Choice):
    """The name of a start method, or a context of ``multiprocessing``."""

    types: ClassVar[tuple[type, ...]] = (str, BaseContext)

    def __init__(self) -> None:
        super().__init__(*METHODS)

    def check(self, name: str, value: Any) -> None:
        if not self.is_kind(value):
            raise TypeError(f"{name} must be a context or the name of a start method, got {value!r}")
        if not self.allows(value):
            raise ValueError(f"{name} must be a start method of this system ({', '.join(METHODS)}), got {value!r}")


class Size(Kind):
    """A number of batches, or a size in bytes as a string such as "512MiB"."""

    types: ClassVar[tuple[type, ...]] = (int, str)
    described = 'a positive integer (batches), or a size such as "512MiB"'
    expected = described.replace('"', "")

    def allows(self, value: int | str) -> bool:
        with contextlib.suppress(ValueError):
            number = value if isinstance(value, int) else _number(value)
            return number >= 1 if number is not None else bool(byte_size(str(value)))
        return False

    def read(self, text: str) -> int | str:
        number = _number(text)
        return text if number is None else number


class Bytes(Kind):
    """A size in bytes, as a number or as a string such as "8GiB"."""

    types: ClassVar[tuple[type, ...]] = (int, str)
    described = 'a positive number of bytes, or a size such as "8GiB"'
    expected = described.replace('"', "")

    def allows(self, value: int | str) -> bool:
        try:
            return size_in_bytes(value) >= 1
        except ValueError:
            return False

    def read(self, text: str) -> int:
        return size_in_bytes(text)


def size_in_bytes(value: int | str) -> int:
    """Converts a value of the kind `Bytes` to a number of bytes. Raises ValueError if it is a string but not a size."""
    number = value if isinstance(value, int) else _number(value)
    return byte_size(str(value)) if number is None else number


class Cores(Kind):
    """ "spread", or a list that has one or more cores for each worker."""

    described = "'spread', or a list with one or more cores for each worker"
    expected = "spread or cores such as 0/1/2-3"

    def is_kind(self, value: Any) -> bool:
        if isinstance(value, str):
            return True
        if not isinstance(value, list | tuple):
            return False
        return all(isinstance(core, int) and not isinstance(core, bool) for entry in _entries(value) for core in entry)

    def allows(self, value: Any) -> bool:
        if isinstance(value, str):
            return value == "spread"
        entries = _entries(value)
        return bool(entries) and all(entries) and all(core >= 0 for entry in entries for core in entry)

    def read(self, text: str) -> str | list[list[int]]:
        """Converts "spread", or a string such as "0/1/2-3+6", to a value. A slash separates workers, a plus sign the
        cores of a worker."""
        if text.lower() == "spread":
            return "spread"
        workers = []
        for worker in text.split("/"):
            parts = (part.partition("-") for part in worker.split("+"))
            ends = [(int(first), int(last or first)) for first, _, last in parts]
            if any(last >= MAX_CORES for _, last in ends):
                raise ValueError(text)
            workers.append([core for first, last in ends for core in range(first, last + 1)])
        return workers


def text_of(value: Any) -> str:
    """Converts an option's value to a string that the ``parse`` of its kind converts back to this value."""
    if isinstance(value, list):
        return "/".join("+".join(map(str, cores)) for cores in value)
    return str(int(value) if isinstance(value, bool) else value)


def byte_size(text: str) -> int:
    """Converts a size such as "512MiB" or "1.5 GB" to bytes. Raises ValueError for any other string, and for a size
    below 1 byte."""
    match = _SIZE.fullmatch(text.strip())
    count = float(match[1]) * _UNITS[match[2].lower()] if match else 0
    if not 1 <= count < math.inf:
        raise ValueError(text)
    return int(count)


def window(value: int | str | None) -> tuple[int | None, int | None]:
    """Converts a value of the kind `Size`, or None, to a number of batches and a number of bytes. At least one of them
    is None."""
    if value is None:
        return None, None
    number = value if isinstance(value, int) else _number(value)
    limit = byte_size(str(value)) if number is None else number
    limit = min(limit, sys.maxsize)  # more than any machine can hold
    return (None, limit) if number is None else (limit, None)


def _number(text: str) -> int | None:
    with contextlib.suppress(ValueError):
        return int(text)
    return None


def _entries(value: Any) -> list[Any]:
    return [entry if isinstance(entry, list | tuple | set | frozenset | range) else [entry] for entry in value]


def _alternatives(*words: str) -> str:
    return " or ".join(", ".join(words).rsplit(", ", 1))
