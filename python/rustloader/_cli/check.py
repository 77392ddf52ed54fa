"""``check``: an epoch on torch's iterator and one on the engine must be the same."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rustloader._cli.factory import Unusable
from rustloader.texts import count_of

if TYPE_CHECKING:
    from rustloader._cli.side import Event
    from rustloader._cli.watched import Watched

__all__ = ["main"]

# Errors in a row after which an epoch is not continued.
_ERRORS_IN_A_ROW = 20
# Seconds between two lines about how far a side has come.
_BETWEEN_LINES = 15.0

_UNSEEDED = (
    "The dataset, the sampler or collate_fn depends on something that no seed governs, such as time or os.urandom."
)
_OUT_OF_ORDER = "with in_order=False batches come as workers finish; check the loader with in_order=True."


def main(options: Any) -> int:
    """Compares, and prints the result. Returns the exit status."""
    try:
        return _Comparison(options).run()
    except Unusable as error:
        print(f"rustloader check: {error.message(options.verbose)}", file=sys.stderr)
        return 2


class _Comparison:
    """One run of the command."""

    def __init__(self, options: Any) -> None:
        self._options = options

    def run(self) -> int:
        """The exit status: 0 if nothing differs, 1 if something does."""
        theirs = self._torchs()
        with self._side("rustloader") as side:
            side.load()
            print(f"rustloader  comparing {_counted(theirs)} ...", flush=True)
            pairs = itertools.zip_longest(theirs, self._epoch(side))
            for k, (torchs, ours) in enumerate(pairs):
                if torchs is None or ours is None or torchs[:2] != ours[:2]:
                    return self._differs(k, torchs, ours, side)
                if ours.kind == "batch" and k == 0:
                    _served(side)  # early: an epoch may take long
                elif ours.kind == "error":
                    _same_error(k, ours)
            served = _served(side)
        print(f"same: {_counted(theirs)} compared, bit for bit; the main process's random state is the same, too")
        batches = sum(event.kind == "batch" for event in theirs)
        part = f"{served:,} of the {batches:,} batches" if served < batches else count_of(batches, "batch")
        print(f"{part} came from the Rust engine")
        return 0

    def _torchs(self) -> list[Event]:
        with self._side("torch") as side:
            about = side.load()
            workers = count_of(about["num_workers"], "worker")
            print(f"torch       {self._options.factory}, {workers} ...", flush=True)
            events = list(self._epoch(side, about["may_be_endless"]))
            if side.ask("served")[0]:
                raise Unusable(
                    "nothing to compare: torch's side used the Rust engine; "
                    "the program must not call rustloader.install() after its loader is made"
                )
        if events[0].kind == "state":
            raise Unusable(f"nothing to compare: the loader of {self._options.factory} gave no batch")
        return events

    def _side(self, engine: str, quiet: bool | None = None) -> Watched:
        from rustloader._cli.watched import Watched

        return Watched(engine, self._options, engine != "torch" if quiet is None else quiet)

    def _epoch(self, side: Watched, may_be_endless: bool = False) -> Iterator[Event]:
        """The events of an epoch, and the random state after it. An error in the first place is all of it."""
        from rustloader._cli.side import Event

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
                hint = "; --batches N ends an endless one" if may_be_endless and not self._options.batches else ""
                print(f"{side.engine}: {count_of(k, 'batch')} so far{hint}", file=sys.stderr, flush=True)
        yield Event("state", side.ask("finish"))

    def _differs(self, k: int, torchs: Event | None, ours: Event | None, side: Watched) -> int:
        """Prints what differs. torch is run once more, to see whether it agrees with itself."""
        where = _where(k, torchs, ours)
        try:
            with self._side("torch", quiet=True) as again:
                about = again.load()
                event = next(itertools.islice(self._epoch(again), k, None), None)
                if not about["in_order"]:
                    print(f"different at {where}, but {_OUT_OF_ORDER}")
                    return 1
                if (event[:2] if event else None) != (torchs[:2] if torchs else None):
                    print(f"different at {where}, but torch's iterator differs from itself there as well.\n{_UNSEEDED}")
                    return 1
                if event is not None and ours is not None and event.kind == ours.kind == "batch":
                    print(f"different at {where}: {again.ask('difference', side.ask('packed'))}")
                    return 1
        except Unusable as error:
            print(f"rustloader check: torch's iterator could not be run again: {error}", file=sys.stderr)
        print(f"different at {where}: torch {_did(torchs)}, rustloader {_did(ours)}")
        return 1


def _served(side: Watched) -> int:
    """How many batches the engine has delivered.

    Raises:
        Unusable: none.
    """
    count: int
    count, line = side.ask("served")
    if count == 0:
        why = line or "none of the batches came from the Rust engine; the loader has an iterator of its own"
        raise Unusable(f"nothing to compare: {why}")
    return count


def _same_error(k: int, event: Event) -> None:
    if k == 0:
        raise Unusable(f"nothing to compare: both engines raise at the first batch: {event.text}", event.details)
    print(f"batch {k}: both raise {event.text}")


def _did(event: Event | None) -> str:
    if event is None:
        return "has ended before"
    return {"batch": "gives a batch", "error": f"raises {event.text}", "state": "ends the epoch"}[event.kind]


def _where(k: int, torchs: Event | None, ours: Event | None) -> str:
    kinds = {torchs.kind if torchs else None, ours.kind if ours else None}
    return "the end: the main process's random state" if kinds == {"state"} else f"batch {k}"


def _counted(events: list[Event]) -> str:
    kinds = [event.kind for event in events]
    batches, errors = kinds.count("batch"), kinds.count("error")
    parts = [count_of(batches, "batch")] if batches or not errors else []
    return " and ".join([*parts, count_of(errors, "error")] if errors else parts)
