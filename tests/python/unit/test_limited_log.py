"""A log of faults takes a limited number of messages per minute, and then a count of the rest."""

import logging

import pytest

from rustloader.system.limited_log import LOG_LINES, LOG_SECONDS, LimitedLog

pytestmark = pytest.mark.ours


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


class Log:
    """A limited log with its own logger, whose records are kept."""

    def __init__(self, level=logging.INFO):
        self.lines = []
        logger = logging.Logger("test", level)
        handler = logging.Handler()
        handler.emit = lambda record: self.lines.append((record.levelname, record.getMessage()))
        logger.addHandler(handler)
        self.clock = Clock()
        self.log = LimitedLog(logger, self.clock)

    def taken(self):
        lines, self.lines[:] = list(self.lines), []
        return lines


@pytest.fixture
def log():
    return Log()


def omitted(count, level="WARNING"):
    return level, f"{count} more messages about faults were omitted: at most 20 are logged per 60 s"


def test_the_limits():
    assert (LOG_LINES, LOG_SECONDS) == (20, 60.0)


def test_as_many_messages_as_allowed_are_logged(log):
    for i in range(20):
        log.log.warning("message %d of %s", i, "all")
        log.clock.now += 1
    assert log.taken() == [("WARNING", f"message {i} of all") for i in range(20)]
    log.log.flush()
    assert log.taken() == []


def test_the_rest_are_counted_and_the_next_minute_begins_with_the_count(log):
    for i in range(25):
        log.log.warning("message %d", i)
    assert len(log.taken()) == 20
    log.clock.now += 59.5
    log.log.warning("late")
    assert log.taken() == []
    log.clock.now += 0.5
    log.log.warning("next")
    assert log.taken() == [omitted(6), ("WARNING", "next")]
    # The count is not counted as a message, so 19 more are allowed.
    for i in range(20):
        log.log.warning("message %d", i)
    assert log.taken() == [("WARNING", f"message {i}") for i in range(19)]
    log.clock.now += 60
    log.log.warning("next")
    assert log.taken() == [omitted(1), ("WARNING", "next")]


def test_the_minute_begins_with_its_first_message(log):
    log.log.warning("first")
    log.clock.now += 1000
    for i in range(21):
        log.log.warning("message %d", i)
    log.clock.now += 59
    log.log.warning("late")
    assert len(log.taken()) == 21
    log.clock.now += 1
    log.log.warning("next")
    assert log.taken() == [omitted(2), ("WARNING", "next")]


def test_a_flush_says_the_count_once_and_begins_no_minute(log):
    for i in range(23):
        log.log.info("message %d", i)
    assert len(log.taken()) == 20
    log.log.flush()
    log.log.flush()
    assert log.taken() == [omitted(3, "INFO")]
    log.log.info("late")
    assert log.taken() == []
    log.log.flush()
    assert log.taken() == [omitted(1, "INFO")]


def test_the_count_has_the_highest_level_that_was_left_out(log):
    for i in range(20):
        log.log.info("message %d", i)
    log.taken()
    log.log.info("left out")
    log.log.warning("left out")
    log.log.info("left out")
    log.log.flush()
    log.log.info("left out")
    log.log.flush()
    assert log.taken() == [omitted(3), omitted(1, "INFO")]


def test_messages_of_a_level_that_is_switched_off_do_not_count():
    log = Log(logging.WARNING)
    for i in range(30):
        log.log.info("message %d", i)
    log.log.warning("shown")
    log.log.flush()
    assert log.taken() == [("WARNING", "shown")]
