"""``bench``: measures a user's loader on torch's iterator and on the engine, and other loaders beside it, in turn."""

from __future__ import annotations

import json
import sys
import time
from contextlib import ExitStack
from typing import Any

from rustloader.metrics.fields import StatsFields
from rustloader.system.cores import usable_cores
from rustloader.tools.bench.passes import Limits, Pass
from rustloader.tools.bench.plan import BenchPlan
from rustloader.tools.bench.rates import SideRates
from rustloader.tools.bench.recommendation import recommend
from rustloader.tools.bench.results import Point, make_comparable, revise_verdicts, starting_verdict
from rustloader.tools.bench.settings import Setting
from rustloader.tools.bench.side import BenchSide
from rustloader.tools.bench.summary import Summary
from rustloader.tools.harness.memory import Peak, used
from rustloader.tools.harness.progress import Progress
from rustloader.tools.harness.rounds import CONFIDENCE, in_turn
from rustloader.tools.probe.factory import Unusable, check_target
from rustloader.tools.probe.process import Probe

# The warm-up ends after this number of memory samples, or after this number of passes.
_MIN_SAMPLES, _MAX_WARM_UPS = 10, 5
_ENGINES = ("torch", "rustloader")


def main(options: Any) -> int:
    """Runs the measurements and prints the result. Returns 0, or 2 after an ``Unusable``, whose message it prints."""
    try:
        for factory in options.factories:
            check_target(factory)
        if repeated := [it for k, it in enumerate(options.factories) if it in options.factories[:k]]:
            raise Unusable(f"{repeated[0]} is named twice; write a second function that returns the other loader")
        _Bench(options).run()
    except Unusable as error:
        print(f"rustloader bench: {error.message(options.verbose)}", file=sys.stderr)
        return 2
    return 0


