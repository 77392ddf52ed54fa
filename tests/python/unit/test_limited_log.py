"""A log of faults takes a limited number of messages per minute, and then a count of the rest."""

import logging

import pytest

from rustloader.system.limited_log import LOG_LINES, LOG_SECONDS, LimitedLog

pytestmark = pytest.mark.ours


class Log:
    """A limited log with its own logger and clock, whose records are kept."""

    def __init__(self, level=logging.INFO):
        self.lines, self.now = [], 1000.0
        logger = logging.Logger("test", level)
        handler = logging.Handler()
        handler.emit = lambda record: self.lines.append((record.levelname, record.getMessage()))
        logger.addHandler(handler)
        self.log = LimitedLog(logger, lambda: self.now)

    def lines_of(self, step, number):
        """The lines that a step logs: "later" and seconds, a level and a number of messages, or "flush"."""
        if step == "later":
            self.now += number
        elif step == "flush":
            self.log.flush()
        else:
            for i in range(number):
                getattr(self.log, step)("message %d of %s", i, "all")
        lines, self.lines = self.lines, []
        return lines


def logged(level, count):
    return [(level.upper(), f"message {i} of all") for i in range(count)]


def omitted(count, level="WARNING"):
    return [(level, f"{count} more messages about faults were omitted: at most 20 are logged per 60 s")]


WARNING = logged("warning", 1)
# By case: the steps, each with its lines.
CASES = {
    "the rest are counted, and the next minute begins with the count, which is no message": [
        ("warning", 25, logged("warning", 20)),
        ("later", 59.5, []),
        ("warning", 1, []),
        ("later", 0.5, []),
        ("warning", 1, omitted(6) + WARNING),
        ("warning", 20, logged("warning", 19)),
        ("later", 60, []),
        ("warning", 1, omitted(1) + WARNING),
    ],
    "the minute begins with its first message": [
        ("warning", 1, WARNING),
        ("later", 1000, []),
        ("warning", 21, logged("warning", 20)),
        ("later", 59, []),
        ("warning", 1, []),
        ("later", 1, []),
        ("warning", 1, omitted(2) + WARNING),
    ],
    "a flush says the count once, and begins no minute": [
        ("info", 20, logged("info", 20)),
        ("flush", 0, []),
        ("info", 3, []),
        ("flush", 0, omitted(3, "INFO")),
        ("flush", 0, []),
        ("info", 1, []),
        ("flush", 0, omitted(1, "INFO")),
    ],
    "the count has the highest level that was left out": [
        ("info", 20, logged("info", 20)),
        ("info", 1, []),
        ("warning", 1, []),
        ("info", 1, []),
        ("flush", 0, omitted(3)),
        ("info", 1, []),
        ("flush", 0, omitted(1, "INFO")),
    ],
}


@pytest.mark.parametrize("steps", CASES.values(), ids=CASES)
def test_messages_are_limited(steps):
    assert (LOG_LINES, LOG_SECONDS) == (20, 60.0)
    log = Log()
    for step, number, lines in steps:
        assert log.lines_of(step, number) == lines, step


def test_level_that_is_off_does_not_count():
    log = Log(logging.WARNING)
    assert log.lines_of("info", 30) == []
    assert log.lines_of("warning", 1) == WARNING and log.lines_of("flush", 0) == []
