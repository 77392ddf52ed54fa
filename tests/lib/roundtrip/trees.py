"""Random descriptions."""

import random

from roundtrip.grow import Forester, sample_steps

__all__ = ["random_samples", "random_tree"]


class Draw:
    """Decisions that belong to a seed."""

    def __init__(self, seed):
        self.integer = random.Random(seed).randint

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


def random_tree(seed):
    """The description that belongs to a seed."""
    return Forester(Draw(seed)).tree()


def random_samples(seed):
    """Descriptions of some samples of one shape, which belong to a seed."""
    return sample_steps(Draw(seed))
