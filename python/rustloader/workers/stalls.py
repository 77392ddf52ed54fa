"""Stall warnings, and the timeouts that are read from ``RUSTLOADER_*``."""

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
    """Seconds until a worker without a first batch is named in the log, and one that works on a single batch (0:
    never); and seconds to wait for its stack (0: the stack is not asked for).

    Raises:
        ValueError: An environment variable is no such number.
    """
    return _seconds(_START, 30.0), _seconds(_ITEM, 120.0), _seconds(_STACK, 1.0)


def sigterm_seconds() -> float:
    """Seconds after which a SIGTERM that reached only one of several workers counts as meant for it.

    Raises:
        ValueError: The environment variable is no such number.
    """
    return _seconds(_SIGTERM, 0.5)


def _seconds(name: str, usual: float) -> float:
    text = os.environ.get(name, "")
    try:
        value = float(text) if text else usual
    except ValueError:
        value = -1.0
    if not value >= 0:
        raise ValueError(f"{name} must be a number of seconds, 0 or more, got {text!r}; set it to one, or unset it")
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
    """Logs a warning about a worker that is stuck. The engine calls it, in ``next``."""
    time = f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    if starting:
        what = f"has not produced its first batch after {time}"
        hint = f"A lock that another thread held at the fork is a common cause; {_START} sets the limit"
    else:
        what = f"has worked on one batch for {time} (state: {state})"
        hint = f"{_ITEM} sets the limit"
    batch = "" if index is None else f", the batch of index {index_text(index)}"
    told = f"Its stack:\n{stack}" if stack is not None else f"Stack unavailable: {why_not}."
    logger.warning("DataLoader worker %d (pid %d) %s%s. %s. %s", worker, pid, what, batch, hint, told)
