"""``check``: compares an epoch on torch's iterator with an epoch on the engine."""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

from rustloader.system.formatting import count_of
from rustloader.tools.cli.check_side import CheckSide, Event
from rustloader.tools.probe.deaths import advice
from rustloader.tools.probe.factory import Unusable
from rustloader.tools.probe.process import MORE_TIME, Probe

# Number of consecutive errors after which an epoch is cut short.
_ERRORS_IN_A_ROW = 20
# Seconds between two progress lines.
_BETWEEN_LINES = 15.0
_UNSEEDED = (
    "The dataset, the sampler or collate_fn depends on something that no seed controls, such as time or os.urandom."
)
_OUT_OF_ORDER = "with in_order=False batches arrive as workers finish them; check the loader with in_order=True."
# Minimum time limit in seconds for requests that do more than run user code, such as the shutdown of workers.
_MIN_LIMIT = 60.0
_SCRIPT = 'put the code of the script under `if __name__ == "__main__":`, or pass a larger --timeout'
# For each request that may hang: the error message and the remedy.
_HANGS = {
    "load": ("importing {place} took more than {limit:g} s", _SCRIPT),
    "about": ("calling {target} took more than {limit:g} s", MORE_TIME),
    "start": ("calling iter() on the loader took more than {limit:g} s", MORE_TIME),
    "next": ("batch {batch} did not arrive within {limit:g} s", MORE_TIME),
    "finish": ("the workers did not end within {limit:g} s", MORE_TIME),
}
_NO_ANSWER = ("the process did not answer within {limit:g} s", MORE_TIME)


def main(options: Any) -> int:
    """Compares the two engines and prints the result. Returns the exit status."""
    try:
        return _Comparison(options).run()
    except Unusable as error:
        print(f"rustloader check: {error.message(options.verbose)}", file=sys.stderr)
        return 2


class _CheckProbe(Probe):
    """A process with the user's loader on one engine.

    ``quiet`` hides Python's warnings, for use when another process has already shown them.
    """

    def __init__(self, engine: str, options: Any, quiet: bool) -> None:
        # With the same hash seed, both sides iterate over sets of strings in the same order. The filter hides the
        # resource tracker's warnings about a process that was killed.
        hashes = os.environ.get("PYTHONHASHSEED") or str(options.seed % 2**32)
        filters = [*filter(None, [os.environ.get("PYTHONWARNINGS")]), "ignore:resource_tracker:UserWarning"]
        environment = {"PYTHONHASHSEED": hashes, "PYTHONWARNINGS": ",".join(filters)}
        super().__init__(CheckSide(options.factory, engine, options.seed, quiet), options.timeout, environment)
        self._batch = 0

    def load(self) -> dict[str, Any]:
        """Imports the user's code and calls the factory. Returns a description of the loader."""
        self.ask("load")
        about: dict[str, Any] = self.ask("about")
        return about

    def events(self) -> Iterator[Event]:
        """Starts the workers, and yields the outcome of each ``next``. Raises ``Unusable`` on a death or a hang."""
        failed = self.ask("start")
        if failed is not None:
            yield failed
            return
        while True:
            yield self.ask("next")
            self._batch += 1

    def limit(self, awaited: str) -> float:
        return self.timeout if awaited in ("load", "about", "start", "next") else max(self.timeout, _MIN_LIMIT)

    def hang_texts(self, awaited: str) -> tuple[str, str]:
        text, remedy = _HANGS.get(awaited, _NO_ANSWER)
        place, limit = self.target.rpartition(":")[0], self.limit(awaited)
        text = text.format(place=place, target=self.target, batch=self._batch, limit=limit)
        return f"{self.engine}: {text}", remedy

    def death_error(self, worker: str, details: str = "") -> Unusable:
        return Unusable(f"{self.engine}: {worker}, detected while waiting for batch {self._batch}\n  {advice(worker)}")


