"""The decisions after a worker's death under ``max_restarts``, tested without workers."""

import errno
import logging
from types import SimpleNamespace
from unittest import mock

import pytest
from support import TORCH_MODE, in_thread

if not TORCH_MODE:
    import torch
    from torch.utils.data import _utils

    import rustloader
    from rustloader.supervision import deaths, restarts
    from rustloader.supervision.restarts import Restarts
    from rustloader.workers import main, process
    from rustloader.workers.group import WorkerGroup
    from rustloader.workers.snapshots import WorkerStart

pytestmark = pytest.mark.ours


def death(worker=0, generation=0, answers=0, task=None, place=None, first_task=0):
    return SimpleNamespace(
        worker_id=worker,
        pid=100 + generation,
        generation=generation,
        answers=answers,
        task=task,
        place=place,
        first_task=first_task,
        index=None if task is None else [task],
        stalled=False,
    )


def decisions(decider, *worker_deaths, **kw):
    return [decider.on_death(each, **kw) for each in worker_deaths]


def test_an_epoch_survives_as_many_deaths_as_allowed_of_all_workers_together():
    decider = Restarts(2)
    assert decisions(decider, death(0), death(1), death(2)) == [0.0, 0.0, None]
    assert decider.survived == 2


def test_each_epoch_survives_as_many():
    decider = Restarts(1)
    assert decisions(decider, death(0), death(1)) == [0.0, None]
    decider.begin_epoch()
    assert decider.survived == 0 and not decider.history
    assert decisions(decider, death(0, 1), death(1, 1)) == [0.0, None]


def test_deaths_without_a_batch_in_between_wait_twice_as_long_each_time():
    decider = Restarts(100)
    waits = decisions(decider, *(death(generation=n, answers=7) for n in range(9)))
    assert waits == [0.0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]


def test_a_batch_in_between_ends_the_back_off():
    decider = Restarts(100)
    steps = [(0, 0), (1, 0), (2, 0), (3, 1), (4, 1), (5, 2)]
    assert decisions(decider, *(death(generation=n, answers=answers) for n, answers in steps)) == [
        0.0,
        0.1,
        0.2,
        0.0,
        0.1,
        0.0,
    ]


def test_the_back_off_of_one_worker_does_not_concern_another():
    decider = Restarts(100)
    assert decisions(decider, death(0), death(0, 1), death(1), death(1, 1)) == [0.0, 0.1, 0.0, 0.1]


def test_a_long_row_of_deaths_is_no_overflow():
    decider = Restarts(5000)
    assert decisions(decider, *(death(generation=n) for n in range(3000)))[-1] == 5.0


def test_want_of_memory_backs_off_from_the_first_death():
    decider = Restarts(100)
    oom = {"out_of_memory": True}
    assert decider.on_death(death(generation=0, answers=3), **oom) == 0.1
    assert decider.on_death(death(generation=1, answers=3), **oom) == 0.2
    assert decider.on_death(death(generation=2, answers=4), **oom) == 0.1


def test_a_death_that_comes_again_is_counted_once():
    decider = Restarts(2)
    decider.on_death(death(generation=0))
    assert not decider.is_counted(death(generation=1))
    assert decider.on_death(death(generation=1)) == 0.1
    assert decider.is_counted(death(generation=1))
    # The back-off is over.
    assert decisions(decider, death(generation=1), death(generation=1)) == [0.0, 0.0]
    assert decider.survived == 2 and len(decider.history) == 2
    assert decisions(decider, death(generation=2), death(generation=2)) == [None, None]


def test_a_death_is_settled_by_a_restart_or_a_final_decision():
    decider = Restarts(3)
    first, second = death(1, 0), death(1, 1)
    decider.on_death(first)
    assert not decider.is_settled(first) and decider.restarts_of(1) == 0
    decider.on_restart(first)
    assert decider.is_settled(first) and not decider.is_settled(second) and not decider.is_settled(death(0))
    assert decider.restarts_of(1) == 1 and decider.restarts_of(0) == 0
    decider.settle(second)
    assert decider.is_settled(second) and decider.restarts_of(1) == 1


def test_a_refused_start_counts_as_a_death_and_backs_off():
    decider = Restarts(3)
    refused = OSError(errno.EAGAIN, "no processes left")
    assert decider.on_death(death()) == 0.0
    assert decider.on_failed_start(death(), refused) == 0.1
    assert decider.on_death(death()) == 0.0
    assert decider.on_failed_start(death(), refused) == 0.2
    assert decider.on_failed_start(death(), refused) is None
    assert decider.on_death(death()) is None
    assert "worker 0 could not be restarted: [Errno 11] no processes left" in decider.history


def test_a_batch_that_three_workers_die_at_is_not_tried_again():
    decider = Restarts(100)
    waits = decisions(decider, *(death(generation=n, task=4) for n in range(3)))
    assert waits == [0.0, 0.1, None]
    assert decider.notes(0)[-1] == "The batch is not retried: 3 workers died while fetching it."
    assert not decider.poison


