"""Finds the bottleneck of a loader from its statistics."""

# No `from __future__ import annotations`: field annotations must be types, not strings.
import math
from dataclasses import dataclass, replace
from typing import Literal

from rustloader.metrics import advice, work
from rustloader.metrics.faults import summary
from rustloader.metrics.fields import LargeAttribute, StatsFields
from rustloader.metrics.transfers import limit_texts
from rustloader.system.formatting import count_of, duration, short_index, size

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

# Minimum number of batches for a verdict. The first batches come from workers that have just started.
_MIN_BATCHES = 20
# The loader is the bottleneck if the loop spends more than this share of its time waiting.
_WAIT_SHARE = 0.1
# Thresholds for the share of time for which workers are busy. Below the first, workers may not be the bottleneck; below
# the second, they are not.
_BUSY_SHARE, _HARDLY_BUSY_SHARE = 0.7, 0.3
# Maximum number of batches or attributes that a sentence names.
_MAX_NAMED = 3
# Size of a batch in bytes below which the latency of a network matters rather than its bandwidth.
_SMALL_BATCH = 1 << 17
# Stands for the unknown number of cores on other machines, so that it sets no limit.
_UNKNOWN_CORES = 1 << 30
# A loop has a training step if it spends at least this many seconds per batch, and at least this share of its time,
# outside `next`.
_MIN_STEP, _MIN_STEP_SHARE = 200e-6, 0.02
# A part of a worker's time is the main part if its share is larger than this.
_MAIN_SHARE = 0.5
# Limits on the recommended number of workers that wait for storage: per core, and as a multiple of the current number.
_MAX_PER_CORE, _MAX_STEP_UP = 4, 4

_OWN_WORK_TEXT = (
    "The dataset's own work takes most of the time, and no loader can speed it up: cache its results, decode faster"
)
_NO_NUMBER = (
    "The number of workers needed is unknown: this loop has no training step. Ask again in a loop that has one."
)
_AUTO_TEXT = 'num_workers="auto" decides at the next iter() whether to add workers.'


@dataclass(frozen=True, repr=False)
class Verdict:
    """The bottleneck of a loader, and the remedy.

    Attributes:
        kind: The bottleneck: "step" (the training step), "workers" (too few of them), "dataset" (its own work, which
            more workers cannot speed up enough), "storage" (workers wait for storage or the network), "cores" (used by
            other work), "collate" (``collate_fn``), "head_of_line" (one slow worker, or a few slow batches), "main"
            (the main process: the sampler, or opening batches), "pinning", "device" (the copy to the device),
            "transport" (between the processes), "network" (to workers on other machines) or "starting" (the start of
            each epoch). "too_few" and "unknown" mean that there is no verdict.
        sentence: The verdict in words, with the remedy.
        reason: The measurements on which the verdict is based.
        workers_needed: The ``num_workers`` to try next; None if more workers do not help, or if the loop had no
            training step. It exceeds the number of cores only if workers wait for storage, or run on other machines.
            The sentence does not name it with ``num_workers="auto"``, because the loader decides.
        predicted_gain: The predicted speed with the ``dispatch`` and ``reorder_window`` that the sentence recommends,
            as a multiple of the current speed; None if it recommends neither, or makes no prediction.

    Examples:
        >>> loader = rustloader.DataLoader(range(64), batch_size=8, num_workers=2)
        >>> batches = list(loader)
        >>> verdict = rustloader.stats(loader).verdict()
        >>> verdict.kind
        'too_few'
        >>> print(verdict)
        Too few batches to tell; ask again after 20. (8 batches so far)
    """

    kind: VerdictKind
    sentence: str
    reason: str
    workers_needed: int | None = None
    predicted_gain: float | None = None

    def __repr__(self) -> str:
        return f"<rustloader.Verdict {self.kind}: {self.sentence}\n ({self.reason})>"

    def __str__(self) -> str:
        return f"{self.sentence} ({self.reason})"


Verdict.__module__ = "rustloader"


