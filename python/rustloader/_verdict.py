"""What limits a loader, by its statistics."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rustloader._figures import Stats, Worker

__all__ = ["Verdict", "judge"]

# Fewer batches say little: the first ones find workers that have just been started.
_FEW = 20
# The loop may wait for so large a part of its time before anything but the loop is said to limit.
_WAITS = 0.1
# Workers that are at work for less than this part of the time are not what the loop waits for.
_BUSY, _HARDLY_BUSY = 0.7, 0.3
# A worker or a task that takes so many times as long as the others is slow.
_SLOW = 2.0
_NAMED = 3


@dataclass(frozen=True)
class Verdict:
    """What limits a loader.

    Attributes:
        kind: "step", "workers", "head_of_line", "main", "collate", "pinning", "starting", "transport", "too_few" or
            "unknown".
        sentence: the same in words, with what to do.
        reason: the figures that it follows from.
        workers_needed: with "workers" and "collate", the smallest ``num_workers`` that would keep the training step
            supplied if each had a core to itself; else None.
    """

    kind: str
    sentence: str
    reason: str
    workers_needed: int | None = None

    def __str__(self) -> str:
        return f"{self.sentence} ({self.reason})"


def judge(stats: Stats) -> Verdict:
    """What limits the loader or iterator that statistics were taken of. Depends on them alone."""
    verdict = _judge(stats)
    if verdict.kind == "unknown" or not stats.handovers:
        return verdict
    left_out = sum(handover.count for handover in stats.handovers)
    reason = f"{verdict.reason}; left out: {left_out} iterators that were torch's own ({_why_torchs(stats)})"
    return replace(verdict, reason=reason)


def _why_torchs(stats: Stats) -> str:
    return "; ".join(handover.reason for handover in stats.handovers)


def _judge(stats: Stats) -> Verdict:
    if stats.note or (stats.handovers and stats.batches == 0):
        reason = stats.note or _why_torchs(stats)
        return Verdict("unknown", "Nothing can be said: the Rust engine has delivered no batch.", reason)
    if stats.batches < _FEW:
        sentence = f"Too few batches to tell; ask again after {_FEW}."
        return Verdict("too_few", sentence, f"{stats.batches} batches so far")
    own, waited, step = stats.own_seconds, stats.waited_seconds, stats.step_seconds
    loop = own + waited + step
    if stats.epochs > 1 and stats.first_seconds > loop:
        return _starting(stats, loop)
    if waited > _WAITS * loop:
        return _waiting(stats, loop)
    each = f"a batch: {_ms(step / stats.batches)} of training step, {_ms(own / stats.batches)} in next(), "
    each += f"{_ms(waited / stats.batches)} of waiting"
    if own > step:
        sampler, rest = stats.sampler_seconds / stats.batches, (own - stats.sampler_seconds) / stats.batches
        what = "the sampler" if sampler > rest else "opening batches (unpickling them, where they are no plain trees)"
        reason = f"{each}; of next() {_ms(sampler)} in the sampler, {_ms(rest)} opening the batch"
        sentence = f"The main process limits, by {what}; more workers do not help."
        return Verdict("main", sentence, reason)
    return Verdict("step", "The training step limits: loading keeps up with it.", each)


def _starting(stats: Stats, loop: float) -> Verdict:
    first = _s(stats.first_seconds)
    reason = f"{first} of waiting for the first batches of {stats.epochs} epochs, {_s(loop)} for the rest"
    sentence = "The start of each epoch limits; persistent_workers=True keeps the workers, if it is not set."
    return Verdict("starting", sentence, reason)


def _waiting(stats: Stats, loop: float) -> Verdict:
    """The loop waits; for what?"""
    tasks = sum(worker.tasks for worker in stats.workers)
    busy = sum(worker.busy_seconds for worker in stats.workers)
    if not tasks or not stats.workers:
        return Verdict("unknown", "Nothing can be said: the workers have left no figures.", _waits(stats, loop))
    per_task = busy / tasks
    pinning = stats.pinning
    if pinning.batches and pinning.seconds > _BUSY * loop:
        per_batch = pinning.seconds / pinning.batches
        if per_batch > per_task / len(stats.workers):
            reason = f"{_waits(stats, loop)}; pinning takes {_ms(per_batch)} a batch in one thread, and a worker "
            reason += f"{_ms(per_task)} with {len(stats.workers)} of them"
            sentence = "Pinning limits: smaller batches or plain ones (tensors in dicts, lists, tuples) pin faster."
            return Verdict("pinning", sentence, reason)
    busy_share = min(1.0, busy / (len(stats.workers) * loop))
    if busy_share < _BUSY and stats.blocked_seconds > stats.waited_seconds / 2:
        return _head_of_line(stats, loop, busy_share, per_task)
    if busy_share < _HARDLY_BUSY:
        reason = f"{_waits(stats, loop)}, although workers are at work for {busy_share:.0%} of the time; "
        reason += f"a batch takes one {_ms(per_task)}"
        sentence = "The way between the processes limits: fewer and larger batches cost less."
        return Verdict("transport", sentence, reason)
    return _workers(stats, loop, per_task)


def _workers(stats: Stats, loop: float, per_task: float) -> Verdict:
    tasks = sum(worker.tasks for worker in stats.workers)
    fetch = sum(worker.fetch_seconds for worker in stats.workers) / tasks
    collate = sum(worker.collate_seconds for worker in stats.workers) / tasks
    pack = sum(worker.pack_seconds for worker in stats.workers) / tasks
    # What the main process itself takes for a batch.
    pace = (loop - stats.waited_seconds) / stats.batches
    needed = math.ceil(round(per_task / pace, 3)) if pace > 0 else 0
    needed = max(needed, len(stats.workers) + 1)
    reason = f"{_waits(stats, loop)}; a batch takes a worker {_ms(per_task)} ({_ms(fetch)} fetching, {_ms(collate)} "
    reason += f"collating, {_ms(pack)} packing), and the main process asks for one every {_ms(pace)}"
    do = f"num_workers={needed} would do"
    if needed > stats.cores:
        do += f", with as many cores: this process has {stats.cores}"
    if collate > per_task / 2:
        sentence = f"collate_fn limits: it takes a worker most of a batch's time. A faster one helps; else {do}."
        return Verdict("collate", sentence, reason, needed)
    return Verdict("workers", f"The workers limit: {do}.", reason, needed)


def _head_of_line(stats: Stats, loop: float, busy_share: float, per_task: float) -> Verdict:
    reason = f"{_waits(stats, loop)}, {stats.blocked_seconds / stats.waited_seconds:.0%} of it while later batches "
    reason += f"were ready; workers are at work for {busy_share:.0%} of the time"
    slow = _slow_worker(stats)
    if slow is not None:
        worker, usual = slow
        its = _ms(worker.busy_seconds / worker.tasks)
        reason += f"; worker {worker.id} takes {its} a batch, the others {_ms(usual)}"
        sentence = f"One slow worker limits: worker {worker.id} (pid {worker.pid}). The others wait for their turn."
        return Verdict("head_of_line", sentence, reason)
    tasks = [task for task in stats.slowest if task.seconds > _SLOW * per_task] or list(stats.slowest)
    named = "; ".join(f"{task.index} took {_ms(task.seconds)}" for task in tasks[:_NAMED])
    reason += f"; a batch takes {_ms(per_task)} on average, {named}"
    sentence = "A few slow batches limit: all later ones wait for them. in_order=False, a larger prefetch_factor or "
    return Verdict("head_of_line", sentence + f"faster samples help; the slowest: {named}.", reason)


def _slow_worker(stats: Stats) -> tuple[Worker, float] | None:
    """The worker that is much slower than the others, and the seconds that they take for a batch."""
    workers = sorted((w for w in stats.workers if w.tasks), key=lambda worker: worker.busy_seconds / worker.tasks)
    if len(workers) < 2:
        return None
    usual = statistics.median(worker.busy_seconds / worker.tasks for worker in workers[:-1])
    slowest = workers[-1]
    # By chance the few slow batches may all have been one worker's, but hardly all of its batches were slow.
    typical = [task for task in stats.slowest if task.worker == slowest.id]
    if slowest.busy_seconds / slowest.tasks < _SLOW * usual or not typical:
        return None
    return (slowest, usual) if typical[0].seconds < _SLOW * 2 * slowest.busy_seconds / slowest.tasks else None


def _waits(stats: Stats, loop: float) -> str:
    return f"the loop waits for {stats.waited_seconds / loop:.0%} of its time"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else _s(seconds)


def _s(seconds: float) -> str:
    return f"{seconds:.3g} s"
