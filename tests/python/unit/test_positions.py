"""`Engine.position`: which tasks of an epoch are delivered, now and a few answers ago."""

import gc
import itertools
import signal
import weakref
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from pinning_support import pinning
from sample_data import Given, WhoAmI, untouched
from support import (
    DataLoader,
    LoaderIter,
)

from rustloader._core import ERROR
from rustloader.iterator.epochs import Epochs

pytestmark = pytest.mark.ours


def position(iterator, answers, back=0):
    """(low, ahead, per_worker, last_worker)"""
    result = iterator._core.position(answers, back)
    return result.low, result.ahead, result.per_worker, result.last_worker


def has_answered(iterator, answers):
    """Checks that the engine has given exactly this number of answers."""
    for other, wrong in ((answers + 1, "not"), (answers - 2, "not")):
        if other >= 0:
            with pytest.raises(ValueError, match=f"{answers} answers were given in this epoch, {wrong} {other}"):
                position(iterator, other)
    return bool(position(iterator, answers))


def loader_of(dataset, workers=2, **kw):
    return DataLoader(dataset, num_workers=workers, batch_size=None, collate_fn=untouched, **kw)


def counted(delivered, workers):
    """The position after the given answers, which are (ordinal, worker), computed from scratch."""
    ordinals = {ordinal for ordinal, _ in delivered}
    low = next(ordinal for ordinal in itertools.count() if ordinal not in ordinals)
    per_worker = [sum(worker == other for _, other in delivered) for worker in range(workers)]
    return low, sorted(i for i in ordinals if i > low), per_worker, delivered[-1][1] if delivered else None


OPTIONS = {
    "in order": dict(),
    "out of order": dict(in_order=False),
    "shared queue": dict(dispatch="shared_queue"),
    "window": dict(reorder_window=7),
    "shared queue, out of order": dict(dispatch="shared_queue", in_order=False),
}


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("workers", [1, 3])
def test_a_position_is_what_was_delivered(kind, workers):
    iterator = iter(loader_of(WhoAmI(40), workers, **OPTIONS[kind]))
    delivered = []
    assert position(iterator, 0) == (0, [], [0] * workers, None)
    for item in iterator:
        delivered.append(item)
        for back in range(min(len(delivered), 8) + 1):
            expected = counted(delivered[: len(delivered) - back], workers)
            assert position(iterator, len(delivered), back) == expected
        assert position(iterator, len(delivered) - 1) == counted(delivered[:-1], workers)
    assert len(delivered) == 40
    # After the end the workers are gone, and the position stays.
    assert iterator._shutdown
    assert position(iterator, 40) == counted(delivered, workers)


# Errors in the main process


class Unreadable:
    """Raises in the main process, when it is unpickled."""

    def __reduce__(self):
        return refuse, ()


def refuse():
    raise KeyError("not here")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.forks
def test_a_batch_that_cannot_be_read_is_an_error_in_its_place(tied, pinned, monkeypatch):
    monkeypatch.setitem(ForkingPickler._extra_reducers, Tied, lambda it: (refuse, ()))
    samples = [0, Tied() if tied else Unreadable(), 2, 3]
    with pinning() if pinned else torch.no_grad():
        iterator = iter(loader_of(Given(samples), pin_memory=pinned))
        assert next(iterator) == 0
        with pytest.raises(KeyError, match="not here"):
            next(iterator)
        assert has_answered(iterator, 2)
        assert position(iterator, 2) == (2, [], [1, 1], 1)
        # The first batch is taken back, and the error with it.
        assert position(iterator, 2, 1) == (0, [], [0, 0], None)
        assert list(iterator) == [2, 3]
        assert has_answered(iterator, 4)


@pytest.mark.forks
def test_an_error_of_reading_keeps_no_iterator_and_is_raised_once():
    iterator = iter(loader_of(Given([Unreadable(), 1])))
    core, answer = iterator._core, [None, None]
    core.next(answer, iterator._sampler_iter)
    code, value = answer
    assert code == ERROR
    with pytest.raises(KeyError, match="not here") as raised:
        value.reraise()
    # The traceback ends in the function that raised it.
    assert raised.traceback[-1].name == "refuse"
    with pytest.raises(RuntimeError, match="has already been raised"):
        value.reraise()
    iterator._shutdown_workers()

    gc.collect()
    gc.disable()
    try:
        iterator = iter(loader_of(Given([Unreadable(), 1])))
        kept = weakref.ref(iterator)
        try:
            next(iterator)
        except KeyError:
            pass
        del iterator
        assert kept() is None
    finally:
        gc.enable()


def test_an_error_of_reading_that_is_never_raised_is_collected():
    iterator = iter(loader_of(Given([Unreadable(), 1])))
    kept = weakref.ref(iterator)

    def cut_off(iterator):
        answer = [None, None]
        iterator._core.next(answer, iterator._sampler_iter)
        # As when a signal handler raises at the return.
        iterator._mode.rescued = answer

    cut_off(iterator)
    iterator._shutdown_workers()
    del iterator
    gc.collect()
    assert kept() is None


class Tied:
    """Has a foreign reducer, so it must be unpickled while its worker lives."""


class Interrupting:
    """Raises a signal when it is unpickled for the first time. The handler of the signal raises an error."""

    times = 0

    def __reduce__(self):
        return restore, ()


def restore():
    Interrupting.times += 1
    if Interrupting.times == 1:
        signal.raise_signal(signal.SIGUSR1)
    return Interrupting.times


# From anywhere, at any time


@pytest.mark.parametrize("whole", [True, False])
def test_a_new_epoch_begins_at_position_0(whole):
    loader = loader_of(WhoAmI(9), persistent_workers=True)
    iterator = iter(loader)
    for _ in iterator if whole else range(3):
        if not whole:
            next(iterator)
    assert position(iterator, 9 if whole else 3)[0] == (9 if whole else 3)
    assert iter(loader) is iterator
    assert position(iterator, 0) == (0, [], [0, 0], None)
    with pytest.raises(ValueError, match="0 batches of this epoch"):
        position(iterator, 0, 1)
    next(iterator)
    assert position(iterator, 1) == (1, [], [1, 0], 0)
    iterator._shutdown_workers()


# The first worker


class From(Epochs):
    """Epochs whose first task goes to a given worker."""

    first = 2

    def first_worker(self, it):
        return self.first


class Beginning(LoaderIter):
    def __init__(self, loader):
        self._epochs = From()
        super().__init__(loader)


@pytest.mark.parametrize("in_order", [True, False])
def test_the_first_task_goes_to_the_first_worker(in_order):
    loader = loader_of(WhoAmI(9), 3, in_order=in_order, persistent_workers=True)
    iterator = Beginning(loader)
    worker_of = dict(iterator)
    # With in_order=False, a task after the first round goes to a worker that has room.
    assert [worker_of[i] for i in range(9 if in_order else 3)] == [(i + 2) % 3 for i in range(9 if in_order else 3)]
    iterator._epochs.first = 1
    iterator._reset(loader)
    worker_of = dict(iterator)
    assert [worker_of[i] for i in range(3)] == [1, 2, 0]
    iterator._epochs.first = 3
    with pytest.raises(ValueError, match="there is no worker 3"):
        iterator._reset(loader)
    iterator._shutdown_workers()