def judge(stats: StatsFields, more_do_not_help: bool = False) -> Verdict:
    """Returns the verdict on the statistics, which depends only on the arguments.

    Args:
        stats: The statistics.
        more_do_not_help: Whether a measurement has shown that more workers do not help.
    """
    verdict = _judge(stats, more_do_not_help)
    if verdict.kind == "dataset" and (advice_text := advice.cache_text(stats)):
        verdict = replace(verdict, sentence=f"{verdict.sentence} {advice_text}")
    if advice_text := _sharing_advice(stats):
        verdict = replace(verdict, sentence=f"{verdict.sentence} {advice_text}")
    pageable = stats.transfers.pageable
    if pageable and verdict.kind != "unknown" and pageable not in verdict.sentence:
        verdict = replace(verdict, reason=f"{verdict.reason}; {pageable}")
    if faults := summary(stats.faults):
        verdict = replace(verdict, reason=f"{verdict.reason}; {faults}")
    if verdict.kind == "unknown" or not stats.fallbacks:
        return verdict
    left_out = count_of(sum(fallback.count for fallback in stats.fallbacks), "iterator")
    reason = f"{verdict.reason}; not counted: {left_out} on torch's own loop ({_fallback_reasons(stats)})"
    return replace(verdict, reason=reason)


def described_attribute(large: LargeAttribute) -> str:
    """Describes a large attribute of a dataset in words."""
    return f"a {large.kind} of {large.items:,} items, about {size(large.bytes)}"


def _sharing_advice(stats: StatsFields) -> str:
    """Returns advice on large attributes that workers copy; an empty string if none are known."""
    if not stats.large_attributes:
        return ""
    largest = max(worker.private_bytes or 0 for worker in stats.workers)
    named = " and ".join(
        f"{large.path} ({described_attribute(large)})" for large in stats.large_attributes[:_MAX_NAMED]
    )
    first = stats.large_attributes[0].path
    text = (
        f"Workers have up to {size(largest)} of private memory each, including copies of the Python objects of {named}"
    )
    return f"{text}: set {first} = rustloader.share({first}) before creating the loader."


def _fallback_reasons(stats: StatsFields) -> str:
    return "; ".join(fallback.reason for fallback in stats.fallbacks)


def _judge(stats: StatsFields, more_do_not_help: bool) -> Verdict:
    if stats.note or (stats.fallbacks and stats.batches == 0):
        why = stats.note or f"torch's own loop made the batches: {_fallback_reasons(stats)}"
        return Verdict("unknown", f"No verdict: {why}.", "the Rust engine has delivered no batch")
    if stats.batches < _MIN_BATCHES:
        sentence = f"Too few batches to tell; ask again after {_MIN_BATCHES}."
        return Verdict("too_few", sentence, f"{count_of(stats.batches, 'batch')} so far")
    own, waited, step = stats.own_seconds, stats.waited_seconds, stats.step_seconds
    loop = own + waited + step
    if stats.epochs > 1 and stats.first_seconds + stats.turnaround_seconds > loop:
        return _starting(stats, loop)
    if stats.transfers.waited_seconds > max(_WAIT_SHARE * loop, waited):
        return Verdict("device", *limit_texts(stats.transfers, loop))
    if waited > _WAIT_SHARE * loop:
        # In epochs this short, a worker makes little more than its first batch.
        if stats.epochs > 1 and stats.batches < 2 * _worker_count(stats) * stats.epochs:
            return _starting(stats, loop)
        return _waiting(stats, loop, more_do_not_help)
    times = f"per batch: {duration(step / stats.batches)} of training step, {duration(own / stats.batches)} in next(), "
    times += f"{duration(waited / stats.batches)} of waiting"
    if own > step:
        return _main(stats, times)
    sentence = "The training step is the bottleneck: loading keeps up with it, and only a faster step helps."
    return Verdict("step", sentence, times)


def _main(stats: StatsFields, times: str) -> Verdict:
    sampler = stats.sampler_seconds / stats.batches
    opening = (stats.own_seconds - stats.sampler_seconds) / stats.batches
    reason = f"{times}; within next(), {duration(sampler)} in the sampler and {duration(opening)} opening the batch"
    if sampler > opening:
        what = "the sampler takes longer than the training step. Use a faster sampler"
    elif stats.copies.pickled > stats.batches / 2:
        what = "opening batches takes longer than the training step, because they are pickled. Return tensors and "
        what += "arrays in dicts, lists or tuples instead of objects of other classes"
    else:
        what = "opening batches takes longer than the training step. Use fewer, larger batches"
    return Verdict("main", f"The main process is the bottleneck: {what}; more workers do not help.", reason)


def _starting(stats: StatsFields, loop: float) -> Verdict:
    if stats.epochs < 2:
        sentence = "Too short to tell: the start of the workers takes most of the time. Ask again after a longer run."
        return Verdict("too_few", sentence, f"{count_of(stats.batches, 'batch')} in {duration(loop)}")
    reason = f"{duration(stats.first_seconds + stats.turnaround_seconds)} in iter(), waiting for the first batches and "
    reason += f"ending the workers, in {stats.epochs} epochs; {duration(loop)} for the rest"
    remedy = "set persistent_workers=True, which keeps the workers from epoch to epoch."
    if stats.iterators < stats.epochs:
        remedy = "the workers are already kept. Use longer epochs, or no workers for epochs this short."
    return Verdict("starting", f"The start of each epoch is the bottleneck: {remedy}", reason)


