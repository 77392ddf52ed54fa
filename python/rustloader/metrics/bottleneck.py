"""Finds what limits a loader, from the statistics of all or some of its batches."""

from __future__ import annotations

from rustloader.metrics import advice, busy_workers, work
from rustloader.metrics.fields import StatsFields
from rustloader.metrics.finding import (
    Finding,
    Pace,
    has_step,
    is_remote,
    loop_seconds,
    pace_of,
    waits_text,
    worker_count,
)
from rustloader.metrics.transfers import limit_texts
from rustloader.system.formatting import count_of, duration, short_index

# The loader is the bottleneck if the loop spends more than this share of its time waiting.
_WAIT_SHARE = 0.1
# Thresholds for the share of time for which workers are busy. Below the first, workers may not be the bottleneck; below
# the second, they are not.
_BUSY_SHARE, _HARDLY_BUSY_SHARE = 0.7, 0.3
# Maximum number of batches that a sentence names.
_MAX_NAMED = 3
# Size of a batch in bytes below which the latency of a network matters rather than its bandwidth.
_SMALL_BATCH = 1 << 17


def find(stats: StatsFields, more_do_not_help: bool = False) -> Finding:
    """Returns what limits the loader, for statistics with at least one batch of the engine.

    Args:
        stats: The statistics.
        more_do_not_help: Whether a measurement has shown that more workers do not help.
    """
    own, waited, step, loop = stats.own_seconds, stats.waited_seconds, stats.step_seconds, loop_seconds(stats)
    if stats.epochs > 1 and stats.turnaround_seconds + stats.first_seconds > loop:
        return _starting(stats, loop)
    if stats.transfers.waited_seconds > max(_WAIT_SHARE * loop, waited):
        left = max(loop - stats.transfers.waited_seconds, 1e-9)
        return Finding("device", *limit_texts(stats.transfers, loop), gain=loop / left)
    if waited > _WAIT_SHARE * loop:
        # In epochs this short, a worker makes little more than its first batch.
        if stats.epochs > 1 and stats.batches < 2 * worker_count(stats) * stats.epochs:
            return _starting(stats, loop, waited)
        return _waiting(stats, loop, more_do_not_help)
    times = f"per batch: {duration(step / stats.batches)} of training step, {duration(own / stats.batches)} in next(), "
    times += f"{duration(waited / stats.batches)} of waiting"
    if own > step:
        return _main(stats, loop, times)
    sentence = f"Nothing to gain here: {waits_text(stats)}. The training step is the bottleneck, and only a faster "
    return Finding("step", f"{sentence}step helps.", times)


def _main(stats: StatsFields, loop: float, times: str) -> Finding:
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
    sentence = f"The main process is the bottleneck: {what}; more workers do not help."
    # Indices that come sooner, and plainer batches, also relieve the workers.
    left = loop - stats.waited_seconds - max(sampler, opening) * stats.batches
    gain = loop / left if left > 0 else float("inf")
    return Finding("main", sentence, reason, gain=gain, gain_kind="unknown")


def _starting(stats: StatsFields, loop: float, waits: float = 0.0) -> Finding:
    """Returns the finding for a loop that waits for starts. ``waits`` is the part of ``loop`` that is due to them."""
    if stats.epochs < 2:
        sentence = "Too short to tell: the start of the workers takes most of the time. Ask again after a longer run."
        return Finding("too_few", sentence, f"{count_of(stats.batches, 'batch')} in {duration(loop)}")
    starting = stats.turnaround_seconds + stats.first_seconds
    reason = f"{duration(starting)} in iter(), waiting for the first batches and ending the workers, in {stats.epochs} "
    reason += f"epochs; {duration(loop)} for the rest"
    are_kept, remedy = stats.iterators < stats.epochs, "set persistent_workers=True, which keeps the workers."
    if are_kept:
        remedy = "the workers are already kept. Use longer epochs, or no workers for epochs this short."
    # The first epoch still starts the workers.
    gain = (starting + loop) / ((starting + waits) / stats.epochs + loop - waits)
    sentence = f"The start of each epoch is the bottleneck: {remedy}"
    return Finding(
        "starting", sentence, reason, gain=gain, gain_kind="limit" if are_kept or waits > 0 else "prediction"
    )


