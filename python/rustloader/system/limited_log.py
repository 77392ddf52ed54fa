"""A log that limits the number of messages when faults repeat."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

# At most LOG_LINES messages about faults are logged per LOG_SECONDS. Further messages are only counted.
LOG_LINES = 20
LOG_SECONDS = 60.0


class LimitedLog:
    """A log that passes at most ``LOG_LINES`` messages to a logger in the ``LOG_SECONDS`` after the first of them.

    Further messages are only counted. The number of omitted messages is logged before the next message after that time,
    and by ``flush``. There is no lock, because a fork could copy it while another thread holds it. Therefore, if
    several threads log at the same time, a few more messages than the limit may pass.

    Args:
        logger: The logger that gets the messages.
        clock: Returns the current time in seconds.
    """

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._end = -float("inf")
        self._lines = 0
        self._omitted = 0
        # The highest level of the omitted messages.
        self._level = logging.NOTSET

    def warning(self, text: str, *args: Any) -> None:
        """Logs a warning, as `log` does."""
        self.log(logging.WARNING, text, *args)

    def info(self, text: str, *args: Any) -> None:
        """Logs an info message, as `log` does."""
        self.log(logging.INFO, text, *args)

    def log(self, level: int, text: str, *args: Any) -> None:
        """Logs a message, or only counts it if the limit is reached. Messages below the logger's level are ignored."""
        if not self._logger.isEnabledFor(level):
            return
        now = self._clock()
        if now >= self._end:
            self._end, self._lines = now + LOG_SECONDS, 0
            self.flush()
        if self._lines < LOG_LINES:
            self._lines += 1
            self._logger.log(level, text, *args)
        else:
            self._omitted += 1
            self._level = max(self._level, level)

    def flush(self) -> None:
        """Logs how many messages were omitted since the last call. Logs nothing if there were none."""
        count, level = self._omitted, self._level
        if count:
            self._omitted, self._level = 0, logging.NOTSET
            text = "%d more messages about faults were omitted: at most %d are logged per %.0f s"
            self._logger.log(level, text, count, LOG_LINES, LOG_SECONDS)


# The log of restarts, stuck workers and failed samples.
faults = LimitedLog(logging.getLogger("rustloader"))
