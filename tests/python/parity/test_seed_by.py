"""`seed_by` and `sample_seed()`: random numbers that depend on the place of a batch or a sample, not on its worker."""

import collections
import contextlib
import copy
import itertools
import logging
import pickle
import random
import threading

import numpy as np
import pytest
import torch
from generators import drawn, main_state
from sample_data import Numbers, as_list
from support import BOTH, DataLoader, TorchDataLoader, in_time, rustloader
from torch.utils.data import IterableDataset, RandomSampler, Subset, get_worker_info
from torch.utils.data._utils import fetch

from rustloader.fetch.seeds import ordinal_of

pytestmark = pytest.mark.ours

UNITS = ["batch", "sample"]
BASE = 7


class Draws(Numbers):
    """Sample i is (i, what it drew)."""

    def __getitem__(self, i):
        return int(i), drawn()


class BatchDraws(Draws):
    """The same, all samples of a batch in one call."""

    def __getitems__(self, indices):
        return [(int(i), drawn()) for i in indices]


class Stream(IterableDataset):
    """(number, what it drew), `n` times in each worker."""

    def __init__(self, n):
        self.n = n

    def __iter__(self):
        for i in range(self.n):
            yield i, drawn()


class Quiet(Stream):
    """The same without draws."""

    def __iter__(self):
        return iter(range(self.n))


def with_draws(samples):
    """A collate_fn that draws, too."""
    return samples, drawn()


def make(workers, seed_by, dataset=None, base=BASE, cls=DataLoader, **kw):
    kw = dict(batch_size=3, collate_fn=with_draws) | kw
    torch.manual_seed(base)
    return cls(Draws(10) if dataset is None else dataset, num_workers=workers, seed_by=seed_by, **kw)


def epochs(loader, count=3):
    return [list(loader) for _ in range(count)]


def base_seed(base=BASE, generator=None):
    """The base seed that torch draws at the first iter()."""
    if generator is None:
        generator = torch.Generator().manual_seed(base)
    return torch.empty((), dtype=torch.int64).random_(generator=generator).item()


def philox(base, place, ordinal, worker, epoch):
    counter = place + (ordinal << 64) + (worker << 128) + (epoch << 192)
    # NumPy increments the counter before its first block.
    return [int(word) for word in np.random.Philox(counter=(counter - 1) % 2**256, key=base).random_raw(4)]


def draws_of(base, place, ordinal, worker=0, epoch=0):
    """The result that `drawn()` must have at a place."""
    first, second, third, _ = philox(base, place, ordinal, worker, epoch)
    seed = first % 2**63
    rand = torch.rand((), generator=torch.Generator().manual_seed(seed)).item()
    return rand, random.Random(second).random(), np.random.RandomState(third % 2**32).rand(), seed


# The seeds as a function of the place


def test_the_words_are_numpys_philox():
    dice = random.Random(3)
    for _ in range(200):
        places = [dice.choice([0, 1, dice.getrandbits(64), 2**64 - 1]) for _ in range(5)]
        assert rustloader._core.seed_words(*places) == philox(*places)


@pytest.mark.parametrize("workers", [0, 2])
def test_each_sample_and_each_collating_has_the_seed_of_its_place(workers):
    base = base_seed()
    for epoch, batches in enumerate(epochs(make(workers, "sample"))):
        for number, (samples, collated) in enumerate(batches):
            assert [i for i, _ in samples] == list(range(10))[3 * number : 3 * number + 3]
            for k, (_, sample) in enumerate(samples):
                assert sample == draws_of(base, k + 1, number, epoch=epoch)
            assert collated == draws_of(base, 0, number, epoch=epoch)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_has_one_seed_and_its_streams_go_on_through_its_samples(workers):
    base = base_seed()
    for epoch, batches in enumerate(epochs(make(workers, "batch"))):
        for number, (samples, collated) in enumerate(batches):
            first, second, third, _ = philox(base, 0, number, 0, epoch)
            generator = torch.Generator().manual_seed(first % 2**63)
            python_random, numpy_random = random.Random(second), np.random.RandomState(third % 2**32)
            for actual in (*(sample for _, sample in samples), collated):
                expected = torch.rand((), generator=generator).item(), python_random.random(), numpy_random.rand()
                assert actual == (*expected, first % 2**63)


