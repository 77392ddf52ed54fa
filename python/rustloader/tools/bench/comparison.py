"""Compares two loaders by the rates of their epochs, with distribution-free confidence intervals."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Literal, NamedTuple

from rustloader.system.formatting import count_of
from rustloader.tools.harness.layout import times
from rustloader.tools.harness.rounds import CONFIDENCE, Interval, median_interval

# The verdict on the speed of a loader, compared with a baseline.
Outcome = Literal["faster", "slower", "no measurable difference", "too few to tell"]

# Minimum epochs and batches of each loader for a verdict.
FEWEST_EPOCHS, FEWEST_BATCHES = 3, 50
# Shares of the cores used by other processes. If the share is at least NOTED, the result mentions it; if it is at least
# BUSY, there is neither a gain nor a recommendation: confidence assumes independent epochs, but a busy machine slows
# down several consecutive ones.
NOTED, BUSY = 0.1, 0.25
# Ratios from 1 / EQUAL to EQUAL count as equal. Two processes that do the same work may differ in speed by up to this
# factor for as long as they run, because their memory is at different addresses.
EQUAL = 1.03
# Maximum ratio of an interval's ends for the verdict "no measurable difference".
_SMALL_RATIO = 1.25
# An interval of ratios clearly excludes 1 if it lies above this value or below its inverse.
_CLEAR_RATIO = 1.1


class Comparison(NamedTuple):
    """The speed of a loader relative to a baseline.

    Attributes:
        verdict: the verdict on the speed of the loader.
        ratio: median of the speed ratios of the pairs of epochs; above 1, the loader is faster than the baseline.
        low: lower end of the confidence interval of the ratio.
        high: upper end.
        confidence: confidence of the interval.
        pairs: number of pairs.
        batches: number of batches measured on the loader that has fewer.
        reason: explanation of "too few to tell".
        name: name of the loader.
        baseline: name of the baseline.
    """

    verdict: Outcome
    ratio: float
    low: float
    high: float
    confidence: float
    pairs: int
    batches: int
    reason: str = ""
    name: str = "rustloader"
    baseline: str = "torch"

    @property
    def is_decided(self) -> bool:
        """True if more epochs would hardly change the result."""
        interval = Interval(self.low, self.high, self.confidence)
        clear = self.low >= _CLEAR_RATIO or self.high <= 1 / _CLEAR_RATIO
        return self.is_known and self.confidence >= CONFIDENCE and (interval.narrow or clear)

    @property
    def is_known(self) -> bool:
        """True if there are enough measurements to show a ratio."""
        return self.verdict != "too few to tell"

    def __str__(self) -> str:
        about = "" if self.name == "rustloader" else f" whether {self.name} is faster"
        name, speed = self.name, f"{times(self.ratio)} as fast as {self.baseline}"
        speed += f" (between {times(self.low)} and {times(self.high)}; {self.pairs} pairs of epochs, "
        speed += f"{self.confidence:.0%} confidence)."
        return {
            "faster": f"{name} is {speed}",
            "slower": f"{name} is slower: {speed}",
            "no measurable difference": f"No measurable difference: {name} is {speed}",
            "too few to tell": f"Too few to tell{about}: {self.reason}.",
        }[self.verdict]


def compare(
    theirs: Sequence[float], ours: Sequence[float], batches: int, name: str = "rustloader", baseline: str = "torch"
) -> Comparison:
    """Compares two loaders by pairs of epochs that were measured in the same round.

    One loader is faster only if two conditions hold: the confidence interval of the ratio is outside the range that
    counts as equal, and the intervals of the two loaders' rates do not overlap. With up to 8 epochs, an interval spans
    all values. There is no measurable difference if the interval of the ratio is narrow and overlaps the range that
    counts as equal. Otherwise there are too few measurements to tell.

    Args:
        theirs: rate of the baseline in each epoch.
        ours: rate of the loader in each epoch.
        batches: number of batches measured on the loader that has fewer.
        name: name of the loader.
        baseline: name of the baseline.

    Example:
        >>> compare([10.0, 11.0, 12.0], [30.0, 33.0, 36.0], 300).verdict
        'faster'
    """
    ratios = [our_rate / their_rate for our_rate, their_rate in zip(ours, theirs, strict=True)]
    low, high, confidence = median_interval(ratios)

    def comparison(verdict: Outcome, reason: str = "") -> Comparison:
        median = statistics.median(ratios)
        return Comparison(verdict, median, low, high, confidence, len(ratios), batches, reason, name, baseline)

    if reason := too_few(len(ratios), batches):
        return comparison("too few to tell", reason)
    if low <= EQUAL and high >= 1 / EQUAL:
        if high <= low * _SMALL_RATIO:
            return comparison("no measurable difference")
        speed = f"{times(low)} to {times(high)} as fast as {baseline}, based on {len(ratios)} pairs of epochs"
        return comparison("too few to tell", f"{name} is {speed}")
    if median_interval(ours).overlaps(median_interval(theirs)):
        leader = name if low > 1 else baseline
        reason = f"{leader} was faster in most pairs of epochs, but the rates of the two overlap"
        return comparison("too few to tell", reason)
    return comparison("faster" if low > 1 else "slower")


def too_few(epochs: int, batches: int) -> str:
    """Returns the reason why there are too few epochs or batches for a verdict; empty if there are enough."""
    if epochs < FEWEST_EPOCHS:
        return f"{count_of(epochs, 'epoch')} of each loader, but at least {FEWEST_EPOCHS} are needed"
    if batches < FEWEST_BATCHES:
        return f"{count_of(batches, 'batch')} of each loader, but at least {FEWEST_BATCHES} are needed"
    return ""
