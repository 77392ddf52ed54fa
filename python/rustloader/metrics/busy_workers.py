"""Finds what limits a loader with busy workers: their number, the dataset, storage, the cores or ``collate_fn``."""

from __future__ import annotations

import math
from typing import Literal

from rustloader.metrics import advice, work
from rustloader.metrics.fields import StatsFields
from rustloader.metrics.finding import MIN_GAIN, Finding, Pace, has_step, is_remote, loop_seconds, waits_text
from rustloader.system.formatting import count_of, duration

# A part of a worker's time is the main part if its share is larger than this.
_MAIN_SHARE = 0.5
# Workers that wait for a core for more than this share of their time lack cores. On two cores, two busy programs beside
# two workers take half of it, and one takes a third: neither is close to the limit.
_QUEUED_SHARE = 0.42
# Stands for the unknown number of cores on other machines, so that it sets no limit.
_UNKNOWN_CORES = 1 << 30
# Limits on the recommended number of workers that wait for storage: per core, and as a multiple of the current number.
_MAX_PER_CORE, _MAX_STEP_UP = 4, 4

_OWN_WORK = (
    "The dataset's own work takes most of the time, and no loader can speed it up: cache its results, decode faster"
)
_NO_NUMBER = (
    "The number of workers needed is unknown: this loop has no training step. Ask again in a loop that has one."
)
_AUTO = 'num_workers="auto" decides at the next iter() whether to add workers.'


def find(stats: StatsFields, pace: Pace, more_do_not_help: bool) -> Finding:
    """Returns the finding for a loop that waits although all workers are busy."""
    tasks = sum(worker.tasks for worker in stats.workers)
    fetch = sum(worker.fetch_seconds for worker in stats.workers) / tasks
    collate = sum(worker.collate_seconds for worker in stats.workers) / tasks
    pack = sum(worker.pack_seconds for worker in stats.workers) / tasks
    shares, queued = work.dataset_shares(stats), work.queued_share(stats)
    # Seconds per batch for which the main process does not wait; None without a training step.
    asks_every = pace.main if has_step(stats) else None
    reason = f"{waits_text(stats)}; a worker takes {duration(pace.work)} per batch ({duration(fetch)} fetching, "
    reason += f"{duration(collate)} collating, {duration(pack)} packing)"
    reason += f", and the main process asks for one every {duration(asks_every)}; " if asks_every else "; "
    reason += f"{count_of(pace.workers, 'worker')}, {count_of(stats.cores, 'core')}; "
    if shares is None:
        reason += "whether the workers wait for storage is unknown"
    else:
        reason += f"in the dataset, the workers compute for {shares.cpu:.0%} of the time, wait for a core for "
        reason += f"{shares.queued:.0%} and for something else for {shares.waiting:.0%}"
    # The work without the waits for a core, which depend on what else runs.
    own = pace.work * (1 - min(queued or 0.0, 1.0))
    needed = None if asks_every is None else max(math.ceil(round(own / asks_every, 3)), pace.workers + 1)
    main_work = _MAIN_SHARE * pace.work
    if pack > main_work:
        sentence = "Inter-process transport is the bottleneck: packing takes the workers most of their time. Let "
        sentence += "default_collate build the batches, or return tensors and arrays in dicts, lists or tuples."
        return Finding("transport", sentence, reason, gain=pace.gain(pace.work - pack), gain_kind="unknown")
    if queued is not None and queued > _QUEUED_SHARE and pace.workers <= stats.cores:
        limits = own > 0 and fetch > main_work and (asks_every is None or own / pace.workers > asks_every)
        sentence = _cores(stats, own if limits else None)
        return Finding("cores", sentence, reason, gain=pace.gain(own), gain_kind="unknown")
    if collate > main_work:
        return _computing(stats, pace, needed, "collate", collate, reason, more_do_not_help)
    if shares is not None and shares.waiting * fetch > main_work and not work.saturated(stats, loop_seconds(stats)):
        return _storage(stats, pace, needed, shares, fetch, reason, more_do_not_help)
    part: Literal["fetch", "both"] = "fetch" if fetch > main_work else "both"
    return _computing(stats, pace, needed, part, fetch if part == "fetch" else pace.work, reason, more_do_not_help)