def _waiting(stats: StatsFields, loop: float, more_do_not_help: bool) -> Verdict:
    """Returns the verdict for a loop that waits for batches."""
    tasks = sum(worker.tasks for worker in stats.workers)
    busy = sum(worker.busy_seconds for worker in stats.workers)
    if not tasks:
        sentence = "No verdict: there are no statistics from the workers yet. Ask again after more batches."
        return Verdict("unknown", sentence, _waiting_text(stats, loop))
    per_task, count = busy / tasks, _worker_count(stats)
    pinning = stats.pinning
    if pinning.batches and pinning.seconds > _BUSY_SHARE * loop:
        per_batch = pinning.seconds / pinning.batches
        if per_batch > per_task / count:
            reason = (
                f"{_waiting_text(stats, loop)}; pinning takes {duration(per_batch)} per batch in one thread, and a "
            )
            reason += f"worker {duration(per_task)}, with {count_of(count, 'worker')}"
            sentence = "Pinning is the bottleneck: use smaller batches, or plain ones (tensors in dicts, lists or "
            sentence += "tuples), or turn off pin_memory where it gains nothing."
            return Verdict("pinning", sentence, reason)
    busy_share = min(1.0, busy / (count * loop))
    if busy_share < _BUSY_SHARE and stats.blocked_seconds > stats.waited_seconds / 2:
        # While a loop waits for a slow batch, that batch's worker is busy.
        if busy > stats.blocked_seconds / 2:
            return _head_of_line(stats, loop, busy_share, per_task)
        starting = sum(worker.starting_seconds for worker in stats.workers)
        if starting > stats.blocked_seconds / 2:
            return _starting(stats, loop)
    if _is_remote(stats) and busy_share < _BUSY_SHARE:
        return _network(stats, loop, busy_share, per_task)
    if busy_share < _HARDLY_BUSY_SHARE:
        reason = f"{_waiting_text(stats, loop)}, although the workers are busy for only {busy_share:.0%} of the time; "
        reason += f"a worker takes {duration(per_task)} per batch"
        sentence = "Inter-process transport is the bottleneck; use fewer, larger batches."
        return Verdict("transport", sentence, reason)
    return _workers(stats, loop, per_task, more_do_not_help)


def _network(stats: StatsFields, loop: float, busy_share: float, per_task: float) -> Verdict:
    """Returns the verdict for a loop that waits for workers on other machines, which are idle for part of the time."""
    size = stats.bytes / stats.batches
    # Batches per second that the workers could make, and seconds for which the loop does not wait.
    rate, not_waiting = _worker_count(stats) / per_task, loop - stats.waited_seconds
    wanted = min(rate, stats.batches / not_waiting) if _has_step(stats, loop) else rate
    rates = f"{stats.bytes / loop / 1e6:.3g} of {wanted * size / 1e6:.3g} MB/s"
    reason = f"{_waiting_text(stats, loop)}, and the workers are busy for {busy_share:.0%} of the time; a batch is "
    reason += f"{size / 1e6:.3g} MB and takes a worker {duration(per_task)}"
    if size < _SMALL_BATCH:
        remedy = "Its latency matters, because batches are small: use larger batches, or a larger prefetch_factor."
    else:
        remedy = "Send fewer bytes (uint8 instead of float32, converted on the GPU), or use workers on this machine."
    return Verdict("network", f"The network is the bottleneck: {rates}. {remedy}", reason)