def test_a_task_that_was_not_begun_is_not_to_blame():
    decider = Restarts(100)
    waits = decisions(decider, *(death(generation=n, task=4) for n in range(5)), under_way=False)
    assert waits == [0.0, 0.1, 0.2, 0.4, 0.8]
    assert decisions(decider, *(death(1, n) for n in range(5))) == waits, "the same must hold without a task"
    assert not any("not retried" in note for note in decider.notes(0))


def test_other_batches_do_not_add_up():
    decider = Restarts(100)
    steps = [(0, 4), (1, 4), (2, 5), (3, 5), (4, 4)]
    waits = decisions(decider, *(death(generation=n, task=task) for n, task in steps))
    assert waits == [0.0, 0.1, 0.2, 0.4, None]


def test_a_new_epoch_forgets_batches():
    decider = Restarts(100)
    decisions(decider, *(death(generation=n, task=4) for n in range(2)))
    decider.begin_epoch()
    assert decisions(decider, *(death(generation=n, task=4) for n in range(2, 4))) == [0.0, 0.1]


def test_a_sample_that_three_workers_die_at_is_passed_over():
    decider = Restarts(100, may_skip_samples=True)
    waits = decisions(decider, *(death(1, n, task=4, place=2, first_task=20) for n in range(3)), cause="fell")
    assert waits == [0.0, 0.1, 0.2]
    assert decider.poison == {1: {24: {2: "3 workers have died at this sample; the last one fell"}}}
    # Another sample of the same batch has its own three deaths.
    waits = decisions(decider, *(death(1, n, task=4, place=3, first_task=20) for n in range(3, 6)))
    assert None not in waits and sorted(decider.poison[1][24]) == [2, 3]


def test_without_the_place_of_the_sample_the_batch_is_not_tried_again():
    decider = Restarts(100, may_skip_samples=True)
    assert decisions(decider, *(death(generation=n, task=4) for n in range(3)))[-1] is None
    decider = Restarts(100, may_skip_samples=False)
    assert decisions(decider, *(death(generation=n, task=4, place=1) for n in range(3)))[-1] is None


@pytest.mark.parametrize("may_skip_samples", [False, True])
def test_three_deaths_at_different_samples_of_a_batch_are_final_and_blame_none(may_skip_samples):
    decider = Restarts(100, may_skip_samples)
    steps = [(0, 4), (1, 5), (2, 4)]
    waits = decisions(decider, *(death(generation=n, task=4, place=place) for n, place in steps))
    assert waits == [0.0, 0.1, None] and not decider.poison
    assert decider.notes(0)[-1] == "The batch is not retried: 3 workers died while fetching it."


def test_the_rest_of_a_batch_has_three_deaths_of_its_own_once_a_sample_is_passed_over():
    decider = Restarts(100, may_skip_samples=True)
    steps = [*enumerate([2, 2, 2, 3, 4, 3])]
    waits = decisions(decider, *(death(generation=n, task=4, place=place) for n, place in steps))
    assert waits == [0.0, 0.1, 0.2, 0.4, 0.8, None] and [*decider.poison[0][4]] == [2]


def test_what_takes_the_place_of_a_sample_that_was_passed_over_has_one_death():
    decider = Restarts(100, may_skip_samples=True)
    waits = decisions(decider, *(death(generation=n, task=4, place=2) for n in range(4)))
    assert waits == [0.0, 0.1, 0.2, None]


def test_the_history_names_worker_pid_cause_and_batch():
    decider = Restarts(2)
    decider.on_death(death(1, task=4), "was killed by signal: Killed")
    decider.on_death(death(0, generation=3), "exited unexpectedly with exit code 3")
    assert decider.line_of(1) == "worker 1 (pid 100) was killed by signal: Killed, at batch 4 (index [4])"
    assert decider.line_of(0) == "worker 0 (pid 103) exited unexpectedly with exit code 3"
    assert list(decider.history) == [decider.line_of(1), decider.line_of(0)]
    assert decider.notes(0) == [
        "Other worker deaths in this epoch (max_restarts=2):\n"
        "  worker 1 (pid 100) was killed by signal: Killed, at batch 4 (index [4])"
    ]


def test_the_history_is_bounded():
    decider = Restarts(5000)
    decisions(decider, *(death(generation=n) for n in range(1000)))
    assert len(decider.history) == 20 and decider.history[-1].startswith("worker 0 (pid 1099)")


def test_a_first_death_has_no_notes():
    decider = Restarts(1)
    decider.on_death(death())
    assert decider.notes(0) == []


