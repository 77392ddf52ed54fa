"""`on_error`: errors that are not a sample's failure, functions and replacements that fail, unusual datasets."""

import signal

import pytest
import torch
from failing_samples import Broken, Endless, Stream, failed, index_batches, numbers
from sample_data import Numbers, as_list
from support import DataLoader, rustloader
from torch.utils.data import IterableDataset, Subset, TensorDataset
from torch.utils.data._utils import fetch

from rustloader.fetch import guard as guards
from rustloader.fetch.tables import TableFetcher
from rustloader.iterator import failures
from rustloader.stateful_dataloader import StatefulDataLoader

pytestmark = [
    pytest.mark.ours,
    pytest.mark.filterwarnings("ignore:.*multi-thread:DeprecationWarning"),
    pytest.mark.filterwarnings(
        "ignore:Exception in thread rustloader-sample:pytest.PytestUnhandledThreadExceptionWarning"
    ),
]

WORKERS = pytest.mark.parametrize("workers", [0, 1])
KINDS = pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader], ids=["plain", "stateful"])


def bad_collate(samples):
    if 8 in numbers([torch.stack(samples)])[0]:
        raise KeyError("collate")
    return as_list(samples)


def bad_init(worker_id):
    raise KeyError("init")


class BadIter(IterableDataset):
    def __iter__(self):
        raise KeyError("iter")


