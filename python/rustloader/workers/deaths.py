"""What is said of a worker that has died."""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import signal
from typing import Any

from rustloader.config import STATUS_AFTER

__all__ = ["describe"]


def describe(process: Any, status: tuple[str, int, str] | None, pid: int) -> str:
    """torch's text for a worker's death, by its process, by what the engine says of how it ended, and by the pid that
    the worker gave, or 0: the user may have closed the process, which then tells nothing."""
    if status is None:
        # Under forkserver the main process is not the parent: the fork server alone knows, and says it a little
        # later. Not join(): where somebody has closed all descriptors that would wait without end.
        with contextlib.suppress(Exception):
            multiprocessing.connection.wait([process.sentinel], STATUS_AFTER)
    if status is None and (code := _asked(process, "exitcode")):
        status = ("code", code, "") if code > 0 else ("signal", -code, _signal_name(-code))
    named = _asked(process, "pid") or pid or "unknown"
    if status is None or status[:2] == ("code", 0):
        return f"DataLoader worker (pid(s) {named}) exited unexpectedly"
    kind, number, name = status
    if kind == "code":
        return (
            f"DataLoader worker (pid {named}) exited unexpectedly with exit code {number}. "
            "Details are lost due to multiprocessing. Rerunning with num_workers=0 may give better error trace."
        )
    text = f"DataLoader worker (pid {named}) is killed by signal: {name}. "
    if number == signal.SIGBUS:
        text += (
            "It is possible that dataloader's workers are out of shared memory. "
            "Please try to raise your shared memory limit."
        )
    return text


def _asked(process: Any, name: str) -> int | None:
    # The user may have closed it, or may have put something else in its place.
    with contextlib.suppress(Exception):
        number: int | None = getattr(process, name)
        return number
    return None


def _signal_name(number: int) -> str:
    return signal.strsignal(number) or f"Unknown signal {number}"
