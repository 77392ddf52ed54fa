"""``bench``: a loader of the user's own through torch's iterator and through the engine, in turn."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from rustloader._cli.factory import Unusable
from rustloader._cli.measure import Order
from rustloader._cli.memory import Peak, used
from rustloader._cli.passes import Limits, Pass
from rustloader._cli.probe import Probe
from rustloader._cli.progress import Progress
from rustloader._cli.results import WITHIN, Point, Side, best, headline, settle, sweep_table, table
from rustloader._cli.timeline import Timeline

__all__ = ["main"]

_RULE = f"the fewest workers whose batches/s are at most {WITHIN:.0%} below the best"
# Memory is looked at so often, or for so many passes.
_LOOKS, _WARM_UPS = 10, 5
# Batches that the picture shows at the most, after those of the start.
_SHOWN = 40


def main(options: Any) -> int:
    """Measures, and says what it found: 0; 2 if there was nothing to measure."""
    try:
        if not sys.platform.startswith("linux"):
            raise Unusable("the engine runs on Linux only: there is nothing to compare")
        if options.plot is not None:
            _check_plot(options.plot)
        _Bench(options).run()
    except Unusable as error:
        print(f"rustloader bench: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nrustloader bench: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    return 0


def _check_plot(path: str) -> None:
    """Before anything is measured for it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise Unusable("--plot needs matplotlib: pip install 'rustloader[plot]'")
    folder = os.path.dirname(os.path.abspath(path))
    if not os.access(folder, os.W_OK) or os.path.isdir(path):
        raise Unusable(f"no file can be written at {path}")


