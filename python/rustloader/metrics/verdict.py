"""Finds the limit of a loader from its statistics."""

# No `from __future__ import annotations`: field annotations must be types, not strings.
import math
from dataclasses import dataclass, replace
from typing import Literal

from rustloader.metrics import advice, work
from rustloader.metrics.faults import summary
from rustloader.metrics.parts import Figures, LargeAttribute
from rustloader.metrics.transfers import limiting
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

# Fewer batches give no verdict: the first ones arrive from workers that have just started.
_MIN_BATCHES = 20
# Waiting above this share of the loop's time makes the loader the bottleneck.
_WAIT_SHARE = 0.1
# Workers that are busy for less than this share of the time are not the bottleneck.
_BUSY_SHARE, _HARDLY_BUSY_SHARE = 0.7, 0.3
_NAMED = 3
# Bytes of a batch below which a network's delay counts, not its rate.
_SMALL_BATCH = 1 << 17
_UNKNOWN_CORES = 1 << 30
# Seconds per batch, and share of the loop's time, below which a step is no training step.
_NO_STEP, _NO_STEP_SHARE = 200e-6, 0.02
_MAIN_SHARE = 0.5
# Bytes per second that a worker reads from a cache, and gathers, at least; and the gain from which one is worth a word.
_CACHE_RATE, _CACHE_GAIN = 1e9, 1.5
# Limits of the advice if workers wait for storage: workers per core, and multiple of the current number.
_PER_CORE, _STEP_UP = 4, 4

_OWN_WORK_TEXT = (
    "The dataset's own work takes most of the time, and no loader can speed it up: cache its results, decode faster"
)
_NO_NUMBER = "How many workers are needed is unknown: this loop has no training step. Ask again in a loop that has one."
_AUTO_TEXT = 'num_workers="auto" decides about more workers at the next iter().'


