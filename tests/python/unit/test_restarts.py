"""The decisions after a worker's death under ``max_restarts``, tested without workers."""

import errno
import itertools
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


# (arguments of Restarts, arguments of each death, the decisions: a back-off in seconds, or None for a final error)
BATCH, SAMPLE = {"task": 4}, {"task": 4, "place": 2}
ROWS = {
    "as many as allowed, of all workers together": ([2], [{"worker": w} for w in range(3)], [0, 0, None]),
    "without a batch in between": ([100], [{"answers": 7}] * 9, [0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5, 5]),
    "a batch in between": ([100], [{"answers": n} for n in (0, 0, 0, 1, 1, 2)], [0, 0.1, 0.2, 0, 0.1, 0]),
    "workers apart": ([100], [{"worker": w} for w in (0, 0, 1, 1)], [0, 0.1, 0, 0.1]),
    "want of memory": ([9], [{"answers": n, "out_of_memory": True} for n in (3, 3, 4)], [0.1, 0.2, 0.1]),
    "a batch": ([100], [BATCH] * 3, [0, 0.1, None]),
    "a batch that was not begun": ([9], [BATCH | {"under_way": False}] * 5, [0, 0.1, 0.2, 0.4, 0.8]),
    "no batch": ([9], [{}] * 5, [0, 0.1, 0.2, 0.4, 0.8]),
    "other batches": ([100], [{"task": n} for n in (4, 4, 5, 5, 4)], [0, 0.1, 0.2, 0.4, None]),
    "a sample": ([100, True], [SAMPLE] * 3, [0, 0.1, 0.2]),
    "a sample, and what takes its place": ([100, True], [SAMPLE] * 4, [0, 0.1, 0.2, None]),
    "a sample, without skips": ([100, False], [SAMPLE] * 3, [0, 0.1, None]),
    "a batch, with skips": ([100, True], [BATCH] * 3, [0, 0.1, None]),
    "samples of a batch": ([100, True], [BATCH | {"place": n} for n in (4, 5, 2)], [0, 0.1, None]),
    "samples of a batch, without skips": ([100], [BATCH | {"place": n} for n in (4, 5, 2)], [0, 0.1, None]),
    "the rest of a batch": (
        [100, True],
        [BATCH | {"place": n} for n in (2, 2, 2, 3, 4, 3)],
        [0, 0.1, 0.2, 0.4, 0.8, None],
    ),
}


@pytest.mark.parametrize("row", ROWS)
def test_each_death_has_its_decision(row):
    arguments, steps, expected = ROWS[row]
    decider = Restarts(*arguments)
    generations = itertools.count()
    for step, wanted in zip(steps, expected, strict=True):
        kw = {name: step[name] for name in ("out_of_memory", "under_way") if name in step}
        place = {name: value for name, value in step.items() if name not in kw}
        assert decider.on_death(death(generation=next(generations), **place), **kw) == wanted
    final = expected[-1] is None
    assert decider.survived == len(steps) - final
    not_retried = "The batch is not retried: 3 workers died while fetching it."
    assert (not_retried in decider.notes(0)) == (final and "task" in steps[0])
    assert decider.poison == (
        {0: {4: {2: mock.ANY}}} if row.startswith(("a sample", "the rest")) and arguments[1:] == [True] else {}
    )


def test_each_epoch_survives_as_many():
    decider = Restarts(1)
    assert decisions(decider, death(0), death(1)) == [0.0, None]
    decider.begin_epoch()
    assert decider.survived == 0 and not decider.history
    assert decisions(decider, death(0, 1), death(1, 1)) == [0.0, None]


def test_a_new_epoch_forgets_batches():
    decider = Restarts(100)
    decisions(decider, *(death(generation=n, task=4) for n in range(2)))
    decider.begin_epoch()
    assert decisions(decider, *(death(generation=n, task=4) for n in range(2, 4))) == [0.0, 0.1]


def test_a_long_row_of_deaths_is_bounded():
    decider = Restarts(5000)
    assert decisions(decider, *(death(generation=n) for n in range(3000)))[-1] == 5.0
    assert len(decider.history) == 20 and decider.history[-1].startswith("worker 0 (pid 3099)")


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


def test_poison_names_task_and_sample_and_cause():
    decider = Restarts(100, may_skip_samples=True)
    decisions(decider, *(death(1, n, task=4, place=2, first_task=20) for n in range(3)), cause="fell")
    assert decider.poison == {1: {24: {2: "3 workers have died at this sample; the last one fell"}}}
    # Another sample of the same batch has its own three deaths.
    waits = decisions(decider, *(death(1, n, task=4, place=3, first_task=20) for n in range(3, 6)))
    assert None not in waits and sorted(decider.poison[1][24]) == [2, 3]


def test_the_history_names_worker_pid_cause_and_batch():
    decider = Restarts(2)
    assert decider.notes(0) == []
    decider.on_death(death(1, task=4), "was killed by signal: Killed")
    decider.on_death(death(0, generation=3), "exited unexpectedly with exit code 3")
    assert decider.line_of(1) == "worker 1 (pid 100) was killed by signal: Killed, at batch 4 (index [4])"
    assert decider.line_of(0) == "worker 0 (pid 103) exited unexpectedly with exit code 3"
    assert list(decider.history) == [decider.line_of(1), decider.line_of(0)]
    assert decider.notes(0) == [
        "Other worker deaths in this epoch (max_restarts=2):\n"
        "  worker 1 (pid 100) was killed by signal: Killed, at batch 4 (index [4])"
    ]


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