class _Comparison:
    """One run of the command."""

    def __init__(self, options: Any) -> None:
        self._options = options

    def run(self) -> int:
        """Runs the comparison. Returns the exit status: 0 if nothing differs, 1 if something does."""
        expected = self._torch_events()
        with self._side("rustloader") as side:
            side.load()
            print(f"rustloader  comparing {_counts_text(expected)} ...", flush=True)
            pairs = itertools.zip_longest(expected, self._epoch(side))
            for k, (torch_event, engine_event) in enumerate(pairs):
                if torch_event is None or engine_event is None or torch_event[:2] != engine_event[:2]:
                    return self._report_difference(k, torch_event, engine_event, side)
                if engine_event.kind == "batch" and k == 0:
                    _served(side)  # fails early, because the rest of the epoch may take a long time
                elif engine_event.kind == "error" and k == 0:
                    cause = f"at the first batch, both engines raise {engine_event.text}"
                    raise Unusable(f"nothing to compare: {cause}", engine_event.details)
                elif engine_event.kind == "error":
                    print(f"batch {k}: both raise {engine_event.text}")
            served = _served(side)
        print(f"same: {_counts_text(expected)} compared, bit for bit; the main process's random state is also the same")
        batches = sum(event.kind == "batch" for event in expected)
        part = f"{served:,} of the {batches:,} batches" if served < batches else count_of(batches, "batch")
        print(f"{part} came from the Rust engine")
        return 0

    def _torch_events(self) -> list[Event]:
        """Returns the events of an epoch on torch's iterator. Raises ``Unusable`` if there is nothing to compare."""
        with self._side("torch") as side:
            about = side.load()
            workers = count_of(about["num_workers"], "worker")
            print(f"torch       {self._options.factory}, {workers} ...", flush=True)
            events = list(self._epoch(side, about["may_be_endless"]))
            side.ask("refuse_engine")
        if events[0].kind == "state":
            raise Unusable(f"nothing to compare: the loader of {self._options.factory} yielded no batches")
        return events

    def _side(self, engine: str, quiet: bool | None = None) -> _CheckProbe:
        return _CheckProbe(engine, self._options, engine != "torch" if quiet is None else quiet)

    def _epoch(self, side: _CheckProbe, may_be_endless: bool = False) -> Iterator[Event]:
        """Yields the events of an epoch, then the random state.

        The epoch is cut short after ``--batches`` events or ``_ERRORS_IN_A_ROW`` consecutive errors. If the first event
        is an error, yields only this event.
        """
        due = time.monotonic() + _BETWEEN_LINES
        in_a_row = 0
        for k, event in enumerate(side.events(), start=1):
            if event.kind == "end":
                break
            yield event
            in_a_row = in_a_row + 1 if event.kind == "error" else 0
            if k == in_a_row:
                return
            if in_a_row == _ERRORS_IN_A_ROW or k == self._options.batches:
                break
            if time.monotonic() >= due:
                due = time.monotonic() + _BETWEEN_LINES
                hint = "; --batches N limits an endless epoch" if may_be_endless and not self._options.batches else ""
                print(f"{side.engine}: {count_of(k, 'batch')} so far{hint}", file=sys.stderr, flush=True)
        yield Event("state", side.ask("finish"))

    def _report_difference(
        self, k: int, torch_event: Event | None, engine_event: Event | None, side: _CheckProbe
    ) -> int:
        """Prints the difference, and returns the exit status.

        Runs torch's iterator a second time, to find out whether it delivers the same batches each time.
        """
        kinds = {torch_event.kind if torch_event else None, engine_event.kind if engine_event else None}
        only_state = kinds == {"state"}
        where = "the end, in the main process's random state" if only_state else f"batch {k}"
        advice = _advice_on_options(side.ask("changing_options"))
        try:
            with self._side("torch", quiet=True) as again:
                about = again.load()
                event = next(itertools.islice(self._epoch(again), k, None), None)
                if not about["in_order"]:
                    print(f"different at {where}, but {_OUT_OF_ORDER}")
                    return 1
                if (event[:2] if event else None) != (torch_event[:2] if torch_event else None):
                    print(f"different at {where}, but two runs on torch's iterator differ there as well.\n{_UNSEEDED}")
                    return 1
                if event is not None and engine_event is not None and event.kind == engine_event.kind == "batch":
                    print(f"different at {where}: {again.ask('difference', side.ask('packed'))}{advice}")
                    return 1
        except Unusable as error:
            print(f"rustloader check: torch's iterator could not be run again: {error}", file=sys.stderr)
        events = "" if only_state else f": torch {_description(torch_event)}, rustloader {_description(engine_event)}"
        print(f"different at {where}{events}{advice}")
        return 1


def _served(side: _CheckProbe) -> int:
    """Returns the number of batches that the engine has delivered. Raises ``Unusable`` if it is 0."""
    count: int
    count, line = side.ask("served")
    if count == 0:
        why = line or "none of the batches came from the Rust engine; the loader has its own iterator"
        raise Unusable(f"nothing to compare: {why}")
    return count


def _advice_on_options(names: list[str]) -> str:
    """Returns a line about the options that may explain a difference; "" if there are none."""
    if not names:
        return ""
    return f"\nrustloader's options can change batches (here: {', '.join(names)}); check the loader without them."


def _description(event: Event | None) -> str:
    if event is None:
        return "has already ended"
    return {"batch": "gives a batch", "error": f"raises {event.text}", "state": "ends the epoch"}[event.kind]


def _counts_text(events: list[Event]) -> str:
    kinds = [event.kind for event in events]
    batches, errors = kinds.count("batch"), kinds.count("error")
    parts = [count_of(batches, "batch")] if batches or not errors else []
    return " and ".join([*parts, count_of(errors, "error")] if errors else parts)
