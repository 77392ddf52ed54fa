"""Workers that end in every way, at every place, under every kind of loader (P18 to P20, S3, S7).

The cases cover each pair of factors; `make stress KIND=matrix` runs the full product.
"""

import pytest
from faults import matrix
from faults.matrix import Case
from faults.scenes import SIGNALS

# A spawned worker imports torch, and two epochs follow.
pytestmark = [pytest.mark.ours, pytest.mark.timeout(300)]


def check(case):
    wrong, seen = matrix.run(case)
    assert not wrong, wrong
    # The machine may be busy. A victim that does not end works for 30 s.
    assert seen is None or seen < 25, f"seen after {seen:.3f} s"


@pytest.mark.parametrize("case", matrix.covering(), ids=str)
def test_s3_a_worker_that_ends_is_named_and_nothing_is_left(case):
    check(case)


@pytest.mark.parametrize("status", ["ignored", "reaped"])
@pytest.mark.parametrize("way", [*SIGNALS, "os._exit(0)", "os._exit(3)"])
def test_s7_the_end_is_named_although_other_code_takes_the_status(way, status):
    """The error says how the worker ended if the kernel reports it for a reaped process: from Linux 6.15 on."""
    check(Case(way, "item", status=status))


@pytest.mark.parametrize("status", ["ignored", "reaped"])
@pytest.mark.parametrize("place", ["birth", "idle", "between", "shutdown"])
def test_s7_the_end_is_named_at_each_place(place, status):
    check(Case("SIGKILL", place, persistent=place == "between", pinned=place == "idle", status=status))


def test_each_pair_of_factors_is_covered():
    wanted = set().union(*map(matrix.pairs_of, matrix.all_cases()))
    assert wanted == set().union(*map(matrix.pairs_of, matrix.covering()))