def test_these_numbers_must_never_change():
    """A program must be able to repeat a run with a later version."""
    batches = {by: list(make(0, by, Draws(3), batch_size=2, base=0))[1] for by in UNITS}
    assert batches == PINNED
    assert list(make(2, "sample", Draws(3), batch_size=2, base=0))[1] == PINNED["sample"]
    assert next(iter(make(0, "sample", Stream(1), base=0))) == PINNED_STREAM


OF_BATCH = (0.5971071720123291, 0.6116192573391606, 0.47820127241358656, 6535690549999984045)
PINNED = {
    "batch": (
        [(2, OF_BATCH)],
        (0.28203094005584717, 0.2041083237253173, 0.8905676133015425, 6535690549999984045),
    ),
    "sample": (
        [(2, (0.07801485061645508, 0.34078921030567266, 0.38300240658838125, 8095129287605129699))],
        OF_BATCH,
    ),
}
PINNED_STREAM = (
    [(0, (0.7132023572921753, 0.7438672829179199, 0.5718557268335438, 3932286601333816797))],
    (0.5993509888648987, 0.27046611494338346, 0.6409696832311579, 4879192079769369485),
)


# The same batches in each setup

WAYS = {
    "1": dict(workers=1),
    "2": dict(workers=2),
    "4, one each": dict(workers=4, prefetch_factor=1),
    "persistent": dict(workers=2, persistent_workers=True),
    "4, persistent": dict(workers=4, persistent_workers=True),
    "forkserver": dict(workers=2, multiprocessing_context="forkserver"),
    "spawn, persistent": dict(workers=2, multiprocessing_context="spawn", persistent_workers=True),
    "as they are ready": dict(workers=2, in_order=False),
    "as they are ready, persistent": dict(workers=3, in_order=False, persistent_workers=True),
}


# Starting an interpreter takes seconds.
@pytest.mark.parametrize(
    ("way", "seed_by"),
    [it for it in itertools.product(WAYS, UNITS) if it[0] != "spawn, persistent" or it[1] == "sample"],
)
def test_the_batches_are_those_of_no_workers(way, seed_by):
    def run(workers, in_order=True, **kw):
        sampler = RandomSampler(range(10), replacement=True, num_samples=17, generator=torch.Generator().manual_seed(1))
        runs = epochs(make(workers, seed_by, sampler=sampler, in_order=in_order, **kw))
        return runs if in_order else [sorted(run) for run in runs]

    wanted = run(0, in_order=WAYS[way].get("in_order", True))
    assert run(**WAYS[way]) == wanted
    seen = collections.Counter(sample for run in wanted for samples, _ in run for _, sample in samples)
    assert set(seen.values()) == {1}, "a repeated index or another epoch has the same numbers"


def test_persistent_workers_that_are_started_again_know_the_epoch():
    wanted = epochs(make(0, "sample"))
    loader = make(2, "sample", persistent_workers=True)
    assert list(loader) == wanted[0]
    loader._iterator._shutdown_workers()
    assert epochs(loader, 2) == wanted[1:]


class Gated(Draws):
    """Sample 0 waits while `shut` exists."""

    def __init__(self, n, shut):
        super().__init__(n)
        self.shut = shut

    def __getitem__(self, i):
        while i == 0 and self.shut.exists():
            threading.Event().wait(0.01)
        return super().__getitem__(i)


@pytest.mark.forks
def test_an_epoch_that_could_not_begin_gives_its_number_to_the_next(tmp_path):
    shut = tmp_path / "shut"
    wanted = epochs(make(0, "sample"))
    loader = make(2, "sample", Gated(10, shut), persistent_workers=True, timeout=1)

    def whole_epoch():
        (_, iterator), batches = in_time(iter, loader), []
        while (it := in_time(next, iterator))[0] == "value":
            batches.append(it[1])
        assert it == ("end",)
        return batches

    assert whole_epoch() == wanted[0]
    shut.touch()
    in_time(iter, loader)
    for _ in range(2):
        with pytest.raises(rustloader.LoaderTimeoutError):
            iter(loader)
    shut.unlink()
    assert whole_epoch() == wanted[2]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_that_refuses_attributes_has_seeds(workers):
    class Frozen(DataLoader):
        def __setattr__(self, name, value):
            if name.startswith("_rustloader_epochs"):
                raise AttributeError(name)
            super().__setattr__(name, value)

    wanted = epochs(make(workers, "sample"))
    assert epochs(make(workers, "sample", cls=Frozen)) == wanted


