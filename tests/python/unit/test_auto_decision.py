"""The number of workers that is decided from the figures of one epoch, and from those of many."""

import dataclasses
import itertools
import math

import pytest
from hypothesis import given as for_all
from hypothesis import settings
from hypothesis import strategies as st
from support import TORCH_MODE

pytestmark = pytest.mark.ours

if not TORCH_MODE:
    from rustloader.auto.decision import Epoch, History, Limit, decide

MS = 1e-3


def epoch(workers, per_batch, pace, batches=200, share=0.0, own=0.0, bandwidth=math.inf, **more):
    """An epoch of a loop that takes a batch every `pace` milliseconds, of which `own` are in next(). A worker produces
    one in `per_batch` milliseconds, unless storage limits all workers to `bandwidth` batches per second."""
    each = max(per_batch * MS, workers / bandwidth)
    rate = max(pace * MS, each / workers)
    busy = each * batches
    figures = {
        "step": (pace - own) * MS * batches,
        "own": own * MS * batches,
        "waited": (rate - pace * MS) * batches,
        "tasks": batches,
        "busy": busy,
        "cpu": share * busy,
        "measured": busy,
    }
    return Epoch(workers=workers, batches=batches, **figures | more)


def target(*args, cores=64, limits=(), history=None, **more):
    return decide(epoch(*args, **more), cores, limits, history or History())[0]


def test_a_limit_that_holds_the_number_below_the_need_is_named():
    limits = [Limit(4, "the dataset has 4 shards")]
    assert decide(epoch(4, 75, 10), 64, limits).held_by == "the dataset has 4 shards"
    # The loop does not wait, the limit is not reached, or there is none.
    assert decide(epoch(4, 35, 10), 64, limits).held_by == decide(epoch(2, 75, 10), 64, limits).held_by == ""
    assert decide(epoch(4, 75, 10), 64).held_by == ""


def run(workers, epochs, figures, cores=64, limits=()):
    """The number of workers of each epoch; `figures(n, workers)` returns the figures of epoch n."""
    counts, history = [workers], History()
    for number in range(epochs - 1):
        decision = decide(figures(number, counts[-1]), cores, limits, history)
        assert bool(decision.reason) == (decision.workers != counts[-1])
        history = decision.history
        counts.append(decision.workers)
    return counts


# Single decisions


@pytest.mark.parametrize(
    "workers, per_batch, pace, wanted",
    [
        (2, 75, 10, 8),  # 7.5
        (2, 70, 10, 8),
        (4, 10, 10, 2),  # exactly one is busy, and one is spare
        (16, 20, 10, 3),
        (2, 19, 10, 2),
        (2, 21, 10, 2),  # within 10 %
        (2, 22, 10, 2),  # also within 10 %, although the loop waits for 9 % of its time
        (2, 23, 10, 3),
        (3, 19, 10, 3),  # one fewer would leave no reserve
        (8, 72, 10, 8),
        (8, 60, 10, 8),
        (8, 55, 10, 8),
        (8, 50, 10, 6),
        (2, 300, 10, 8),  # at most four times as many
        (8, 300, 10, 32),
    ],
)
def test_the_number_is_what_the_loop_keeps_busy(workers, per_batch, pace, wanted):
    assert target(workers, per_batch, pace) == wanted


def test_a_loop_that_does_not_wait_needs_no_more_workers():
    assert target(2, 75, 10) == 8
    assert target(2, 75, 10, waited=0.05) == 2


def test_processor_time_bounds_workers_that_compute():
    assert target(2, 75, 10, share=1.0, cores=4) == 4
    assert target(2, 75, 10, share=0.5, cores=3) == 6
    assert target(2, 75, 10, share=0.1, cores=2) == 8
    # More workers than cores, and all of them compute.
    assert target(16, 75, 10, share=1.0, cores=4) == 4
    # Clocks are inaccurate: a worker measured at slightly more than one core counts as one core.
    assert target(4, 75, 10, share=1.05, cores=4) == 4
    assert target(8, 75, 10, share=4.0, cores=8) == 2


def test_time_in_the_queue_for_a_core_is_neither_work_nor_waiting():
    # Eight workers on four cores: each has a core for half of the time.
    figures = epoch(8, 20, 1, share=0.5)
    assert decide(figures, 4).workers == 8
    assert decide(dataclasses.replace(figures, queued=figures.busy / 2), 4).workers == 4


def test_unknown_processor_time_counts_as_work():
    figures = epoch(2, 75, 10)
    assert decide(dataclasses.replace(figures, measured=0.0), 4).workers == 4


