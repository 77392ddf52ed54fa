"""Recommends a number of workers after a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from rustloader.bench.layout import listed
from rustloader.bench.results import Point, Side
from rustloader.texts import count_of

# Maximum distance from the best rate for a number of workers that counts as good.
_WITHIN = 0.05
# Minimum share of idle cores that shows a wait for storage, if the system does not report how long workers queue.
_IDLE = 0.2
RULE = (
    f"the fewest workers with batches/s within {_WITHIN:.0%} of the best, or not measurably below; "
    "more workers than cores only if they wait for storage"
)


class Choice(NamedTuple):
    """The number of workers for one engine; None if there are too few measurements. ``reason`` explains None, or names
    numbers of workers that are as good or were not considered; it may be empty."""

    workers: int | None
    reason: str = ""


def recommend(points: Sequence[Point], engine: str, cores: int) -> Choice:
    """The fewest workers that are as good as the best. ``cores``: processor cores that the loader may use.

    Example:
        >>> recommend(points, "rustloader", cores=4)
        Choice(workers=2, reason='no measurable difference between 2 and 4 workers')
    """
    sides: dict[int, Side] = {point.workers: getattr(point, engine) for point in points}
    for workers, side in sides.items():
        if side.too_few:
            return Choice(None, f"too few epochs or batches with {count_of(workers, 'worker')}")
    beyond = [point.workers for point in points if point.workers > cores and not _waits_for_storage(point, cores)]
    allowed = {workers: side for workers, side in sides.items() if workers not in beyond}
    if not allowed:
        return Choice(None, f"all numbers of workers are above the {count_of(cores, 'core')} available")
    best = max(allowed.values(), key=lambda side: side.rate)
    same = [workers for workers, side in allowed.items() if side.interval.overlaps(best.interval)]
    near = [workers for workers, side in allowed.items() if side.rate >= (1 - _WITHIN) * best.rate]
    reasons = []
    if len(same) > 1:
        reasons.append(f"no measurable difference between {listed(same)} workers")
    if beyond and max(sides.values(), key=lambda side: side.rate) is not best:
        reasons.append(f"more than {count_of(cores, 'worker')} would compete for {count_of(cores, 'core')}")
    return Choice(min(same + near), "; ".join(reasons))


def _waits_for_storage(point: Point, cores: int) -> bool:
    """Whether workers wait longer than they compute, so that more workers than cores help. Time in the queue for a core
    counts as neither, because other programs may cause it."""
    workers: list[dict[str, Any]] = ((point.verdict or {}).get("stats") or {}).get("workers") or []
    known = [it for it in workers if it.get("cpu_seconds") is not None and it.get("queued_seconds") is not None]
    parts = ("fetch", "collate", "pack")
    busy = sum(sum(it[f"{part}_seconds"] for part in parts) - it.get("unmeasured_seconds", 0.0) for it in known)
    if busy <= 0:
        return point.rustloader.cores_used < (1 - _IDLE) * cores
    computing, queued = (sum(it[name] for it in known) for name in ("cpu_seconds", "queued_seconds"))
    return bool(busy - computing - queued > computing)
