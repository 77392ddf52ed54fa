"""``rustloader.report()`` and ``rustloader.report_ranks()``: statistics at intervals, and those of all ranks."""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from rustloader._core import set_reporting
from rustloader.metrics import ledger
from rustloader.metrics.loader_stats import stats, stats_of_ledger
from rustloader.metrics.ranks import RankReport, RankStats, rank_stats
from rustloader.metrics.stats import Stats, check_interval
from rustloader.system import hooks, local_ranks
from rustloader.system.cleanup import clean_up_after
from rustloader.system.forks import at_fork


@contextlib.contextmanager
def report(source: Any, callback: Callable[[Stats], object], every: float = 10.0) -> Iterator[None]:
    """Calls a function periodically with a loader's statistics, while the body of a ``with`` statement runs.

    The callback runs in the training loop, without a thread: in the first ``next`` after ``every`` seconds, and once
    more at the end of the body; with ``num_workers=0`` only there. Its time counts as part of the training step. If it
    fails, that ``next`` raises its error, and no batch is lost.

    Args:
        source: A loader or an iterator, as for ``rustloader.stats()``.
        callback: A function of one argument, a ``rustloader.Stats``.
        every: Minimum seconds between two calls, greater than 0 (default: 10).

    Returns:
        A context manager, which also works as a decorator of the training function.

    Raises:
        ValueError: ``every`` is not greater than 0; raised on entering.
        TypeError: ``source`` is neither a loader nor an iterator; raised when the callback is due.

    Examples:
        >>> loader = rustloader.DataLoader(range(8), batch_size=4, num_workers=2)
        >>> with rustloader.report(loader, lambda stats: print(stats.batches, "batches"), every=30):
        ...     for batch in loader:
        ...         pass
        2 batches
    """
    check_interval(every)
    due = time.monotonic() + every

    def call() -> None:
        nonlocal due
        # Set first, so that a callback that iterates over a loader does not recurse.
        due = time.monotonic() + every
        callback(stats(source))

    def call_if_due() -> None:
        if time.monotonic() >= due:
            call()

    # As in `installed`: at interpreter shutdown, the body may end after the globals of this module are set to None.
    is_finalizing = sys.is_finalizing
    hooks.before_next.append(call_if_due)
    set_reporting(True)
    try:
        yield
    except BaseException as error:
        if is_finalizing():
            raise
        _stop(call_if_due)
        clean_up_after(error, call)
        raise
    _stop(call_if_due)
    call()


def _stop(hook: Callable[[], object]) -> None:
    hooks.before_next.remove(hook)
    set_reporting(bool(hooks.before_next))


def _stop_all() -> None:
    hooks.before_next.clear()
    set_reporting(False)


at_fork("reports", after_in_child=_stop_all)  # workers do not report


def report_ranks(source: Any = None, group: Any = None) -> RankReport:
    """Gathers the statistics of all ranks' loaders, and names the slowest rank.

    All ranks of the process group must call this function at the same point in the program, because it makes one
    ``all_gather_object`` of a few hundred bytes per rank. Without ``torch.distributed``, the report contains only this
    process.

    Args:
        source: This rank's loader or iterator, as for ``rustloader.stats()`` (default: the one with the most batches).
        group: Process group to gather from (default: all ranks).

    Returns:
        The report, the same on all ranks of the group. A rank outside the group gets a report on itself only.

    Raises:
        TypeError: ``source`` is neither a loader nor an iterator. The other ranks still get the report.

    Examples:
        >>> loader = rustloader.DataLoader(range(64), batch_size=4, num_workers=1, name="train")
        >>> batches = list(loader)
        >>> report = rustloader.report_ranks(loader)
        >>> report.ranks[0].loader, report.ranks[0].batches
        ('train', 16)
    """
    failure: Exception | None = None
    rank, host = global_rank(), socket.gethostname()
    try:
        own = rank_stats(rank, host, _busiest() if source is None else stats(source))
    except Exception as error:
        # The other ranks wait for this one, so it takes part with empty statistics and raises the error afterwards.
        own, failure = RankStats(rank, host), error
    ranks: list[Any] = [own]
    if _is_initialized() and dist.get_rank(group) >= 0:
        ranks = [None] * dist.get_world_size(group)
        dist.all_gather_object(ranks, own, group=group)
    if failure is not None:
        raise failure
    return RankReport(tuple(sorted(ranks, key=lambda it: it.rank)))


def global_rank() -> int:
    """Returns the global rank of this process, as set by torch.distributed or else by the launcher; 0 by default."""
    return dist.get_rank() if _is_initialized() else local_ranks.global_rank() or 0


def _is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def _busiest() -> Stats | None:
    """Returns the statistics of the loader with the most batches; None if the engine has served no loader."""
    served = [it for _, it in ledger.loader_ledgers() if it.iterators]
    busiest = max(served, key=lambda it: it.totals().counts["batches"], default=None)
    return None if busiest is None else stats_of_ledger(busiest)
