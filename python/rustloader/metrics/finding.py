"""The bottleneck of a loader, and how fast its loop is with the remedy, as a multiple of its current speed.

The prediction is the one of a pipeline with buffers: a batch takes as long as its slowest stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from rustloader.metrics.fields import StatsFields

VerdictKind = Literal[
    "step",
    "workers",
    "dataset",
    "storage",
    "cores",
    "collate",
    "head_of_line",
    "main",
    "pinning",
    "device",
    "transport",
    "network",
    "starting",
    "too_few",
    "unknown",
]

# A loop has a training step if it spends at least this many seconds per batch, and at least this share of its time,
# outside `next`.
_MIN_STEP, _MIN_STEP_SHARE = 200e-6, 0.02

# A remedy pays if it is predicted to make the loop at least this many times as fast.
MIN_GAIN = 1.05


@dataclass(frozen=True)
class Finding:
    """The bottleneck of a loader.

    Attributes:
        kind: The bottleneck.
        sentence: The finding in words, with the remedy.
        reason: The measurements on which the finding is based.
        workers_needed: The ``num_workers`` to try next; None if more workers do not help, or the number is unknown.
        gain: The predicted speed with the first remedy, as a multiple of the current speed.
        gain_kind: Whether ``gain`` is a prediction, or the most that the remedy can achieve ("limit"). "unknown" if the
            remedy also relieves other parts of the loop, so that the gain may be larger.
    """

    kind: VerdictKind
    sentence: str
    reason: str
    workers_needed: int | None = None
    gain: float = 1.0
    gain_kind: Literal["prediction", "limit", "unknown"] = "limit"


def loop_seconds(stats: StatsFields) -> float:
    """Returns the duration of the loop in seconds, without the waits for the first batches of epochs."""
    return stats.own_seconds + stats.waited_seconds + stats.step_seconds


def waits_text(stats: StatsFields) -> str:
    """Describes the share of its time for which the loop waits."""
    share = stats.waited_seconds / (loop_seconds(stats) or 1.0)
    return f"the loop waits for {share:.{int(share < 0.1)}%} of its time"


def has_step(stats: StatsFields) -> bool:
    """Returns True if the loop has a training step."""
    return stats.step_seconds >= max(_MIN_STEP * stats.batches, _MIN_STEP_SHARE * loop_seconds(stats))


def is_remote(stats: StatsFields) -> bool:
    """Returns True if the workers run on other machines."""
    return stats.scheduling is not None and stats.scheduling.remote


class Pace(NamedTuple):
    """Mean seconds per batch.

    Attributes:
        main: Work of the main process: the training step, and the work within ``next``.
        waited: Time for which the loop waits.
        work: Work of one worker; 0.0 without tasks.
        workers: Number of workers.
        computing: CPU time of all processes, divided by the number of cores; 0.0 if unknown.
    """

    main: float
    waited: float
    work: float
    workers: int
    computing: float

    def gain(self, work: float | None = None, workers: int | None = None) -> float:
        """Returns the gain if a worker takes ``work`` seconds per batch, or if there are ``workers``.

        More workers do not make a batch faster than the cores can compute it. Without an argument, the workers keep
        their pace, and only what delays the batches on their way is gone.
        """
        per_batch = (self.work if work is None else work) / (self.workers if workers is None else workers)
        return self._gain(max(self.main, per_batch, 0.0 if workers is None else self.computing))

    def most(self) -> float:
        """Returns the gain if the loop never waits."""
        return self._gain(self.main)

    def _gain(self, seconds: float) -> float:
        now = self.main + self.waited
        return max(1.0, now / seconds) if seconds > 0 else float("inf")


def pace_of(stats: StatsFields) -> Pace:
    """Returns the seconds per batch of a loader that has delivered a batch."""
    tasks = sum(worker.tasks for worker in stats.workers)
    work = sum(worker.busy_seconds for worker in stats.workers) / tasks if tasks else 0.0
    main, waited = (stats.own_seconds + stats.step_seconds) / stats.batches, stats.waited_seconds / stats.batches
    known = [worker for worker in stats.workers if worker.cpu_seconds is not None]
    measured = sum(worker.busy_seconds - worker.unmeasured_seconds for worker in known)
    computing = sum(worker.cpu_seconds or 0.0 for worker in known) / measured * work if measured > 0 else 0.0
    if stats.core_users is not None and computing:
        computing += stats.core_users.main * stats.cores * (main + waited)
    return Pace(main, waited, work, worker_count(stats), computing / stats.cores)


def worker_count(stats: StatsFields) -> int:
    """Returns the current number of workers. ``stats.workers`` may list more, from earlier epochs."""
    return stats.num_workers or max(1, len(stats.workers))