def _workers(stats: StatsFields, loop: float, per_task: float, more_do_not_help: bool) -> Verdict:
    """Returns the verdict for a loop that waits although all workers are busy."""
    tasks = sum(worker.tasks for worker in stats.workers)
    fetch = sum(worker.fetch_seconds for worker in stats.workers) / tasks
    collate = sum(worker.collate_seconds for worker in stats.workers) / tasks
    pack = sum(worker.pack_seconds for worker in stats.workers) / tasks
    count, shares, queued = _worker_count(stats), work.dataset_shares(stats), work.queued_share(stats)
    # Seconds per batch for which the main process does not wait; None without a training step.
    pace = (loop - stats.waited_seconds) / stats.batches if _has_step(stats, loop) else None
    reason = (
        f"{_waiting_text(stats, loop)}; a worker takes {duration(per_task)} per batch ({duration(fetch)} fetching, "
    )
    reason += f"{duration(collate)} collating, {duration(pack)} packing)"
    reason += f", and the main process asks for one every {duration(pace)}; " if pace else "; "
    reason += f"{count_of(count, 'worker')}, {count_of(stats.cores, 'core')}; "
    if shares is None:
        reason += "whether the workers wait for storage is unknown"
    else:
        reason += f"in the dataset, the workers compute for {shares.cpu:.0%} of the time, wait for a core for "
        reason += f"{shares.queued:.0%} and for something else for {shares.waiting:.0%}"
    needed = None if pace is None else max(math.ceil(round(per_task / pace, 3)), count + 1)
    if pack > _MAIN_SHARE * per_task:
        sentence = "Inter-process transport is the bottleneck: packing takes the workers most of their time. Let "
        sentence += "default_collate build the batches, or return tensors and arrays in dicts, lists or tuples."
        return Verdict("transport", sentence, reason)
    if queued is not None and queued > _MAIN_SHARE and count <= stats.cores:
        own = per_task * (1 - queued)
        limits = fetch > _MAIN_SHARE * per_task and (pace is None or own / count > pace)
        return Verdict("cores", _cores(stats, own if limits else None), reason)
    if collate > _MAIN_SHARE * per_task:
        return _computing(stats, needed, "collate", reason, more_do_not_help)
    if shares is not None and shares.waiting * fetch > _MAIN_SHARE * per_task and not work.saturated(stats, loop):
        return _storage(stats, needed, shares, reason, more_do_not_help)
    return _computing(stats, needed, "fetch" if fetch > _MAIN_SHARE * per_task else "both", reason, more_do_not_help)


def _cores(stats: StatsFields, own: float | None) -> str:
    """Returns the sentence for a verdict that other work uses the cores.

    ``own`` is the dataset's own work in seconds per batch, if it would limit the loop even without the other work;
    otherwise None.
    """
    users = stats.core_users
    who = "other work uses them while the workers are ready to run"
    if users is not None:
        who = f"{users}, while workers were ready to run"
    sentence = f"The cores are the bottleneck: {who}. End other programs, use fewer threads in the training process "
    sentence += "(torch.set_num_threads), or add cores."
    if own is not None:
        sentence += f" Even then the dataset is a limit: its own work takes a worker {duration(own)} per batch."
    return sentence


def _is_remote(stats: StatsFields) -> bool:
    return stats.scheduling is not None and stats.scheduling.remote


def _is_auto(stats: StatsFields) -> bool:
    return stats.scheduling is not None and stats.scheduling.auto_workers is not None


def _has_step(stats: StatsFields, loop: float) -> bool:
    return stats.step_seconds >= max(_MIN_STEP * stats.batches, _MIN_STEP_SHARE * loop)


def _storage(
    stats: StatsFields, needed: int | None, shares: work.Shares, reason: str, more_do_not_help: bool
) -> Verdict:
    """Returns the verdict for workers that wait for storage, which may outnumber the cores."""
    waits = "The workers wait for storage or the network for most of their time"
    faster = "faster storage (a local disk, larger files, a cache)"
    count = _worker_count(stats)
    threads = advice.worker_threads(stats, count, needed, shares)
    more = [f"worker_threads={threads}"] if threads else []
    unknown = " With a map-style dataset, worker_threads does the same with fewer processes."
    hint = unknown if stats.scheduling is None else ""
    if more_do_not_help:
        sentence = f"{waits}: use {' or '.join([*more, faster])}; more workers do not help.{hint}"
        return Verdict("storage", sentence, reason)
    if needed is None and _is_auto(stats):
        return Verdict("storage", f"{waits}: use {' or '.join([*more, faster])}. {_AUTO_TEXT}{hint}", reason)
    if needed is None:
        first = "".join(f"{option}, " for option in more)
        sentence = f"{waits}: use {first}more workers, even more than cores, or {faster}. {_NO_NUMBER}{hint}"
        return Verdict("storage", sentence, reason)
    limit = min(_MAX_PER_CORE * stats.cores, _MAX_STEP_UP * count, int(stats.cores / max(shares.cpu, 1e-3)))
    number = min(needed, limit)
    if number <= count:
        sentence = f"{waits}: use {' or '.join([*more, faster])}; more workers will hardly help.{hint}"
        return Verdict("storage", sentence, reason)
    if _is_auto(stats):
        return Verdict("storage", f"{waits}: use {' or '.join([*more, faster])}. {_AUTO_TEXT}{hint}", reason, number)
    more.append(f"num_workers={number}{' and measure again' if number < needed else ''}")
    sentence = f"{waits}: use {' or '.join(more)}, or {faster}.{hint}"
    return Verdict("storage", sentence, reason, number)


