"""Presents the measurements of ``bench`` as medians, intervals, ratios, tables and JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rustloader.metrics.fields import StatsFields
from rustloader.metrics.verdict import judge
from rustloader.system.formatting import duration, size
from rustloader.tools.bench.comparison import Comparison, compare
from rustloader.tools.bench.rates import SideRates, make_sides_comparable
from rustloader.tools.bench.settings import SWEPT, Setting
from rustloader.tools.harness.layout import WIDTH, aligned, number, times


@dataclass
class Point:
    """The measurements with one setting.

    Attributes:
        workers: number of workers.
        torch: measurements on torch's iterator.
        rustloader: measurements on the engine. With 0 workers torch's own loop runs, and this is the same object as
            ``torch``.
        verdict: verdict on the loader when it runs on the engine; None without workers.
        options: values of the swept options.
        others: measurements of the other factories' loaders on the engine, by factory; empty without workers.
        verdicts: verdicts on these loaders, by factory.
        judged_others: ``judged`` of these loaders, by factory.
        judged: statistics that the verdict is based on; None without workers, or if the verdict must not be revised.
    """

    workers: int
    torch: SideRates = field(default_factory=SideRates)
    rustloader: SideRates = field(default_factory=SideRates)
    verdict: dict[str, Any] | None = None
    options: tuple[tuple[str, Any], ...] = ()
    others: dict[str, SideRates] = field(default_factory=dict)
    verdicts: dict[str, dict[str, Any]] = field(default_factory=dict)
    judged_others: dict[str, StatsFields | None] = field(default_factory=dict)
    judged: StatsFields | None = None

    @property
    def setting(self) -> Setting:
        """The number of workers and the swept options."""
        return Setting(self.workers, self.options)

    @property
    def torch_only(self) -> bool:
        """True if only torch's own loop was measured."""
        return self.rustloader is self.torch

    @property
    def others_share(self) -> float:
        """The share of the cores that other processes used, the largest of the loaders' values; 0 if unknown.

        Remote workers count as other processes if they run on this machine, so their loaders are left out.
        """
        return max((side.others_share for side in self.sides if not side.is_remote), default=0.0)

    @property
    def sides(self) -> list[SideRates]:
        """All measurements."""
        return [self.torch, self.rustloader, *self.others.values()]

    @property
    def comparison(self) -> Comparison | None:
        """The comparison of the two engines; None without workers."""
        return None if self.torch_only else _compared(self.torch, self.rustloader)

    def comparisons(self, factory: str) -> dict[str, Comparison]:
        """Compares the loaders of the other factories with the loader of ``factory``, both on the engine.

        The comparison counts samples, because the batches may have different sizes.
        """
        return {name: _compared(self.rustloader, side, name, factory) for name, side in self.others.items()}

    @property
    def ratios(self) -> dict[str, float | None]:
        """Ratios of the two engines, by name of the measurement; above 1, rustloader is better.

        For the rate this is rustloader's value divided by torch's, for the others torch's divided by rustloader's.
        """
        ours, theirs = self.rustloader, self.torch
        comparison = self.comparison

        def ratio(theirs: float | None, ours: float | None) -> float | None:
            return theirs / ours if ours and theirs is not None else None

        medians = ("cpu_seconds_per_batch", "first_batch_seconds")
        return {
            "batches_per_second": comparison.ratio if comparison else 1.0,
            **{name: ratio(theirs.median(name), ours.median(name)) for name in medians},
            "memory_bytes": ratio(theirs.memory_bytes, ours.memory_bytes),
            **(dict.fromkeys(("cpu_seconds_per_batch", "memory_bytes")) if ours.is_remote else {}),
        }

    def as_dict(self, factory: str) -> dict[str, Any]:
        """Returns the results for JSON. ``factory`` is the first factory."""
        comparison, others = self.comparison, self.comparisons(factory)
        return {
            "workers": self.workers,
            **({"options": dict(self.options)} if self.options else {}),
            "torch": self.torch.as_dict(),
            "rustloader": self.rustloader.as_dict(),
            "ratio": self.ratios,
            "comparison": comparison._asdict() if comparison else None,
            "others_share": self.others_share,
            "verdict": self.verdict,
            "others": {
                name: side.as_dict()
                | {"loader": side.about, "comparison": others[name]._asdict(), "verdict": self.verdicts.get(name)}
                for name, side in self.others.items()
            },
        }


