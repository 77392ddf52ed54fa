"""A worker's end: in every way, at every place, under every kind of loader (P18 to P20, S3, S7).

Here a set of cases in which each pair of factors comes up; `make stress KIND=matrix` has the full product.
"""

import pytest
from faults import matrix
from faults.matrix import Case
from faults.scenes import SIGNALS

# A spawned worker imports torch, and two epochs follow.
pytestmark = [pytest.mark.ours, pytest.mark.timeout(300)]


def right(case):
    wrong, seen = matrix.run(case)
    assert not wrong, wrong
    # The machine may be busy; what the victim would do otherwise takes 30 s.
    assert seen is None or seen < 25, f"seen after {seen:.3f} s"


@pytest.mark.parametrize("case", matrix.covering(), ids=str)
def test_s3_a_worker_that_ends_is_named_and_nothing_is_left(case):
    right(case)


@pytest.mark.parametrize("status", ["ignored", "reaped"])
@pytest.mark.parametrize("way", [*SIGNALS, "os._exit(0)", "os._exit(3)"])
def test_s7_the_end_is_named_although_its_status_is_not_ours(way, status):
    """Where the kernel reports the status of a process that other code has reaped: from Linux 6.15 on."""
    right(Case(way, "item", status=status))


@pytest.mark.parametrize("status", ["ignored", "reaped"])
@pytest.mark.parametrize("place", ["birth", "idle", "between", "shutdown"])
def test_s7_wherever_it_ends(place, status):
    right(Case("SIGKILL", place, persistent=place == "between", pinned=place == "idle", status=status))


def test_each_pair_of_factors_comes_up():
    wanted = set().union(*map(matrix.pairs_of, matrix.all_cases()))
    assert wanted == set().union(*map(matrix.pairs_of, matrix.covering()))
