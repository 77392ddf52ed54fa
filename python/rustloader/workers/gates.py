"""Lets spawned workers import torch in turn, as many at a time as the rank has cores.

The import takes seconds of processor time. If all workers import at the same time on fewer cores, the first batch comes
when nearly all are done. In turn, worker 0 is done after one import, and the last worker no later than before.

Each worker holds the write end of a pipe until it has imported everything. The worker that follows on the same core
waits for the end of that file, which also comes if the first one dies.
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

# Descriptors that select() takes.
_SELECTABLE = 1024


class Gate:
    """The gate of one worker: the pipe that it waits for, and the one that it holds."""

    def __init__(self, waits_for: int | None, holds: int) -> None:
        self._waits_for, self._holds = waits_for, holds

    def calls(self) -> list[Call]:
        """Returns the calls that the worker makes before it imports anything: it waits for the end of the file."""
        if self._waits_for is None:
            return []
        return [Call(select.select, [_inherited(self._waits_for)], [], [], GATE_SECONDS)]

    def for_child(self) -> list[int]:
        """Returns the descriptors that the worker closes when it has imported everything."""
        held = [_inherited(self._holds)]
        return held if self._waits_for is None else [*held, self._waits_for]


def _inherited(fd: int) -> int:
    """Hands a descriptor to the process that is being spawned, where it has the same number."""
    popen: Any = get_spawning_popen()
    number: int = popen.duplicate_for_child(fd)
    return number


class Gates:
    """The gates of workers that are spawned together, if they are more than the cores."""

    def __init__(self, workers: int) -> None:
        self._cores = own_cores()
        self._are_needed = workers > self._cores
        # The read ends of the workers' pipes, in the order of their starts.
        self._ends: list[int] = []

    @contextlib.contextmanager
    def next(self) -> Iterator[Gate | None]:
        """Provides the gate of the next worker, for the time of its start, or None."""
        pipe = self._pipe() if self._are_needed else None
        if pipe is None:
            self._are_needed = False
            yield None
            return
        read, write = pipe
        self._ends.append(read)
        before = len(self._ends) - 1 - self._cores
        try:
            yield Gate(self._ends[before] if before >= 0 else None, write)
        finally:
            # The worker alone holds it now.
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
        """Closes the main process's ends, after the last start."""
        while self._ends:
            os.close(self._ends.pop())
