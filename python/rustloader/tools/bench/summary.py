"""Formats the output of ``bench``, as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rustloader.tools.bench.comparison import BUSY, EQUAL, NOTED
from rustloader.tools.bench.plan import BenchPlan
from rustloader.tools.bench.recommendation import RULE, RULE_OF_OPTIONS, Choice
from rustloader.tools.bench.results import Point, factories_table, sweep_table, table
from rustloader.tools.harness.layout import number, times, wrapped


class Summary:
    """The result of one run.

    Args:
        options: the options of the command line.
        plan: the plan of the run.
        about: description of the machine and the loader.
        points: the measurements.
        choices: recommendations of a sweep, by engine.
        unmeasured: the reason why torch's own loop could not be measured; empty if it was measured.
    """

    def __init__(
        self,
        options: Any,
        plan: BenchPlan,
        about: dict[str, Any],
        points: list[Point],
        choices: dict[str, Choice],
        unmeasured: str = "",
    ) -> None:
        self._options, self._plan, self._about = options, plan, about
        self._points, self._choices, self._unmeasured = points, choices, unmeasured

    @property
    def shown(self) -> Point:
        """The point to show in full: the recommended one, or the fastest if none with workers is recommended."""
        chosen = self._choices["rustloader"].setting if self._choices else None
        with_workers = [point for point in self._points if not point.torch_only]
        fastest = max(with_workers, key=lambda point: point.rustloader.rate)
        return next((point for point in with_workers if point.setting == chosen), fastest)

    def text(self) -> str:
        """Returns the summary as lines that fit a terminal."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        about, point = self._about, self.shown
        start = "persistent" if about["persistent_workers"] else "started for each epoch"
        loader = f"({about['start_method']}, {start}), prefetch_factor={about['prefetch_factor']}"
        if self._choices:
            yield f"Workers {loader}\n"
            yield sweep_table(self._points, self._choices["rustloader"].setting)
            yield ""
            yield from self._recommendation()
            yield f"\nWith {point.setting}:\n"
        else:
            yield f"{point.setting} {loader}\n"
        yield table(point)
        yield ""
        yield from self._result(point)
        yield ""
        yield from self._other_factories(point)
        yield wrapped(self._notes(point))

    def _other_factories(self, point: Point) -> Iterator[str]:
        if not point.others:
            return
        factory = self._options.factories[0]
        yield f"The loaders on the engine; the ratio is that to {factory}:\n"
        yield f"{factories_table(self._points, factory)}\n"
        is_busy = max(it.others_share for it in self._points) >= BUSY
        for name, comparison in point.comparisons(factory).items():
            if not (is_busy and comparison.is_known):
                yield wrapped(str(comparison), "  ")
            verdict = point.verdicts[name]
            yield wrapped(f"Verdict on {name}: {verdict['sentence']}{_cached_text(verdict)}", "  ")
        yield ""

    def _recommendation(self) -> Iterator[str]:
        for engine, choice in sorted(self._choices.items()):
            if choice.workers is None:
                yield wrapped(f"No recommendation for {engine}: {choice.reason}.", "  ")
            else:
                reason = f" ({choice.reason})" if choice.reason else ""
                yield wrapped(f"Recommended with {engine}: {choice.setting.keywords}{reason}.", "  ")
        if any(choice.workers is not None for choice in self._choices.values()):
            yield wrapped(f"Rule: {self._rule}.", "  ")

    def _result(self, point: Point) -> Iterator[str]:
        comparison, options = point.comparison, self._options
        others = max(it.others_share for it in self._points)
        if comparison is not None:
            if others < BUSY or not comparison.is_known:
                yield wrapped(str(comparison), "  ")
            if not comparison.is_known:
                budget = self._plan.budget
                longer = f"--budget {2 * budget:g}" if budget else "omit --epochs, or increase it"
                yield f"  To measure longer: {longer}"
        if others >= NOTED:
            remedy = ": end them and measure again" if others >= BUSY else ""
            yield wrapped(f"Other processes used {others:.0%} of the cores during the run{remedy}.", "  ")
        if text := self._without_workers(point, others):
            yield wrapped(text, "  ")
        if point.verdict is not None:
            if point.rustloader.is_remote:
                yield wrapped("torch has no workers on other machines, so its workers ran on this one.", "  ")
            text = f"{point.verdict['sentence']}{_cached_text(point.verdict)}"
            yield wrapped(f"Verdict on rustloader's iterator: {text}", "  ")
            yield wrapped(f"  {point.verdict['reason']}", "  ")
        if not options.step:
            what = "The verdict and the recommendation apply" if self._choices else "The verdict applies"
            text = f"The loop ran no training step. {what} to loading only."
            yield wrapped(f"{text} To include your training step, pass its duration: --step SECONDS", "  ")

    def _without_workers(self, point: Point, others: float) -> str:
        """Returns a sentence that compares torch's own loop with the faster loader with workers; may be empty."""
        own_loop = next((it.torch for it in self._points if it.torch_only), None)
        if own_loop is None:
            reason = self._unmeasured
            return f"torch's own loop, without workers, could not be measured: {reason}" if reason else ""
        best = max(point.torch, point.rustloader, key=lambda side: side.rate)
        if own_loop.too_few or best.too_few or others >= BUSY:
            return ""
        ratio = own_loop.rate / best.rate
        if ratio > EQUAL and not own_loop.interval.overlaps(best.interval):
            remedy = "use num_workers=0" + ("" if self._options.step else ", or measure with --step SECONDS")
            return f"Without workers, torch is {times(ratio)} as fast as the faster loader with workers: {remedy}."
        if self._choices:  # the table has the rate
            return ""
        rate = f"{number(own_loop.rate)} batches/s, {times(ratio)} the rate of the faster loader with workers"
        return f"Without workers, torch reaches {rate}."

    def _notes(self, point: Point) -> str:
        excluding = "exclude the start of the workers."
        including = "include the start of the workers: the epochs are too short to exclude it."
        return (
            f"Rates and CPU {excluding if point.rustloader.steady else including} "
            "CPU and memory are totals of the main process and the workers; memory is the peak, minus the memory "
            "before iter(). A ratio above 1 means that rustloader is better, or the loader of the line in the last "
            "table; the ratio of the rates is the median over the rounds of epochs."
        )

    def as_dict(self) -> dict[str, Any]:
        """Returns the summary for JSON."""
        options, plan = self._options, self._plan
        about = {name: value for name, value in self._about.items() if name not in ("machine", "num_workers")}
        return {
            "factories": options.factories,
            "machine": self._about["machine"],
            "settings": {
                "epochs": plan.epochs,
                "budget": plan.budget,
                "seconds": plan.seconds,
                "batches": options.batches,
                "step": options.step,
                "timeout": options.timeout,
                "loader": about,
            },
            "results": [point.as_dict(options.factories[0]) for point in self._points],
            "recommendation": self._recommended(),
        }

    def _recommended(self) -> dict[str, Any] | None:
        if not self._choices:
            return None
        workers = {engine: choice.workers for engine, choice in self._choices.items()}
        reasons = {engine: choice.reason for engine, choice in self._choices.items()}
        options = {engine: dict(choice.options) for engine, choice in self._choices.items()}
        swept = {"options": options} if self._sweeps_options else {}
        return workers | swept | {"reasons": reasons, "rule": self._rule, "step": self._options.step}

    @property
    def _sweeps_options(self) -> bool:
        return any(point.options for point in self._points)

    @property
    def _rule(self) -> str:
        return f"{RULE}; {RULE_OF_OPTIONS}" if self._sweeps_options else RULE


def _cached_text(verdict: dict[str, Any]) -> str:
    """Describes the share of the samples that came from a cache; an empty string without a cache."""
    share = verdict.get("cached_share")
    return "" if share is None else f" After the warm-up, {share:.0%} of the samples came from the cache."