def _computing(
    stats: StatsFields,
    needed: int | None,
    main_part: Literal["fetch", "collate", "both"],
    reason: str,
    more_do_not_help: bool,
) -> Verdict:
    """Returns the verdict for workers that compute, and need a core each.

    ``main_part`` is "fetch" or "collate" if that part takes most of the workers' time; otherwise "both".
    """
    # The number of cores of remote machines is unknown.
    count, cores = _worker_count(stats), _UNKNOWN_CORES if _is_remote(stats) else stats.cores
    cannot_grow = more_do_not_help or count >= cores
    number = None if needed is None or cannot_grow else min(needed, cores)
    if main_part == "collate":
        sentence = "collate_fn is the bottleneck: it takes the workers most of their time. Make it faster, use "
        sentence += "smaller samples, or let default_collate build the batches."
    elif number is not None and number == needed:
        sentence = "The workers are the bottleneck."
    else:
        sentence = _OWN_WORK_TEXT if main_part == "fetch" else "The workers are the bottleneck: make samples cheaper"
        may_grow = number is None and not cannot_grow and not _is_auto(stats)
        sentence += ", or use more workers." if may_grow else ", or add cores."
    if _is_auto(stats) and count < cores:
        sentence += f" {_AUTO_TEXT}"
    elif more_do_not_help:
        sentence += " A measurement showed that more workers do not help."
    elif number is not None:
        sentence += f" Use num_workers={number}"
        sentence += "." if number == needed else f": that uses all {cores} cores and is still not enough for this step."
    elif count >= cores:
        sentence += f" More workers do not help: there {'is' if cores == 1 else 'are'} {count_of(cores, 'core')}."
    else:
        sentence += f" {_NO_NUMBER}"
    if main_part == "collate":
        return Verdict("collate", sentence, reason, number)
    is_enough = number == needed if number is not None else not cannot_grow
    return Verdict("workers" if is_enough else "dataset", sentence, reason, number)


def _head_of_line(stats: StatsFields, loop: float, busy_share: float, per_task: float) -> Verdict:
    reason = (
        f"{_waiting_text(stats, loop)}, {stats.blocked_seconds / stats.waited_seconds:.0%} of it while later batches "
    )
    reason += f"were ready; the workers are busy for {busy_share:.0%} of the time"
    prediction = advice.shared_queue(stats, _worker_count(stats))
    remedies = ["in_order=False"]
    if prediction is not None:
        remedies.insert(0, advice.shared_queue_text(stats, prediction))
    gain = None if prediction is None else prediction.gain
    slow = work.slow_worker(stats)
    if slow is not None:
        worker, usual = slow
        took = duration(worker.busy_seconds / worker.tasks)
        reason += f"; worker {worker.id} takes {took} per batch, the others {duration(usual)}"
        sentence = f"One slow worker is the bottleneck: worker {worker.id} (pid {worker.pid}). The others wait for "
        sentence += f"their turn: check what only this worker reads, or set {' or '.join(remedies)}."
        return Verdict("head_of_line", sentence, reason, predicted_gain=gain)
    reason += f"; a batch takes {duration(per_task)} on average"
    tasks = stats.blocking or [task for task in stats.slowest if task.seconds > work.SLOW * per_task] or stats.slowest
    named = "; ".join(
        f"{short_index(task.index)} took {duration(task.seconds)} on worker {task.worker}"
        for task in tasks[:_MAX_NAMED]
    )
    if prediction is None and not _has_shared_queue(stats):
        remedies.append("a larger prefetch_factor")
    sentence = f"A few slow batches are the bottleneck: all later ones wait for them. Use {', '.join(remedies)} or "
    sentence += f"faster samples{f'; the slowest: {named}' if named else ''}."
    return Verdict("head_of_line", sentence, reason, predicted_gain=gain)


def _has_shared_queue(stats: StatsFields) -> bool:
    return stats.scheduling is not None and stats.scheduling.dispatch == "shared_queue"


def _worker_count(stats: StatsFields) -> int:
    """Returns the current number of workers. ``stats.workers`` may list more, from earlier epochs."""
    return stats.num_workers or len(stats.workers)


def _waiting_text(stats: StatsFields, loop: float) -> str:
    return f"the loop waits for {stats.waited_seconds / loop:.0%} of its time"
