"""Workers that are stuck: after how long they are named, and the warning that names them. And the other times that a
program can set, by its environment."""

from __future__ import annotations

import logging
import os
from typing import Any

__all__ = ["index_text", "limits", "sigterm_seconds", "tell"]

logger = logging.getLogger("rustloader")

_START, _ITEM = "RUSTLOADER_STALL_START_SECONDS", "RUSTLOADER_STALL_ITEM_SECONDS"
_STACK = "RUSTLOADER_STALL_STACK_SECONDS"
_SIGTERM = "RUSTLOADER_SIGTERM_SECONDS"


def limits() -> tuple[float, float, float]:
    """After how many seconds a worker is named that has not come to its first batch, and one that is at one batch;
    0: never. And for how many seconds its stack is waited for; 0: it is not asked for.

    Raises:
        ValueError: an environment variable that is no such number.
    """
    return _seconds(_START, 30.0), _seconds(_ITEM, 120.0), _seconds(_STACK, 1.0)


def sigterm_seconds() -> float:
    """After how many seconds a SIGTERM that one worker alone has got, of several, is taken to be meant for it.

    Raises:
        ValueError: an environment variable that is no such number.
    """
    return _seconds(_SIGTERM, 0.5)


def _seconds(name: str, usual: float) -> float:
    text = os.environ.get(name, "")
    try:
        value = float(text) if text else usual
    except ValueError:
        value = -1.0
    if not value >= 0:
        raise ValueError(f"{name} is {text!r}: set it to a number of seconds, or unset it")
    return value


def index_text(index: Any) -> str:
    """An index batch, as texts show it."""
    text = repr(index)
    return text if len(text) <= 200 else text[:200] + "..."


def tell(
    worker: int,
    pid: int,
    starting: bool,
    seconds: float,
    state: str,
    index: Any,
    stack: str | None,
    why_not: str | None,
) -> None:
    """Warns of a worker that is stuck. Called by the engine, in ``next``."""
    time = f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    if starting:
        what = f"has not come to its first batch {time} after its start"
        hint = f"A lock that another thread held at the fork is a common cause; {_START} sets the limit"
    else:
        what = f"has been at one batch for {time} (state: {state})"
        hint = f"{_ITEM} sets the limit"
    batch = "" if index is None else f", the batch of index {index_text(index)}"
    told = f"Its stack:\n{stack}" if stack is not None else f"Its stack cannot be had: {why_not}."
    logger.warning("DataLoader worker %d (pid %d) %s%s. %s. %s", worker, pid, what, batch, hint, told)
