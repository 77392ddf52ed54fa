"""Pairwise parametrization: instead of all combinations of values, few that contain each pair of values."""

import itertools

import lanes
import pytest


def pairs(**values):
    """Returns a mark that parametrizes a test with few cases that contain each pair of values of two parameters."""
    combinations = itertools.product(*map(range, map(len, values.values())))
    cases = [dict(zip(values, combination, strict=True)) for combination in combinations]
    chosen = [cases[k] for k in lanes.cover(cases, len(cases))]
    rows = [[values[name][k] for name, k in case.items()] for case in chosen]
    return pytest.mark.parametrize(list(values), rows, ids=["-".join(map(text, row)) for row in rows])


def text(value):
    return getattr(value, "__name__", None) or str(value)