def _waiting(stats: StatsFields, loop: float, more_do_not_help: bool) -> Finding:
    """Returns the finding for a loop that waits for batches."""
    pace, count = pace_of(stats), worker_count(stats)
    if not any(worker.tasks for worker in stats.workers):
        sentence = "No verdict: there are no statistics from the workers yet. Ask again after more batches."
        return Finding("unknown", sentence, waits_text(stats))
    if (finding := _pinning(stats, loop, pace)) is not None:
        return finding
    busy = sum(worker.busy_seconds for worker in stats.workers)
    busy_share = min(1.0, busy / (count * loop))
    if busy_share < _BUSY_SHARE and stats.blocked_seconds > stats.waited_seconds / 2:
        # While a loop waits for a slow batch, that batch's worker is busy.
        if busy > stats.blocked_seconds / 2:
            return _head_of_line(stats, pace, busy_share)
        starting = sum(worker.starting_seconds for worker in stats.workers)
        if starting > stats.blocked_seconds / 2:
            return _starting(stats, loop, stats.blocked_seconds)
    if is_remote(stats) and busy_share < _BUSY_SHARE:
        return _network(stats, loop, pace, busy_share)
    if busy_share < _HARDLY_BUSY_SHARE:
        reason = f"{waits_text(stats)}, although the workers are busy for only {busy_share:.0%} of the time; "
        reason += f"a worker takes {duration(pace.work)} per batch"
        sentence = "Inter-process transport is the bottleneck; use fewer, larger batches."
        return Finding("transport", sentence, reason, gain=pace.gain(), gain_kind="unknown")
    return busy_workers.find(stats, pace, more_do_not_help)


def _pinning(stats: StatsFields, loop: float, pace: Pace) -> Finding | None:
    """Returns the finding that pinning is the bottleneck; None if it is not."""
    pinning = stats.pinning
    if not pinning.batches or pinning.seconds <= _BUSY_SHARE * loop:
        return None
    per_batch = pinning.seconds / pinning.batches
    if per_batch <= pace.work / pace.workers:
        return None
    reason = f"{waits_text(stats)}; pinning takes {duration(per_batch)} per batch in one thread, and a worker "
    reason += f"{duration(pace.work)}, with {count_of(pace.workers, 'worker')}"
    sentence = "Pinning is the bottleneck: use smaller batches, or plain ones (tensors in dicts, lists or tuples), or "
    sentence += "turn off pin_memory where it gains nothing."
    return Finding("pinning", sentence, reason, gain=pace.gain())


def _network(stats: StatsFields, loop: float, pace: Pace, busy_share: float) -> Finding:
    """Returns the finding for a loop that waits for workers on other machines, which are idle for part of the time."""
    size = stats.bytes / stats.batches
    # Batches per second that the workers could make.
    rate = pace.workers / pace.work
    wanted = min(rate, 1 / pace.main) if has_step(stats) else rate
    rates = f"{stats.bytes / loop / 1e6:.3g} of {wanted * size / 1e6:.3g} MB/s"
    reason = f"{waits_text(stats)}, and the workers are busy for {busy_share:.0%} of the time; a batch is "
    reason += f"{size / 1e6:.3g} MB and takes a worker {duration(pace.work)}"
    if size < _SMALL_BATCH:
        remedy = "Its latency matters, because batches are small: use larger batches, or a larger prefetch_factor."
    else:
        remedy = "Send fewer bytes (uint8 instead of float32, converted on the GPU), or use workers on this machine."
    return Finding("network", f"The network is the bottleneck: {rates}. {remedy}", reason, gain=pace.gain())


def _head_of_line(stats: StatsFields, pace: Pace, busy_share: float) -> Finding:
    reason = f"{waits_text(stats)}, {stats.blocked_seconds / stats.waited_seconds:.0%} of it while later batches were "
    reason += f"ready; the workers are busy for {busy_share:.0%} of the time"
    prediction = advice.shared_queue(stats, pace.workers)
    remedies = ["in_order=False"]
    if prediction is not None:
        remedies.insert(0, advice.shared_queue_text(stats, prediction))
    gain = pace.most() if prediction is None else prediction.gain
    slow = work.slow_worker(stats)
    if slow is not None:
        worker, usual = slow
        took = duration(worker.busy_seconds / worker.tasks)
        reason += f"; worker {worker.id} takes {took} per batch, the others {duration(usual)}"
        sentence = f"One slow worker is the bottleneck: worker {worker.id} (pid {worker.pid}). The others wait for "
        sentence += f"their turn: check what only this worker reads, or set {' or '.join(remedies)}."
        return Finding(
            "head_of_line", sentence, reason, gain=gain, gain_kind="limit" if prediction is None else "prediction"
        )
    reason += f"; a batch takes {duration(pace.work)} on average"
    tasks = stats.blocking or [task for task in stats.slowest if task.seconds > work.SLOW * pace.work] or stats.slowest
    named = "; ".join(
        f"{short_index(task.index)} took {duration(task.seconds)} on worker {task.worker}"
        for task in tasks[:_MAX_NAMED]
    )
    if prediction is None and not _has_shared_queue(stats):
        remedies.append("a larger prefetch_factor")
    sentence = f"A few slow batches are the bottleneck: all later ones wait for them. Use {', '.join(remedies)} or "
    sentence += f"faster samples{f'; the slowest: {named}' if named else ''}."
    return Finding(
        "head_of_line", sentence, reason, gain=gain, gain_kind="limit" if prediction is None else "prediction"
    )


def _has_shared_queue(stats: StatsFields) -> bool:
    return stats.scheduling is not None and stats.scheduling.dispatch == "shared_queue"