@WORKERS
def test_other_errors_are_raised_as_torch_does(workers):
    dataset = Broken(12, [1, 9])
    loader = DataLoader(dataset, batch_size=4, num_workers=workers, on_error="skip", collate_fn=bad_collate)
    iterator = iter(loader)
    assert [[int(sample[0]) for sample in next(iterator)] for _ in range(2)] == [[0, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(KeyError, match="collate"):
        next(iterator)
    with pytest.raises(StopIteration):
        next(iterator)
    assert failed(rustloader.stats(loader)) == [(1, "skipped")], "failures of a batch that raises do not count"
    with pytest.raises(KeyError, match="iter"):
        next(iter(DataLoader(BadIter(), num_workers=workers, on_error="skip")))
    if workers:
        loader = DataLoader(Broken(12), num_workers=1, on_error="skip", worker_init_fn=bad_init)
        with pytest.raises(KeyError, match="init"):
            next(iter(loader))
        assert rustloader.stats(loader).faults.skipped == 0


@pytest.mark.parametrize("at", [1, -1], ids=["the second failure", "the last failure"])
@pytest.mark.parametrize("size", [8, 4], ids=["a batch follows", "the last batch"])
@pytest.mark.parametrize("bad", [(0, 1, 2, 3), (0, 1, 2)], ids=["empty batch", "batch"])
@pytest.mark.parametrize("limit", [None, 2])
@KINDS
@WORKERS
def test_an_interrupt_between_failures_loses_none_of_them(monkeypatch, workers, kind, limit, bad, size, at):
    class Cut(Exception):
        pass

    class Log:
        def warning(self, text, title, name, *_):
            if name == f"sample {bad[at]}":
                raise Cut

    monkeypatch.setattr(failures, "fault_log", Log())
    loader = kind(Broken(size, bad), batch_size=4, num_workers=workers, on_error="skip", max_errors=limit)
    iterator = iter(loader)
    with pytest.raises(Cut):
        next(iterator)
    if limit is None:
        # torch's iterator without workers loses the batch.
        loses = kind is DataLoader and not workers
        assert numbers(iterator) == [[3], [4, 5, 6, 7]][len(bad) == 4 or loses : 1 + (size == 8)]
    else:
        for _ in range(2):
            with pytest.raises(rustloader.ErrorLimitExceeded):
                next(iterator)
    assert failed(rustloader.stats(loader)) == [(i, "skipped") for i in bad]


def test_failures_left_by_an_interrupted_epoch_do_not_count_in_the_next(monkeypatch):
    class Cut(Exception):
        pass

    class Log:
        def warning(self, *_):
            monkeypatch.undo()
            raise Cut

    options = dict(batch_size=4, num_workers=1, on_error="skip", max_errors=4, persistent_workers=True)
    loader = DataLoader(Broken(8, range(4)), **options)
    monkeypatch.setattr(failures, "fault_log", Log())
    with pytest.raises(Cut):
        next(iter(loader))
    assert numbers(loader) == [[4, 5, 6, 7]]
    assert rustloader.stats(loader).faults.skipped == 5


class Exits(Numbers):
    def __getitem__(self, i):
        raise SystemExit(3)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_sample_that_ends_the_process_is_no_failure(threads):
    with pytest.raises(SystemExit):
        list(DataLoader(Exits(2), on_error="skip"))
    with pytest.raises((rustloader.WorkerDiedError, SystemExit)):
        list(DataLoader(Exits(2), num_workers=1, worker_threads=threads, on_error="skip", batch_size=2))


class Timeout(Exception):
    pass


class Interrupted(Numbers):
    """A signal arrives once, at sample 1."""

    done = False

    def __getitem__(self, i):
        if i == 1 and not self.done:
            self.done = True
            signal.raise_signal(signal.SIGUSR1)
            for _ in range(3):  # the handler runs here at the latest
                pass
        return super().__getitem__(i)


class InterruptedBatches(Interrupted):
    def __getitems__(self, indices):
        return [self[i] for i in indices]


class InterruptedStream(IterableDataset):
    def __init__(self, n):
        self.inner = Interrupted(n)

    def __iter__(self):
        return map(self.inner.__getitem__, range(self.inner.n))


@KINDS
@pytest.mark.parametrize("dataset", [Interrupted, InterruptedBatches, InterruptedStream])
def test_what_a_signal_handler_raises_without_workers_is_no_failure(dataset, kind):
    def handler(number, frame):
        raise Timeout

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        loader = kind(dataset(6), batch_size=2, on_error="skip")
        iterator = iter(loader)
        with pytest.raises(Timeout):
            next(iterator)
        rest = [batch.tolist() for batch in iterator]
    finally:
        signal.signal(signal.SIGUSR1, before)
    if dataset is InterruptedStream:
        assert rest[-1] == [4, 5]
    else:
        # torch's iterator loses the batch.
        assert rest == [[0, 1], [2, 3], [4, 5]][kind is DataLoader :]
    assert rustloader.stats(loader).faults.skipped == 0


def raises(index, error):
    raise RuntimeError(f"no substitute for {index}") from error


def stops(index, error):
    raise StopIteration


@WORKERS
@pytest.mark.parametrize("dataset", [Broken, Stream])
def test_an_error_of_the_function_is_raised_in_the_place_of_the_batch(dataset, workers):
    iterator = iter(DataLoader(dataset(12), batch_size=4, num_workers=workers, on_error=raises))
    for place, batch in enumerate([1, 4, None] if dataset is Broken else [1]):
        if batch is None:
            assert numbers([next(iterator)]) == [index_batches()[place]]
        else:
            with pytest.raises(RuntimeError, match=f"no substitute for {batch if dataset is Broken else None}"):
                next(iterator)
    with pytest.raises(RuntimeError, match="StopIteration"):
        list(DataLoader(dataset(12), batch_size=4, num_workers=workers, on_error=stops))


def test_ten_replacements_are_tried():
    fetched = []

    class Recording(Broken):
        def __getitem__(self, i):
            fetched.append(i)
            return super().__getitem__(i)

    with pytest.raises(ValueError, match="bad 3"):
        next(iter(DataLoader(Recording(20, range(20)), batch_size=1, sampler=[3], on_error="replace")))
    assert len(fetched) == 11 and fetched[0] == 3 and len(set(fetched)) > 5 and {*fetched[1:]} <= {*range(20)} - {3}
    with pytest.raises(ValueError, match="bad 0"):  # no other sample could replace it
        next(iter(DataLoader(Broken(1, [0]), on_error="replace")))


class Words(Broken):
    def __getitem__(self, word):
        if word == "b":
            raise ValueError("bad word")
        return word


class Unsized(Broken):
    __len__ = None


@WORKERS
def test_replacements_need_integer_indices_and_a_length(workers):
    settings = dict(sampler=["a", "b", "c"], num_workers=workers, collate_fn=as_list)
    with pytest.raises(TypeError, match=r"""on_error="replace" needs integer indices .* index 'b' of a Words"""):
        list(DataLoader(Words(), on_error="replace", **settings))
    with pytest.raises(TypeError, match="a dataset with a length"):
        list(DataLoader(Unsized(), sampler=range(4), num_workers=workers, on_error="replace"))
    loader = DataLoader(Words(), on_error="skip", **settings)
    assert list(loader) == [["a"], ["c"]] and failed(rustloader.stats(loader)) == [("b", "skipped")]


@WORKERS
@pytest.mark.parametrize("samples", [0, 6])
def test_an_iterator_that_fails_endlessly_is_abandoned(samples, workers):
    loader = DataLoader(Endless(samples), batch_size=4, num_workers=workers, on_error="skip")
    iterator = iter(loader)
    for _ in range(samples // 4):
        next(iterator)
    with pytest.raises(ValueError, match=f"bad {samples + guards.MAX_CONSECUTIVE_FAILURES}"):
        next(iterator)
    iterator = iter(DataLoader(Endless(), batch_size=300, num_workers=workers, on_error=lambda index, error: 0))
    with pytest.raises(ValueError, match="bad 1000"):
        for _ in range(4):
            assert next(iterator).tolist() == [0] * 300


@WORKERS
def test_an_iterator_that_fails_now_and_then_is_not_abandoned(workers):
    bad = [i for i in range(3000) if i % 999]
    assert numbers(DataLoader(Stream(3000, bad), num_workers=workers, on_error="skip")) == [[0], [999], [1998], [2997]]


class OneCall(Broken):
    """Returns a whole batch, which cannot be split into samples."""

    def __getitems__(self, indices):
        if self.bad.intersection(indices):
            raise ValueError("bad batch")
        return {"all": torch.tensor(indices)}


def test_batches_that_are_built_in_one_call():
    collate = dict(batch_size=4, num_workers=1, collate_fn=as_list)
    loader = DataLoader(OneCall(), on_error="skip", **collate)
    with pytest.raises(TypeError, match="__getitems__ of OneCall must return a list of samples, got dict"):
        next(iter(loader))
    assert list(DataLoader(OneCall(8, []), on_error="skip", **collate)) == [["all"]] * 2


@WORKERS
def test_tables_keep_their_gather(workers):
    table = TensorDataset(torch.arange(12.0), torch.arange(12))
    for dataset in (table, Subset(table, range(12))):
        loader = DataLoader(
            dataset, batch_sampler=[[0, 1], [2, 77, 3], [99], [4]], num_workers=workers, on_error="skip"
        )
        assert [b.tolist() for _, b in loader] == [[0, 1], [2, 3], [4]]
        assert [i for i, _ in failed(rustloader.stats(loader))] == [77, 99]
        iterator = iter(DataLoader(dataset, on_error="skip"))
        assert (
            isinstance(iterator._dataset_fetcher.inner, TableFetcher) and iterator._dataset_fetcher.dataset is dataset
        )


@pytest.mark.forks
@pytest.mark.warns
def test_a_fetcher_that_was_replaced_is_left_alone(monkeypatch, caplog):
    monkeypatch.setattr(fetch._MapDatasetFetcher, "fetch", lambda self, index: self.dataset[index[0]])
    for workers in (0, 1):
        loader = DataLoader(Broken(), batch_size=4, num_workers=workers, on_error="skip")
        for _ in range(2):
            with pytest.raises(ValueError, match="bad 4"):
                list(loader)
        messages = [it.getMessage() for it in caplog.records if it.name == "rustloader"]
        assert messages == ["a DataLoader: on_error has no effect: torch's fetcher was replaced"] * (workers + 1)