class _Bench:
    """One run of the command."""

    def __init__(self, options: Any) -> None:
        self._options = options
        self._limits = Limits(options.batches, options.seconds, options.step)
        # None: as the factory sets it.
        self._counts: list[int] | list[None] = options.workers or [None]
        self._about: dict[str, Any] = {}

    def run(self) -> None:
        """All of it."""
        if not self._options.json:
            print(f"{self._options.factory}: {self._plan()}", flush=True)
        with Progress(self._steps()) as progress:
            points = [self._point(count, progress) for count in self._counts]
            settle(points)
            chosen = self._choice(points)
            timelines = self._timelines(chosen["rustloader"], points, progress) if self._options.plot else {}
        if self._options.json:
            print(json.dumps(self._as_dict(points, chosen), indent=2))
        else:
            print("\n".join(self._told(points, chosen)))
        if self._options.plot:
            from rustloader._cli.picture import draw

            figure = draw(self._options.factory, points, chosen["rustloader"], timelines, self._options.step)
            figure.savefig(self._options.plot)
            if not self._options.json:
                print(f"\nThe picture is in {self._options.plot}.")

    # --- measuring

    def _point(self, count: int | None, progress: Progress) -> Point:
        """Both sides with so many workers: passes in turn, the first one changing."""
        with ExitStack() as stack:
            names = ("torch",) if count == 0 else ("torch", "rustloader")
            where = "" if count is None else f"{count} workers: "
            progress.say(f"{where}making the loaders")
            probes = [stack.enter_context(Probe(self._order(name, count))) for name in names]
            self._about, *_ = [probe.answer() for probe in probes]
            sides = {probe.engine: Side() for probe in probes}
            for probe in probes:
                progress.say(f"{where}{probe.engine}, warming up")
                self._warm_up(probe, sides[probe.engine])
                progress.step()
            for number in range(1, self._options.epochs + 1):
                for probe in probes if number % 2 else reversed(probes):
                    progress.say(f"{where}{probe.engine}, epoch {number} of {self._options.epochs}")
                    sides[probe.engine].passes.append(Pass(**probe.ask("run", number, self._limits, False)))
                    progress.step()
            verdict = None if count == 0 else probes[-1].ask("verdict")
        return Point(self._about["num_workers"], sides["torch"], sides.get("rustloader", sides["torch"]), verdict)

    def _warm_up(self, probe: Probe, side: Side) -> None:
        """The first passes, which nobody times: memory and sizes."""
        before = used(probe.group)
        peak = Peak(probe.group)
        for _ in range(_WARM_UPS):
            side.batch_bytes = probe.ask("run", 0, self._limits, True, meanwhile=peak.look)["batch_bytes"]
            if peak.looks >= _LOOKS:
                break
        if before is not None and peak.bytes is not None:
            side.memory_bytes = max(0, peak.bytes - before)

    def _timelines(self, count: int, points: list[Point], progress: Progress) -> dict[str, Timeline]:
        """What main and workers of both sides do when; nothing where there are no workers."""
        if count == 0:
            count = max(point.workers for point in points)
        if count == 0:
            return {}
        # What was under way at the start, and as much again.
        skipped = 2 * count * (self._about["prefetch_factor"] or 2)
        limits = self._limits._replace(batches=skipped + _SHOWN)
        found = {}
        for name in ("torch", "rustloader"):
            progress.say(f"the picture: {name}")
            with tempfile.TemporaryDirectory(prefix="rustloader-bench-") as folder:
                with Probe(self._order(name, count, folder)) as probe:
                    probe.answer()
                    found[name] = Timeline(count, skipped, **probe.ask("watch", limits))
            progress.step()
        return found

    def _order(self, engine: str, workers: int | None, records: str | None = None) -> Order:
        return Order(self._options.factory, engine, workers, os.getpid(), records)

    def _steps(self) -> int:
        sides = sum(1 if count == 0 else 2 for count in self._counts)
        return sides * (1 + self._options.epochs) + (2 if self._options.plot else 0)

    # --- telling

    def _plan(self) -> str:
        epochs, seconds = self._options.epochs, self._options.seconds
        text = f"{epochs} epochs of each loader in turn, after one to warm up; of an epoch at most {seconds:g} s"
        if self._options.batches is not None:
            text += f" and {self._options.batches} batches"
        most = sum(1 if count == 0 else 2 for count in self._counts) * (1 + epochs) * seconds
        return text + f" (about {most / 60:.0f} min at the most)" if most >= 90 else text

    def _choice(self, points: list[Point]) -> dict[str, int]:
        return {
            "rustloader": best({point.workers: point.rustloader.rate for point in points}),
            "torch": best({point.workers: point.torch.rate for point in points}),
        }

    def _told(self, points: list[Point], chosen: dict[str, int]) -> Iterator[str]:
        about, swept = self._about, self._options.workers is not None
        point = next(point for point in points if point.workers == chosen["rustloader"])
        start = "persistent" if about["persistent_workers"] else "started each epoch"
        if swept:
            yield f"workers {start} ({about['start_method']})\n"
            yield sweep_table(points, chosen["rustloader"])
            ours, theirs = chosen["rustloader"], chosen["torch"]
            yield f"\nRecommended: num_workers={ours} with rustloader, {theirs} with torch: {_RULE}."
            yield f"\nWith num_workers={point.workers}:\n"
        else:
            prefetch = about["prefetch_factor"]
            yield f"{point.workers} workers, {start} ({about['start_method']}), prefetch_factor={prefetch}\n"
        yield table(point)
        yield ""
        if point.rustloader is not point.torch:
            yield headline(point)
        if point.verdict is not None:
            yield f"Verdict on rustloader's: {point.verdict['sentence']}"
            yield f"  {point.verdict['reason']}"
            if not self._options.step:
                yield "  The loop did nothing but take batches; --step SECONDS has it train between them."
        yield from _notes(point)

    def _as_dict(self, points: list[Point], chosen: dict[str, int]) -> dict[str, Any]:
        options = self._options
        asked = {name: getattr(options, name) for name in ("epochs", "batches", "seconds", "step")}
        about = {name: value for name, value in self._about.items() if name not in ("machine", "num_workers")}
        return {
            "factory": options.factory,
            "machine": self._about["machine"],
            "settings": asked | {"loader": about},
            "results": [point.as_dict() for point in points],
            "recommendation": chosen | {"rule": _RULE} if options.workers is not None else None,
        }


def _notes(point: Point) -> Iterator[str]:
    if point.rustloader.steady:
        yield "Rates and CPU are those after the start of the workers; CPU and memory are of all processes together."
    else:
        yield "Too few batches to leave out the start of the workers: it counts (--seconds, --batches allow more)."
        yield "CPU and memory are of all processes together."
    yield "Memory is what came on top of that before iter(), at the most. A ratio above 1 is better."
