"""`overlap_epochs`: workers begin the next epoch before the current one has ended.

That nothing else changes is tested by the random programs of test_differential.py and test_model.py.
"""

import logging
import os
import random
import signal

import numpy as np
import pytest
import torch
from sample_data import Numbers, as_list, worker_id
from support import (
    STARTED,
    DataLoader,
    TorchDataLoader,
    epoch,
    gone,
    rustloader,
    values,
    wait_until,
    within,
    worker_pids,
    workers_report,
)
from torch.utils.data import (
    RandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from rustloader.tools.top.model import observe

pytestmark = [pytest.mark.ours, pytest.mark.filterwarnings("ignore:.*multi-thread:DeprecationWarning")]

METHODS = ["fork", "spawn", "forkserver"]


class Drawn(Numbers):
    """Sample i is i, its worker, and a draw of each of the worker's generators; some samples fail after the draws."""

    def __init__(self, n, fails=()):
        super().__init__(n)
        self.fails = frozenset(fails)

    def __getitem__(self, i):
        drawn = torch.rand(()).item(), random.random(), float(np.random.rand())
        if i in self.fails:
            raise KeyError(f"sample {i}")
        return int(i), worker_id(), *drawn


class Logged(Numbers):
    """Each sample appends a byte to a file when it begins."""

    def __init__(self, n, file, payload=1):
        super().__init__(n)
        self.file, self.payload = str(file), payload

    def begun(self):
        return os.path.getsize(self.file) if os.path.exists(self.file) else 0

    def __getitem__(self, i):
        file = os.open(self.file, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.write(file, b".")
        os.close(file)
        return torch.full((self.payload,), i)


def was_predicted(loader):
    """True if the last epoch of a loader was predicted correctly; None if it was not predicted."""
    predictor = loader._iterator._mode._predictor
    return None if predictor is None else predictor.is_right


# --- the overlap


def before_the_end(loader, dataset, of_next):
    """The batches of an epoch, the last of which is delivered once samples of the next epoch have begun."""
    before, it = dataset.begun(), iter(loader)
    batches = [next(it) for _ in range(len(loader) - 1)]
    assert wait_until(lambda: dataset.begun() - before > dataset.n + of_next), "the next epoch did not begin early"
    return [*batches, *it]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("dispatch", [None, "shared_queue"])
def test_workers_begin_the_next_epoch_before_the_last_batch(tmp_path, method, in_order, dispatch):
    dataset = Logged(8, tmp_path / "log")
    settings = dict(num_workers=2, persistent_workers=True, multiprocessing_context=method, in_order=in_order)
    loader = DataLoader(dataset, shuffle=True, dispatch=dispatch, overlap_epochs=True, **settings)
    orders = []
    for number in range(3):
        # The samples of this epoch that began during the previous one.
        early = 0 if number == 0 else 4
        orders.append([int(b) for b in before_the_end(loader, dataset, -early)])
        assert sorted(orders[-1]) == list(range(8))
        assert was_predicted(loader) is (True if number else None)
        # With a shared queue, a worker may not even have started by then.
        assert workers_report(loader._iterator, state="idle")
    assert orders[0] != orders[1] or orders[1] != orders[2]


class HoldsFirst(Numbers):
    """Sample 0 begins once the file `open` exists; `held` is made while it waits."""

    def __init__(self, n, folder):
        super().__init__(n)
        self.open, self.held = folder / "open", folder / "held"

    def __getitem__(self, i):
        if i == 0:
            self.held.touch()
            assert wait_until(self.open.exists, STARTED)
        return torch.tensor(i)


@pytest.mark.parametrize("dispatch", [None, "shared_queue"])
def test_top_shows_early_batch_with_its_number_in_its_epoch(tmp_path, dispatch):
    dataset = HoldsFirst(4, tmp_path)
    dataset.open.touch()
    loader = DataLoader(dataset, num_workers=2, persistent_workers=True, overlap_epochs=True, dispatch=dispatch)
    it = iter(loader)
    batches = [next(it)]
    dataset.open.unlink()
    dataset.held.unlink()
    # The last `next` of this epoch has not been called: the early epoch has begun.
    batches += [next(it) for _ in range(2)]
    assert wait_until(dataset.held.exists, STARTED)
    (shown,) = [seen for seen in observe(os.getpid()) if seen.figures.epoch_batches == 3]
    assert [worker.batch for worker in shown.figures.workers if worker.index == "[0]"] == [0]
    dataset.open.touch()
    batches += it
    assert [int(batch) for batch in batches] == list(range(4)) and epoch(loader) == list(range(4))


# --- a worker that learns of two epochs at once


class Meeting(Drawn):
    """Worker 0 waits in call `call` until worker 1 has made a sample."""

    calls = 0

    def __init__(self, folder, call, fails):
        super().__init__(2, fails)
        self.folder, self.call = folder, call

    def __getitem__(self, i):
        self.calls += 1
        if worker_id() == 1:
            (self.folder / "made").touch()
        elif worker_id() == 0 and self.calls == self.call:
            assert wait_until((self.folder / "made").exists, STARTED)
        return super().__getitem__(i)


class LateStart:
    """A worker_init_fn in which worker 1 waits for a file."""

    def __init__(self, file):
        self.file = file

    def __call__(self, worker):
        assert worker == 0 or wait_until(self.file.exists, STARTED)


def batches_and_notes(it):
    """The batches of an iterator, and the notes of errors in their place."""
    while True:
        try:
            yield next(it)
        except KeyError as error:
            yield error.__notes__
        except StopIteration:
            return


def epochs_of_late_worker(folder, fails=(), **options):
    """Three epochs of two samples. Worker 1 starts in the second one, when the third one is already announced."""
    started = folder / "started"
    if options.get("num_workers"):
        options |= dict(persistent_workers=True, overlap_epochs=True, dispatch="shared_queue")
        options |= dict(worker_init_fn=LateStart(started))
    # The first call of the second epoch. A replaced sample takes another call.
    call = 4 if options.get("on_error") == "replace" else 3
    loader = DataLoader(Meeting(folder, call, fails), batch_size=None, collate_fn=as_list, **options)
    epochs = [list(batches_and_notes(iter(loader)))]
    it = iter(loader)
    started.touch()
    return [*epochs, list(batches_and_notes(it)), list(batches_and_notes(iter(loader)))]


@pytest.mark.parametrize("on_error", ["raise", "replace"])
@pytest.mark.parametrize("seed_by", ["sample", "batch"])
def test_late_worker_draws_numbers_of_its_tasks_epoch(tmp_path, seed_by, on_error):
    def run(workers):
        torch.manual_seed(5)
        fails = () if on_error == "raise" else [1]
        folder = tmp_path / str(workers)
        folder.mkdir()
        return epochs_of_late_worker(folder, fails, num_workers=workers, seed_by=seed_by, on_error=on_error)

    expected, seen = run(0), run(2)
    workers = [[sample[1] for sample in samples] for samples in seen]
    assert workers[:2] == [[0, 0], [0, 1]]
    assert without_worker_ids(seen) == without_worker_ids(expected)


def without_worker_ids(epochs):
    return [[(sample[0], *sample[2:]) for sample in samples] for samples in epochs]


def test_set_epoch_is_predicted():
    dataset = Numbers(12)
    sampler = DistributedSampler(dataset, num_replicas=2, rank=0)
    loader = DataLoader(dataset, sampler=sampler, num_workers=2, persistent_workers=True, overlap_epochs=True)
    for number in range(3):
        sampler.set_epoch(number)
        assert values(epoch(loader)) == [[i] for i in sampler]
        assert was_predicted(loader) is (True if number else None)
    # No further calls of set_epoch.
    for expected in (False, None, None):
        assert values(epoch(loader)) == [[i] for i in sampler]
        assert was_predicted(loader) is expected


def draw_nothing():
    pass


def iterate_other_loader():
    list(TorchDataLoader(Numbers(2)))


def draw_numbers():
    torch.rand(3)


@pytest.mark.parametrize("between", [draw_nothing, iterate_other_loader, draw_numbers])
@pytest.mark.parametrize("has_generator", [False, True])
def test_one_wrong_prediction_ends_them(between, has_generator, caplog):
    caplog.set_level(logging.INFO, "rustloader")
    generator = torch.Generator() if has_generator else None
    options = dict(shuffle=True, num_workers=2, persistent_workers=True, overlap_epochs=True)
    loader = DataLoader(Numbers(9), generator=generator, **options)
    predictions, shown = [], []
    for _ in range(4):
        epoch(loader)
        predictions.append(was_predicted(loader))
        shown.append(rustloader.stats(loader).scheduling.overlap_epochs)
        between()
    is_right = has_generator or between is draw_nothing
    assert predictions == ([None, True, True, True] if is_right else [None, False, None, None])
    assert shown == ([True] * 4 if is_right else [True, False, False, False])
    assert sum("did not begin as predicted" in record.getMessage() for record in caplog.records) == (not is_right)


def test_sampler_of_another_class_is_not_predicted(caplog):
    class Own(RandomSampler):
        pass

    caplog.set_level(logging.INFO, "rustloader")
    dataset = Numbers(9)
    options = dict(num_workers=2, persistent_workers=True, overlap_epochs=True)
    loader = DataLoader(dataset, sampler=Own(dataset), **options)
    for _ in range(2):
        epoch(loader)
        assert not rustloader.stats(loader).scheduling.overlap_epochs
    logged = [record.getMessage() for record in caplog.records if "overlap_epochs" in record.getMessage()]
    reason = "its sampler is not torch's own, so the order of its next epoch is unknown"
    assert logged == [f"a DataLoader: overlap_epochs has no effect: {reason}"]


# --- deaths


class DiesTheSecondTime(Numbers):
    """Sample 1 kills its worker when it is requested for the second time."""

    asked = 0

    def __getitem__(self, i):
        if i == 1:
            self.asked += 1
            if self.asked == 2:
                os.kill(os.getpid(), signal.SIGKILL)
        return torch.tensor(i)


def test_a_death_in_the_next_epoch_does_not_touch_the_present_one():
    loader = DataLoader(DiesTheSecondTime(8), num_workers=2, persistent_workers=True, overlap_epochs=True)
    it = iter(loader)
    samples = [int(next(it)) for _ in range(7)]
    victim = worker_pids(it)[1]
    assert wait_until(lambda: gone(victim))
    samples += [int(b) for b in it]
    assert samples == list(range(8))
    it = iter(loader)
    assert int(next(it)) == 0
    with pytest.raises(RuntimeError, match=rf"DataLoader worker \(pid {victim}\)"):
        next(it)
    # All workers are new.
    assert values(epoch(loader)) == [[i] for i in range(8)]


@pytest.mark.parametrize("dispatch", [None, "shared_queue"])
def test_a_worker_that_is_killed_between_epochs_is_noticed(dispatch):
    loader = DataLoader(Numbers(8), num_workers=2, persistent_workers=True, overlap_epochs=True, dispatch=dispatch)
    epoch(loader)
    victim = worker_pids(loader._iterator)[0]
    os.kill(victim, signal.SIGKILL)
    # With a shared queue, the other worker alone may serve all epochs below before a busy kernel has ended this one.
    assert wait_until(lambda: gone(victim))
    with within(60), pytest.raises(RuntimeError, match="killed by signal"):
        for _ in range(100):
            epoch(loader)
    assert sorted(int(b) for b in epoch(loader)) == list(range(8))


@pytest.mark.warns
def test_it_has_no_effect_with_max_restarts(lines):
    loader = DataLoader(
        DiesTheSecondTime(8), num_workers=2, persistent_workers=True, overlap_epochs=True, max_restarts=3
    )
    for _ in range(3):
        assert values(epoch(loader)) == [[i] for i in range(8)]
    assert lines("overlap_epochs has no effect: with max_restarts")


# --- the end


def test_a_loop_that_is_left_gives_its_blocks_back(tmp_path):
    """The blocks of canceled early epochs do not accumulate."""
    dataset = Logged(6, tmp_path / "log", payload=100_000)
    loader = DataLoader(dataset, num_workers=2, persistent_workers=True, overlap_epochs=True)
    held = []
    for number in range(12):
        before = dataset.begun()
        for count, _ in enumerate(loader):
            if count == 4:
                break
        if number == 0:
            # The outstanding tasks: the last one of this epoch, and three of the next.
            assert wait_until(lambda before=before: dataset.begun() - before == 9)
            assert workers_report(loader._iterator, state="idle")
        held.append(loader._iterator._core.memory()[1])
    assert max(held) <= 2 * held[0]


# --- where it applies


def test_it_needs_workers_that_stay():
    text = (
        r"^overlap_epochs=True needs workers: with num_workers=0 the program's own process makes the samples, and "
        r"there is no worker to begin the next epoch early; set num_workers to 1 or more, or omit overlap_epochs$"
    )
    with pytest.raises(ValueError, match=text):
        DataLoader(range(2), overlap_epochs=True)
    text = (
        r"^overlap_epochs=True needs persistent workers: other workers end with their epoch and cannot begin the next "
        r"epoch early; set persistent_workers=True, or omit overlap_epochs$"
    )
    with pytest.raises(ValueError, match=text):
        DataLoader(range(2), num_workers=1, overlap_epochs=True)
    with pytest.raises(TypeError, match="overlap_epochs"):
        DataLoader(range(2), num_workers=1, persistent_workers=True, overlap_epochs=1)
    assert epoch(DataLoader(range(2), num_workers=1, overlap_epochs=False)) == [0, 1]


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(4))


def test_an_iterable_dataset_is_refused():
    loader = DataLoader(Stream(), num_workers=1, persistent_workers=True, overlap_epochs=True)
    with pytest.raises(ValueError, match=r"^overlap_epochs needs a map-style dataset, got True for an iterable one"):
        iter(loader)


def test_install_sets_it_where_it_has_an_effect(lines):
    with rustloader.installed(overlap_epochs=True):
        assert list(TorchDataLoader(range(3), num_workers=1)) == [0, 1, 2]
        kept = TorchDataLoader(range(3), num_workers=1, persistent_workers=True)
        for _ in range(2):
            assert list(kept) == [0, 1, 2]
        assert was_predicted(kept)
        stream = TorchDataLoader(Stream(), num_workers=1, persistent_workers=True)
        assert list(stream) == [0, 1, 2, 3]
        assert lines("overlap_epochs has no effect: an iterable dataset")
        assert list(TorchDataLoader(range(3))) == [0, 1, 2]