def _compared(theirs: SideRates, ours: SideRates, *names: str) -> Comparison:
    before, now = ([rate * side.batch_size for rate in side.rates] for side in (theirs, ours))
    return compare(before, now, min(theirs.batches, ours.batches), *names)


def make_comparable(points: Iterable[Point]) -> None:
    """Makes the rates of all points comparable; see ``make_sides_comparable()``."""
    make_sides_comparable([side for point in points for side in point.sides])


def starting_verdict(side: SideRates) -> dict[str, Any]:
    """Returns a verdict if the start of the workers takes most of an epoch; otherwise an empty dictionary.

    The statistics of a loader do not show this if epochs have only a few batches.
    """
    first, whole = side.median("first_batch_seconds"), side.median("seconds")
    if first < whole / 2 or not all(pass_.complete for pass_ in side.passes):
        return {}
    return {
        "kind": "starting",
        "sentence": "Starting the workers is the bottleneck; persistent_workers=True keeps them between epochs.",
        "reason": f"the first batch takes {duration(first)} of an epoch's {duration(whole)}",
        "workers_needed": None,
        "predicted_gain": None,
    }


def revise_verdicts(points: list[Point]) -> None:
    """Changes verdicts that advise more workers if more workers were measured and were not faster."""
    for point in points:
        more = [other for other in points if other.workers > point.workers and other.options == point.options]
        if point.verdict is not None:
            point.verdict |= _revision(point.judged, [it.rustloader for it in (point, *more)])
        for name, judged in point.judged_others.items():
            point.verdicts[name] |= _revision(judged, [it.others[name] for it in (point, *more)])


def _revision(judged: StatsFields | None, sides: list[SideRates]) -> dict[str, Any]:
    """Returns the new verdict if the sides after the first, which have more workers, were not faster; else nothing."""
    first, *more = sides
    if judged is None or not more or any(side.too_few for side in sides):
        return {}
    if any(side.interval.low > first.interval.high for side in more):
        return {}
    return asdict(judge(judged, more_do_not_help=True))


def merge_by_workers(points: Iterable[Point]) -> list[Point]:
    """Returns one point per number of workers.

    A point has torch's passes from all points with its number of workers, because options have no effect on torch. The
    other measurements are those of the last of these points.
    """
    by_workers: dict[int, Point] = {}
    for point in points:
        known = by_workers.get(point.workers)
        torch = point.torch if known is None else replace(known.torch, passes=known.torch.passes + point.torch.passes)
        by_workers[point.workers] = replace(point, torch=torch, options=())
    return list(by_workers.values())


def table(point: Point) -> str:
    """Formats the table for one setting."""
    if point.torch_only:
        return aligned([("", "torch's own loop"), *(row[:2] for row in _rows(point))])
    return aligned([("", "torch", "rustloader", "ratio"), *_rows(point)])


def _rows(point: Point) -> Iterator[tuple[str, str, str, str]]:
    theirs, ours, ratios, comparison = point.torch, point.rustloader, point.ratios, point.comparison
    if comparison is not None and not comparison.is_known:
        ratios, comparison = dict.fromkeys(ratios), None
    rate = times(ratios["batches_per_second"])
    yield "batches/s", number(theirs.rate), number(ours.rate), rate
    interval = ours.interval
    is_whole_range = interval.low == min(ours.rates)
    title = "  lowest to highest" if is_whole_range else f"  {interval.confidence:.0%} confidence"
    ratio_interval = _interval_text(comparison.low, comparison.high, times) if comparison else ""
    yield title, _interval_text(*theirs.interval[:2]), _interval_text(*interval[:2]), ratio_interval
    megabytes = [number(side.rate * side.batch_bytes / 1e6) for side in (theirs, ours)]
    yield "MB/s", megabytes[0], megabytes[1], rate
    yield "CPU per batch", _cpu(theirs), _cpu(ours), times(ratios["cpu_seconds_per_batch"])
    yield "first batch", _first_batch(theirs), _first_batch(ours), times(ratios["first_batch_seconds"])
    yield "memory", _memory(theirs), _memory(ours), times(ratios["memory_bytes"])


