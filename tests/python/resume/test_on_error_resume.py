"""`on_error` with StatefulDataLoader: a resumed run delivers what an uninterrupted run delivers."""

import itertools
import pickle
import re

import pytest
import torch
from failing_samples import Broken, Drawing, InBatches, SavedIterator, SavedStream, Stream, failed, minus, numbers
from support import rustloader

from rustloader import ErrorLimitExceeded
from rustloader.stateful_dataloader import StatefulDataLoader

pytestmark = [
    pytest.mark.ours,
    pytest.mark.filterwarnings("ignore:.*epoch of 0 batches"),
]

# In batches of 4, every sample of the second, the third and the last batch fails.
BAD = (1, *range(4, 12), 14, 20, 21, 22)


class Counting(Broken):
    """Sample i is (i, its draw, the number of samples that this dataset has been asked for), which is the state."""

    made = 0

    def __getitem__(self, i):
        self.made += 1
        sample = super().__getitem__(i)
        return torch.tensor([*sample, float(self.made)])

    def state_dict(self):
        return {"made": self.made}

    def load_state_dict(self, state):
        self.made = state["made"]


class CountingDraws(Counting, Drawing):
    pass


class DrawnStream(SavedStream):
    """Sample i is (i, a random number)."""

    def __iter__(self):
        return DrawnIterator(self.n, self.bad)


class DrawnIterator(SavedIterator):
    def __next__(self):
        return torch.tensor([super().__next__(), torch.rand(())])


def as_lists(batches):
    return [torch.as_tensor(batch).tolist() for batch in batches]


def make(dataset, bad=BAD, **kw):
    torch.manual_seed(3)
    settings = dict(batch_size=4, on_error="skip") | kw
    return StatefulDataLoader(dataset(bad=bad), **settings)


