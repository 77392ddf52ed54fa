"""Shared sequences compare with each other and with plain ones as lists and tuples do."""

import operator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rustloader import share

TESTS = [operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne]
ITEMS = st.lists(st.integers(0, 2) | st.just(1.5), max_size=4)


@settings(deadline=None)
@given(ITEMS, ITEMS)
def test_shared_sequences_compare_as_plain_ones(one, two):
    for kind in (list, tuple):
        a, b = kind(one), kind(two)
        for test in TESTS:
            expected = test(a, b)
            assert test(share(a), share(b)) is test(share(a), b) is test(a, share(b)) is expected, (test, a, b)


def outcome(call):
    try:
        return call()
    except Exception as error:
        return type(error), str(error)


def test_errors_are_those_of_lists():
    numbers, words = [1, 2], [1, "a"]
    for test in TESTS[:4]:
        assert outcome(lambda test=test: test(share(numbers), share(words))) == outcome(
            lambda test=test: test(numbers, words)
        )
        for other in (5, None, "ab", (1, 2), share((1, 2)), {1: 2}, iter([1])):
            for sides in ((share(numbers), other), (other, share(numbers))):
                with pytest.raises(TypeError, match="not supported between instances of"):
                    test(*sides)
            with pytest.raises(TypeError, match="'SharedTuple'"):
                test(share((1, 2)), share(numbers))
    with pytest.raises(ValueError, match="truth value of an array"):
        assert share([np.arange(2)]) < share([np.arange(2)])


def test_the_first_items_that_differ_decide():
    """NaN is neither equal to nor less than anything. The result is that of the items' comparison."""
    nan = float("nan")
    assert not share([nan, 1]) < share([nan, 2]) and not share([nan]) >= share([nan])
    assert share([{"a": 1}, 1]) < [{"a": 1}, 2]
    with pytest.raises(TypeError, match="'dict' and 'dict'"):
        assert share([{"a": 1}]) < [{"a": 2}]
    assert sorted([share([2]), [1, 5], share([1])]) == [[1], [1, 5], [2]]
