"""Stall warnings."""

from __future__ import annotations

import logging
from typing import Any

from rustloader.config import INDEX_SHOWN, STALL_ITEM, STALL_START

logger = logging.getLogger("rustloader")


def index_text(index: Any) -> str:
    """The text of an index batch, shortened."""
    try:
        text = repr(index)
    except Exception as error:  # the user's __repr__ must not replace the death or the warning
        text = f"<{type(index).__name__}, whose repr() raised {type(error).__name__}>"
    return text if len(text) <= INDEX_SHOWN else text[:INDEX_SHOWN] + "..."


def warn(
    worker: int,
    pid: int,
    starting: bool,
    seconds: float,
    state: str,
    index: Any,
    stack: str | None,
    why_not: str | None,
) -> None:
    """Logs a warning about a stuck worker. The engine calls it in ``next``."""
    time = f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    if starting:
        what = f"has not produced its first batch after {time}"
        hint = f"A lock that another thread held at the fork is a common cause; {STALL_START.name} sets the limit"
    else:
        what = f"has worked on one batch for {time} (state: {state})"
        hint = f"{STALL_ITEM.name} sets the limit"
    batch = "" if index is None else f", the batch of index {index_text(index)}"
    dump = f"Its stack:\n{stack}" if stack is not None else f"Stack unavailable: {why_not}."
    logger.warning("DataLoader worker %d (pid %d) %s%s. %s. %s", worker, pid, what, batch, hint, dump)
