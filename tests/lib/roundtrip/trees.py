"""Random descriptions, drawn by Hypothesis or by a plain random generator."""

import functools
import random

from hypothesis import strategies as st

from roundtrip.grow import Forester, sample_steps

__all__ = ["forests", "random_samples", "random_tree", "samples", "trees"]


class Draw:
    """Decisions. The simplest is 0, toward which Hypothesis shrinks its examples."""

    def __init__(self, integer):
        self.integer = integer

    def pick(self, values):
        return values[self.integer(0, len(values) - 1)]

    def chance(self, percent):
        return self.integer(0, 99) >= 100 - percent

    def weighted(self, choices):
        """One of the keys of {choice: weight}."""
        at = self.integer(0, sum(choices.values()) - 1)
        for choice, weight in choices.items():
            at -= weight
            if at < 0:
                return choice
        raise AssertionError(choices)


@functools.cache
def integers(low, high):
    return st.integers(low, high)


@st.composite
def trees(draw):
    """A description."""
    return Forester(Draw(lambda low, high: draw(integers(low, high)))).tree()


@st.composite
def forests(draw, most):
    """Up to `most` descriptions that are sent together."""
    return draw(st.lists(trees(), min_size=1, max_size=most))


def random_tree(seed):
    """The description that belongs to a seed."""
    return Forester(Draw(random.Random(seed).randint)).tree()


def random_samples(seed):
    """Descriptions of some samples of one shape, which belong to a seed."""
    return sample_steps(Draw(random.Random(seed).randint))


@st.composite
def samples(draw):
    """Descriptions of some samples of one shape."""
    return sample_steps(Draw(lambda low, high: draw(integers(low, high))))
