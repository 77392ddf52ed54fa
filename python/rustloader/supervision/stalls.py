"""Warnings about stuck workers, and the error message for a worker that was killed because it was stuck."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

from rustloader.fetch.failures import index_text
from rustloader.settings.limits import STALL_ITEM, STALL_START
from rustloader.system.limited_log import faults as fault_log

logger = logging.getLogger("rustloader")


# The line that faulthandler writes for the frame in which torch's fetcher fetches samples or collates them.
_FETCHER = re.compile(r'  File "[^"]*\btorch/utils/data/_utils/fetch\.py", line \d+ in fetch$')


def up_to_fetcher(stack: str) -> str:
    """Removes the callers of torch's fetcher, which are the same for all batches, from a stack dump.

    Args:
        stack: The output of faulthandler, with the innermost frame of each thread first.
    """
    shown, below_fetcher = [], False
    for line in stack.splitlines():
        below_fetcher = below_fetcher and line.startswith("  ")
        if not below_fetcher:
            shown.append(line)
            below_fetcher = _FETCHER.fullmatch(line) is not None
    return "\n".join(shown)


def text(worker_id: int, torch_text: str) -> str:
    """Returns the error message for a worker that exceeded ``stall_timeout`` and was killed.

    ``torch_text`` is torch's message about the death.
    """
    return (
        f"DataLoader worker {worker_id} took longer than stall_timeout for one batch and was killed; the log has its "
        f"stack, and a larger stall_timeout allows slower batches. {torch_text}"
    )


def warn(
    worker: int,
    pid: int,
    starting: bool,
    seconds: float,
    state: str,
    index: Any,
    stack: str | None,
    why_not: str | None,
    exceeds: tuple[float, bool] | None = None,
) -> None:
    """Logs a warning about a stuck worker. The engine calls this function during ``next``.

    Args:
        worker: The worker's ID.
        pid: The process ID of the worker.
        starting: Whether the worker has not produced its first batch yet.
        seconds: How long the worker has been stuck.
        state: The name of the state that its status page shows.
        index: The worker's index batch, or None.
        stack: The stacks of the worker's threads, or None.
        why_not: The reason why there is no stack; None if there is one.
        exceeds: If the worker has exceeded ``stall_timeout``: the value of this option, and whether the worker was
            killed. Otherwise None.
    """
    time = f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    log: Callable[..., None] = logger.warning
    if starting:
        what = f"has not produced its first batch after {time}"
        hint = f"A lock that another thread held at the fork is a common cause; {STALL_START.name} sets the limit"
    else:
        what = f"has been working on one batch for {time} (state: {state})"
        hint = f"{STALL_ITEM.name} sets the limit"
    if exceeds is not None:
        limit, was_killed = exceeds
        log = fault_log.warning
        if was_killed:
            hint = f"It was killed: stall_timeout is {limit:g} s"
        else:
            hint = f"stall_timeout is {limit:g} s, but this process kills only its own descendants"
    batch = "" if index is None else f"; the batch has index {index_text(index)}"
    dump = f"Its stack:\n{up_to_fetcher(stack)}" if stack is not None else f"Stack unavailable: {why_not}."
    log("DataLoader worker %d (pid %d) %s%s. %s. %s", worker, pid, what, batch, hint, dump)
