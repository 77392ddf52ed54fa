"""Makes spawned workers take turns importing torch. At most one worker per core of the rank imports it at a time.

The import takes seconds of CPU time. If more workers than cores import at the same time, the first batch arrives only
when nearly all imports are done. With turns, worker 0 is ready after the time of one import, and the last worker is
ready no later than without turns.

Each worker holds the write end of a pipe until its imports are done. With C cores, worker N + C waits for end-of-file
on the pipe of worker N. End-of-file also arrives if worker N dies.
"""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Iterator
from multiprocessing.context import get_spawning_popen
from typing import Any

from rustloader.settings.limits import GATE_SECONDS
from rustloader.system.cores import own_cores
from rustloader.workers.preparation import Call

# select() accepts only descriptors below this number.
_SELECTABLE = 1024


class Gate:
    """The gate of one worker: the pipe on which the worker waits for its predecessor, and the pipe that it holds
    open."""

    def __init__(self, waits_for: int | None, holds: int) -> None:
        self._waits_for, self._holds = waits_for, holds

    def calls(self) -> list[Call]:
        """Returns the calls that the worker makes before its first import. They wait up to ``GATE_SECONDS`` for
        end-of-file on the predecessor's pipe."""
        if self._waits_for is None:
            return []
        return [Call(select.select, [_inherited(self._waits_for)], [], [], GATE_SECONDS)]

    def for_child(self) -> list[int]:
        """Returns the descriptors that the worker closes after its imports."""
        held = [_inherited(self._holds)]
        return held if self._waits_for is None else [*held, self._waits_for]


def _inherited(fd: int) -> int:
    """Passes a descriptor to the process that is being spawned, and returns its number in that process, which is the
    same."""
    popen: Any = get_spawning_popen()
    number: int = popen.duplicate_for_child(fd)
    return number


class Gates:
    """The gates of workers that are spawned together. They are used only if there are more workers than cores."""

    def __init__(self, workers: int) -> None:
        self._cores = own_cores()
        self._are_needed = workers > self._cores
        # The read ends of the workers' pipes, in the order in which the workers start.
        self._ends: list[int] = []

    @contextlib.contextmanager
    def next(self) -> Iterator[Gate | None]:
        """Yields the gate of the next worker, or None if workers import without taking turns. The body starts the
        worker."""
        pipe = self._pipe() if self._are_needed else None
        if pipe is None:
            self._are_needed = False
            yield None
            return
        read, write = pipe
        self._ends.append(read)
        predecessor = len(self._ends) - 1 - self._cores
        try:
            yield Gate(self._ends[predecessor] if predecessor >= 0 else None, write)
        finally:
            # From now on, only the worker holds the write end.
            os.close(write)

    def _pipe(self) -> tuple[int, int] | None:
        try:
            pipe = os.pipe2(os.O_CLOEXEC)
        except OSError:
            return None
        if max(pipe) < _SELECTABLE:
            return pipe
        for fd in pipe:
            os.close(fd)
        return None

    def close(self) -> None:
        """Closes the main process's read ends. Must be called after the last worker has been started."""
        while self._ends:
            os.close(self._ends.pop())
