"""Decides what happens after a worker's death if ``max_restarts`` is set: a restart, now or later, or an error."""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from typing import Any

import torch

from rustloader._core import Death
from rustloader.fetch.failures import index_text
from rustloader.settings.limits import BACK_OFF, DEATHS_SHOWN, MAX_BACK_OFF, POISON_AFTER

logger = logging.getLogger("rustloader")

FORK_WARNING = (
    "a DataLoader restarts a dead worker by forking the main process, which %s. The new worker may hang or crash: "
    'set multiprocessing_context="forkserver" to start workers from a clean process'
)


class Restarts:
    """The deaths of an iterator's workers in an epoch, and the decision about each death.

    Args:
        limit: Number of deaths that an epoch survives: ``max_restarts``.
        may_skip_samples: Whether a sample at which workers die can be skipped, because ``on_error`` is set and the
            dataset is map-style.

    Attributes:
        lock: Held while the consequence of a death is decided and the worker is restarted.
        survived: Number of deaths in this epoch that were not final. A failed restart counts as a death.
        history: The latest deaths and failed restarts of this epoch, one line each.
        poison: For each worker, the samples that it must skip, as {task: {position in the index batch: reason}}.
    """

    def __init__(self, limit: int, may_skip_samples: bool = False) -> None:
        self.limit, self._may_skip_samples = limit, may_skip_samples
        # Reentrant, because a signal handler may call `next` in a thread that holds the lock.
        self.lock = threading.RLock()
        # For each worker: the generation of its last counted death, and whether that death is final.
        self._counted: dict[int, tuple[int, bool]] = {}
        # For each worker: the generation of its last settled death (see `settle`).
        self._settled: dict[int, int] = {}
        self._restarts: Counter[int] = Counter()
        # For each worker: a line that describes its last death.
        self._lines: dict[int, str] = {}
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """Forgets the deaths of the previous epoch."""
        self.survived = 0
        self.history: deque[str] = deque(maxlen=DEATHS_SHOWN)
        self.poison: dict[int, dict[int, dict[int, str]]] = {}
        # For each worker: its number of answers at its last death, and the number of delayed restarts since its last
        # answer.
        self._in_a_row: dict[int, tuple[int, int]] = {}
        # Number of deaths at each sample, by the task and the sample's position in the index batch (None if unknown).
        self._deaths_at: Counter[tuple[int, int | None]] = Counter()
        # Number of deaths in each task since one of its samples was last declared poison.
        self._in_task: Counter[int] = Counter()
        # Workers whose last death is final because too many workers have died in their batch.
        self._poisoned: set[int] = set()

    def restarts_of(self, worker_id: int) -> int:
        """Returns the number of restarts of a worker in all epochs."""
        return self._restarts[worker_id]

    def is_counted(self, death: Death) -> bool:
        """Returns True if ``on_death`` has already counted this death."""
        return self._counted.get(death.worker_id, (-1, False))[0] >= death.generation

    def on_death(
        self, death: Death, cause: str = "exited unexpectedly", under_way: bool = True, out_of_memory: bool = False
    ) -> float | None:
        """Counts a death and decides what happens next. A death that was already counted is not counted again: the
        result is then 0, or None if the death is final.

        Args:
            death: The death.
            cause: How the process ended, as in "was killed by signal: Killed".
            under_way: Whether the worker had started the task that the death names. If a worker dies earlier, while it
                starts or replays batches, the death does not count against that batch.
            out_of_memory: Whether the worker's memory cgroup ran out of memory.

        Returns:
            The number of seconds after which the worker is to be restarted; None if the death is final.
        """
        if self.is_counted(death):
            return None if self._counted[death.worker_id][1] else 0.0
        self._lines[death.worker_id] = line = described(death, cause, under_way)
        self.history.append(line)
        if under_way and death.task is not None and not self._survives_at(death, death.task, cause):
            return self._decided(death, None)
        answers, delayed = self._in_a_row.get(death.worker_id, (-1, 0))
        # After an out-of-memory kill, even the first restart is delayed, so that other workers can release memory.
        delayed = delayed + 1 if death.answers == answers else int(out_of_memory)
        return self._decided(death, self._next_start(death, delayed))

    def on_failed_start(self, death: Death, error: Exception) -> float | None:
        """Counts a failed restart as a death, and decides what happens next. Returns the same as ``on_death``."""
        self.history.append(f"worker {death.worker_id} could not be restarted: {error}")
        _, delayed = self._in_a_row.get(death.worker_id, (0, 0))
        return self._decided(death, self._next_start(death, delayed + 1))

    def on_restart(self, death: Death) -> None:
        """Counts the restart that followed a death, and settles the death."""
        self._restarts[death.worker_id] += 1
        self.settle(death)

    def settle(self, death: Death) -> None:
        """Records that nothing remains to be done about a death: the worker was restarted, or the death is final."""
        self._settled[death.worker_id] = death.generation

    def is_settled(self, death: Death) -> bool:
        """Returns True if ``settle`` was called for this death."""
        return self._settled.get(death.worker_id, -1) >= death.generation

    def line_of(self, worker_id: int) -> str:
        """Returns a line that describes a worker's last death. The worker must have died at least once."""
        return self._lines[worker_id]

    def notes(self, worker_id: int) -> list[str]:
        """Returns notes for the error about a worker's final death: about earlier deaths, and about its batch."""
        notes = []
        others = [line for line in self.history if line != self._lines.get(worker_id)]
        if others:
            lines = "".join(f"\n  {line}" for line in others)
            notes.append(f"Other worker deaths in this epoch (max_restarts={self.limit}):{lines}")
        if worker_id in self._poisoned:
            notes.append(f"The batch is not retried: {POISON_AFTER} workers died while fetching it.")
        return notes

    def _decided(self, death: Death, seconds: float | None) -> float | None:
        self._counted[death.worker_id] = death.generation, seconds is None
        return seconds

    def _next_start(self, death: Death, delayed: int) -> float | None:
        self._in_a_row[death.worker_id] = death.answers, delayed
        if self.survived >= self.limit:
            return None
        self.survived += 1
        return min(BACK_OFF * 2.0 ** (min(delayed, 64) - 1), MAX_BACK_OFF) if delayed else 0.0

    def _survives_at(self, death: Death, task: int, cause: str) -> bool:
        """Counts a death at a sample. Returns True if the worker may be restarted, and False if the batch must not be
        retried. After too many deaths at the sample, a restart requires that the sample can be skipped; the sample
        is then declared poison."""
        sample = task, death.place
        self._deaths_at[sample] += 1
        self._in_task[task] += 1
        if max(self._deaths_at[sample], self._in_task[task]) < POISON_AFTER:
            return True
        number = death.first_task + task
        # Deaths at different samples of a batch do not show that any one sample is the cause: the worker may have run
        # out of time or memory each time.
        place = death.place if self._deaths_at[sample] >= POISON_AFTER else None
        # True if workers die even at the sample that is fetched instead of a skipped one.
        is_skipped = place in self.poison.get(death.worker_id, {}).get(number, {})
        if place is None or is_skipped or not self._may_skip_samples:
            self._poisoned.add(death.worker_id)
            return False
        self._in_task[task] = 0
        places = self.poison.setdefault(death.worker_id, {}).setdefault(number, {})
        places[place] = f"{POISON_AFTER} workers have died at this sample; the last one {cause}"
        return True


def described(death: Death, cause: str, under_way: bool = True) -> str:
    """Describes a death in one line. The arguments are those of ``Restarts.on_death``."""
    text = f"worker {death.worker_id} (pid {death.pid}) {cause}"
    if death.task is not None:
        text += f", {'at' if under_way else 'before'} batch {death.task} (index {index_text(death.index)})"
    return text


def hazard_of_fork() -> str | None:
    """Returns the reason why it is unsafe to fork this process, or None if no reason is known."""
    for name in ("cuda", "xpu", torch._C._get_privateuse1_backend_name()):
        is_initialized: Any = getattr(getattr(torch, name, None), "is_initialized", None)
        if is_initialized is not None and is_initialized():
            return f"has initialized {name.upper()}"
    others = threading.active_count() - 1
    if others > 0:
        return f"runs {others} other thread{'s' * (others > 1)}"
    return None
