"""A side of ``check`` with a limit on each wait: what hangs is named and ended."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

from rustloader._cli.factory import Unusable
from rustloader._cli.probe import Probe
from rustloader._cli.side import Event, SideOrder
from rustloader._cli.workers import UNNOTICED, advice, dead, how, kill, places

__all__ = ["Watched"]

# Seconds: the least limit for what is not only the user's code, such as the start of Python and the end of workers.
_PATIENT = 60.0
# Seconds between two looks at the workers.
_BETWEEN = 0.5

_MORE_TIME = "if it is slow and not stuck, pass a larger --timeout"
_SCRIPT = 'put what runs as a script under `if __name__ == "__main__":`, or pass a larger --timeout'
# What was waited for, and the way out.
_HANGS = {
    "load": ("importing {place} took more than {limit:g} s", _SCRIPT),
    "make": ("calling {target} took more than {limit:g} s", _MORE_TIME),
    "start": ("iter() of the loader took more than {limit:g} s", _MORE_TIME),
    "next": ("batch {batch} did not come within {limit:g} s", _MORE_TIME),
    "finish": ("the workers did not end within {limit:g} s", _MORE_TIME),
}
_NO_ANSWER = ("the process did not answer within {limit:g} s", _MORE_TIME)


class Watched:
    """A process with the user's loader on one engine. A context manager; nothing of the process is left afterwards.

    Args:
        engine: a name of ``ENGINES``.
        options: the command's.
        quiet: whether Python's warnings were shown before.
    """

    def __init__(self, engine: str, options: Any, quiet: bool) -> None:
        self.engine = engine
        self._options = options
        order = SideOrder(options.factory, engine, options.seed, quiet, os.getpid())
        self._probe = Probe(order, "rustloader._cli.side", _environment(options.seed))
        self._stacks: int | None = None
        self._workers: dict[int, int] = {}
        self._batch = 0
        self._hangs = False

    def __enter__(self) -> Watched:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if self._hangs or (kind is not None and not issubclass(kind, Exception)):
            # At once: on a signal workers that are still being started would print tracebacks.
            kill(self._probe.group)
        # Otherwise the side has ended, or ends by itself when the connection is closed.
        self._probe.__exit__(None, *rest)

    def load(self) -> dict[str, Any]:
        """Imports the user's code and calls the factory. Returns what the side says about the loader."""
        self._stacks = self._answer("ready")
        self.ask("load")
        about: dict[str, Any] = self.ask("make")
        return about

    def events(self) -> Iterator[Event]:
        """Starts the workers; one event for each call of ``next``.

        Raises:
            Unusable: a worker has died, or something hangs.
        """
        started = self.ask("start")
        if isinstance(started, Event):
            yield started
            return
        self._workers = started
        while True:
            yield self.ask("next")
            self._batch += 1

    def ask(self, request: str, *arguments: Any) -> Any:
        """Sends a request and waits for the answer, for as long as the limit allows."""
        return self._answer(request, request, *arguments)

    def _answer(self, what: str, *request: Any) -> Any:
        begin = due = time.monotonic()
        ours = what in ("ready", "finish", "difference", "packed", "served")
        limit = max(self._options.timeout, _PATIENT) if ours else self._options.timeout
        unnoticed: dict[int, float] = {}

        def look() -> None:
            nonlocal due
            now = time.monotonic()
            if now < due:
                return
            due = now + _BETWEEN
            for number, code in dead(self._workers):
                if now - unnoticed.setdefault(number, now) >= UNNOTICED:
                    self._hangs = True  # its `next` may block for ever
                    raise self._died(f"worker {number} (pid {self._workers[number]}) {how(code)}")
            if now - begin >= limit:
                raise self._hang(what, limit)

        value = self._probe.ask(*request, meanwhile=look) if request else self._probe.answer(look)
        if isinstance(value, Event) and value.kind == "death":
            raise self._died(value.text)
        return value

    # --- deaths

    def _died(self, text: str) -> Unusable:
        seen = f"seen while waiting for batch {self._batch}"
        return Unusable(f"{self.engine}: {text}, {seen}\n  {advice(text)}")

    # --- hangs

    def _hang(self, what: str, limit: float) -> Unusable:
        self._hangs = True
        place = self._options.factory.rpartition(":")[0]
        text, remedy = _HANGS.get(what, _NO_ANSWER)
        text = text.format(place=place, target=self._options.factory, batch=self._batch, limit=limit)
        found = places(self._probe.group, self._workers, self._stacks)
        return Unusable("\n  ".join([f"{self.engine}: {text}", *found, remedy]))


def _environment(seed: int) -> dict[str, str]:
    # Both sides see sets of strings in the same order. What is left of a side that is ended is no news.
    hashes = os.environ.get("PYTHONHASHSEED") or str(seed % 2**32)
    filters = [*filter(None, [os.environ.get("PYTHONWARNINGS")]), "ignore:resource_tracker:UserWarning"]
    return {"PYTHONHASHSEED": hashes, "PYTHONWARNINGS": ",".join(filters)}
