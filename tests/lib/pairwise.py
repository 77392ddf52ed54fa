"""A few of many cases: instead of the product of all values, just each pair of values of two parameters."""

import itertools

import lanes
import pytest


def pairs(**values):
    """A mark that parametrizes a test with as few cases as have each pair of values of two of its parameters."""
    places = itertools.product(*map(range, map(len, values.values())))
    cases = [dict(zip(values, of_each, strict=True)) for of_each in places]
    chosen = [cases[place] for place in lanes.cover(cases, len(cases))]
    return pytest.mark.parametrize(list(values), [[values[name][k] for name, k in case.items()] for case in chosen])
