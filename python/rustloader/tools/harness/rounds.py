"""Measures alternatives, called sides, in turn, round by round. Computes medians and intervals of the measurements."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from rustloader.tools.harness.layout import number
from rustloader.tools.harness.progress import say

Item = TypeVar("Item")

# Target confidence of intervals. At least 6 values are needed to reach it.
CONFIDENCE = 0.95
# Maximum ratio of the ends of a narrow interval.
_NARROW_RATIO = 1.1


class Failure(Exception):
    """Raised if a side fails or delivers a wrong result, so that its measurement is meaningless."""


class Interval(NamedTuple):
    """A confidence interval of a median."""

    low: float
    high: float
    # The probability that the interval contains the median of the distribution.
    confidence: float

    @property
    def narrow(self) -> bool:
        """True if the interval is so narrow that more values would add little."""
        return self.high <= self.low * _NARROW_RATIO

    def overlaps(self, other: Interval) -> bool:
        """Returns True if the two intervals intersect."""
        return self.low <= other.high and other.low <= self.high


def median_interval(values: Sequence[float]) -> Interval:
    """Returns the narrowest distribution-free interval for a median, with a confidence of at least ``CONFIDENCE``.

    Its ends are order statistics, the k-th smallest and the k-th largest value. A value lies below the median with
    probability 1/2, so the interval misses the median with probability 2 P(B < k), where B is binomial with n trials.
    Source: W. R. Thompson, "On confidence ranges for the median and other expectation distributions for populations of
    unknown distribution form", Annals of Mathematical Statistics 7 (1936), 122-128.

    With fewer than 6 values the interval is their whole range, and its confidence is lower.

    Example:
        >>> median_interval([3.0, 1.0, 2.0])
        Interval(low=1.0, high=3.0, confidence=0.75)
    """
    ordered = sorted(values)
    n = len(ordered)
    k, missed = 1, 2 / 2**n
    while (more := missed + 2 * math.comb(n, k) / 2**n) <= 1 - CONFIDENCE:
        k, missed = k + 1, more
    return Interval(ordered[k - 1], ordered[n - k], max(0.0, 1 - missed))


def spread(values: Sequence[float], form: Callable[[float], str] = number) -> str:
    """Formats the median and its interval: "2.00 (1.90 to 2.10)"."""
    median, interval = statistics.median(values), median_interval(values)
    return f"{form(median)} ({form(interval.low)} to {form(interval.high)})" if len(values) > 1 else form(median)


def in_turn(items: Sequence[Item], number: int) -> list[Item]:
    """Returns the items in the order for round ``number``, which counts from 0.

    Two items alternate as AB BA BA AB; three items take each of their six orders in turn.
    """
    first = number // 2 % len(items)
    order = [*items[first:], *items[:first]]
    return order[::-1] if number % 2 else order


class Rounds(dict[str, list[Any]]):
    """The measurements by side, one per round.

    A measurement is a number, or a dictionary of several figures. The argument ``figure`` selects one of these.
    """

    def of(self, side: str, figure: str | None = None) -> list[float]:
        """Returns the measurement of a side for each round."""
        return [measured if figure is None else measured[figure] for measured in self[side]]

    def median(self, side: str, figure: str | None = None) -> float:
        """Returns the median of a side's measurements."""
        return statistics.median(self.of(side, figure))

    def ratios(self, one: str, other: str, figure: str | None = None) -> list[float]:
        """Returns ``one`` divided by ``other`` for each round."""
        pairs = zip(self.of(one, figure), self.of(other, figure), strict=True)
        return [a / b if b else math.inf for a, b in pairs]

    def ratio(self, one: str, other: str, figure: str | None = None) -> float:
        """Returns the median of the rounds' ratios.

        Each ratio compares measurements of the same round, because the speed of a machine changes between rounds.
        """
        return statistics.median(self.ratios(one, other, figure))


def interleave(
    sides: Mapping[str, Callable[[], Any]],
    rounds: int,
    label: str = "",
    references: Mapping[str, Callable[[], Any]] | None = None,
    after: Callable[[], object] | None = None,
    show: Callable[[str], object] = say,
) -> Rounds:
    """Measures all sides in turn in each round, and returns the measurements.

    Args:
        sides: functions that measure each side. A function returns a number, or a dictionary of figures.
        rounds: number of rounds.
        label: name of the measurement.
        references: functions that measure bounds and other references; they are called last in each round.
        after: called after the sides of each round, to check their results.
        show: called with a description before each measurement of a side, and with an empty string at the end.
    """
    references = references or {}
    measured = Rounds({name: [] for name in (*sides, *references)})
    for turn in range(rounds):
        for name in in_turn(list(sides), turn):
            show(f"{label}: round {turn + 1} of {rounds}, {name}")
            measured[name].append(sides[name]())
        if after is not None:
            after()
        for name, measure in references.items():
            measured[name].append(measure())
    show("")
    return measured
