"""Counts the faults from which epochs recovered: worker restarts, and failed samples."""

from __future__ import annotations

from rustloader.fetch.failures import Failure
from rustloader.metrics.fields import FaultStats
from rustloader.system.formatting import count_of

# Maximum numbers of failures and deaths whose descriptions are kept.
KEPT_FAILURES = 1000
KEPT_DEATHS = 100


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
        self._restarts = self._stalls = self._out_of_memory = 0
        self._skipped = self._replaced = 0
        self._failures: list[Failure] = []
        self._deaths: list[str] = []

    def note_failure(self, failure: Failure) -> None:
        """Counts a failed sample. Called when its batch is delivered."""
        if failure.action == "skipped":
            self._skipped += 1
        else:
            self._replaced += 1
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
        self._restarts += 1
        self._stalls += stalled
        self._out_of_memory += out_of_memory
        if len(self._deaths) < KEPT_DEATHS:
            self._deaths.append(text)
        if self._parent is not None:
            self._parent.note_restart(text, stalled, out_of_memory)

    def absorb(self, other: Faults) -> None:
        """Adds the counts of another object, but not its descriptions of failures and deaths."""
        self._restarts += other._restarts
        self._stalls += other._stalls
        self._out_of_memory += other._out_of_memory
        self._skipped += other._skipped
        self._replaced += other._replaced

    def stats(self) -> FaultStats:
        """Returns the counts and descriptions so far."""
        return FaultStats(
            restarts=self._restarts,
            stalls=self._stalls,
            out_of_memory=self._out_of_memory,
            skipped=self._skipped,
            replaced=self._replaced,
            failures=tuple(self._failures),
            deaths=tuple(self._deaths),
        )
