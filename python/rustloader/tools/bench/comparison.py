"""Compares two engines by the rates of their epochs, with distribution-free confidence intervals."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Literal, NamedTuple

from rustloader.system.formatting import count_of
from rustloader.tools.harness.layout import times
from rustloader.tools.harness.rounds import CONFIDENCE, Interval, median_interval

# The verdict on rustloader, compared with torch.
Outcome = Literal["faster", "slower", "no measurable difference", "too few to tell"]

# Minimum epochs and batches of each engine for a verdict.
FEWEST_EPOCHS, FEWEST_BATCHES = 3, 50
# Shares of the cores that other processes use: one that is worth a word, and one from which there is no
# recommendation.
NOTED, BUSY = 0.1, 0.25
# Ratios from the inverse of this to this count as equal. Processes that do the same work differ by up to this factor
# during their whole life, because their memory lies at different addresses.
EQUAL = 1.03
# Maximum ratio of an interval's ends for one that shows a small difference.
_SMALL = 1.25
# Minimum ratio for an interval that is clearly away from 1.
_CLEAR = 1.1


class Comparison(NamedTuple):
    """The speed of rustloader relative to torch.

    ``ratio`` is the median of the ratios of the pairs of epochs, and ``low`` to ``high`` its confidence interval; above
    1 rustloader is faster. ``batches`` counts the engine with fewer. ``reason`` explains "too few to tell".
    """

    verdict: Outcome
    ratio: float
    low: float
    high: float
    confidence: float
    pairs: int
    batches: int
    reason: str = ""

    @property
    def decided(self) -> bool:
        """True if more epochs would hardly change the result."""
        interval = Interval(self.low, self.high, self.confidence)
        clear = self.low >= _CLEAR or self.high <= 1 / _CLEAR
        return self.is_known and self.confidence >= CONFIDENCE and (interval.narrow or clear)

    @property
    def is_known(self) -> bool:
        """True if there are enough measurements to show a ratio."""
        return self.verdict != "too few to tell"

    def __str__(self) -> str:
        return self.text()

    def text(self, others: float = 0.0) -> str:
        """Returns the result as a sentence. ``others``: the share of the cores that other processes used meanwhile."""
        speed = f"{times(self.ratio)} as fast as torch"
        speed += f" (between {times(self.low)} and {times(self.high)}; {self.pairs} pairs of epochs"
        # The interval takes the epochs for independent: a busy machine slows some in a row.
        speed += f", {self.confidence:.0%} confidence)." if others < BUSY else ")."
        return {
            "faster": f"rustloader is {speed}",
            "slower": f"rustloader is slower: {speed}",
            "no measurable difference": f"No measurable difference: rustloader is {speed}",
            "too few to tell": f"Too few to tell: {self.reason}.",
        }[self.verdict]


def compare(theirs: Sequence[float], ours: Sequence[float], batches: int) -> Comparison:
    """Compares two engines by pairs of epochs that were measured one after the other.

    There is a winner only if the confidence interval of the pairs' ratio lies outside the range that counts as equal,
    and the intervals of the two engines' rates do not overlap. With up to 8 epochs these are the whole ranges. There is
    no measurable difference if the interval of the ratio reaches 1 and is not wide; else there are too few to tell.

    Args:
        theirs, ours: batches per second of torch and of rustloader in each epoch.
        batches: batches of each engine.

    Example:
        >>> compare([10.0, 11.0, 12.0], [30.0, 33.0, 36.0], 300).verdict
        'faster'
    """
    ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    low, high, confidence = median_interval(ratios)

    def comparison(verdict: Outcome, reason: str = "") -> Comparison:
        return Comparison(verdict, statistics.median(ratios), low, high, confidence, len(ratios), batches, reason)

    if reason := too_few(len(ratios), batches):
        return comparison("too few to tell", reason)
    if low <= EQUAL and high >= 1 / EQUAL:
        if high <= low * _SMALL:
            return comparison("no measurable difference")
        speed = f"{times(low)} to {times(high)} as fast as torch, based on {len(ratios)} pairs of epochs"
        return comparison("too few to tell", f"rustloader is {speed}")
    if median_interval(ours).overlaps(median_interval(theirs)):
        leader = "rustloader" if low > 1 else "torch"
        reason = f"{leader} was faster in most pairs of epochs, but the rates of the two overlap"
        return comparison("too few to tell", reason)
    return comparison("faster" if low > 1 else "slower")


def too_few(epochs: int, batches: int) -> str:
    """Returns the reason why there are too few epochs or batches for a verdict, or an empty text."""
    if epochs < FEWEST_EPOCHS:
        return f"{count_of(epochs, 'epoch')} of each engine, and it takes at least {FEWEST_EPOCHS}"
    if batches < FEWEST_BATCHES:
        return f"{count_of(batches, 'batch')} of each engine, and it takes at least {FEWEST_BATCHES}"
    return ""
