"""Decides the number of workers for the next epoch from measurements of the last one, without side effects.

If the training loop takes a batch every ``pace`` seconds, and a worker needs ``per_batch`` seconds to make one, then
the loop needs ``per_batch / pace`` workers. Limits such as memory may lower that number. The number changes only if the
measurements call for it by a clear margin. Each reversal of direction doubles the number of consecutive epochs that
must agree on the next reversal, so that noise cannot make the number of workers oscillate.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

from rustloader.system.formatting import count_of, duration

# Minimum number of batches, of batches per worker, and of seconds in an epoch for a decision. In a shorter epoch, the
# first batches have too much weight.
_MIN_BATCHES, _MIN_BATCHES_PER_WORKER, _MIN_SECONDS = 20, 3, 0.5
# The number of workers increases only if the loop spends more than the first share of its time waiting. The number must
# also be below the need by more than the second share of the need.
_WAIT_SHARE, _NEED_MARGIN = 0.05, 0.1
# The number decreases only if one worker fewer is still at least this multiple of the need.
_SURPLUS = 1.35
# The new number as a multiple of the need, after an increase and after a decrease. It exceeds the need because some
# batches take longer than others. With the margins above, a measurement error of 10 % does not reverse a change.
_SPARE_AFTER_INCREASE, _SPARE_AFTER_DECREASE = 1.05, 1.15
# Maximum factor of an increase.
_MAX_STEP_UP = 4
# Maximum number of workers per core, and in total. If there are more cores than the second limit, the number of cores
# replaces that limit.
_PER_CORE, _MAX_WORKERS = 16, 64
# If the ratio of the workers' CPU time to their busy time exceeds this value, they count as multithreaded.
_THREADED_SHARE = 1.5
# An increase counts as useless if its gain is below the first share of the expected gain. It is judged only if the
# expected gain exceeds the second share of the time per batch, because a smaller gain might not be visible.
_MIN_GAIN, _VISIBLE_GAIN = 0.25, 0.1
# After a useless increase, the time that a worker takes for a batch, or the loop's pace, must change by this factor
# before another increase is tried.
_CHANGE_FACTOR = 2.0
# The loop's work between two batches counts as a training step only if it takes at least this number of seconds, and at
# least this share of the loop's time.
_MIN_STEP, _MIN_STEP_SHARE = 50e-6, 0.02


@dataclasses.dataclass(frozen=True)
class Epoch:
    """The measurements of an epoch, or of the part of it that the program has consumed. Times are in seconds.

    Attributes:
        workers: Number of workers.
        batches: Number of batches that were delivered.
        step: Time that the loop spent outside ``next``.
        own: Time that the loop spent in ``next`` without waiting.
        waited: Time that the loop waited for batches, not including the first one.
        tasks: Number of batches that the workers made.
        busy: Total time that the workers spent on these batches.
        cpu: CPU time that the workers used in the part of ``busy`` for which this was measured.
        measured: Length of that part of ``busy``.
        queued: Part of ``measured`` during which workers were ready to run but had no core.
    """

    workers: int
    batches: int
    step: float
    own: float
    waited: float
    tasks: int
    busy: float
    cpu: float = 0.0
    measured: float = 0.0
    queued: float = 0.0

    @property
    def loop(self) -> float:
        """Total time of the loop, not including the wait for the first batch."""
        return self.step + self.own + self.waited

    @property
    def is_long(self) -> bool:
        """True if the epoch is long enough for a decision."""
        least = max(_MIN_BATCHES, _MIN_BATCHES_PER_WORKER * self.workers)
        return min(self.batches, self.tasks) >= least and self.loop >= _MIN_SECONDS and self.busy > 0

    @property
    def has_step(self) -> bool:
        """True if the loop does a noticeable amount of work between two batches, such as a training step."""
        return self.step >= max(_MIN_STEP * self.batches, _MIN_STEP_SHARE * self.loop)

    @property
    def pace(self) -> float:
        """Seconds from one batch to the next if the loop never waited."""
        return (self.step + self.own) / self.batches

    @property
    def per_batch(self) -> float:
        """Seconds that a worker takes for a batch."""
        return self.busy / self.tasks

    @property
    def period(self) -> float:
        """Seconds from one batch to the next, including the time that the loop waits."""
        return self.loop / self.batches

    @property
    def need(self) -> float:
        """Number of workers that the loop can keep busy."""
        return self.per_batch / max(self.pace, 1e-9)

    @property
    def cpu_share(self) -> float:
        """CPU time as a share of the workers' busy time, not including waits for a core; 1 if unknown."""
        running = self.measured - self.queued
        return self.cpu / running if running > 0 else 1.0


class Limit(NamedTuple):
    """A maximum number of workers, and the reason for it."""

    maximum: float
    reason: str


class _Trial(NamedTuple):
    """The baseline for an increase: the number of workers before it, and the measurements with that number."""

    workers: int
    per_batch: float
    pace: float
    period: float

    def is_like(self, epoch: Epoch) -> bool:
        """Returns True if a worker's time per batch and the loop's pace in ``epoch`` are similar to the baseline's."""
        pairs = ((self.per_batch, epoch.per_batch), (self.pace, epoch.pace))
        return all(before / _CHANGE_FACTOR < now < before * _CHANGE_FACTOR for before, now in pairs)


@dataclasses.dataclass(frozen=True)
class History:
    """The state that one decision passes to the next.

    Attributes:
        direction: Direction of the last change: 1, -1, or 0 if there was none.
        reversals: Number of changes that reversed the direction of the preceding change.
        wanted: The direction that the latest epochs call for, and how many consecutive epochs have called for it.
        trial: The baseline of the last change if it was an increase that has not been evaluated yet; otherwise None.
        ceiling: The baseline of a useless increase; its number of workers is now a limit. None if there is none.
    """

    direction: int = 0
    reversals: int = 0
    wanted: tuple[int, int] = (0, 0)
    trial: _Trial | None = None
    ceiling: _Trial | None = None


