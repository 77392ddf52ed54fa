"""The command's end of a process with the user's loader on one engine. Every wait has a limit."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Self

from rustloader.system.procfs import members
from rustloader.tools.probe.deaths import UNNOTICED, advice, dead, how, kill, places
from rustloader.tools.probe.factory import Unusable
from rustloader.tools.probe.side import Side

# Before `serve` installs its handler there is nothing to clean up: an interrupt ends the process without a traceback.
_CODE = """\
import os, signal, sys
signal.signal(signal.SIGINT, lambda *_: os._exit(130))
from rustloader.tools.probe.side import serve
serve(*map(int, sys.argv[1:]))
"""
_STDERR = 2
# Seconds between two checks of the workers.
_CHECK_INTERVAL = 0.5
MORE_TIME = "if it is slow and not stuck, pass a larger --timeout"


class Probe:
    """A process with the user's loader on one engine, and its workers.

    They form a process group: Ctrl-C reaches the command alone, and the ``with`` statement ends the whole group.
    ``answer`` gives up after ``timeout`` seconds without progress. ``environment`` adds variables.
    """

    def __init__(self, side: Side, timeout: float, environment: Mapping[str, str] | None = None) -> None:
        self.engine, self.target, self.timeout = side.engine, side.target, timeout
        # The request that is being answered; "ready" until the process has started.
        self._awaited = "ready"
        self._asked = "ready"
        self._stacks: int | None = None
        self._workers: dict[int, int] = {}
        # The process will not end by itself.
        self._stuck = False
        self._connection, far_end = multiprocessing.Pipe()
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        with far_end:
            self._process = subprocess.Popen(
                [sys.executable, *flags, "-c", _CODE, str(far_end.fileno()), str(os.getpid())],
                pass_fds=[far_end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=_STDERR,  # stdout is for results alone
                process_group=0,
                env=os.environ | (environment or {}),
            )
        self._send(side)

    @property
    def group(self) -> int:
        """The process group."""
        return self._process.pid

    def ask(self, *request: Any, meanwhile: Callable[[], object] | None = None) -> Any:
        """Sends a request and waits for the answer."""
        self.request(*request)
        return self.answer(meanwhile)

    def request(self, *request: Any) -> None:
        """Sends a request: the name of a method of the side, and its arguments."""
        self._asked = request[0]
        if self._awaited != "ready":
            self._awaited = self._asked
        self._send(request)

    def answer(self, meanwhile: Callable[[], object] | None = None) -> Any:
        """Waits for the answer to the last request, and calls ``meanwhile`` repeatedly. Raises ``Unusable`` if the
        process failed or makes no progress, or if a worker died and its iterator does not notice."""
        progress = due = time.monotonic()
        unnoticed: dict[int, float] = {}

        def look() -> None:
            nonlocal due
            if meanwhile is not None:
                meanwhile()
            now = time.monotonic()
            if now < due:
                return
            due = now + _CHECK_INTERVAL
            for number, code in dead(self._workers):
                if now - unnoticed.setdefault(number, now) >= UNNOTICED:
                    self._stuck = True  # its `next` may never return
                    raise self.died(f"worker {number} (pid {self._workers[number]}) {how(code)}")
            if now - progress >= self.limit(self._awaited):
                raise self._hang()

        while True:
            name, value = self._receive(look, 0.02 if meanwhile else 0.2)
            progress = time.monotonic()
            if name == "ready":
                self._stacks, self._awaited = value, self._asked
            elif name == "workers":
                self._workers = value
            elif name == "died":
                raise self.died(*value)
            elif name == "unsent":
                self._stuck = True
                raise Unusable(f"with {self.engine}'s iterator, a worker cannot send its batch: {value}")
            elif name == "unusable":
                raise value
            elif name != "progress":
                return value

    # --- limits and texts, which a command may override

    def limit(self, awaited: str) -> float:
        """Returns the seconds without progress until a request is given up; "ready" is the start of the process."""
        return self.timeout

    def hang(self, awaited: str) -> tuple[str, str]:
        """Returns the message for a request that hangs, and the way out."""
        what = f"{self.target} did not return a loader" if awaited in ("ready", "about") else "no batch came"
        return f"with {self.engine}'s iterator, {what} within {self.timeout:g} s", MORE_TIME

    def died(self, worker: str, details: str = "") -> Unusable:
        """Returns the error for a dead worker, which ``deaths.death`` has described."""
        return Unusable(f"with {self.engine}'s iterator, {worker}\n  {advice(worker)}", details)

    def _hang(self) -> Unusable:
        self._stuck = True
        text, remedy = self.hang(self._awaited)
        return Unusable("\n  ".join([text, *places(self.group, self._workers, self._stacks), remedy]))

    # --- the connection

    def _send(self, message: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # the process has ended; `answer` reports it
            self._connection.send(message)

    def _receive(self, look: Callable[[], object], every: float) -> tuple[str, Any]:
        """Returns the next message: its name and value. Calls ``look`` every ``every`` seconds."""
        while not self._connection.poll(every):
            if self._ended() is not None and not self._connection.poll():
                raise self._gone()
            look()
        try:
            name, value = self._connection.recv()
        except (EOFError, ConnectionResetError):
            self._await(lambda: self._ended() is not None, 5.0)
            raise self._gone() from None
        return name, value

    # --- the end

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._connection.close()
        try:
            if self._stuck or (kind is not None and not issubclass(kind, Exception)):
                # SIGKILL: workers that are still starting would print tracebacks on other signals.
                kill(self.group)
            # Between two requests the process notices the closed connection.
            elif not self._await(lambda: self._ended() is not None, 10.0 if kind is None else 2.0):
                os.killpg(self.group, signal.SIGINT)
                self._await(lambda: self._ended() is not None, 5.0)
            self._await(lambda: not any(members(self.group)), 1.0)
        finally:
            # The id cannot be reused until the process is reaped.
            os.killpg(self.group, signal.SIGKILL)
            self._process.wait()

    def _ended(self) -> os.waitid_result | None:
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)

    def _await(self, condition: Callable[[], bool], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.02)
        return True

    def _gone(self) -> Unusable:
        ended = self._ended()
        if ended is None:
            how_it_ended = "closed the connection"
        elif ended.si_code == os.CLD_EXITED:
            how_it_ended = how(ended.si_status)
        else:
            how_it_ended = how(-ended.si_status)
            how_it_ended += " (the system may have been out of memory)" if ended.si_status == signal.SIGKILL else ""
        return Unusable(f"the process with {self.engine}'s iterator {how_it_ended}")
