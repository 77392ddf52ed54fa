"""``bench``: measures a user's loader on torch's iterator and on the engine, in turn."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from contextlib import ExitStack
from typing import Any

from rustloader.settings.options import PREFETCH_FACTOR
from rustloader.system.cores import usable_cores
from rustloader.tools.bench.cached import CACHED, CacheGain
from rustloader.tools.bench.passes import Limits, Pass
from rustloader.tools.bench.plan import BenchPlan, check_plot
from rustloader.tools.bench.rates import SideRates
from rustloader.tools.bench.ray_cluster import RAY, Cluster, Price, check_ray
from rustloader.tools.bench.recommendation import Choice, recommend
from rustloader.tools.bench.results import Point, make_comparable, revise_verdicts, starting_verdict
from rustloader.tools.bench.settings import Setting
from rustloader.tools.bench.side import BenchSide
from rustloader.tools.bench.summary import Summary
from rustloader.tools.bench.timeline import Timeline
from rustloader.tools.harness.memory import Peak, used
from rustloader.tools.harness.progress import Progress
from rustloader.tools.harness.rounds import CONFIDENCE, in_turn
from rustloader.tools.probe.factory import Unusable, check_target
from rustloader.tools.probe.process import Probe

# The warm-up ends after this number of memory samples, or after this number of passes.
_MIN_SAMPLES, _MAX_WARM_UPS = 10, 5
# Maximum number of batches in the plot, not counting those skipped at the start.
_MAX_SHOWN = 40
_ENGINES = ("torch", "rustloader")


def main(options: Any) -> int:
    """Runs the measurements and prints the result. Returns 0, or 2 after an ``Unusable``, whose message it prints."""
    try:
        check_target(options.factory)
        if options.plot is not None:
            check_plot(options.plot)
        if options.ray:
            check_ray()
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
        self._limits = Limits(options.batches, self._plan.seconds, options.step)
        self._about: dict[str, Any] = {}
        self._spent = 0.0  # seconds of measurements
        self._probes = 0

    def run(self) -> None:
        """Measures, prints the summary, and writes the plot."""
        if not self._options.json:
            print(f"{self._options.factory}: {self._plan}", flush=True)
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
            timelines = self._timelines(summary.shown.setting, progress) if self._options.plot else {}
        print(json.dumps(summary.as_dict(), indent=2) if self._options.json else summary.text())
        if self._options.plot:
            self._draw(points, choices, timelines)

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

    def _draw(self, points: list[Point], choices: dict[str, Choice], timelines: dict[str, Timeline]) -> None:
        from rustloader.tools.bench.picture import draw

        path, options = self._options.plot, self._options
        figure = draw(options.factory, points, choices, timelines, options.step)
        try:
            figure.savefig(path)
        except OSError as error:
            raise Unusable(f"the plot cannot be written to {path}: {error.strerror or error}") from None
        if not options.json:
            print(f"\nThe plot is in {path}.")

    def _point(self, setting: Setting, remaining: int, progress: Progress) -> Point:
        """Measures each engine with one setting. ``remaining`` counts the unmeasured settings, including this one."""
        with ExitStack() as stack:
            others = ((RAY,) if self._options.ray else ()) + ((CACHED,) if self._options.cache else ())
            names = _ENGINES[:1] if setting.workers == 0 else _ENGINES + others
            where = f"{setting}: " if str(setting) else ""
            progress.say(f"{where}creating the loaders")
            probes = [stack.enter_context(self._probe(name, setting)) for name in names]
            about, *other_descriptions = [probe.answer() for probe in probes]
            self._about = self._about or about
            sides = {probe.engine: SideRates() for probe in probes}
            for probe in probes:
                progress.say(f"{where}{probe.engine}, warming up")
                self._warm_up(probe, sides[probe.engine])
                progress.step(self._bar_position(0.0))
            begin = time.monotonic()
            pair = sides["torch"], sides.get("rustloader", sides["torch"])
            point = Point(about["num_workers"], *pair, options=setting.options, ray=sides.get(RAY))
            point.cache = CacheGain() if CACHED in sides else None
            self._epochs(point, probes, begin, self._plan.share(self._spent, remaining), where, progress)
            self._spent += time.monotonic() - begin
            if not point.torch_only:
                started = {} if about["persistent_workers"] else starting_verdict(point.rustloader)
                point.verdict = probes[1].ask("verdict") | started
                judged = point.verdict.pop("judged")
                point.judged = None if started else judged
            if point.ray is not None:
                make_comparable([point])
                ours, cluster = point.rustloader, Cluster(**other_descriptions[1]["cluster"])
                cpu = ours.median("cpu_seconds_per_batch")
                point.price = Price(ours.batch_bytes, cpu, usable_cores(), cluster)
        return point

    def _epochs(
        self, point: Point, probes: list[Probe], begin: float, share: float, where: str, progress: Progress
    ) -> None:
        """Adds rounds of epochs to ``point`` until there are enough.

        A round is one epoch on each engine. The order of the engines changes between rounds.
        """
        sides = {"torch": point.torch, "rustloader": point.rustloader, RAY: point.ray or SideRates()}
        number, longest = 0, 0.0
        while self._needs_more(point, number, share - (time.monotonic() - begin), longest):
            number += 1
            started = time.monotonic()
            for probe in in_turn(probes, number - 1):
                of = f" of {self._plan.epochs}" if self._plan.epochs else ""
                progress.say(f"{where}{probe.engine}, epoch {number}{of}")
                if probe.engine == CACHED and point.cache is not None:
                    first, second, point.cache.fit = probe.ask("run_cached", number, self._limits)
                    point.cache.first.passes.append(Pass(**first))
                    point.cache.second.passes.append(Pass(**second))
                else:
                    sides[probe.engine].passes.append(Pass(**probe.ask("run", number, self._limits, False)))
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
        if point.torch.too_few or point.rustloader.too_few:
            return seconds > 0
        comparison, interval = point.comparison, point.torch.interval
        own_loop_decided = interval.confidence >= CONFIDENCE and interval.narrow
        decided = own_loop_decided if comparison is None else comparison.is_decided
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

    def _timelines(self, setting: Setting, progress: Progress) -> dict[str, Timeline]:
        """Records and returns the timeline of each engine; empty without workers."""
        if not (workers := setting.workers):
            return {}
        # Twice the number of batches that are outstanding at the start.
        skipped = 2 * workers * (self._about["prefetch_factor"] or PREFETCH_FACTOR)
        limits = self._limits._replace(batches=skipped + _MAX_SHOWN)
        timelines = {}
        for name in _ENGINES:
            progress.say(f"recording {name} for the plot")
            with tempfile.TemporaryDirectory(prefix="rustloader-bench-") as folder:
                with self._probe(name, setting, folder) as probe:
                    probe.answer()
                    timelines[name] = Timeline(workers, skipped, **probe.ask("watch", limits))
        return timelines

    def _probe(self, engine: str, setting: Setting, records: str | None = None) -> Probe:
        quiet, cache = self._probes > 0, self._options.cache or 0
        side = BenchSide(self._options.factory, engine, setting, records, quiet, cache)
        self._probes += 1
        probe = Probe(side, self._options.timeout + self._options.step)
        probe.request("about")
        return probe