class Decision(NamedTuple):
    """The decision about the next epoch.

    Attributes:
        workers: The number of workers.
        reason: The reason for a change; empty if the number does not change.
        history: The history to pass to the next decision.
        held_by: The reason for the limit that keeps the number below the need; empty if no limit does.
    """

    workers: int
    reason: str
    history: History
    held_by: str = ""


def decide(epoch: Epoch, cores: float, limits: Sequence[Limit] = (), history: History = History()) -> Decision:
    """Decides the number of workers of the next epoch.

    Args:
        epoch: The measurements of the last epoch.
        cores: Number of cores that the workers may use.
        limits: Additional limits, such as one that follows from the free memory.
        history: The history that the last decision returned.

    Example:
        >>> epoch = Epoch(workers=2, batches=100, step=1.0, own=0.0, waited=2.75, tasks=100, busy=7.5, measured=7.5)
        >>> decide(epoch, cores=4)[:2]
        (8, 'a worker takes 75 ms per batch, and the loop asks for one every 10 ms')
    """
    now = epoch.workers
    if not epoch.is_long:
        return Decision(now, "", history)
    trial, history = history.trial, dataclasses.replace(history, trial=None)
    if trial is not None and trial.workers < now and _gained_nothing(trial, epoch):
        history = dataclasses.replace(history, ceiling=trial)
        reason = f"{count_of(now, 'worker')} took {duration(epoch.period)} per batch, and {trial.workers} took "
        return _changed(epoch, trial.workers, f"{reason}{duration(trial.period)}", history)
    if history.ceiling is not None and not history.ceiling.is_like(epoch) and now <= history.ceiling.workers:
        history = dataclasses.replace(history, ceiling=None)
    limit = _tightest(epoch, cores, limits, history)
    target, reason = _target(epoch, limit)
    direction = (target > now) - (target < now)
    if not direction:
        is_short = now < (1 - _NEED_MARGIN) * epoch.need and epoch.waited > _WAIT_SHARE * epoch.loop
        is_held = is_short and int(limit.maximum) <= now
        return Decision(now, "", dataclasses.replace(history, wanted=(0, 0)), limit.reason if is_held else "")
    agreed = history.wanted[1] + 1 if history.wanted[0] == direction else 1
    patience = 2**history.reversals if direction == -history.direction else 1
    if agreed < patience:
        return Decision(now, "", dataclasses.replace(history, wanted=(direction, agreed)))
    return _changed(epoch, target, reason, history)


def _gained_nothing(trial: _Trial, epoch: Epoch) -> bool:
    expected = trial.period - max(trial.pace, trial.per_batch / epoch.workers)
    return expected > _VISIBLE_GAIN * trial.period and trial.period - epoch.period < _MIN_GAIN * expected


def _changed(epoch: Epoch, target: int, reason: str, history: History) -> Decision:
    direction = 1 if target > epoch.workers else -1
    trial = _Trial(epoch.workers, epoch.per_batch, epoch.pace, epoch.period) if direction > 0 else None
    reversals = history.reversals + (direction == -history.direction)
    changed = dataclasses.replace(history, direction=direction, reversals=reversals, wanted=(0, 0), trial=trial)
    return Decision(target, reason, changed)


def _tightest(epoch: Epoch, cores: float, limits: Sequence[Limit], history: History) -> Limit:
    """Returns the limit with the smallest maximum: one of ``limits``, or one that follows from the other arguments."""
    share = epoch.cpu_share if epoch.cpu_share > _THREADED_SHARE else min(epoch.cpu_share, 1.0)
    by_cpu = cores / max(share, 1e-3)
    text = f"the workers compute for {epoch.cpu_share:.0%} of their time, and there {_cores(cores)}"
    bounds = [Limit(by_cpu, text), *limits]
    bounds.append(Limit(max(cores, min(_PER_CORE * cores, _MAX_WORKERS)), f"there {_cores(cores)}"))
    bounds.append(Limit(epoch.tasks / 2, f"the epoch had {count_of(epoch.tasks, 'batch')}"))
    if history.ceiling is not None:
        bounds.append(Limit(history.ceiling.workers, "more workers were not faster"))
    return min(bounds, key=lambda limit: limit.maximum)


def _cores(cores: float) -> str:
    return f"{'is' if cores == 1 else 'are'} {cores:.3g} core{'' if cores == 1 else 's'}"


def _target(epoch: Epoch, limit: Limit) -> tuple[int, str]:
    """Returns the number of workers that the measurements call for, and the reason; the current number and an empty
    string if they do not call for a change."""
    now, need = epoch.workers, epoch.need
    least = min(need, limit.maximum)
    spare = _SPARE_AFTER_INCREASE if now < need else _SPARE_AFTER_DECREASE
    wanted = math.ceil(round(need * spare, 3))
    target = max(1, min(wanted, int(limit.maximum)))
    if now < (1 - _NEED_MARGIN) * least and epoch.waited > _WAIT_SHARE * epoch.loop:
        bounds = {wanted: "", int(limit.maximum): f"; {limit.reason}"}
        target = min(target, _MAX_STEP_UP * now)
        more = bounds.get(target, f"; limited to {_MAX_STEP_UP} times the current number")
    elif now - 1 >= _SURPLUS * least:
        more = "" if target == wanted else f"; {limit.reason}"
    else:
        return now, ""
    pace = f"the loop asks for one every {duration(epoch.pace)}" if epoch.has_step else "the loop has no training step"
    return target, f"a worker takes {duration(epoch.per_batch)} per batch, and {pace}{more}"
