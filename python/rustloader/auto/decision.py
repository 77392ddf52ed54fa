"""Decides how many workers the next epoch has, from the figures of the last one. Pure: figures in, decision out.

A loop that takes a batch every ``pace`` seconds needs ``per_batch / pace`` workers, each of which makes one in
``per_batch`` seconds. Limits bound that. The number changes only by clear margins. After each reversal of its direction
the next one takes twice as many epochs that agree, so that noise cannot make it swing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

from rustloader.system.formatting import count_of, duration

# An epoch with fewer batches, batches per worker or seconds decides nothing: its first batches weigh too much.
_MIN_BATCHES, _MIN_BATCHES_PER_WORKER, _MIN_SECONDS = 20, 3, 0.5
# More workers only if the loop waits for this share of its time, and the number is below the need by this share.
_WAIT_SHARE, _NEED_MARGIN = 0.05, 0.1
# Fewer workers only if one less is still this many times the need.
_SURPLUS = 1.35
# Workers for batches of uneven cost, as a multiple of the need: of more workers, and of fewer. With the margins above,
# figures that are off by 10 % in either direction do not turn a change back.
_SPARE, _SPARE_OF_FEWER = 1.05, 1.15
# Maximum factor of one change upwards.
_MAX_STEP_UP = 4
# Maximum of workers per core, and of all workers on a machine with fewer cores.
_PER_CORE, _MAX_WORKERS = 16, 64
# Processor time as a share of the time at work from which on a worker uses several threads.
_THREADED_SHARE = 1.5
# Part of the expected gain of more workers below which they gained nothing, and the smallest expected gain, as a share
# of the time of a batch, that shows.
_MIN_GAIN, _VISIBLE_GAIN = 0.25, 0.1
# Factor by which the work on a batch or the loop's pace must change until more workers are tried again.
_CHANGE_FACTOR = 2.0
# A step of less than this many seconds per batch, or this share of the loop's time, is no training step.
_NO_STEP, _NO_STEP_SHARE = 50e-6, 0.02


@dataclasses.dataclass(frozen=True)
class Epoch:
    """The figures of an epoch, or of the part of it that the program has taken. Times are in seconds.

    Attributes:
        workers: Number of workers.
        batches: Number of batches delivered.
        step: The loop between two calls of ``next``.
        own: In ``next`` without waiting.
        waited: Waiting for batches, the first one left out.
        tasks: Number of batches made.
        busy: Work of all workers on them.
        cpu: Processor time of that part of ``busy`` whose processor time is known.
        measured: That part of ``busy``.
        queued: Part of ``measured``: ready to run, without a core.
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
        return self.step + self.own + self.waited

    @property
    def is_long(self) -> bool:
        """True if the epoch is long enough to decide by."""
        least = max(_MIN_BATCHES, _MIN_BATCHES_PER_WORKER * self.workers)
        return min(self.batches, self.tasks) >= least and self.loop >= _MIN_SECONDS and self.busy > 0

    @property
    def has_step(self) -> bool:
        return self.step >= max(_NO_STEP * self.batches, _NO_STEP_SHARE * self.loop)

    @property
    def pace(self) -> float:
        """Seconds from batch to batch if the loop never waits."""
        return (self.step + self.own) / self.batches

    @property
    def per_batch(self) -> float:
        """A worker's seconds per batch."""
        return self.busy / self.tasks

    @property
    def rate(self) -> float:
        """Seconds from batch to batch."""
        return self.loop / self.batches

    @property
    def need(self) -> float:
        """The workers that the loop keeps busy."""
        return self.per_batch / max(self.pace, 1e-9)

    @property
    def share(self) -> float:
        """Processor time as a share of the time at work, without waiting for a core. Unknown time counts as 1."""
        at_work = self.measured - self.queued
        return self.cpu / at_work if at_work > 0 else 1.0


class Limit(NamedTuple):
    """A maximum of workers, and its reason."""

    maximum: float
    reason: str


class _Trial(NamedTuple):
    """The baseline that more workers were tried against: the number before, and its figures."""

    workers: int
    per_batch: float
    pace: float
    rate: float

    def is_like(self, epoch: Epoch) -> bool:
        pairs = ((self.per_batch, epoch.per_batch), (self.pace, epoch.pace))
        return all(before / _CHANGE_FACTOR < now < before * _CHANGE_FACTOR for before, now in pairs)


