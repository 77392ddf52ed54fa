"""Builds the value that a description stands for.

A description is a tuple of steps ``(operation, (earlier steps it works on, ...), *arguments)``; the value is that of
the last step. It holds nothing but numbers, texts and tuples, so it travels as an index, is built again in any
process, and its repr is a reproducer. A step that cannot be made stands as a :class:`NotMade`.
"""

import dataclasses
import warnings

from roundtrip import build_arrays, build_containers, build_tensors, objects

__all__ = ["FOR_TORCH", "OPERATIONS", "NotMade", "build"]


@dataclasses.dataclass(frozen=True)
class NotMade:
    """In the place of a value that torch or NumPy refused to make."""

    operation: str
    error: str


OPERATIONS = {
    "atom": lambda name: objects.ATOMS[name](),
    "nasty": lambda name: objects.NASTY[name](),
    "int": int,
    "float": objects.nan,
    # Not the description's own text: whether that is one object twice depends on how the index has travelled.
    "str": lambda text: "".join(list(text)),
    **build_tensors.OPERATIONS,
    **build_arrays.OPERATIONS,
    **build_containers.OPERATIONS,
}


# Where torch's reducers will take the value apart: they move a tensor's memory, and an array over it would show what
# comes to lie there next.
FOR_TORCH = {**OPERATIONS, "numpy": build_tensors.numpy_apart}


def build(description, operations=OPERATIONS):
    """The value, made of nothing that was there before."""
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
