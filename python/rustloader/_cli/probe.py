"""The command's end of a process that has one loader on one engine."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Self

from rustloader._cli.factory import Unusable
from rustloader._cli.measure import Order
from rustloader._cli.memory import members

if TYPE_CHECKING:
    from rustloader._cli.side import SideOrder

__all__ = ["Probe"]

# Until `serve` has its own handler, an interrupt ends the process without a traceback: there is nothing to clean up.
_CODE = """\
import os, signal, sys
signal.signal(signal.SIGINT, lambda *_: os._exit(130))
from {} import serve
serve(int(sys.argv[1]))
"""
_STDERR = 2


class Probe:
    """A process that has one loader on one engine, and its workers. They are a process group of their own: Ctrl-C comes
    to us alone, and nothing of the group is left after the ``with`` statement.

    Args:
        order: what it has to do. The process gets ready by itself; see ``answer``.
        module: has the function ``serve``, which the process runs with the number of its descriptor.
        environment: variables that it gets in addition.
    """

    def __init__(
        self,
        order: Order | SideOrder,
        module: str = "rustloader._cli.measure",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.engine = order.engine
        self._connection, there = multiprocessing.Pipe()
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        with there:
            self._process = subprocess.Popen(
                [sys.executable, *flags, "-c", _CODE.format(module), str(there.fileno())],
                pass_fds=[there.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=_STDERR,  # what the user's code prints is no result
                process_group=0,
                env=os.environ | (environment or {}),
            )
        with contextlib.suppress(BrokenPipeError):  # it has ended at once: `answer` says how
            self._connection.send(order)

    @property
    def group(self) -> int:
        """The process group."""
        return self._process.pid

    def ask(self, *request: Any, meanwhile: Callable[[], object] | None = None) -> Any:
        """Sends a request and waits for the answer."""
        with contextlib.suppress(BrokenPipeError):
            self._connection.send(request)
        return self.answer(meanwhile)

    def answer(self, meanwhile: Callable[[], object] | None = None) -> Any:
        """The next answer of the process; the first one is about the loader.

        Args:
            meanwhile: called again and again until it arrives.

        Raises:
            Unusable: the process cannot go on.
        """
        return self._receive(meanwhile, 0.02)[1]

    def _receive(self, meanwhile: Callable[[], object] | None, every: float) -> tuple[str, Any]:
        """The next message, as its name and its value. ``meanwhile`` is called at that interval, in seconds."""
        while not self._connection.poll(every if meanwhile else 0.2):
            if self._has_ended() and not self._connection.poll():
                raise Unusable(f"the process with {self.engine}'s iterator ended: {self._how()}")
            if meanwhile is not None:
                meanwhile()
        try:
            name, value = self._connection.recv()
        except (EOFError, ConnectionResetError):
            self._await_end(5.0)
            raise Unusable(f"the process with {self.engine}'s iterator ended: {self._how()}") from None
        if name == "unusable":
            raise value if isinstance(value, Unusable) else Unusable(value)
        return name, value

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._connection.close()
        try:
            # Between two requests the process sees that the connection is closed.
            if not self._await_end(10.0 if kind is None else 0.0):
                for number, seconds in ((signal.SIGINT, 5.0), (signal.SIGTERM, 2.0)):
                    os.killpg(self.group, number)
                    if self._await_end(seconds):
                        break
            self._await_workers(1.0)
        finally:
            # The number cannot be reused before the process is waited for.
            os.killpg(self.group, signal.SIGKILL)
            self._process.wait()

    def _has_ended(self) -> bool:
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _await_end(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not self._has_ended():
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.02)
        return True

    def _await_workers(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while any(members(self.group)) and time.monotonic() < deadline:
            time.sleep(0.02)

    def _how(self) -> str:
        ended = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return "it closed the connection"
        if ended.si_code == os.CLD_EXITED:
            return f"exit status {ended.si_status}"
        return f"{signal.Signals(ended.si_status).name}" + (
            " (the system may have been out of memory)" if ended.si_status == signal.SIGKILL else ""
        )