def test_limits_bound_and_name_themselves():
    decision = decide(epoch(2, 75, 10), 64, [Limit(5.9, "memory is short"), Limit(7, "shards")])
    assert decision.workers == 5
    assert decision.reason == ("a worker takes 75 ms per batch, and the loop asks for one every 10 ms; memory is short")
    assert decide(epoch(8, 75, 10), 64, [Limit(1, "one shard")]).workers == 1
    assert decide(epoch(8, 75, 10), 64, [Limit(0.5, "no memory")]).workers == 1


def test_a_short_epoch_decides_nothing():
    kept = History(direction=1, reversals=2)
    for figures in (
        epoch(2, 75, 10, batches=19),
        epoch(8, 75, 1, batches=23),
        epoch(2, 7.5, 1, batches=100),  # 0.4 s
        epoch(2, 75, 10, tasks=19),
        epoch(2, 75, 10, busy=0.0),
        Epoch(workers=2, batches=0, step=0.0, own=0.0, waited=0.0, tasks=0, busy=0.0),
    ):
        assert decide(figures, 64, (), kept) == (figures.workers, "", kept, "")
    assert target(2, 75, 10, batches=20) == 8


def test_no_more_workers_than_half_of_the_batches():
    assert target(16, 2000, 10, batches=50) == 25


def test_a_loop_without_a_training_step_takes_what_there_is():
    decision = decide(epoch(2, 10, 0.03, own=0.02), 4)
    assert decision.workers == 8
    assert decision.reason == (
        "a worker takes 10 ms per batch, and the loop has no training step; limited to 4 times the current number"
    )
    assert target(2, 10, 0.03, own=0.02, share=1.0, cores=4) == 4


# Several epochs


def test_workers_that_gain_nothing_are_taken_back_for_good():
    """Storage delivers 50 batches per second, regardless of the number of workers."""
    counts = run(2, 50, lambda n, workers: epoch(workers, 40, 5, bandwidth=50))
    assert counts == [2, 8] + [2] * 48


def test_a_part_of_the_gain_is_worth_the_workers():
    """Storage delivers 100 batches per second, which four workers can consume."""
    counts = run(2, 50, lambda n, workers: epoch(workers, 40, 5, bandwidth=100))
    assert counts == [2, 8, 17] + [8] * 47


def test_another_loop_lifts_the_ceiling():
    def figures(number, workers):
        return epoch(workers, 40, 5, bandwidth=50) if number < 10 else epoch(workers, 40, 15)

    assert run(2, 10, figures)[-1] == 2
    assert run(2, 20, figures)[-1] == 3


def test_each_reversal_takes_twice_as_many_epochs_that_agree():
    def figures(number, workers):
        return epoch(workers, 80 if number % 16 < 8 else 20, 10)

    counts = run(2, 200, figures)
    changes = [n for n in range(1, 200) if counts[n] != counts[n - 1]]
    assert len(changes) <= 6
    assert changes[:4] == [1, 9, 18, 28]


@settings(max_examples=300, deadline=None)
@for_all(
    st.integers(1, 32),
    st.floats(0.5, 40),
    st.floats(0, 1),
    st.integers(1, 64),
    st.lists(st.floats(0.9, 1.1), min_size=50, max_size=50),
)
def test_it_settles_and_never_swings(start, need, share, cores, noise):
    def figures(number, workers):
        return epoch(workers, 10 * need * noise[number], 10, share=share)

    counts = run(start, 50, figures, cores)
    changes = [b - a for a, b in itertools.pairwise(counts) if a != b]
    assert len(changes) <= 6
    assert sum(a * b < 0 for a, b in itertools.pairwise(changes)) <= 1
    # After ten epochs, the number takes at most two values.
    assert len(set(counts[10:])) <= 2
    allowed = cores / share if share * 64 > cores else 64
    least = min(need, max(1, int(allowed)), max(cores, min(16 * cores, 64)))
    assert counts[-1] >= 0.75 * least - 1
    assert counts[-1] <= 1.6 * max(1, need) + 2


@settings(max_examples=200, deadline=None)
@for_all(
    st.integers(1, 64),
    st.integers(0, 500),
    st.floats(0, 10),
    st.floats(0, 10),
    st.floats(0, 10),
    st.floats(0, 100),
    st.floats(0, 100),
    st.floats(0.1, 64),
    st.lists(st.floats(0, 64), max_size=2),
)
def test_any_figures_give_a_number(workers, batches, step, own, waited, busy, cpu, cores, limits):
    figures = Epoch(workers, batches, step, own, waited, batches, busy, cpu, busy)
    decision = decide(figures, cores, [Limit(limit, "a limit") for limit in limits])
    assert 1 <= decision.workers <= max(4 * workers, 1)
    assert bool(decision.reason) == (decision.workers != workers)
