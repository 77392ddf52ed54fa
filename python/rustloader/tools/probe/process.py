"""The command's view of a process with the user's loader on one engine. All waits have time limits."""

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
from rustloader.tools.probe.deaths import UNNOTICED_SECONDS, advice, exit_text, failed_workers, hang_details, kill
from rustloader.tools.probe.factory import Unusable
from rustloader.tools.probe.side import Side

# Until `serve` installs its handler, an interrupt ends the process without a traceback: there is nothing to clean up.
_CODE = """\
import os, signal, sys
signal.signal(signal.SIGINT, lambda *_: os._exit(130))
from rustloader.tools.probe.side import serve
serve(*map(int, sys.argv[1:]))
"""
_STDERR = 2
# Seconds between two checks of the workers.
_CHECK_INTERVAL = 0.5
MORE_TIME = "if it is slow rather than stuck, pass a larger --timeout"


class Probe:
    """A process with the user's loader on one engine, and its workers.

    They form a separate process group, so Ctrl-C reaches only the command. Leaving the ``with`` statement ends all
    processes of the group.

    Args:
        side: the object that answers the requests in the process.
        timeout: seconds without progress after which ``answer`` gives up.
        environment: additional environment variables.
    """

    def __init__(self, side: Side, timeout: float, environment: Mapping[str, str] | None = None) -> None:
        self.engine, self.target, self.title, self.timeout = side.engine, side.target, side.title, timeout
        # The request that the process is answering; "ready" until the process has started.
        self._awaited = "ready"
        # The last request.
        self._asked = "ready"
        # The process's descriptor of the file that receives stacks; the result of `deaths.write_stacks_on_signal`.
        self._stacks: int | None = None
        # The process IDs of the workers, by worker number.
        self._workers: dict[int, int] = {}
        # True if the process may never exit unless it is killed.
        self._stuck = False
        self._connection, far_end = multiprocessing.Pipe()
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        with far_end:
            self._process = subprocess.Popen(
                [sys.executable, *flags, "-c", _CODE, str(far_end.fileno()), str(os.getpid())],
                pass_fds=[far_end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=_STDERR,  # stdout is only for results
                process_group=0,
                env=os.environ | (environment or {}),
            )
        self._send(side)

    @property
    def group(self) -> int:
        """The ID of the process group, which is also that of the main process."""
        return self._process.pid

    def ask(self, *request: Any, meanwhile: Callable[[], object] | None = None) -> Any:
        """Sends a request, waits for the answer, and returns it."""
        self.request(*request)
        return self.answer(meanwhile)

    def request(self, *request: Any) -> None:
        """Sends a request: the name of a method of the side, and its arguments."""
        self._asked = request[0]
        if self._awaited != "ready":
            self._awaited = self._asked
        self._send(request)

    def answer(self, meanwhile: Callable[[], object] | None = None) -> Any:
        """Waits for the answer to the last request, and returns it. Calls ``meanwhile`` repeatedly until then.

        Raises ``Unusable`` if the process fails or makes no progress, or if a worker dies.
        """
        progress = due = time.monotonic()
        unnoticed: dict[int, float] = {}

        def check() -> None:
            nonlocal due
            if meanwhile is not None:
                meanwhile()
            now = time.monotonic()
            if now < due:
                return
            due = now + _CHECK_INTERVAL
            for number, code in failed_workers(self._workers):
                if now - unnoticed.setdefault(number, now) >= UNNOTICED_SECONDS:
                    self._stuck = True  # the iterator's `next` may never return
                    raise self.death_error(f"worker {number} (pid {self._workers[number]}) {exit_text(code)}")
            if now - progress >= self.limit(self._awaited):
                raise self._hang_error()

        while True:
            name, value = self._receive(check, 0.02 if meanwhile else 0.2)
            progress = time.monotonic()
            if name == "ready":
                self._stacks, self._awaited = value, self._asked
            elif name == "workers":
                self._workers = value
            elif name == "died":
                raise self.death_error(*value)
            elif name == "unsent":
                self._stuck = True
                raise Unusable(f"with {self.title}, a worker cannot send its batch: {value}")
            elif name == "unusable":
                raise value
            elif name != "progress":
                return value

    # --- time limits and messages, which a subclass may override

    def limit(self, awaited: str) -> float:
        """Returns the maximum seconds without progress for a request; "ready" stands for the start of the process."""
        return self.timeout

    def hang_texts(self, awaited: str) -> tuple[str, str]:
        """Returns the message for a request that hangs, and the remedy."""
        what = f"{self.target} did not return a loader" if awaited in ("ready", "about") else "no batch arrived"
        return f"with {self.title}, {what} within {self.timeout:g} s", MORE_TIME

    def death_error(self, worker: str, details: str = "") -> Unusable:
        """Returns the error for a dead worker. ``worker`` is the result of ``deaths.describe_death``."""
        return Unusable(f"with {self.title}, {worker}\n  {advice(worker)}", details)

    def _hang_error(self) -> Unusable:
        self._stuck = True
        text, remedy = self.hang_texts(self._awaited)
        return Unusable("\n  ".join([text, *hang_details(self.group, self._workers, self._stacks), remedy]))

    # --- the connection

    def _send(self, message: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # `answer` reports that the process has ended
            self._connection.send(message)

    def _receive(self, check: Callable[[], object], every: float) -> tuple[str, Any]:
        """Waits for the next message, and returns its name and value. Calls ``check`` every ``every`` seconds."""
        while not self._connection.poll(every):
            if self._exit_status() is not None and not self._connection.poll():
                raise self._exit_error()
            check()
        try:
            name, value = self._connection.recv()
        except (EOFError, ConnectionResetError):
            self._wait_until(lambda: self._exit_status() is not None, 5.0)
            raise self._exit_error() from None
        return name, value

    # --- shutdown

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._connection.close()
        try:
            if self._stuck or (kind is not None and not issubclass(kind, Exception)):
                # Uses SIGKILL, because workers that are still starting would print tracebacks on other signals.
                kill(self.group)
            # A process that is waiting for a request ends when it notices the closed connection.
            elif not self._wait_until(lambda: self._exit_status() is not None, 10.0 if kind is None else 2.0):
                os.killpg(self.group, signal.SIGINT)
                self._wait_until(lambda: self._exit_status() is not None, 5.0)
            self._wait_until(lambda: not any(members(self.group)), 1.0)
        finally:
            # Safe, because the process ID cannot be reused before the process is reaped below.
            os.killpg(self.group, signal.SIGKILL)
            self._process.wait()

    def _exit_status(self) -> os.waitid_result | None:
        """Returns the exit status of the process without reaping it; None if it is running."""
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)

    def _wait_until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Waits for a condition for up to ``seconds`` seconds. Returns False if it is not met."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.02)
        return True

    def _exit_error(self) -> Unusable:
        """Returns the error for a process that has ended, or has closed the connection."""
        ended = self._exit_status()
        if ended is None:
            end_text = "closed the connection"
        elif ended.si_code == os.CLD_EXITED:
            end_text = exit_text(ended.si_status)
        else:
            end_text = exit_text(-ended.si_status)
            end_text += " (the system may have been out of memory)" if ended.si_status == signal.SIGKILL else ""
        return Unusable(f"the process with {self.title} {end_text}")
