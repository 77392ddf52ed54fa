"""`set_epoch` of a dataset reaches the copies in persistent workers."""

import gc
import os
import pickle
import random
import signal
import time

import pytest
from remote_support import LoopbackContext
from sample_data import first_time
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import rustloader
from rustloader import LoaderTimeoutError
from rustloader.stateful_dataloader import StatefulDataLoader

pytestmark = pytest.mark.ours


class Epochs:
    """Samples are (the epoch that this copy was given, its number of calls of set_epoch)."""

    epoch, calls = 0, 0

    def set_epoch(self, epoch):
        self.epoch = epoch
        self.calls += 1


class Mapped(Epochs, Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return self.epoch, self.calls


class Streamed(Epochs, IterableDataset):
    """Has the epoch that it was given before `iter`."""

    def __iter__(self):
        return self.samples(self.epoch)

    def samples(self, epoch):
        for _ in range(2 if get_worker_info() else 4):
            yield epoch, self.calls


def unchanged(batch):
    return batch


def make(dataset, **kw):
    kw = {"num_workers": 2, "persistent_workers": True, "batch_size": None, "collate_fn": unchanged, **kw}
    return StatefulDataLoader(dataset, **kw)


def epochs_of(batches):
    return {epoch for epoch, _ in batches}


KINDS = pytest.mark.parametrize("kind", [Mapped, Streamed])


@KINDS
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_it_reaches_persistent_workers(kind, method):
    loader = make(kind(), multiprocessing_context=method)
    assert epochs_of(loader) == {0}
    for epoch in (1, 5, 2):
        loader.dataset.set_epoch(epoch)
        assert epochs_of(loader) == {epoch}
    # Without another call, the epoch stays.
    assert epochs_of(loader) == {2}


class Held(Epochs, IterableDataset):
    """In the first epoch, worker 1 waits for a file."""

    def __init__(self, file):
        self.file = file

    def __iter__(self):
        epoch = self.epoch
        for k in range(4):
            while epoch == 0 and get_worker_info().id == 1 and k == 2 and not self.file.exists():
                time.sleep(0.01)
            yield epoch, self.calls


@pytest.mark.parametrize("sets_another", [True, False])
def test_a_worker_that_is_late_for_an_epoch_hears_of_the_next_one(sets_another, tmp_path):
    """The program gives up the epoch before that worker has begun it."""
    loader = make(Held(tmp_path / "go"), timeout=6)
    iterator = iter(loader)
    assert [next(iterator) for _ in range(3)] == [(0, 0)] * 3
    for epoch in (4, 5):
        loader.dataset.set_epoch(epoch)
        with pytest.raises(LoaderTimeoutError):
            iter(loader)
    (tmp_path / "go").touch()
    if sets_another:
        loader.dataset.set_epoch(6)
    epoch = 6 if sets_another else 5
    assert list(loader) == [(epoch, 3)] * 8
    assert list(loader) == [(epoch, 3)] * 8


@KINDS
def test_a_call_before_the_first_epoch_counts(kind):
    dataset = kind()
    dataset.set_epoch(7)
    loader = make(dataset)
    assert epochs_of(loader) == {7}
    assert epochs_of(loader) == {7}


@KINDS
def test_it_may_be_called_in_mid_epoch(kind):
    """A running epoch is left alone, as in torch's fresh copies of the dataset."""
    loader = make(kind())
    iterator = iter(loader)
    next(iterator)
    loader.dataset.set_epoch(3)
    assert epochs_of(iterator) == {0}
    assert epochs_of(loader) == {3}


@KINDS
def test_forwarding_can_be_disabled(kind):
    loader = make(kind(), forward_set_epoch=False)
    list(loader)
    loader.dataset.set_epoch(3)
    assert epochs_of(loader) == {0}
    assert loader.dataset.epoch == 3


class Strict(Mapped):
    """Refuses attributes that it does not define."""

    def __setattr__(self, name, value):
        if name not in ("epoch", "calls"):
            raise AttributeError(name)
        super().__setattr__(name, value)


def test_a_dataset_that_refuses_attributes():
    loader = make(Strict())
    list(loader)
    loader.dataset.set_epoch(3)
    assert epochs_of(loader) == {3}


class Instance(Mapped):
    """Its set_epoch is an attribute of the instance."""

    def __init__(self):
        self.set_epoch = self.other

    def other(self, epoch):
        self.epoch = 10 * epoch


def test_a_method_that_is_no_part_of_the_class_is_left_alone():
    loader = make(Instance())
    list(loader)
    loader.dataset.set_epoch(3)
    assert epochs_of(loader) == {0}
    assert loader.dataset.epoch == 30


def test_the_dataset_stays_as_it_was():
    dataset = Mapped()
    loader = make(dataset)
    dataset.set_epoch(2)
    list(loader)
    assert type(dataset) is Mapped and dataset.epoch == 2 and dataset.calls == 1
    copy = pickle.loads(pickle.dumps(dataset))
    copy.set_epoch(4)
    assert (copy.epoch, dataset.epoch) == (4, 2)
    assert epochs_of(loader) == {2}


@pytest.mark.parametrize("context", ["fork", "forkserver"])
def test_set_epoch_of_the_class_is_restored_with_the_last_loader(context):
    """Workers that are not forked receive the local classes by value, with the method in place."""

    class Base(Mapped):
        def set_epoch(self, epoch):
            super().set_epoch(epoch)

    class Derived(Base):
        pass

    method = Base.set_epoch
    loaders = [make(dataset, multiprocessing_context=context) for dataset in (Base(), Derived(), Derived())]
    assert Base.set_epoch is not method and "set_epoch" not in vars(Derived)
    for epoch in (0, 1):
        for loader in loaders:
            loader.dataset.set_epoch(epoch)
            assert epochs_of(loader) == {epoch}
            assert set(vars(loader.dataset)) == {"epoch", "calls"}
    while loaders:
        assert Base.set_epoch is not method
        loader = loaders.pop()
        loader.dataset.set_epoch(5)
        assert epochs_of(loader) == {5}
        del loader
        gc.collect()
    assert Base.set_epoch is method


@KINDS
def test_a_resumed_epoch_is_told_the_programs_epoch(kind):
    loader = make(kind())
    loader.dataset.set_epoch(5)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    del iterator
    loader = make(kind())
    loader.dataset.set_epoch(5)
    loader.load_state_dict(state)
    assert [epoch for epoch, _ in loader] == [5, 5, 5]
    loader.dataset.set_epoch(6)
    assert [epoch for epoch, _ in loader] == [6] * 4


class WithState(Mapped):
    def state_dict(self):
        return {"epoch": self.epoch}

    def load_state_dict(self, state):
        self.epoch = state["epoch"]


def test_state_after_iter_has_the_epoch():
    loader = make(WithState(), num_workers=1)
    list(loader)
    loader.dataset.set_epoch(epoch=3)
    iter(loader)
    assert loader.state_dict()["_snapshot"]["_worker_snapshots"]["worker_0"]["dataset_state"] == {"epoch": 3}


class Failing(Mapped):
    def set_epoch(self, epoch):
        super().set_epoch(epoch)
        if get_worker_info() and epoch == 2:
            raise ZeroDivisionError("no such epoch")


def test_an_error_of_set_epoch_stands_in_place_of_the_batches():
    loader = make(Failing())
    list(loader)
    loader.dataset.set_epoch(2)
    iterator = iter(loader)
    for _ in range(4):
        with pytest.raises(ZeroDivisionError, match="no such epoch"):
            next(iterator)
    assert next(iterator, None) is None
    loader.dataset.set_epoch(3)
    assert epochs_of(loader) == {3}


@KINDS
def test_it_reaches_workers_that_only_an_option_makes_persistent(kind):
    loader = make(kind(), persistent_workers=False)
    with rustloader.installed(persistent_workers=True):
        for epoch in (0, 3, 4):
            loader.dataset.set_epoch(epoch)
            assert epochs_of(loader) == {epoch}


class Order(Epochs, IterableDataset):
    """16 numbers in an order that depends on the epoch. The worker dies once, in epoch `deadly`."""

    def __init__(self, folder, deadly):
        self.folder, self.deadly = folder, deadly

    def __iter__(self):
        for place, number in enumerate(random.Random(self.epoch).sample(range(16), 16)):
            if place == 10 and self.epoch == self.deadly and first_time(f"{self.folder}/died"):
                os.kill(os.getpid(), signal.SIGKILL)
            yield number


@pytest.mark.warns
@pytest.mark.parametrize("deadly", [2, 3])
@pytest.mark.parametrize("persistent", [True, False])
def test_a_worker_that_is_started_again_keeps_to_the_epoch_that_runs(persistent, deadly, tmp_path):
    options = {"num_workers": 1, "persistent_workers": persistent, "max_restarts": 1}
    loader = make(Order(tmp_path, deadly), **options)
    for epoch in (2, 3):
        loader.dataset.set_epoch(epoch)
        iterator = iter(loader)
        numbers = [next(iterator)]
        # For the next epoch.
        loader.dataset.set_epoch(epoch + 1)
        numbers += iterator
        assert numbers == random.Random(epoch).sample(range(16), 16)
    assert os.listdir(tmp_path) == ["died"]


@pytest.mark.warns
def test_a_worker_elsewhere_that_is_started_again_keeps_to_the_epoch_that_runs(tmp_path):
    """It reads the dataset as it was when the first workers started."""
    (deaths := tmp_path / "deaths").mkdir()
    context = LoopbackContext(tmp_path)
    loader = make(Order(deaths, 3), num_workers=1, max_restarts=1, multiprocessing_context=context)
    for epoch in (2, 3, 4):
        loader.dataset.set_epoch(epoch)
        assert list(loader) == random.Random(epoch).sample(range(16), 16)
    assert os.listdir(deaths) == ["died"]