# Columns that a sweep's table drops, in this order, until it fits.
_OPTIONAL_COLUMNS = ("lowest to highest", "first batch")


def sweep_table(points: Iterable[Point], chosen: Setting) -> str:
    """Formats the table of a sweep, with a line per setting and engine, and a column per swept option.

    An arrow marks the ``chosen`` setting.
    """
    points = list(points)
    swept = {name: head for name, head in SWEPT.items() if any(name in dict(point.options) for point in points)}
    rows = [
        _sweep_row(point, name, swept, point.setting == chosen)
        for point in points
        for name in (("both",) if point.torch_only else ("torch", "rustloader"))
    ]
    return _fitting(rows, 2 + len(swept))


def _fitting(rows: list[dict[str, str]], left: int) -> str:
    """Formats rows of cells by heading, the first ``left`` columns aligned left. A table that is too wide loses
    columns."""
    columns, optional = list(rows[0]), list(_OPTIONAL_COLUMNS)
    while True:
        table = aligned([columns, *([row[name] for name in columns] for row in rows)], left=left, gap=2)
        if max(map(len, table.splitlines())) <= WIDTH or not optional:
            return table
        columns.remove(optional.pop(0))


def _sweep_row(point: Point, name: str, swept: dict[str, str], chosen: bool) -> dict[str, str]:
    """Returns the cells of a line by heading. ``name`` is an engine, or "both" for torch's own loop."""
    side = point.torch if name == "both" else getattr(point, name)
    # A setting has two lines: torch's shows the number of workers, and rustloader's shows the options.
    options = dict(point.options) if name == "rustloader" else {}
    return {
        "workers": "" if name == "rustloader" else str(point.workers),
        "engine": "torch's loop" if name == "both" else name,
        **{head: str(options.get(option, "")) for option, head in swept.items()},
        "batches/s": number(side.rate),
        "lowest to highest": _interval_text(min(side.rates), max(side.rates)),
        "ratio": _ratio(point.comparison) if name == "rustloader" else "",
        "CPU/batch": _cpu(side),
        "first batch": _first_batch(side),
        "memory": _memory(side),
        "": "<-" if chosen and name != "torch" else "",
    }


def _ratio(comparison: Comparison | None) -> str:
    """Formats the ratio of the rates; "-" if there is none, or too few measurements to tell."""
    return times(comparison.ratio if comparison is not None and comparison.is_known else None)


def factories_table(points: Iterable[Point], factory: str) -> str:
    """Formats the table that compares the loaders of all factories on the engine, with a line per setting and factory.

    The ratio, in samples per second, is that to the loader of ``factory``, the first one. Returns an empty string
    without other factories.
    """
    rows = []
    for point in points:
        comparisons = point.comparisons(factory)
        for name, side in {factory: point.rustloader, **point.others}.items() if point.others else ():
            rows.append(
                {
                    "": ", ".join(filter(None, (name, str(Setting(None, point.options))))),
                    "workers": str(side.about.get("num_workers", point.workers)),
                    "batch": str(side.about.get("batch_size", "-")),
                    "batches/s": number(side.rate),
                    "lowest to highest": _interval_text(min(side.rates), max(side.rates)),
                    "ratio": _ratio(comparisons.get(name)),
                    "CPU/batch": _cpu(side),
                    "first batch": _first_batch(side),
                    "memory": _memory(side),
                }
            )
    return _fitting(rows, 1) if rows else ""


def _cpu(side: SideRates) -> str:
    return "-" if side.is_remote else duration(side.median("cpu_seconds_per_batch"))


def _first_batch(side: SideRates) -> str:
    return duration(side.median("first_batch_seconds"))


def _memory(side: SideRates) -> str:
    return "-" if side.memory_bytes is None or side.is_remote else size(side.memory_bytes)


def _interval_text(low: float, high: float, form: Callable[[float], str] = number) -> str:
    return f"{form(low)} to {form(high)}"