def test_the_base_seed_comes_from_the_loaders_generator():
    generator = torch.Generator().manual_seed(11)
    base = base_seed(generator=torch.Generator().manual_seed(11))
    for workers in (0, 2):
        loader = make(workers, "sample", generator=generator.clone_state())
        assert [collated for _, collated in loader] == [draws_of(base, 0, number) for number in range(4)]
        # Later draws have no effect.
        assert next(iter(loader))[1] == draws_of(base, 0, 0, epoch=1)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_pickled_loader_goes_on_with_the_next_epoch(workers):
    wanted = epochs(make(0, "sample"))
    loader = make(workers, "sample")
    assert list(loader) == wanted[0]
    copy = pickle.loads(pickle.dumps(loader))
    torch.manual_seed(99)
    assert list(copy) == wanted[1] and list(loader) == wanted[1] and list(copy) == wanted[2]


# Samples without batches; datasets and fetchers that make whole batches


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("seed_by", UNITS)
def test_without_batches_a_sample_and_its_conversion_have_their_seeds(workers, seed_by):
    base = base_seed()
    for number, ((i, sample), converted) in enumerate(make(workers, seed_by, batch_size=None)):
        assert i == number
        if seed_by == "sample":
            assert sample == draws_of(base, 1, number) and converted == draws_of(base, 0, number)
        else:
            assert sample == draws_of(base, 0, number) and converted[3] == sample[3] and converted != sample


def notes(caplog):
    return [it.getMessage() for it in caplog.records if it.name == "rustloader" and it.levelno == logging.INFO]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("persistent", [False, True])
def test_a_dataset_that_makes_whole_batches_gets_the_batchs_seed(workers, persistent, caplog):
    caplog.set_level(logging.INFO, "rustloader")
    loader = make(workers, "sample", BatchDraws(10), persistent_workers=persistent and workers > 0)
    assert epochs(loader) == epochs(make(0, "batch"))
    (note,) = notes(caplog)
    assert 'seed_by="sample" seeds each batch' in note and "__getitems__ of BatchDraws" in note
    # Another loader logs it again; with batch_size=None there is no such call.
    next(iter(make(workers, "sample", BatchDraws(10))))
    next(iter(make(workers, "sample", BatchDraws(10), batch_size=None)))
    assert len(notes(caplog)) == 2


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_of_a_subset_have_their_own_seeds(workers, caplog):
    """torch's Subset has a `__getitems__` that only reads one sample after the other."""
    caplog.set_level(logging.INFO, "rustloader")
    wanted = epochs(make(0, "sample", Draws(6)))
    subset = Subset(Draws(10), [0, 1, 2, 3, 4, 5])
    for dataset in (subset, Subset(Subset(Draws(20), range(10)), range(6))):
        assert epochs(make(workers, "sample", dataset)) == wanted
    assert notes(caplog) == []
    # These do make whole batches.
    own = Subset(Draws(10), range(6))
    own.__getitems__ = lambda indices: [own[i] for i in indices]
    for dataset in (Subset(BatchDraws(10), range(6)), *([own] if workers == 0 else [])):
        assert epochs(make(workers, "sample", dataset)) == epochs(make(0, "batch", subset))
        assert len(notes(caplog)) == 1
        caplog.clear()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.forks
def test_a_fetcher_that_a_library_replaced_gets_the_batchs_seed_and_plain_indices(workers, monkeypatch, caplog):
    def foreign(self, indices):
        assert type(indices) is list
        return self.collate_fn([self.dataset[i] for i in indices])

    caplog.set_level(logging.INFO, "rustloader")
    wanted = list(make(0, "batch"))
    monkeypatch.setattr(fetch._MapDatasetFetcher, "fetch", foreign)
    assert list(make(workers, "sample")) == wanted
    assert len(notes(caplog)) == 1 and "fetcher was replaced" in notes(caplog)[0]