SETTINGS = {
    "samples": (Drawing, dict(seed_by="sample", shuffle=True)),
    "in order": (Broken, dict()),
    "replaced": (Drawing, dict(on_error="replace", seed_by="sample", shuffle=True)),
    "replaced under torch's seeds": (Broken, dict(on_error="replace", shuffle=True)),
    "function": (Broken, dict(on_error=minus)),
    "batches": (InBatches, dict(seed_by="batch", shuffle=True)),
    "without batches": (Broken, dict(batch_size=None)),
    "dataset with a state": (Counting, dict()),
    "dataset with a state, few snapshots": (CountingDraws, dict(snapshot_every_n_steps=3, seed_by="sample")),
    "dataset with a state, seeds of batches": (CountingDraws, dict(snapshot_every_n_steps=3, seed_by="batch")),
    "stream": (Stream, dict()),
    "stream without batches": (Stream, dict(batch_size=None)),
    "stream with a state": (SavedStream, dict()),
    "stream with a state, few snapshots": (DrawnStream, dict(snapshot_every_n_steps=2, seed_by="sample")),
    "stream, function": (SavedStream, dict(on_error=minus, seed_by="batch")),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_resumed_epoch_goes_on_as_it_would_have(name, workers):
    dataset, kw = SETTINGS[name]
    kw = kw | dict(num_workers=workers)
    whole = as_lists(make(dataset, **kw))
    assert len(whole) > 1
    for cut in range(len(whole) + 1):
        loader = make(dataset, **kw)
        iterator = iter(loader)
        assert as_lists(itertools.islice(iterator, cut)) == whole[:cut]
        state = pickle.loads(pickle.dumps(loader.state_dict()))
        resumed = make(dataset, **kw)
        resumed.load_state_dict(state)
        assert as_lists(resumed) == whole[cut:], cut


@pytest.mark.parametrize("kw", [dict(), dict(num_workers=2), dict(num_workers=2, persistent_workers=True)], ids=str)
@pytest.mark.parametrize("seed_by", [None, "sample"])
def test_replacements_of_later_epochs(seed_by, kw):
    dataset = Broken if seed_by is None else Drawing
    kw = kw | dict(on_error="replace", seed_by=seed_by, bad=(1, 5, 20))
    loader = make(dataset, **kw)
    epochs = [as_lists(loader) for _ in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    for number, cut in itertools.product(range(3), (0, 2, 6)):
        loader = make(dataset, **kw)
        for _ in range(number):
            list(loader)
        iterator = iter(loader)
        for _ in range(cut):
            next(iterator)
        resumed = make(dataset, **kw)
        resumed.load_state_dict(loader.state_dict())
        assert as_lists(resumed) == epochs[number][cut:]
        if seed_by is not None or "persistent_workers" in kw:
            # Otherwise a new iterator draws a new base seed.
            assert [as_lists(resumed) for _ in range(number + 1, 3)] == epochs[number + 1 :]


@pytest.mark.parametrize("persistent", [False, True])
def test_a_shared_queue_and_any_order(persistent):
    kw = dict(num_workers=3, dispatch="shared_queue", in_order=False, persistent_workers=persistent)
    whole = sorted(as_lists(make(Broken)))
    loader = make(Broken, **kw)
    for _ in range(2):
        iterator = iter(loader)
        before = as_lists(itertools.islice(iterator, 2))
        resumed = make(Broken, **kw)
        resumed.load_state_dict(loader.state_dict())
        assert sorted(before + as_lists(resumed)) == whole
        assert sorted(before + as_lists(iterator)) == whole


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", ["in order", "stream with a state", "dataset with a state"])
def test_a_resumed_epoch_counts_its_own_failures(name, workers):
    dataset, kw = SETTINGS[name]
    loader = make(dataset, num_workers=workers, **kw)
    iterator = iter(loader)
    first = next(iterator)
    resumed = make(dataset, num_workers=workers, **kw)
    resumed.load_state_dict(loader.state_dict())
    list(iterator)
    list(resumed)
    rest, whole = failed(rustloader.stats(resumed)), failed(rustloader.stats(loader))
    assert whole[-len(rest) :] == rest and len(rest) == len(whole) - (1 if dataset is not SavedStream else 9)
    assert numbers([first]) == [[0, 2, 3]] if dataset is not SavedStream else [[0, 2, 3, 12]]


def to_the_limit(batches):
    """Returns the batches before the error, and the text of the error up to the number of failures."""
    delivered = []
    with pytest.raises(ErrorLimitExceeded) as caught:
        for batch in batches:
            delivered.append(torch.as_tensor(batch).tolist())
    return delivered, str(caught.value).split(" failed in this epoch")[0]


@pytest.mark.parametrize("kw", [dict(), dict(num_workers=2), dict(num_workers=2, persistent_workers=True)], ids=str)
@pytest.mark.parametrize("name", ["in order", "stream with a state", "dataset with a state"])
def test_max_errors_counts_on_after_a_resume(name, kw):
    dataset, dataset_options = SETTINGS[name]
    settings = dict(bad=(1, 6, 8, 9, 10, 11, 14, 17), max_errors=7) | dataset_options | kw
    whole = to_the_limit(make(dataset, **settings))
    assert re.match(r"\d+ samples have$", whole[1])
    for cut, back in itertools.product(range(1, len(whole[0]) + 1), range(2)):
        loader = make(dataset, **settings)
        iterator = iter(loader)
        for _ in range(cut):
            next(iterator)
        state = loader.state_dict(back=back)
        resumed = make(dataset, **settings)
        resumed.load_state_dict(state)
        resumed_iterator = iter(resumed)
        assert resumed.state_dict() == state
        rest, count = to_the_limit(resumed_iterator)
        assert (whole[0][: cut - back] + rest, count) == whole
        # A state of an earlier version has no count.
        state["_rustloader"].pop("failures", None)
        older = make(dataset, **settings)
        older.load_state_dict(state)
        iter(older)
        assert older.state_dict() == state


@pytest.mark.parametrize("workers", [0, 2])
def test_a_later_epoch_counts_anew_after_a_resume(workers):
    settings = dict(bad=(1, 5, 20), max_errors=3, num_workers=workers, persistent_workers=workers > 0)
    loader = make(Broken, **settings)
    for _ in range(2):
        iterator = iter(loader)
        next(iterator), next(iterator)
        state = loader.state_dict()
        assert state["_rustloader"]["failures"] == 2
        resumed = make(Broken, **settings)
        resumed.load_state_dict(state)
        for _ in range(2):
            list(resumed)
        list(iterator)
    ended = loader.state_dict()
    resumed = make(Broken, **settings)
    resumed.load_state_dict(ended)
    next(iter(resumed))
    assert resumed.state_dict()["_rustloader"]["failures"] == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_after_the_limit(workers):
    loader = make(Broken, num_workers=workers, max_errors=3)
    iterator = iter(loader)
    assert numbers([next(iterator)]) == [[0, 2, 3]]
    with pytest.raises(ErrorLimitExceeded):
        next(iterator)
    resumed = make(Broken, num_workers=workers)
    resumed.load_state_dict(loader.state_dict())
    assert numbers(resumed)[-1] == [16, 17, 18, 19]