def _cores(stats: StatsFields, own: float | None) -> str:
    """Returns the sentence for a finding that other work uses the cores.

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


def _is_auto(stats: StatsFields) -> bool:
    return stats.scheduling is not None and stats.scheduling.auto_workers is not None


def _storage(
    stats: StatsFields,
    pace: Pace,
    needed: int | None,
    shares: work.Shares,
    fetch: float,
    reason: str,
    more_do_not_help: bool,
) -> Finding:
    """Returns the finding for workers that wait for storage, which may outnumber the cores."""
    waits = "The workers wait for storage or the network for most of their time"
    faster = "faster storage (a local disk, larger files, a cache)"
    unknown = " With a map-style dataset, worker_threads does the same with fewer processes."
    hint = unknown if stats.scheduling is None else ""
    number = None
    if needed is not None and not more_do_not_help:
        limits = _MAX_PER_CORE * stats.cores, _MAX_STEP_UP * pace.workers, shares.threads_for(stats.cores)
        number = min(needed, *limits)
        number = number if number > pace.workers else None
    threads = advice.worker_threads(stats, pace.workers, needed, shares)
    more, gain, is_limit = [], pace.gain(pace.work - shares.waiting * fetch), needed is None
    if threads:
        now = 1 if stats.scheduling is None else stats.scheduling.worker_threads
        gain = pace.gain(pace.work - fetch + fetch * now / threads)
        more = [f"worker_threads={threads}"]
    elif number is not None:
        gain = pace.gain(workers=number)
    else:
        is_limit = True
    if more_do_not_help:
        sentence = f"{waits}: use {' or '.join([*more, faster])}; more workers do not help.{hint}"
    elif needed is None and not _is_auto(stats):
        first = "".join(f"{option}, " for option in more)
        sentence = f"{waits}: use {first}more workers, even more than cores, or {faster}. {_NO_NUMBER}{hint}"
    elif needed is not None and number is None:
        sentence = f"{waits}: use {' or '.join([*more, faster])}; more workers will hardly help.{hint}"
    elif number is None or _is_auto(stats):
        sentence = f"{waits}: use {' or '.join([*more, faster])}. {_AUTO}{hint}"
    else:
        more.append(f"num_workers={number}")
        again = " and measure again" if number < (needed or 0) else ""
        sentence = f"{waits}: use {' or '.join(more)}{again}, or {faster}.{hint}"
    return Finding("storage", sentence, reason, number, gain, "limit" if is_limit else "prediction")


def _computing(
    stats: StatsFields,
    pace: Pace,
    needed: int | None,
    main_part: Literal["fetch", "collate", "both"],
    part_seconds: float,
    reason: str,
    more_do_not_help: bool,
) -> Finding:
    """Returns the finding for workers that compute, and need a core each.

    ``main_part`` is "fetch" or "collate" if that part takes most of the workers' time; otherwise "both".
    ``part_seconds`` is its time per batch.
    """
    # The number of cores of remote machines is unknown.
    count, cores = pace.workers, _UNKNOWN_CORES if is_remote(stats) else stats.cores
    cannot_grow = more_do_not_help or count >= cores
    number = None if needed is None or cannot_grow else min(needed, cores)
    if number is not None and pace.gain(workers=number) < MIN_GAIN:
        number, cannot_grow = None, True  # the cores are already busy
    is_enough = number == needed if number is not None else not cannot_grow
    gain = pace.gain(pace.work - part_seconds) if number is None else pace.gain(workers=number)
    if main_part == "collate":
        sentence = "collate_fn is the bottleneck: it takes the workers most of their time. Make it faster, use "
        sentence += "smaller samples, or let default_collate build the batches."
    elif number is not None and is_enough:
        sentence = "The workers are the bottleneck."
    else:
        sentence = _OWN_WORK if main_part == "fetch" else "The workers are the bottleneck: make samples cheaper"
        may_grow = number is None and not cannot_grow and not _is_auto(stats)
        sentence += ", or use more workers." if may_grow else ", or add cores."
    if _is_auto(stats) and count < cores:
        sentence += f" {_AUTO}"
    elif more_do_not_help:
        sentence += " A measurement showed that more workers do not help."
    elif number is not None:
        sentence += f" Use num_workers={number}"
        sentence += "." if is_enough else f": that uses all {cores} cores and is still not enough for this step."
    elif count >= cores:
        sentence += f" More workers do not help: there {'is' if cores == 1 else 'are'} {count_of(cores, 'core')}."
    elif cannot_grow:
        sentence += " More workers do not help: the cores are busy."
    else:
        sentence += f" {_NO_NUMBER}"
    kind: Literal["collate", "workers", "dataset"] = "workers" if is_enough else "dataset"
    kind = "collate" if main_part == "collate" else kind
    return Finding(kind, sentence, reason, number, gain, "limit" if number is None else "prediction")