# Iterable datasets


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_samples_of_a_stream_are_counted_in_their_worker(workers, persistent):
    base = base_seed()
    loader = make(workers, "sample", Stream(5), batch_size=2, persistent_workers=persistent and workers > 0)
    for epoch, batches in enumerate(epochs(loader)):
        by_worker = collections.defaultdict(list)
        for number, batch in enumerate(batches):
            by_worker[number % max(workers, 1)].append(batch)
        for worker, of_worker in by_worker.items():
            samples = [sample for batch, _ in of_worker for _, sample in batch]
            assert samples == [draws_of(base, 1, i, worker + 1, epoch) for i in range(5)]
            assert [it for _, it in of_worker] == [draws_of(base, 0, i, worker + 1, epoch) for i in range(3)]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_batches_of_a_stream_are_counted_in_their_worker(workers):
    base = base_seed()
    for epoch, batches in enumerate(epochs(make(workers, "batch", Stream(5), drop_last=True, batch_size=2))):
        assert len(batches) == 2 * max(workers, 1)
        for number, (samples, collated) in enumerate(batches):
            worker, ordinal = number % max(workers, 1), number // max(workers, 1)
            assert samples[0][1] == draws_of(base, 0, ordinal, worker + 1, epoch)
            assert samples[0][1][3] == samples[1][1][3] == collated[3] and samples[0][1] != samples[1][1] != collated


# What stays torch's


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("seed_by", UNITS)
@pytest.mark.parametrize("kind", ["shuffle", "generator", "stream"])
def test_mains_own_streams_are_as_without_the_option(workers, seed_by, kind):
    def trace(cls, **kw):
        torch.manual_seed(5), random.seed(5), np.random.seed(5)
        random.gauss(0, 1), np.random.randn()
        generator = torch.Generator().manual_seed(6)
        more = dict(shuffle=True, generator=generator) if kind == "generator" else dict(shuffle=kind == "shuffle")
        loader = cls(datasets[cls], batch_size=2, num_workers=workers, **more, **kw)
        steps = []
        for taken in (2, 99):
            iterator = iter(loader)
            steps.append((main_state(generator), random.gauss(0, 1), np.random.randn()))
            steps += [main_state(generator) for _ in itertools.islice(iterator, taken)]
            del iterator
        return steps

    # Without workers, draws in samples of torch's loader advance main's streams.
    datasets = dict(zip(BOTH, (Quiet(4), Stream(4)) if kind == "stream" else (Numbers(9), Draws(9)), strict=True))
    seen = trace(DataLoader, seed_by=seed_by, collate_fn=with_draws)
    assert seen == trace(TorchDataLoader) and len(seen) > 4


class FailsAt(Draws):
    """Sample 4 draws and fails."""

    def __getitem__(self, i):
        sample = super().__getitem__(i)
        if i == 4:
            raise ValueError("sample 4 is bad")
        return sample


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("seed_by", UNITS)
def test_an_error_leaves_the_other_batches_and_mains_streams_as_they_were(workers, seed_by):
    wanted = list(make(0, seed_by))
    iterator = iter(make(workers, seed_by, FailsAt(10)))
    before = main_state()
    assert next(iterator) == wanted[0]
    with pytest.raises(ValueError, match="sample 4 is bad"):
        next(iterator)
    with pytest.raises(RuntimeError, match="sample_seed"):
        rustloader.sample_seed()
    assert list(iterator) == wanted[2:]
    assert main_state() == before


def worker_draws(worker_id):
    """A worker_init_fn that keeps what it draws, and fails if there is a seed."""
    info = get_worker_info()
    with contextlib.suppress(RuntimeError):
        rustloader.sample_seed()
        raise AssertionError("a seed before the first sample")
    info.dataset.begun = torch.rand(()).item(), random.random(), np.random.rand()


class Begins(Stream):
    """Each sample is what worker_init_fn and iter() drew."""

    begun = None

    def __iter__(self):
        with pytest.raises(RuntimeError, match="sample_seed"):
            rustloader.sample_seed()
        return iter([(self.begun, torch.rand(()).item())] * self.n)


