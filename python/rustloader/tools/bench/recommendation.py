"""Recommends a setting after a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from rustloader.system.formatting import count_of
from rustloader.tools.bench.comparison import BUSY
from rustloader.tools.bench.rates import SideRates
from rustloader.tools.bench.results import Point, merge_by_workers
from rustloader.tools.bench.settings import TORCH_LOOP, Setting
from rustloader.tools.harness.layout import listed

# A setting is as good as the best if its rate is lower by at most this share of the best rate.
_TOLERANCE = 0.05
# Minimum share of idle cores that indicates waits for storage. Used if the system does not report how long workers wait
# for a core.
_MIN_IDLE_SHARE = 0.2
RULE = (
    f"the fewest workers with batches/s within {_TOLERANCE:.0%} of the best, or not measurably below; "
    "more workers than cores only if they wait for storage"
)

RULE_OF_OPTIONS = "among settings with the same number of workers, the first one given"


class Choice(NamedTuple):
    """The recommended setting for one engine.

    Attributes:
        workers: number of workers; None if there is no recommendation.
        reason: why there is no recommendation, or which settings are equally good or were not considered; may be empty.
        options: values of the swept options.
    """

    workers: int | None
    reason: str = ""
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def setting(self) -> Setting:
        """The number of workers and the swept options."""
        return Setting(self.workers, self.options)


def recommend(points: Sequence[Point], engine: str, cores: int) -> Choice:
    """Returns the setting with the fewest workers that is as good as the best.

    Recommends nothing if a setting has too few measurements, or if other processes used too many of the cores. Also
    recommends nothing if all settings have more workers than cores, and the workers do not wait for storage.

    Args:
        points: the measurements.
        engine: "torch" or "rustloader".
        cores: number of processor cores that the loader may use.

    Example:
        >>> recommend(points, "rustloader", cores=4)
        Choice(workers=2, reason='no measurable difference between 2 and 4 workers')
    """
    sides = _sides(points, engine)
    # torch's own loop is measured even if it was not requested, so it may have too few epochs.
    if len(sides) > 1 and TORCH_LOOP in sides and sides[TORCH_LOOP].too_few:
        del sides[TORCH_LOOP]
    for setting, side in sides.items():
        if side.too_few:
            return Choice(None, f"too few epochs or batches with {setting}")
    if (others := max(point.others_share for point in points)) >= BUSY:
        return Choice(
            None, f"other processes used {others:.0%} of the cores during the run: end them, and measure again"
        )
    above_cores = {point.workers for point in points if point.workers > cores and not _waits_for_storage(point, cores)}
    allowed = {setting: side for setting, side in sides.items() if setting.workers not in above_cores}
    if not allowed:
        return Choice(None, f"all settings have more workers than the {count_of(cores, 'core')} available")
    best = max(allowed.values(), key=lambda side: side.rate)
    same = [setting for setting, side in allowed.items() if side.interval.overlaps(best.interval)]
    near = [setting for setting, side in allowed.items() if side.rate >= (1 - _TOLERANCE) * best.rate]
    reasons = []
    if len(same) > 1:
        reasons.append(f"no measurable difference between {_settings_text(same)}")
    if above_cores and max(sides.values(), key=lambda side: side.rate) is not best:
        reasons.append(f"more than {count_of(cores, 'worker')} would compete for {count_of(cores, 'core')}")
    # The first setting among those with the fewest workers.
    chosen = min((setting for setting in sides if setting in same + near), key=lambda setting: setting.workers or 0)
    return Choice(chosen.workers, "; ".join(reasons), chosen.options)


def _sides(points: Sequence[Point], engine: str) -> dict[Setting, SideRates]:
    """Returns the measurements of an engine by setting. For torch, a setting is only a number of workers."""
    if engine == "torch":
        return {Setting(point.workers): point.torch for point in merge_by_workers(points)}
    return {point.setting: point.rustloader for point in points}


def _settings_text(settings: Sequence[Setting]) -> str:
    if any(setting.options for setting in settings):
        return listed([f"({setting})" for setting in settings])
    return f"{listed([setting.workers for setting in settings])} workers"


def _waits_for_storage(point: Point, cores: int) -> bool:
    """Returns True if workers wait for storage longer than they compute, so that more workers than cores help.

    The time that a worker waits for a core counts as neither, because other programs may cause it.
    """
    workers: list[dict[str, Any]] = ((point.verdict or {}).get("stats") or {}).get("workers") or []
    known = [it for it in workers if it.get("cpu_seconds") is not None and it.get("queued_seconds") is not None]
    parts = ("fetch", "collate", "pack")
    busy = sum(sum(it[f"{part}_seconds"] for part in parts) - it.get("unmeasured_seconds", 0.0) for it in known)
    if busy <= 0:
        return point.rustloader.cores_used < (1 - _MIN_IDLE_SHARE) * cores
    computing, queued = (sum(it[name] for it in known) for name in ("cpu_seconds", "queued_seconds"))
    return bool(busy - computing - queued > computing)
