"""How many workers a sweep recommends: never more than its figures bear out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rustloader.bench.layout import listed
from rustloader.bench.results import Point, Side
from rustloader.texts import count_of

__all__ = ["RULE", "Choice", "recommend"]

# A number of workers is as good as the best if its rate is at most this part below it.
_WITHIN = 0.05
# Where the system does not say how long workers queue for a core: they wait for storage if all processes together leave
# this part of the cores idle.
_IDLE = 0.2
RULE = (
    f"the fewest workers with batches/s within {_WITHIN:.0%} of the best, or not measurably below; "
    "more workers than cores only if they wait for storage"
)


@dataclass(frozen=True)
class Choice:
    """The number of workers for one engine.

    Attributes:
        workers: one of those that were measured; None if there are too few figures to recommend one.
        reason: why there is none, or which numbers of workers are no worse or were not considered; may be empty.
    """

    workers: int | None
    reason: str = ""


def recommend(points: Sequence[Point], engine: str, cores: int) -> Choice:
    """The fewest workers that do as well as any.

    Args:
        points: what was measured.
        engine: "torch" or "rustloader".
        cores: processor cores that the loader may use.

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
    """Whether workers wait longer than they compute, so that more of them than cores are of use. Time in the queue for
    a core is neither: there may be other programs."""
    workers: list[dict[str, Any]] = ((point.verdict or {}).get("stats") or {}).get("workers") or []
    known = [it for it in workers if it.get("cpu_seconds") is not None and it.get("queued_seconds") is not None]
    parts = ("fetch", "collate", "pack")
    busy = sum(sum(it[f"{part}_seconds"] for part in parts) - it.get("unmeasured_seconds", 0.0) for it in known)
    if busy <= 0:
        return point.rustloader.cores_used < (1 - _IDLE) * cores
    computing, queued = (sum(it[name] for it in known) for name in ("cpu_seconds", "queued_seconds"))
    return bool(busy - computing - queued > computing)