def test_worker_init_fn_and_iter_draw_from_torchs_streams():
    def run(cls, **kw):
        torch.manual_seed(3)
        loader = cls(Begins(2), num_workers=2, collate_fn=as_list, worker_init_fn=worker_draws, **kw)
        return [list(loader) for _ in range(2)]

    assert run(DataLoader, seed_by="sample") == run(TorchDataLoader)
    # Persistent workers call iter() again after they have made samples.
    assert len(run(DataLoader, seed_by="sample", persistent_workers=True)[1]) == 4


# Resumed epochs


def test_the_ordinals_of_a_resumed_epoch():
    dice = random.Random(5)
    for _ in range(300):
        first = dice.randrange(20)
        ahead = dice.sample(range(40), dice.randrange(12))
        wanted = [ordinal for ordinal in range(first, 60) if ordinal not in ahead]
        assert [ordinal_of(k, first, ahead) for k in range(len(wanted))][:20] == wanted[:20]
        # Before the first ordinal, nothing is left out.
        assert [ordinal_of(-k, first, ahead) for k in (1, 2, 3)] == [first - 1, first - 2, first - 3]
    assert ordinal_of(3, 0, ()) == 3


# sample_seed()


def test_elsewhere_there_is_no_seed():
    for _ in make(0, "sample"):
        with pytest.raises(RuntimeError, match='seed_by="sample"'):
            rustloader.sample_seed()
    iterator = iter(make(0, "sample", Stream(3)))
    next(iterator)
    with pytest.raises(RuntimeError, match="sample_seed"):
        rustloader.sample_seed()


class InThread(Numbers):
    """Each sample is the result of sample_seed() in a thread that the dataset has started."""

    def __getitem__(self, i):
        answers = []

        def ask():
            try:
                answers.append(rustloader.sample_seed())
            except RuntimeError as error:
                answers.append(str(error))

        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        return answers


@pytest.mark.parametrize("workers", [0, 1])
def test_another_thread_of_the_dataset_has_no_seed(workers):
    (batch,) = make(workers, "sample", InThread(1), collate_fn=as_list)
    assert "in the thread that makes the sample" in batch[0][0]


class Nested(Numbers):
    """Sample i reads a loader of its own, and draws before and after."""

    def __getitem__(self, i):
        before = drawn()
        inner = list(DataLoader(Draws(2), seed_by="sample", collate_fn=as_list))
        return before, len(inner), drawn()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_within_a_sample_leaves_its_streams_alone(workers):
    for number, (samples, _) in enumerate(make(workers, "sample", Nested(4), batch_size=2)):
        for k, (before, count, after) in enumerate(samples):
            assert before == draws_of(base_seed(), k + 1, number) and count == 2
            first, second, third, _ = philox(base_seed(), k + 1, number, 0, 0)
            python_random, numpy_random = random.Random(second), np.random.RandomState(third % 2**32)
            python_random.random(), numpy_random.rand()
            assert after[1:] == (python_random.random(), numpy_random.rand(), first % 2**63)


def test_an_epoch_whose_worker_init_fn_fails_gives_its_number_to_the_next(tmp_path):
    """A loader that can resume has the error in `iter`."""

    def init(worker_id):
        with contextlib.suppress(FileNotFoundError):
            (tmp_path / "fail").unlink()
            raise OSError("once")

    def loader():
        torch.manual_seed(BASE)
        return make(1, "sample", cls=rustloader.StatefulDataLoader, worker_init_fn=init)

    expected = epochs(loader(), 1)
    (tmp_path / "fail").touch()
    failing = loader()
    with pytest.raises(OSError, match="once"):
        iter(failing)
    torch.manual_seed(BASE)
    assert epochs(failing, 1) == expected
    assert failing.state_dict()["_rustloader"]["seeds"]["epoch"] == 0


def test_the_state_of_a_copy_has_the_epochs_of_its_loader():
    loader = make(1, "sample", cls=rustloader.StatefulDataLoader)
    epochs(loader, 3)
    copied = copy.copy(loader)
    other = make(1, "sample", base=BASE + 1, cls=rustloader.StatefulDataLoader)
    other.load_state_dict(copied.state_dict())
    assert epochs(other, 1) == epochs(copied, 1)
