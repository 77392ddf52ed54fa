"""The rows of the tables of statistics: fields of dataclasses that ``Stats.scalars()`` and Prometheus show."""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple


class Figure(NamedTuple):
    """A field, as it is shown outside of its class.

    Attributes:
        field: Name of the field.
        name: Its name in ``scalars()`` and in Prometheus (there after "rustloader_").
        text: Its description in Prometheus; empty if Prometheus does not show the field itself.
        is_gauge: Whether it is a current value rather than a counter.
        is_scalar: Whether ``scalars()`` has it.
    """

    field: str
    name: str
    text: str
    is_gauge: bool
    is_scalar: bool


def figure(default: Any, name: str, text: str = "", *, gauge: bool = False, scalar: bool = True) -> Any:
    """Returns a dataclass field with a default, which ``scalars()`` or Prometheus shows under a name."""
    return dataclasses.field(default=default, metadata={"figure": (name, text, gauge, scalar)})


def figures_of(cls: Any) -> Iterator[Figure]:
    """Yields the figures among the fields of a dataclass."""
    for field in dataclasses.fields(cls):
        if "figure" in field.metadata:
            yield Figure(field.name, *field.metadata["figure"])
