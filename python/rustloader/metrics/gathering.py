"""``rustloader.report_ranks()``: the statistics of all ranks, gathered on demand."""

from __future__ import annotations

import socket
from typing import Any

import torch.distributed as dist

import rustloader.system.local_ranks as local_ranks
from rustloader.metrics import ledger
from rustloader.metrics.loader_stats import stats, stats_of_ledger
from rustloader.metrics.ranks import RankReport, RankStats
from rustloader.metrics.stats import Stats


def report_ranks(source: Any = None, group: Any = None) -> RankReport:
    """Gathers the statistics of all ranks' loaders, and names the slowest rank.

    All ranks of the process group must call this function at the same point in the program, as with any
    ``torch.distributed`` collective. A call makes one ``all_gather_object`` of a few hundred bytes per rank; nothing
    runs between calls. Without ``torch.distributed``, the report contains only this process.

    Args:
        source: This rank's loader or iterator, as for ``rustloader.stats()`` (default: None, the loader of this
            process that has delivered the most batches).
        group: Process group to gather from (default: None, all ranks).

    Returns:
        The report, which is the same on all ranks of the group. A rank outside the group gets a report on itself
        only.

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
    try:
        own = _rank_stats(_busiest() if source is None else stats(source))
    except Exception as error:
        # The other ranks wait for this one, so it takes part with empty statistics and raises the error afterwards.
        own, failure = RankStats(global_rank(), socket.gethostname()), error
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
    ledgers = {id(it): it for _, it in ledger.loader_ledgers() if it.iterators}.values()
    busiest = max(ledgers, key=lambda it: it.totals().counts.batches, default=None)
    return None if busiest is None else stats_of_ledger(busiest, sum(it.alive for it in busiest.totals().workers))


def _rank_stats(loader_stats: Stats | None) -> RankStats:
    rank, host = global_rank(), socket.gethostname()
    if loader_stats is None or not loader_stats.batches or loader_stats.note:
        return RankStats(rank, host, "" if loader_stats is None else loader_stats.name)
    verdict = loader_stats.verdict()
    return RankStats(
        rank=rank,
        host=host,
        loader=loader_stats.name,
        batches=loader_stats.batches,
        seconds=loader_stats.loop_seconds,
        next_seconds=loader_stats.next_seconds,
        kind=verdict.kind,
        sentence=verdict.sentence,
    )