def test_threads_and_accelerators_make_a_fork_unsafe():
    with mock.patch("threading.active_count", lambda: 1):
        assert restarts.hazard_of_fork() is None
        with mock.patch.object(torch.cuda, "is_initialized", lambda: True):
            assert restarts.hazard_of_fork() == "has initialized CUDA"
        with mock.patch.object(torch.xpu, "is_initialized", lambda: True):
            assert restarts.hazard_of_fork() == "has initialized XPU"
    with mock.patch("threading.active_count", lambda: 2):
        assert restarts.hazard_of_fork() == "runs 1 other thread"
    with mock.patch("threading.active_count", lambda: 3):
        assert restarts.hazard_of_fork() == "runs 2 other threads"


def test_the_lock_admits_its_own_thread_again():
    decider = Restarts(1)
    with decider.lock, decider.lock:
        assert not in_thread(decider.lock.acquire, False)


def test_refusals_of_the_system_are_distinguished_from_other_errors():
    assert all(process.is_refused(OSError(number, "")) for number in (errno.EAGAIN, errno.ENOMEM, errno.EMFILE))
    assert not process.is_refused(OSError(errno.EPIPE, "")) and not process.is_refused(TimeoutError())


def test_nothing_is_logged_by_a_decision(caplog):
    with caplog.at_level(logging.DEBUG):
        Restarts(1).on_death(death())
    assert not caplog.records


def killed(**kw):
    values = {"exitcode": -9, "signal": "Killed", **kw}
    return SimpleNamespace(**(vars(death(1, task=4)) | values))


def test_the_error_of_a_death_has_its_class_text_and_notes():
    error = deaths.error_of(killed(), None, 2, ["Others died."])()
    assert type(error) is rustloader.WorkerDiedError and error.restarts == 2
    assert str(error) == "DataLoader worker (pid 100) is killed by signal: Killed. "
    assert error.__notes__ == ["Worker 1 was assigned the batch with index [4].", "Others died."]
    error = deaths.error_of(killed(), None, out_of_memory=True)()
    assert str(error).endswith("is killed by signal: Killed. Its memory cgroup was out of memory.")
    error = deaths.error_of(killed(stalled=True), None, 1)()
    assert type(error) is rustloader.WorkerStalledError and error.restarts == 1
    assert str(error).endswith("is killed by signal: Killed. ")


def test_the_cause_of_a_death_in_words():
    assert deaths.cause(killed(), None) == "was killed by signal: Killed"
    assert deaths.cause(killed(), None, True) == "was killed by signal: Killed (its memory cgroup was out of memory)"
    assert deaths.cause(killed(exitcode=3), None) == "exited unexpectedly with exit code 3"
    assert deaths.cause(killed(exitcode=0), None) == "exited unexpectedly"
    assert deaths.cause(killed(exitcode=None), None) == "exited unexpectedly"
    assert deaths.cause(killed(stalled=True), None).startswith("took longer than stall_timeout for one batch")


def test_a_group_asks_once_for_each_death_whether_memory_ran_out():
    group = WorkerGroup(None, [], None, None, None)
    answers = iter([True, False])
    group._oom_kills = SimpleNamespace(grew=lambda: next(answers))
    assert group.was_out_of_memory(killed(), -9) and group.was_out_of_memory(killed(), -9)
    assert not group.was_out_of_memory(killed(generation=1), -11), "there was no OOM kill"
    assert not group.was_out_of_memory(killed(generation=2, stalled=True), -9), "the loader killed it itself"
    assert not group.was_out_of_memory(killed(generation=3), -9)
    assert next(answers, "all asked") == "all asked"


@pytest.mark.parametrize(
    ("own", "changed"),
    [
        ({}, False),
        ({"generation": 1}, False),  # it has given no answer
        ({"generation": 1, "answers": 3}, True),
        ({"generation": 1, "first_task": 8}, True),
        ({"generation": 1, "answers": 3, "dataset_kind": 1}, False),  # it produces its batches again
        ({"generation": 1, "answers": 3, "dataset_kind": 1, "start": {"place": 2}}, True),
        ({"generation": 1, "answers": 3, "seeding": Ellipsis}, False),
    ],
)
def test_seeds_of_a_replacement(own, changed):
    start = WorkerStart(dataset_state=own.pop("start", None), replay=1)
    job = SimpleNamespace(**{"base_seed": 5, "generation": 0, "first_task": 0, "answers": 0} | vars_of(own))
    torch_seeds = 7, _utils.worker._generate_state(5, 2)
    seeds = main._seeds_of(job, 2, start)
    assert (seeds != torch_seeds) == changed
    if changed:
        assert seeds[0] != torch_seeds[0] and list(seeds[1]) != list(torch_seeds[1]) and 0 <= seeds[0] < 1 << 63
        job.generation += 1
        assert main._seeds_of(job, 2, start)[0] not in (seeds[0], main._seeds_of(job, 1, start)[0])


def vars_of(own):
    return {"dataset_kind": 0, "seeding": None} | own