class _Bench:
    """One run of the command."""

    def __init__(self, options: Any) -> None:
        self._options = options
        self._plan = BenchPlan(options)
        self._factory, *self._others = options.factories
        self._limits = Limits(options.batches, self._plan.seconds, options.step)
        self._about: dict[str, Any] = {}
        self._spent = 0.0  # seconds of measurements
        # The factories that have had a process, which has shown Python's warnings.
        self._seen: set[str] = set()

    def run(self) -> None:
        """Measures, and prints the summary."""
        if not self._options.json:
            print(f"{self._factory}: {self._plan}", flush=True)
        with Progress(self._plan.steps or self._plan.budget or 0.0) as progress:
            points, unmeasured = self._points(progress)
            make_comparable(points)
            revise_verdicts(points)
            # torch has none of the swept options, so its settings differ only in the number of workers.
            requested = self._plan.settings[: self._plan.requested]
            varied = {"torch": {setting.workers for setting in requested}, "rustloader": requested}
            swept = [engine for engine in _ENGINES if len(varied[engine]) > 1]
            choices = {engine: recommend(points, engine, usable_cores()) for engine in swept}
            summary = Summary(self._options, self._plan, self._about, points, choices, unmeasured)
        print(json.dumps(summary.as_dict(), indent=2) if self._options.json else summary.text())

    def _points(self, progress: Progress) -> tuple[list[Point], str]:
        """Measures each setting.

        Returns:
            The points, sorted by number of workers, and the reason why torch's own loop was not measured (empty if it
            was). If that loop was not requested, its failure does not end the run, because some datasets need workers.
        """
        settings, points, unmeasured = self._plan.settings, [], ""
        for k, setting in enumerate(settings):
            try:
                points.append(self._point(setting, len(settings) - k, progress))
            except Unusable as error:
                if k < self._plan.requested:
                    raise
                unmeasured = str(error).partition("\n")[0]
        return sorted(points, key=lambda point: point.workers), unmeasured

    def _point(self, setting: Setting, remaining: int, progress: Progress) -> Point:
        """Measures each loader with one setting. ``remaining`` counts the unmeasured settings, including this one."""
        with ExitStack() as stack:
            wanted = {"torch": (self._factory, "torch")}
            if setting.workers != 0:
                wanted["rustloader"] = self._factory, "rustloader"
                wanted |= {factory: (factory, "rustloader") for factory in self._others}
            where = f"{setting}: " if str(setting) else ""
            progress.say(f"{where}creating the loaders")
            probes = {name: stack.enter_context(self._probe(*side, setting)) for name, side in wanted.items()}
            sides = {name: SideRates(about=probe.answer()) for name, probe in probes.items()}
            about = sides["rustloader" if "rustloader" in sides else "torch"].about
            self._about = self._about or about
            for name, probe in probes.items():
                progress.say(f"{where}{name}, warming up")
                self._warm_up(probe, sides[name])
                progress.step(self._bar_position(0.0))
            begin = time.monotonic()
            pair = sides["torch"], sides.get("rustloader", sides["torch"])
            others = {factory: sides[factory] for factory in self._others if factory in sides}
            point = Point(about["num_workers"], *pair, options=setting.options, others=others)
            share = self._plan.share(self._spent, remaining)
            self._epochs(point, probes, sides, begin, share, where, progress)
            self._spent += time.monotonic() - begin
            if not point.torch_only:
                point.verdict, point.judged = _verdict(probes["rustloader"], point.rustloader)
            for factory, side in others.items():
                point.verdicts[factory], point.judged_others[factory] = _verdict(probes[factory], side)
        return point

    def _epochs(
        self,
        point: Point,
        probes: dict[str, Probe],
        sides: dict[str, SideRates],
        begin: float,
        share: float,
        where: str,
        progress: Progress,
    ) -> None:
        """Adds rounds of epochs to the sides of ``point`` until there are enough.

        A round is one epoch of each loader. The order of the loaders changes between rounds.
        """
        number, longest = 0, 0.0
        while self._needs_more(point, number, share - (time.monotonic() - begin), longest):
            number += 1
            started = time.monotonic()
            for name in in_turn(list(probes), number - 1):
                of = f" of {self._plan.epochs}" if self._plan.epochs else ""
                progress.say(f"{where}{name}, epoch {number}{of}")
                sides[name].passes.append(Pass(**probes[name].ask("run", number, self._limits, False)))
                progress.step(self._bar_position(time.monotonic() - begin))
            longest = max(longest, time.monotonic() - started)

    def _needs_more(self, point: Point, done: int, seconds: float, longest: float) -> bool:
        """Returns True if another round of epochs is needed.

        ``done`` rounds were measured; the longest took ``longest`` seconds. ``seconds`` of the budget remain.
        """
        if self._plan.epochs is not None:
            return done < self._plan.epochs
        if done == 0:
            return True
        make_comparable([point])
        if any(side.too_few for side in point.sides):
            return seconds > 0
        comparison, interval = point.comparison, point.torch.interval
        decided = interval.confidence >= CONFIDENCE and interval.narrow
        if comparison is not None:
            decided = all(it.is_decided for it in (comparison, *point.comparisons(self._factory).values()))
        return seconds > longest and not decided

    def _bar_position(self, seconds: float) -> float | None:
        """Returns the position of the bar after ``seconds`` with this setting; None if the bar counts steps."""
        return None if self._plan.steps else self._spent + seconds

    def _warm_up(self, probe: Probe, side: SideRates) -> None:
        """Runs untimed passes, and stores the peak memory and the batch size in ``side``."""
        before = used(probe.group)
        peak = Peak(probe.group)
        for _ in range(_MAX_WARM_UPS):
            side.batch_bytes = probe.ask("run", 0, self._limits, True, meanwhile=peak.sample)["batch_bytes"]
            if peak.samples >= _MIN_SAMPLES:
                break
        if before is not None and peak.bytes is not None:
            side.memory_bytes = max(0, peak.bytes - before)

    def _probe(self, factory: str, engine: str, setting: Setting) -> Probe:
        side = BenchSide(factory, engine, setting, factory in self._seen, is_named=bool(self._others))
        self._seen.add(factory)
        probe = Probe(side, self._options.timeout + self._options.step)
        probe.request("about")
        return probe


def _verdict(probe: Probe, side: SideRates) -> tuple[dict[str, Any], StatsFields | None]:
    """Returns the verdict on a loader on the engine, and the statistics by which it may be revised."""
    verdict = probe.ask("verdict")
    judged = verdict.pop("judged")
    started = {} if side.about["persistent_workers"] else starting_verdict(side)
    return verdict | started, None if started else judged
