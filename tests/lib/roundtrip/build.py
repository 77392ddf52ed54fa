"""Builds the value that a description stands for.

A description is a tuple of steps ``(operation, (earlier steps it works on, ...), *arguments)``; its value is that of
the last step. It consists of numbers, strings and tuples only, so it can be sent as an index and built in any process,
and its repr reproduces it. A step that fails yields a :class:`NotMade`.
"""

import dataclasses
import warnings

from roundtrip import build_arrays, build_containers, build_tensors, cases, objects

__all__ = ["FOR_TORCH", "OPERATIONS", "NotMade", "build"]


@dataclasses.dataclass(frozen=True)
class NotMade:
    """Stands for a value that torch or NumPy refused to create."""

    operation: str
    error: str


OPERATIONS = {
    "atom": lambda name: objects.ATOMS[name](),
    "nasty": lambda name: objects.NASTY[name](),
    "case": lambda name, n: cases.CASES[name](n),
    "int": int,
    "float": objects.float_from_bits,
    # A new string: whether two equal strings of the description are one object depends on how the index was sent.
    "str": lambda text: "".join(list(text)),
    **build_tensors.OPERATIONS,
    **build_arrays.OPERATIONS,
    **build_containers.OPERATIONS,
}


# For values that torch's reducers pickle: they move a tensor's memory, and an array over it would show whatever lies
# there next.
FOR_TORCH = {**OPERATIONS, "numpy": build_tensors.numpy_apart}


def build(description, operations=OPERATIONS):
    """Builds the value from new objects only."""
    values = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for operation, parts, *arguments in description:
            try:
                value = operations[operation](*[values[i] for i in parts], *arguments)
            except Exception as e:
                value = NotMade(operation, type(e).__name__)
            values.append(value)
    return values[-1]
