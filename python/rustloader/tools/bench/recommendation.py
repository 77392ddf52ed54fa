"""Recommends a setting after a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from rustloader.system.formatting import count_of
from rustloader.tools.bench.comparison import BUSY
from rustloader.tools.bench.rates import SideRates
from rustloader.tools.bench.results import Point, merged
from rustloader.tools.bench.settings import ALONE, Setting
from rustloader.tools.harness.layout import listed

# Maximum distance from the best rate for a number of workers that counts as good.
_TOLERANCE = 0.05
# Minimum share of idle cores that shows a wait for storage, if the system does not report how long workers queue.
_MIN_IDLE_SHARE = 0.2
RULE = (
    f"the fewest workers with batches/s within {_TOLERANCE:.0%} of the best, or not measurably below; "
    "more workers than cores only if they wait for storage"
)


RULE_OF_OPTIONS = "among settings with as many workers the first one as given"


class Choice(NamedTuple):
    """The number of workers for one engine, and swept options; None if there are too few measurements. ``reason``
    explains None, or names settings that are as good or were not considered; it may be empty."""

    workers: int | None
    reason: str = ""
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def setting(self) -> Setting:
        return Setting(self.workers, self.options)


def recommend(points: Sequence[Point], engine: str, cores: int) -> Choice:
    """Returns the fewest workers that are as good as the best; none if other processes used the cores meanwhile.

    Args:
        points: what was measured.
        engine: "torch" or "rustloader".
        cores: processor cores that the loader may use.

    Example:
        >>> recommend(points, "rustloader", cores=4)
        Choice(workers=2, reason='no measurable difference between 2 and 4 workers')
    """
    sides = _sides(points, engine)
    # It was measured although nothing asked for it.
    if len(sides) > 1 and ALONE in sides and sides[ALONE].too_few:
        del sides[ALONE]
    for setting, side in sides.items():
        if side.too_few:
            return Choice(None, f"too few epochs or batches with {setting}")
    if (others := max(point.others_share for point in points)) >= BUSY:
        return Choice(None, f"other processes used {others:.0%} of the cores meanwhile: end them, and measure again")
    beyond = {point.workers for point in points if point.workers > cores and not _waits_for_storage(point, cores)}
    allowed = {setting: side for setting, side in sides.items() if setting.workers not in beyond}
    if not allowed:
        return Choice(None, f"all numbers of workers are above the {count_of(cores, 'core')} available")
    best = max(allowed.values(), key=lambda side: side.rate)
    same = [setting for setting, side in allowed.items() if side.interval.overlaps(best.interval)]
    near = [setting for setting, side in allowed.items() if side.rate >= (1 - _TOLERANCE) * best.rate]
    reasons = []
    if len(same) > 1:
        reasons.append(f"no measurable difference between {_named(same)}")
    if beyond and max(sides.values(), key=lambda side: side.rate) is not best:
        reasons.append(f"more than {count_of(cores, 'worker')} would compete for {count_of(cores, 'core')}")
    # The first one of those with the fewest workers.
    chosen = min((setting for setting in sides if setting in same + near), key=lambda setting: setting.workers or 0)
    return Choice(chosen.workers, "; ".join(reasons), chosen.options)


def _sides(points: Sequence[Point], engine: str) -> dict[Setting, SideRates]:
    """Returns the measurements of an engine by setting. torch has no setting but the number of workers."""
    if engine == "torch":
        return {Setting(point.workers): point.torch for point in merged(points)}
    return {point.setting: point.rustloader for point in points}


def _named(settings: Sequence[Setting]) -> str:
    if any(setting.options for setting in settings):
        return listed([f"({setting})" for setting in settings])
    return f"{listed([setting.workers for setting in settings])} workers"


def _waits_for_storage(point: Point, cores: int) -> bool:
    """Returns True if workers wait longer than they compute, so that more workers than cores help. Time in the queue
    for a core counts as neither, because other programs may cause it."""
    workers: list[dict[str, Any]] = ((point.verdict or {}).get("stats") or {}).get("workers") or []
    known = [it for it in workers if it.get("cpu_seconds") is not None and it.get("queued_seconds") is not None]
    parts = ("fetch", "collate", "pack")
    busy = sum(sum(it[f"{part}_seconds"] for part in parts) - it.get("unmeasured_seconds", 0.0) for it in known)
    if busy <= 0:
        return point.rustloader.cores_used < (1 - _MIN_IDLE_SHARE) * cores
    computing, queued = (sum(it[name] for it in known) for name in ("cpu_seconds", "queued_seconds"))
    return bool(busy - computing - queued > computing)
