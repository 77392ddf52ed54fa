"""Counts the faults from which epochs recovered: worker restarts, and failed samples."""

from __future__ import annotations

from dataclasses import fields

from rustloader.fetch.failures import Failure
from rustloader.metrics.fields import FaultStats
from rustloader.system.formatting import count_of

# Maximum numbers of failures and deaths whose descriptions are kept.
KEPT_FAILURES = 1000
KEPT_DEATHS = 100
_COUNTS = [field.name for field in fields(FaultStats) if field.type is int]


def summary(faults: FaultStats) -> str:
    """Describes the counts in words. Returns an empty string if all counts are 0."""
    parts = []
    if faults.restarts:
        causes = [(faults.stalls, "stuck"), (faults.out_of_memory, "out of memory")]
        named = ", ".join(f"{count} {cause}" for count, cause in causes if count)
        parts.append(count_of(faults.restarts, "restart") + (f" ({named})" if named else ""))
    if faults.skipped:
        parts.append(f"{count_of(faults.skipped, 'sample')} skipped")
    if faults.replaced:
        parts.append(f"{count_of(faults.replaced, 'sample')} replaced")
    return ", ".join(parts)


class Faults:
    """The faults of all iterators of a loader, or of one iterator.

    Args:
        parent: The loader's faults, if these are an iterator's. Everything counted here is also counted there.
    """

    def __init__(self, parent: Faults | None = None) -> None:
        self._parent = parent
        self._counts = dict.fromkeys(_COUNTS, 0)
        self._failures: list[Failure] = []
        self._deaths: list[str] = []

    def note_failure(self, failure: Failure) -> None:
        """Counts a failed sample. Called when its batch is delivered."""
        self._counts["skipped" if failure.action == "skipped" else "replaced"] += 1
        if len(self._failures) < KEPT_FAILURES:
            self._failures.append(failure)
        if self._parent is not None:
            self._parent.note_failure(failure)

    def note_restart(self, text: str, stalled: bool = False, out_of_memory: bool = False) -> None:
        """Counts the restart of a worker.

        Args:
            text: Description of the death that caused it.
            stalled: Whether the worker was killed because it was stuck.
            out_of_memory: Whether its memory cgroup was out of memory.
        """
        self._add({"restarts": 1, "stalls": int(stalled), "out_of_memory": int(out_of_memory)})
        if len(self._deaths) < KEPT_DEATHS:
            self._deaths.append(text)
        if self._parent is not None:
            self._parent.note_restart(text, stalled, out_of_memory)

    def absorb(self, other: Faults) -> None:
        """Adds the counts of another object, but not its descriptions of failures and deaths."""
        self._add(other._counts)

    def _add(self, counts: dict[str, int]) -> None:
        for name, count in counts.items():
            self._counts[name] += count

    def stats(self) -> FaultStats:
        """Returns the counts and descriptions so far."""
        return FaultStats(**self._counts, failures=tuple(self._failures), deaths=tuple(self._deaths))
