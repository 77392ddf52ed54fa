"""Predictions of the time with another dispatch policy or reorder window, against cases that can be worked out."""

import random

import pytest
from hypothesis import given as for_all
from hypothesis import settings
from hypothesis import strategies as st
from support import TORCH_MODE

pytestmark = pytest.mark.ours

if not TORCH_MODE:
    from rustloader.metrics.prediction import Prediction, Scheduler, makespan, predict


def time(durations, workers=2, outstanding=4, window=None, shared=False, step=0.0):
    return makespan(durations, Scheduler(workers, outstanding, window or outstanding, shared), step)


# Cases worked out by hand


@pytest.mark.parametrize(
    "durations, settings, seconds",
    [
        ([], {}, 0),
        # Worker 0 has 3 + 1, worker 1 has 1 + 1.
        ([3, 1, 1, 1], {}, 4),
        ([3, 1, 1, 1], {"shared": True}, 3),
        # Worker 1 finishes batches 1 to 3 while worker 0 is at batch 0. With a window of 4, the last two wait for it.
        ([6, 1, 1, 1, 1, 1], {"shared": True}, 7),
        ([6, 1, 1, 1, 1, 1], {"shared": True, "window": 5}, 7),
        ([6, 1, 1, 1, 1, 1], {"shared": True, "window": 6}, 6),
        # A window below the number of workers leaves some idle.
        ([1] * 4, {"workers": 4, "outstanding": 8, "window": 1, "shared": True}, 4),
        ([1] * 4, {"workers": 4, "outstanding": 8, "window": 2, "shared": True}, 2),
        # One batch under way at a time, although the window has room.
        ([2, 1, 1], {"outstanding": 1, "window": 8, "shared": True}, 4),
        ([2, 1, 1], {"outstanding": 2, "window": 8, "shared": True}, 2),
        # The last batch needs no step after it.
        ([1] * 5, {"step": 10}, 1 + 4 * 10),
        # The workers finish 2 batches in 3 seconds; the loop takes 1 per second.
        ([3] * 6, {"step": 1}, 9 + 1),
        # Batch 2 begins when batch 0 is delivered, at 1; batch 3 when batch 1 is, at 11 and not at 2.
        ([1, 1, 1, 30], {"outstanding": 2, "step": 10}, 11 + 30),
        # The replacement of a batch is submitted before the step.
        ([1, 9], {"workers": 1, "outstanding": 1, "step": 10}, 1 + 10),
    ],
)
def test_makespan(durations, settings, seconds):
    assert time(durations, **settings) == seconds


# The schedules on which the design is based


def one_in_ten(n=400):
    rng = random.Random(3)
    return [0.060 if rng.random() < 0.1 else 0.0045 for _ in range(n)]


def relative(durations, **settings):
    """The time as a multiple of the ideal one."""
    return time(durations, workers=4, outstanding=8, **settings) / (sum(durations) / 4)


@settings(deadline=None, max_examples=300)
@for_all(
    durations=st.lists(st.floats(0, 10), max_size=60),
    workers=st.integers(1, 6),
    factor=st.integers(1, 4),
    window=st.integers(1, 40),
    shared=st.booleans(),
    step=st.floats(0, 5),
)
def test_what_holds_for_every_schedule(durations, workers, factor, window, shared, step):
    settings = {"workers": workers, "outstanding": factor * workers, "window": window, "shared": shared, "step": step}
    took = time(durations, **settings)
    n, slack = len(durations), 1e-9 * (1 + sum(durations))
    alone = sum(durations) + step * max(0, n - 1)
    assert max([0, sum(durations) / workers, step * max(0, n - 1), *durations]) - slack <= took <= alone + slack


# Predictions

NOW = {"workers": 4, "outstanding": 8, "window": 8, "shared": False}


def predicted(durations, step=0.0, least=0.0, **more):
    return predict(durations, Scheduler(**NOW | more), step, least)


def test_the_smallest_window_that_does_as_well_is_recommended():
    prediction = predicted(one_in_ten())
    assert prediction.window == 32 and 1.6 < prediction.gain < 2.1


def test_where_there_is_nothing_to_gain():
    assert predicted([0.01] * 64) == predicted([0.0] * 64) == Prediction(None, 1.0)
    assert predicted([0.01] * 7) is None and predicted([0.01] * 8) is not None
    assert predicted(one_in_ten(), step=0.1).gain == pytest.approx(1.0, abs=0.01)  # the step hides the slow batches
    larger = predicted(one_in_ten(), window=48)  # than what would be recommended
    assert larger.window is None and larger.gain > 1


def test_a_queue_that_is_there_already_is_no_gain():
    prediction = predicted(one_in_ten(), shared=True)
    assert prediction.window == 32 and prediction.gain == pytest.approx(
        relative(one_in_ten(), shared=True) / relative(one_in_ten(), shared=True, window=32)
    )
    assert predicted(one_in_ten(), shared=True, window=32) == Prediction(None, 1.0)


def test_no_gain_goes_below_the_work_of_the_cores():
    durations = one_in_ten()
    whole = time(durations, **NOW)
    assert predicted(durations, least=whole).gain == 1.0
    assert predicted(durations, least=whole / 1.25).gain == pytest.approx(1.25)
