"""Which tests a short run has, and how shares divide them (tests/lib/lanes.py)."""

import itertools

import lanes
import pytest

pytestmark = pytest.mark.ours


def product(**values):
    return [dict(zip(values, row, strict=True)) for row in itertools.product(*values.values())]


def pairs(cases):
    return {pair for case in cases for pair in itertools.combinations(sorted(case.items()), 2)}


def test_few_cases_have_each_value_and_more_have_each_pair():
    cases = product(a=[1, 2, 3, 4], b=["x", "y", "z"], c=[True, False])
    few = [cases[i] for i in lanes.cover(cases, 4)]
    assert len(few) == 4 and {item for case in few for item in case.items()} == {
        item for case in cases for item in case.items()
    }
    enough = [cases[i] for i in lanes.cover(cases, len(cases))]
    assert pairs(enough) == pairs(cases) and len(enough) < len(cases)


@pytest.mark.parametrize("seconds, count", [(0.01, 24), (0.5, 4), (4, 3), (6, 0)])
def test_two_seconds_or_a_tenth_of_a_function_but_no_case_that_takes_more_than_five(seconds, count):
    cases = [Case(parameters) for parameters in product(a=[1, 2, 3, 4], b=["x", "y", "z"], c=[True, False])]
    assert len(lanes.short(cases, seconds)) == count


def test_quick_cases_use_each_value_even_if_that_takes_longer():
    rows = [Case({"row": n}) for n in range(30)]
    assert lanes.short(rows, 0.2) == rows
    assert len(lanes.short(rows, 0.21)) == 9


def test_marks_of_short_runs():
    cases = [Case({"a": 1}, "random"), Case({"a": 2}, "random")]
    assert lanes.short(cases, 100) == cases[:1]
    assert lanes.short([Case({"a": 1}, "long_setup")], 0.1) == []


def test_shares_have_each_function_once_and_take_about_as_long():
    costs = {f"test_{i}": 1 + i % 7 for i in range(50)}
    shares = [lanes.share(costs, number, 4) for number in (1, 2, 3, 4)]
    assert sorted(itertools.chain(*shares)) == sorted(costs)
    totals = [sum(costs[name] for name in names) for names in shares]
    assert max(totals) - min(totals) <= 7


class Case:
    """The part of a test item that `lanes` reads."""

    def __init__(self, parameters, marker=None):
        self.callspec, self.params, self.marker = self, parameters, marker

    def get_closest_marker(self, name):
        return name == self.marker or None
