"""The result of ``rustloader.report_ranks()``: a comparison of the loaders of all ranks."""

# No `from __future__ import annotations`: field annotations must be types, not strings.
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rustloader.metrics.finding import VerdictKind
from rustloader.metrics.stats import Stats
from rustloader.system.formatting import duration

# The slowest rank delays the others if its loop spends at least this share of its time in `next`, and if its time in
# `next` per batch is at least this many times the median of the others.
_WAIT_SHARE, _SLOWER_FACTOR = 0.1, 1.2


@dataclass(frozen=True)
class RankStats:
    """The statistics of one rank's loader so far.

    Attributes:
        rank: Global rank.
        host: Name of its machine.
        loader: Name of the loader; empty if the rank has none.
        batches: Number of batches delivered.
        seconds: Time of the loop in seconds: ``iter()``, ``next``, the training step, and ending the workers.
        next_seconds: Part of ``seconds`` spent in ``next``: waiting, and the work of ``next`` itself.
        kind: The bottleneck of the loader, as in ``Verdict``.
        sentence: The verdict in words, with the remedy.

    Examples:
        >>> rank = rustloader.RankStats(1, "node1", "train", batches=10, seconds=2.0, next_seconds=0.5)
        >>> rank.next_seconds_per_batch, rank.next_share
        (0.05, 0.25)
    """

    rank: int
    host: str
    loader: str = ""
    batches: int = 0
    seconds: float = 0.0
    next_seconds: float = 0.0
    kind: VerdictKind = "unknown"
    sentence: str = "No loader of this rank has received a batch from the engine."

    @property
    def next_seconds_per_batch(self) -> float:
        """Seconds in ``next`` per batch; 0.0 before the first batch."""
        return self.next_seconds / self.batches if self.batches else 0.0

    @property
    def next_share(self) -> float:
        """Share of the loop's time that is spent in ``next``; 0.0 before the first batch."""
        return self.next_seconds / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class RankReport:
    """The statistics of all ranks, which ``print`` shows as a table.

    Attributes:
        ranks: One entry per rank, in order of global rank.

    Examples:
        >>> report = rustloader.RankReport((rustloader.RankStats(0, "a"), rustloader.RankStats(1, "b")))
        >>> print(report.slowest)
        None
    """

    ranks: tuple[RankStats, ...]

    @property
    def slowest(self) -> RankStats | None:
        """The rank whose loop spends the most time in ``next`` per batch; None if no rank has a batch.

        Ranks that exchange gradients all run at the speed of the slowest rank. The others wait for it in their training
        step, so only the slowest rank spends much of its time in ``next``.
        """
        with_batches = [it for it in self.ranks if it.batches]
        return max(with_batches, key=lambda it: it.next_seconds_per_batch, default=None)

    def __str__(self) -> str:
        return "\n".join([*_table(self.ranks), _sentence(self.ranks, self.slowest)])


for _cls in (RankStats, RankReport):
    _cls.__module__ = "rustloader"


def rank_stats(rank: int, host: str, stats: Stats | None) -> RankStats:
    """Returns the statistics of a rank; empty ones if its loader has no batch of the engine, or if there is none."""
    if stats is None or not stats.batches or stats.note:
        return RankStats(rank, host, "" if stats is None else stats.name)
    verdict, spent = stats.verdict(), (stats.loop_seconds, stats.next_seconds)
    return RankStats(rank, host, stats.name, stats.batches, *spent, verdict.kind, verdict.sentence)


def _table(ranks: Iterable[RankStats]) -> list[str]:
    rows = [("rank", "host", "loader", "batches", "per second", "in next()", "share", "limited by")]
    for it in ranks:
        rate = f"{it.batches / it.seconds:,.1f}" if it.seconds else "-"
        in_next = duration(it.next_seconds_per_batch) if it.batches else "-"
        share = f"{it.next_share:.0%}" if it.seconds else "-"
        rows.append((str(it.rank), it.host, it.loader or "-", f"{it.batches:,}", rate, in_next, share, it.kind))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    # The columns of names are on the left.
    forms = [f"{'<' if column in (1, 2, 7) else '>'}{width}" for column, width in enumerate(widths)]
    return ["  ".join(map(format, row, forms)).rstrip() for row in rows]


def _sentence(ranks: Sequence[RankStats], slowest: RankStats | None) -> str:
    if slowest is None:
        return "No rank has received a batch from the engine."
    if slowest.next_share < _WAIT_SHARE and slowest.kind != "starting":
        return "No rank's loop waits for its loader: the training step sets the pace."
    others = [it.next_seconds_per_batch for it in ranks if it is not slowest and it.batches]
    took = f"{duration(slowest.next_seconds_per_batch)} per batch in next()"
    if not others:
        return f"The loop spends {took}. {slowest.sentence}"
    usual = statistics.median(others)
    if slowest.next_seconds_per_batch < _SLOWER_FACTOR * usual:
        if slowest.next_seconds_per_batch < _SLOWER_FACTOR * min(others):
            return f"All ranks wait about equally for their loaders: {took}. {slowest.sentence}"
        waits = f"Most ranks wait about equally for their loaders, rank {slowest.rank} the longest"
        return f"{waits}: {took}. {slowest.sentence}"
    who = f"Rank {slowest.rank} on {slowest.host} is the slowest"
    return f"{who}: its loop spends {took}, the others {duration(usual)}. {slowest.sentence}"