@dataclasses.dataclass(frozen=True)
class History:
    """The results of earlier decisions that the next one needs.

    Attributes:
        direction: Of the last change: 1, -1, or 0 before the first.
        reversals: Number of changes against the one before.
        wanted: Direction that the last epochs agree on, and their number.
        trial: The last change, if it was upwards and no epoch has judged it.
        ceiling: The largest number that more workers did not make faster.
    """

    direction: int = 0
    reversals: int = 0
    wanted: tuple[int, int] = (0, 0)
    trial: _Trial | None = None
    ceiling: _Trial | None = None


class Decision(NamedTuple):
    """The number of workers of the next epoch, and the reason of a change; empty for none. ``held_by``: the limit that
    keeps the number below the need; empty for none."""

    workers: int
    reason: str
    history: History
    held_by: str = ""


def decide(epoch: Epoch, cores: float, limits: Sequence[Limit] = (), history: History = History()) -> Decision:
    """Decides from an epoch's figures.

    Args:
        epoch: The figures.
        cores: Cores that the workers may use.
        limits: Further limits, such as memory.
        history: Of the last decision.

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
        reason = f"{count_of(now, 'worker')} took {duration(epoch.rate)} per batch, and {trial.workers} took "
        return _changed(epoch, trial.workers, f"{reason}{duration(trial.rate)}", history)
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
    expected = trial.rate - max(trial.pace, trial.per_batch / epoch.workers)
    return expected > _VISIBLE_GAIN * trial.rate and trial.rate - epoch.rate < _MIN_GAIN * expected


def _changed(epoch: Epoch, target: int, reason: str, history: History) -> Decision:
    direction = 1 if target > epoch.workers else -1
    trial = _Trial(epoch.workers, epoch.per_batch, epoch.pace, epoch.rate) if direction > 0 else None
    reversals = history.reversals + (direction == -history.direction)
    changed = dataclasses.replace(history, direction=direction, reversals=reversals, wanted=(0, 0), trial=trial)
    return Decision(target, reason, changed)


def _tightest(epoch: Epoch, cores: float, limits: Sequence[Limit], history: History) -> Limit:
    """Returns the smallest of the limits."""
    share = epoch.share if epoch.share > _THREADED_SHARE else min(epoch.share, 1.0)
    by_cpu = cores / max(share, 1e-3)
    text = f"the workers compute for {epoch.share:.0%} of their time, and there {_cores(cores)}"
    bounds = [Limit(by_cpu, text), *limits]
    bounds.append(Limit(max(cores, min(_PER_CORE * cores, _MAX_WORKERS)), f"there {_cores(cores)}"))
    bounds.append(Limit(epoch.tasks / 2, f"the epoch had {count_of(epoch.tasks, 'batch')}"))
    if history.ceiling is not None:
        bounds.append(Limit(history.ceiling.workers, "more were no faster"))
    return min(bounds, key=lambda limit: limit.maximum)


def _cores(cores: float) -> str:
    return f"{'is' if cores == 1 else 'are'} {cores:.3g} core{'' if cores == 1 else 's'}"


def _target(epoch: Epoch, limit: Limit) -> tuple[int, str]:
    """Returns the number of workers that the figures ask for, and why."""
    now, need = epoch.workers, epoch.need
    least = min(need, limit.maximum)
    spare = _SPARE if now < need else _SPARE_OF_FEWER
    wanted = math.ceil(round(need * spare, 3))
    target = max(1, min(wanted, int(limit.maximum)))
    if now < (1 - _NEED_MARGIN) * least and epoch.waited > _WAIT_SHARE * epoch.loop:
        bounds = {wanted: "", int(limit.maximum): f"; {limit.reason}"}
        target = min(target, _MAX_STEP_UP * now)
        more = bounds.get(target, f"; at most {_MAX_STEP_UP} times as many at once")
    elif now - 1 >= _SURPLUS * least:
        more = "" if target == wanted else f"; {limit.reason}"
    else:
        return now, ""
    pace = f"the loop asks for one every {duration(epoch.pace)}" if epoch.has_step else "the loop has no training step"
    return target, f"a worker takes {duration(epoch.per_batch)} per batch, and {pace}{more}"
