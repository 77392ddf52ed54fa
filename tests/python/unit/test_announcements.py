"""A worker finds the early epoch of a task by the task's number."""

import random

import pytest

from rustloader.workers.announcements import Announcements

# Announced first tasks, and tasks in the order in which the worker receives them, with the epoch that begins at each.
ROWS = {
    "one": ([4], [(3, None), (4, b"4"), (5, None)]),
    "two": ([4, 6], [(3, None), (5, b"4"), (6, b"6"), (7, None)]),
    "skipped": ([4, 6], [(3, None), (7, b"6"), (8, None)]),
    "ended": ([4, 6, 8], [(6, b"6"), (8, b"8")]),
}


@pytest.mark.parametrize("name", ROWS)
def test_epoch_begins_at_its_first_task(name):
    announcements, (first_tasks, tasks) = Announcements(), ROWS[name]
    for first_task in first_tasks:
        announcements.add(first_task, b"%d" % first_task)
    for task, message in tasks:
        begun = announcements.take(task)
        assert (begun and begun[1]) == message


@pytest.mark.parametrize("tasks, restored", [((), None), ((4,), None), ((4, 6), 6), ((7,), 7)], ids=str)
def test_canceled_epoch_restores_generators_only_if_it_has_begun(tasks, restored):
    announcements, states = Announcements(), {}
    announcements.add(4, b"")
    announcements.add(6, b"")
    for task in tasks:
        states[task] = random.getstate()
        announcements.take(task)
        random.random()
    states[None] = random.getstate()
    announcements.forget(is_canceled=True)
    assert random.getstate() == states[restored]
    assert announcements.take(9) is None
