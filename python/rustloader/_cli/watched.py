"""A side of ``check`` with a limit on each wait: what hangs is named and ended."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

from rustloader._cli import stacks
from rustloader._cli.factory import Unusable
from rustloader._cli.memory import members
from rustloader._cli.probe import Probe
from rustloader._cli.side import Event, SideOrder, how

__all__ = ["Watched"]

_CODE = "import sys; from rustloader._cli.side import serve; serve(int(sys.argv[1]))"
# Seconds: the least limit for what is not only the user's code, such as the start of Python and the end of workers.
_PATIENT = 60.0
# Seconds after which a worker that has died is reported although its iterator has not noticed. torch looks every 5 s.
_UNNOTICED = 12.0
# Seconds between two looks at the workers.
_BETWEEN = 0.5
# Workers that are asked where they are.
_ASKED = 8

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
        # Both sides see sets of strings in the same order.
        seed = os.environ.get("PYTHONHASHSEED") or str(options.seed % 2**32)
        order = SideOrder(options.factory, engine, options.seed, quiet, os.getpid())
        self._probe = Probe(order, _CODE, {"PYTHONHASHSEED": seed})
        self._stacks: int | None = None
        self._workers: dict[int, int] = {}
        self._batch = 0
        self._hangs = False

    def __enter__(self) -> Watched:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if self._hangs:
            self._kill()
        # After an error of its own a side has ended, or ends when the connection is closed.
        self._probe.__exit__(None if kind is not None and issubclass(kind, Exception) else kind, *rest)

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
            yield self._living(started)
            return
        self._workers = started
        while True:
            yield self._living(self.ask("next"))
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
            for number, code in self._dead():
                if now - unnoticed.setdefault(number, now) >= _UNNOTICED:
                    raise self._died(f"worker {number} (pid {self._workers[number]}) {how(code)}", "")
            if now - begin >= limit:
                raise self._hang(what, limit)

        return self._probe.ask(*request, meanwhile=look) if request else self._probe.answer(look)

    # --- deaths

    def _living(self, event: Event) -> Event:
        if event.kind == "death":
            raise self._died(event.text, event.details)
        return event

    def _died(self, text: str, details: str) -> Unusable:
        advice = "code in the worker ended it; with num_workers=0 the error may show"
        if signal.SIGKILL.name in text:
            advice = "the system may have been out of memory: use fewer workers or smaller batches"
        elif signal.SIGBUS.name in text:
            advice = "/dev/shm may be full: use fewer workers or smaller batches, or enlarge it"
        elif "killed by" in text:
            advice = "native code in the worker may have crashed; `python -X faulthandler` shows where"
        return Unusable(f"{self.engine}: {text}, before batch {self._batch} came\n  {advice}", details)

    def _dead(self) -> list[tuple[int, int]]:
        """Workers that have failed and that nothing has waited for: number and exit code."""
        found = []
        for number, pid in self._workers.items():
            with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
                if fields[0] == "Z" and (code := os.waitstatus_to_exitcode(int(fields[-1]))):
                    found.append((number, code))
        return found

    # --- hangs

    def _hang(self, what: str, limit: float) -> Unusable:
        self._hangs = True
        place = self._options.factory.rpartition(":")[0]
        text, advice = _HANGS.get(what, _NO_ANSWER)
        text = text.format(place=place, target=self._options.factory, batch=self._batch, limit=limit)
        return Unusable("\n  ".join([f"{self.engine}: {text}", *self._places(), advice]))

    def _places(self) -> Iterator[str]:
        """Where main and workers are in the user's code."""
        for number, code in self._dead():
            yield f"worker {number} (pid {self._workers[number]}) {how(code)}"
        if self._stacks is None:
            return
        group = self._probe.group
        processes = {"the main process": group}
        processes |= {f"worker {number}": pid for number, pid in list(self._workers.items())[:_ASKED]}
        for name, pid in processes.items():
            if place := stacks.place(pid, group, self._stacks):
                yield f"{name} (pid {pid}) is at {place}"

    def _kill(self) -> None:
        """Ends the group at once, but for multiprocessing's resource tracker, which cleans up and leaves by itself."""
        for pid in list(members(self._probe.group)):
            with contextlib.suppress(OSError):
                with open(f"/proc/{pid}/cmdline", "rb") as file:
                    if b"resource_tracker" in file.read():
                        continue
                os.kill(pid, signal.SIGKILL)