@dataclass(frozen=True, repr=False)
class Verdict:
    """Names the limit of a loader and the remedy.

    Attributes:
        kind: The limit: "step" (the training step), "workers" (too few of them), "dataset" (its own work, on all
            cores), "storage" (workers wait for storage or the network), "cores" (other work takes them), "collate"
            (``collate_fn``), "head_of_line" (one slow worker, or a few slow batches), "main" (the sampler, or opening
            batches), "pinning", "device" (the copy to it), "transport" (between the processes), "network" (to workers
            on other machines) or "starting" (of each epoch). "too_few" and "unknown" mean no verdict.
        sentence: The same in words, with the remedy.
        reason: The figures behind it.
        workers_needed: The ``num_workers`` to try next. None if more workers do not help, or the loop had no training
            step. It exceeds the number of cores only if workers wait for storage. With ``num_workers="auto"`` the
            sentence leaves it to the loader.
        predicted_gain: How many times as fast the loader is predicted to be with the ``dispatch`` and
            ``reorder_window`` of the sentence; None if it names none of the two with a prediction.

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


def judge(stats: Figures, is_most: bool = False) -> Verdict:
    """Returns the verdict on statistics, which depends on nothing else.

    Args:
        stats: The statistics.
        is_most: Whether more workers were tried, and do not help.
    """
    verdict = _judge(stats, is_most)
    if verdict.kind == "dataset" and (caching := _caching(stats)):
        verdict = replace(verdict, sentence=f"{verdict.sentence} {caching}")
    if copying := _copying(stats):
        verdict = replace(verdict, sentence=f"{verdict.sentence} {copying}")
    pageable = stats.transfers.pageable
    if pageable and verdict.kind != "unknown" and pageable not in verdict.sentence:
        verdict = replace(verdict, reason=f"{verdict.reason}; {pageable}")
    if survived := summary(stats.faults):
        verdict = replace(verdict, reason=f"{verdict.reason}; {survived}")
    if verdict.kind == "unknown" or not stats.fallbacks:
        return verdict
    left_out = count_of(sum(fallback.count for fallback in stats.fallbacks), "iterator")
    reason = f"{verdict.reason}; not counted: {left_out} on torch's own loop ({_why_torchs(stats)})"
    return replace(verdict, reason=reason)


def described(large: LargeAttribute) -> str:
    """Describes an attribute in words."""
    return f"a {large.kind} of {large.items:,} items, about {size(large.bytes)}"


def _caching(stats: Figures) -> str:
    """Describes the gain from a cache; empty if it is unknown, or little."""
    estimate, tasks = stats.cache_estimate, sum(worker.tasks for worker in stats.workers)
    if estimate is None or not tasks:
        return ""
    fetch = sum(worker.fetch_seconds for worker in stats.workers) / tasks
    rest = sum(worker.collate_seconds + worker.pack_seconds for worker in stats.workers) / tasks
    cached = rest + stats.bytes / stats.batches / _CACHE_RATE
    held = min(1.0, estimate.free_bytes / estimate.bytes)
    gain = (fetch + rest) / (cached * held + (fetch + rest) * (1 - held))
    if gain < _CACHE_GAIN:
        return ""
    what = "all samples" if held == 1 else f"{held:.0%} of the samples"
    text = (
        f"A cache of {size(min(estimate.bytes, estimate.free_bytes))} would hold {what} ({size(estimate.free_bytes)} "
    )
    text += f"are free), and epochs after the first would take about 1/{gain:.0f}: rustloader.cache(dataset) keeps "
    return f"{text}what the dataset makes, and its then= is for what is random."


def _copying(stats: Figures) -> str:
    """Returns advice on a dataset that workers copy; empty if nothing is known of one."""
    if not stats.large_attributes:
        return ""
    most = max(worker.private_bytes or 0 for worker in stats.workers)
    named = " and ".join(f"{large.path} ({described(large)})" for large in stats.large_attributes[:_NAMED])
    first = stats.large_attributes[0].path
    text = f"A worker has up to {size(most)} of memory of its own; each copies the Python objects of {named}"
    return f"{text}: set {first} = rustloader.share({first}) before the loader is made."


def _why_torchs(stats: Figures) -> str:
    return "; ".join(fallback.reason for fallback in stats.fallbacks)


def _judge(stats: Figures, is_most: bool) -> Verdict:
    if stats.note or (stats.fallbacks and stats.batches == 0):
        why = stats.note or f"torch's own loop made the batches: {_why_torchs(stats)}"
        return Verdict("unknown", f"No verdict: {why}.", "the Rust engine has delivered no batch")
    if stats.batches < _MIN_BATCHES:
        sentence = f"Too few batches to tell; ask again after {_MIN_BATCHES}."
        return Verdict("too_few", sentence, f"{count_of(stats.batches, 'batch')} so far")
    own, waited, step = stats.own_seconds, stats.waited_seconds, stats.step_seconds
    loop = own + waited + step
    if stats.epochs > 1 and stats.first_seconds > loop:
        return _starting(stats, loop)
    if stats.transfers.waited_seconds > max(_WAIT_SHARE * loop, waited):
        return Verdict("device", *limiting(stats.transfers, loop))
    if waited > _WAIT_SHARE * loop:
        # Epochs so short that a worker makes little more than its first batch.
        if stats.epochs > 1 and stats.batches < 2 * _count(stats) * stats.epochs:
            return _starting(stats, loop)
        return _waiting(stats, loop, is_most)
    each = f"per batch: {duration(step / stats.batches)} of training step, {duration(own / stats.batches)} in next(), "
    each += f"{duration(waited / stats.batches)} of waiting"
    if own > step:
        return _main(stats, each)
    sentence = "The training step is the bottleneck: loading keeps up with it, and only a faster step helps."
    return Verdict("step", sentence, each)


def _main(stats: Figures, each: str) -> Verdict:
    sampler, rest = stats.sampler_seconds / stats.batches, (stats.own_seconds - stats.sampler_seconds) / stats.batches
    reason = f"{each}; of next() {duration(sampler)} in the sampler, {duration(rest)} opening the batch"
    if sampler > rest:
        what = "the sampler takes longer than the training step. Use a faster sampler"
    elif stats.copies.pickled > stats.batches / 2:
        what = "opening batches takes longer than the training step, because they are pickled. Return tensors and "
        what += "arrays in dicts, lists or tuples instead of objects of other classes"
    else:
        what = "opening batches takes longer than the training step. Use fewer, larger batches"
    return Verdict("main", f"The main process is the bottleneck: {what}; more workers do not help.", reason)


def _starting(stats: Figures, loop: float) -> Verdict:
    if stats.epochs < 2:
        sentence = "Too short to tell: the start of the workers takes most of the time. Ask again after a longer run."
        return Verdict("too_few", sentence, f"{count_of(stats.batches, 'batch')} in {duration(loop)}")
    reason = f"{duration(stats.first_seconds)} of waiting for the first batches of {stats.epochs} epochs, "
    reason += f"{duration(loop)} for the rest"
    remedy = "set persistent_workers=True, which keeps the workers from epoch to epoch."
    if stats.iterators < stats.epochs:
        remedy = "the workers are kept already. Use longer epochs, or no workers for epochs this short."
    return Verdict("starting", f"The start of each epoch is the bottleneck: {remedy}", reason)


def _waiting(stats: Figures, loop: float, is_most: bool) -> Verdict:
    """Returns the verdict on a loop that waits for batches."""
    tasks = sum(worker.tasks for worker in stats.workers)
    busy = sum(worker.busy_seconds for worker in stats.workers)
    if not tasks:
        sentence = "No verdict: the workers have left no figures. Ask again after more batches."
        return Verdict("unknown", sentence, _waits(stats, loop))
    per_task, count = busy / tasks, _count(stats)
    pinning = stats.pinning
    if pinning.batches and pinning.seconds > _BUSY_SHARE * loop:
        per_batch = pinning.seconds / pinning.batches
        if per_batch > per_task / count:
            reason = f"{_waits(stats, loop)}; pinning takes {duration(per_batch)} per batch in one thread, and a "
            reason += f"worker {duration(per_task)}, with {count_of(count, 'worker')}"
            sentence = "Pinning is the bottleneck: use smaller batches, or plain ones (tensors in dicts, lists or "
            sentence += "tuples), or leave out pin_memory where it gains nothing."
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
        reason = f"{_waits(stats, loop)}, although the workers are at work for only {busy_share:.0%} of the time; "
        reason += f"a worker takes {duration(per_task)} per batch"
        sentence = "Inter-process transport is the bottleneck; use fewer, larger batches."
        return Verdict("transport", sentence, reason)
    return _workers(stats, loop, per_task, is_most)


def _network(stats: Figures, loop: float, busy_share: float, per_task: float) -> Verdict:
    """Returns the verdict on a loop that waits for workers on other machines, which wait as well."""
    size = stats.bytes / stats.batches
    # Batches per second that the workers could make, and that the loop could take.
    rate, own = _count(stats) / per_task, loop - stats.waited_seconds
    wanted = min(rate, stats.batches / own) if _has_step(stats, loop) else rate
    rates = f"{stats.bytes / loop / 1e6:.3g} of {wanted * size / 1e6:.3g} MB/s"
    reason = f"{_waits(stats, loop)}, and the workers are at work for {busy_share:.0%} of the time; a batch has "
    reason += f"{size / 1e6:.3g} MB, and takes a worker {duration(per_task)}"
    if size < _SMALL_BATCH:
        remedy = "Its delay counts, because batches are small: use larger ones, or a larger prefetch_factor."
    else:
        remedy = "Send fewer bytes (uint8 in place of float32, converted on the GPU), or use workers of this machine."
    return Verdict("network", f"The network limits: {rates}. {remedy}", reason)


def _workers(stats: Figures, loop: float, per_task: float, is_most: bool) -> Verdict:
    """Returns the verdict if all workers are busy and the loop waits."""
    tasks = sum(worker.tasks for worker in stats.workers)
    fetch = sum(worker.fetch_seconds for worker in stats.workers) / tasks
    collate = sum(worker.collate_seconds for worker in stats.workers) / tasks
    pack = sum(worker.pack_seconds for worker in stats.workers) / tasks
    count, shares, queued = _count(stats), work.in_dataset(stats), work.queued_share(stats)
    # Seconds per batch of the main process itself; None without a training step.
    pace = (loop - stats.waited_seconds) / stats.batches if _has_step(stats, loop) else None
    reason = f"{_waits(stats, loop)}; a worker takes {duration(per_task)} per batch ({duration(fetch)} fetching, "
    reason += f"{duration(collate)} collating, {duration(pack)} packing)"
    reason += f", and the main process asks for one every {duration(pace)}; " if pace else "; "
    reason += f"{count_of(count, 'worker')}, {count_of(stats.cores, 'core')}; "
    if shares is None:
        reason += "whether the workers wait for storage is unknown"
    else:
        reason += f"of their time in the dataset the workers compute for {shares.cpu:.0%}, "
        reason += f"wait for a core for {shares.queued:.0%} and for something else for {shares.waiting:.0%}"
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
        return _computing(stats, needed, "collate", reason, is_most)
    if shares is not None and shares.waiting * fetch > _MAIN_SHARE * per_task and not work.saturated(stats, loop):
        return _storage(stats, needed, shares, reason, is_most)
    return _computing(stats, needed, "fetch" if fetch > _MAIN_SHARE * per_task else "both", reason, is_most)


def _cores(stats: Figures, own: float | None) -> str:
    """Returns the sentence on cores that other work takes. ``own``: seconds per batch of the dataset's own work, if
    that limits without the other work, too.
    """
    users = stats.core_users
    who = "other work takes them while the workers are ready to run"
    if users is not None:
        who = f"{users}, while workers were ready to run"
    sentence = f"The cores are the bottleneck: {who}. End other programs, use fewer threads in the training process "
    sentence += "(torch.set_num_threads), or add cores."
    if own is not None:
        sentence += f" Even then the dataset limits: its own work takes a worker {duration(own)} per batch."
    return sentence


def _is_remote(stats: Figures) -> bool:
    return stats.scheduling is not None and stats.scheduling.remote


def _is_auto(stats: Figures) -> bool:
    return stats.scheduling is not None and stats.scheduling.auto_workers is not None


def _has_step(stats: Figures, loop: float) -> bool:
    return stats.step_seconds >= max(_NO_STEP * stats.batches, _NO_STEP_SHARE * loop)


def _storage(stats: Figures, needed: int | None, shares: work.Shares, reason: str, is_most: bool) -> Verdict:
    """Returns the verdict on workers that wait. They do not need a core each."""
    waits = "The workers wait for storage or the network for most of their time"
    faster = "faster storage (a local disk, larger files, a cache)"
    count = _count(stats)
    threads = advice.worker_threads(stats, count, needed, shares)
    more = [f"worker_threads={threads}"] if threads else []
    unknown = " With a map-style dataset, worker_threads does the same with fewer processes."
    hint = unknown if stats.scheduling is None else ""
    if is_most:
        sentence = f"{waits}: use {' or '.join([*more, faster])}; more workers do not help.{hint}"
        return Verdict("storage", sentence, reason)
    if needed is None and _is_auto(stats):
        return Verdict("storage", f"{waits}: use {' or '.join([*more, faster])}. {_AUTO_TEXT}{hint}", reason)
    if needed is None:
        first = "".join(f"{option}, " for option in more)
        sentence = f"{waits}: use {first}more workers, even more than cores, or {faster}. {_NO_NUMBER}{hint}"
        return Verdict("storage", sentence, reason)
    limit = min(_PER_CORE * stats.cores, _STEP_UP * count, int(stats.cores / max(shares.cpu, 1e-3)))
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
    stats: Figures, needed: int | None, most: Literal["fetch", "collate", "both"], reason: str, is_most: bool
) -> Verdict:
    """Returns the verdict on workers that compute, and need a core each. ``most`` takes most of their time."""
    # Other machines have cores that this one does not know.
    count, cores = _count(stats), _UNKNOWN_CORES if _is_remote(stats) else stats.cores
    cannot_grow = is_most or count >= cores
    number = None if needed is None or cannot_grow else min(needed, cores)
    if most == "collate":
        sentence = "collate_fn is the bottleneck: it takes the workers most of their time. Make it faster, use "
        sentence += "smaller samples, or let default_collate build the batches."
    elif number is not None and number == needed:
        sentence = "The workers are the bottleneck."
    else:
        sentence = _OWN_WORK_TEXT if most == "fetch" else "The workers are the bottleneck: make samples cheaper"
        may_grow = number is None and not cannot_grow and not _is_auto(stats)
        sentence += ", or use more workers." if may_grow else ", or add cores."
    if _is_auto(stats) and count < cores:
        sentence += f" {_AUTO_TEXT}"
    elif is_most:
        sentence += " More workers were measured, and do not help."
    elif number is not None:
        sentence += f" Use num_workers={number}"
        sentence += "." if number == needed else f": that uses all {cores} cores, and is not enough for this step."
    elif count >= cores:
        sentence += f" More workers do not help: there {'is' if cores == 1 else 'are'} {count_of(cores, 'core')}."
    else:
        sentence += f" {_NO_NUMBER}"
    if most == "collate":
        return Verdict("collate", sentence, reason, number)
    is_enough = number == needed if number is not None else not cannot_grow
    return Verdict("workers" if is_enough else "dataset", sentence, reason, number)


def _head_of_line(stats: Figures, loop: float, busy_share: float, per_task: float) -> Verdict:
    reason = f"{_waits(stats, loop)}, {stats.blocked_seconds / stats.waited_seconds:.0%} of it while later batches "
    reason += f"were ready; the workers are at work for {busy_share:.0%} of the time"
    prediction = advice.shared_queue(stats, _count(stats))
    remedies = ["in_order=False"]
    if prediction is not None:
        remedies.insert(0, advice.shared_queue_text(stats, prediction))
    gain = None if prediction is None else prediction.gain
    slow = work.slow_worker(stats)
    if slow is not None:
        worker, usual = slow
        fetch_time = duration(worker.busy_seconds / worker.tasks)
        reason += f"; worker {worker.id} takes {fetch_time} per batch, the others {duration(usual)}"
        sentence = f"One slow worker is the bottleneck: worker {worker.id} (pid {worker.pid}). The others wait for "
        sentence += f"their turn: look at what it alone reads, or set {' or '.join(remedies)}."
        return Verdict("head_of_line", sentence, reason, predicted_gain=gain)
    reason += f"; a batch takes {duration(per_task)} on average"
    tasks = stats.blocking or [task for task in stats.slowest if task.seconds > work.SLOW * per_task] or stats.slowest
    named = "; ".join(
        f"{short_index(task.index)} took {duration(task.seconds)} on worker {task.worker}" for task in tasks[:_NAMED]
    )
    if prediction is None and not _has_shared_queue(stats):
        remedies.append("a larger prefetch_factor")
    sentence = f"A few slow batches are the bottleneck: all later ones wait for them. Use {', '.join(remedies)} or "
    sentence += f"faster samples{f'; the slowest: {named}' if named else ''}."
    return Verdict("head_of_line", sentence, reason, predicted_gain=gain)


def _has_shared_queue(stats: Figures) -> bool:
    return stats.scheduling is not None and stats.scheduling.dispatch == "shared_queue"


def _count(stats: Figures) -> int:
    """Returns the current number of workers. Earlier there may have been more."""
    return stats.num_workers or len(stats.workers)


def _waits(stats: Figures, loop: float) -> str:
    return f"the loop waits for {stats.waited_seconds / loop:.0%} of its time"
