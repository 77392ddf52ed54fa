"""The early epochs that a worker has been told about, each found by the number of a task."""

from __future__ import annotations

from collections import deque

from rustloader.system.generators import GeneratorStates


class Announcements:
    """The announced epochs whose first task this worker has not received, and the generators' states before the last
    early epoch began.

    In a shared queue, messages and tasks travel separately: a worker can receive two announcements before its first
    task of either epoch. It receives an announcement before any task of that epoch, and its tasks in order.
    """

    def __init__(self) -> None:
        # The first task and the message of each epoch. While an epoch is announced, the one announced before it is the
        # current one, and those before that have ended.
        self._announced: deque[tuple[int, bytes]] = deque(maxlen=2)
        self._before: GeneratorStates | None = None

    def add(self, first_task: int, message: bytes) -> None:
        """Keeps the message of an epoch whose first task is ``first_task``."""
        self._announced.append((first_task, message))

    def take(self, task: int) -> tuple[int, bytes] | None:
        """Returns first task and message of the epoch that begins in this worker with ``task``. Returns None if the
        task belongs to the worker's current epoch."""
        epoch = None
        while self._announced and self._announced[0][0] <= task:
            epoch = self._announced.popleft()
        if epoch is not None:
            self._before = GeneratorStates()
        return epoch

    def forget(self, is_canceled: bool) -> None:
        """Forgets all announced epochs. If the last one is canceled after this worker has begun it, restores the states
        that the random generators had before."""
        if is_canceled and not self._announced and self._before is not None:
            self._before.restore()
        self._announced.clear()
        self._before = None
