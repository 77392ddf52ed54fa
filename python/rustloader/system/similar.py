"""Finds the name that a user probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# Minimum similarity, between 0 and 1, of a name and the one that was meant.
_CUTOFF = 0.7


def similar(name: str, known: Iterable[str]) -> str | None:
    """Returns the known name that a name resembles or begins, or None."""
    known = list(known)
    if len(name) > 2:
        known.sort(key=lambda it: not it.startswith(name))
        if known and known[0].startswith(name):
            return known[0]
    matches = difflib.get_close_matches(name, known, 1, _CUTOFF)
    return matches[0] if matches else None


def suggest(error: TypeError, given: Iterable[str], known: Iterable[str]) -> None:
    """Adds a note to an error about an unknown keyword argument if a parameter has a similar name.

    Args:
        error: The error. Its message does not change.
        given: Names of the keyword arguments that were passed.
        known: Names of the function's parameters.
    """
    if "unexpected keyword argument" not in str(error) or "Did you mean" in str(error):
        return
    known = list(known)
    for name in given:
        if name not in known and (meant := similar(name, known)):
            error.add_note(f"Did you mean {meant} instead of {name}?")
