"""`on_error`: failing samples are skipped or replaced, however the batches are produced."""

import functools
import itertools

import pytest
import torch
from failing_samples import (
    BAD,
    SIZE,
    Broken,
    CalledByFetcher,
    Drawing,
    InBatches,
    Stream,
    failed,
    index_batches,
    left,
    minus,
    negated,
    numbers,
)
from pinning_support import pinning
from sample_data import as_list
from support import DataLoader, rustloader
from torch.utils.data import Subset
from torch.utils.data._utils import fetch

from rustloader._core import seed_words
from rustloader.stateful_dataloader import StatefulDataLoader

pytestmark = [
    pytest.mark.ours,
    pytest.mark.filterwarnings("ignore:.*multi-thread:DeprecationWarning"),
]

# `make stress KIND=restarts` and `KIND=soak` skip samples under the other options.
SETTINGS = {
    "no workers": dict(num_workers=0),
    "two workers": dict(num_workers=2),
    "more workers than batches": dict(num_workers=7),
    "threads": dict(num_workers=2, worker_threads=3),
    "seeds of samples": dict(num_workers=2, seed_by="sample"),
    "seeds without workers": dict(num_workers=0, seed_by="sample"),
    "persistent": dict(num_workers=2, persistent_workers=True),
    "spawn": dict(num_workers=2, multiprocessing_context="spawn", persistent_workers=True),
}
DATASETS = {
    "samples": Broken,
    "batches": InBatches,
    "subset": lambda: Subset(Broken(2 * SIZE), range(SIZE)),
    "subset of batches": lambda: Subset(InBatches(2 * SIZE), range(SIZE)),
}
POLICIES = {"skip": ("skip", left, "skipped"), "function": (minus, negated, "replaced")}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dataset", DATASETS)
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader], ids=["plain", "stateful"])
def test_batches_are_those_without_the_failing_samples(kind, name, dataset, policy):
    on_error, expected, action = POLICIES[policy]
    loader = kind(DATASETS[dataset](), batch_size=4, on_error=on_error, **SETTINGS[name])
    for _ in range(2):
        assert numbers(loader) == expected(index_batches())
    assert failed(rustloader.stats(loader)) == [(i, action) for i in BAD] * 2


@pytest.mark.parametrize("workers", [0, 2])
def test_index_batches_of_a_sampler(workers):
    batches = [[3, 1], [4], [], [5, 5, 2], [7, 6], [0]]
    loader = DataLoader(
        Broken(), batch_sampler=batches, num_workers=workers, on_error="skip", collate_fn=lambda samples: len(samples)
    )
    # An index batch without indices does not count as one whose samples have all failed.
    assert list(loader) == [1, 0, 1, 1]
    assert [i for i, _ in failed(rustloader.stats(loader))] == [1, 4, 5, 5, 7, 6]


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader], ids=["plain", "stateful"])
def test_without_batches_a_failed_sample_is_skipped_or_replaced_by_a_function(kind, workers):
    loader = kind(Broken(), batch_size=None, num_workers=workers, on_error="skip")
    assert [int(sample[0]) for sample in loader] == [i for i in range(SIZE) if i not in BAD]
    loader = kind(Broken(), batch_size=None, num_workers=workers, on_error=minus)
    assert [int(sample[0]) for sample in loader] == [-i if i in BAD else i for i in range(SIZE)]


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader], ids=["plain", "stateful"])
def test_batches_that_are_all_empty(kind, workers):
    loader = kind(
        Broken(8, range(8)), batch_size=2, num_workers=workers, on_error="skip", persistent_workers=bool(workers)
    )
    for _ in range(2):
        iterator = iter(loader)
        assert list(iterator) == []
        with pytest.raises(StopIteration):
            next(iterator)
    assert [i for i, _ in failed(rustloader.stats(loader))] == [*range(8)] * 2


def test_thousands_of_empty_batches_are_passed_over():
    loader = DataLoader(Broken(3001, range(3000)), num_workers=1, on_error="skip")
    assert numbers(loader) == [[3000]]
    faults = rustloader.stats(loader).faults
    assert (faults.skipped, len(faults.failures), faults.unlisted_failures) == (3000, 1000, 2000)


def chunks(items, size=4):
    return [items[at : at + size] for at in range(0, len(items), size)]


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("policy", ["skip", "replace", "function"])
@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader], ids=["plain", "stateful"])
def test_iterable_datasets_continue_with_the_next_sample(kind, policy, workers):
    on_error, good = policy, [i for i in range(SIZE) if i not in BAD]
    if policy == "function":
        on_error, good = minus, [-i if i in BAD else i for i in range(SIZE)]
    action = "replaced" if policy == "function" else "skipped"
    for kw in (dict(), dict(persistent_workers=True), dict(seed_by="sample"), dict(drop_last=True)):
        if not workers and "persistent_workers" in kw:
            continue
        loader = kind(Stream(), batch_size=4, num_workers=workers, on_error=on_error, **kw)
        batches = [batch for batch in chunks(good) if len(batch) == 4 or "drop_last" not in kw]
        for _ in range(2):
            # Two workers take turns, and each has all samples.
            assert numbers(loader) == [batch for batch in batches for _ in range(max(workers, 1))]
        failures = failed(rustloader.stats(loader))
        assert failures == [(None, action)] * (len(BAD) * 2 * max(workers, 1))
    loader = kind(Stream(), batch_size=None, num_workers=workers, on_error=on_error)
    assert [*loader] == [i for i in good for _ in range(max(workers, 1))]


def replaced(batches, base_seed, epoch, length=SIZE, bad=BAD):
    """The samples delivered with `on_error="replace"`, and the samples that failed, in order."""
    results, failures = [], []
    for batch in batches:
        samples = []
        for i in batch:
            attempt, chosen = 0, i
            while chosen in bad:
                failures.append(chosen)
                chosen = seed_words(base_seed, attempt, i, 2**64 - 1, epoch)[0] % (length - 1)
                chosen += chosen >= i  # never the sample itself
                attempt += 1
            samples.append(chosen)
        results.append(samples)
    return results, failures


@pytest.mark.parametrize("seed_by", [None, "batch", "sample"])
@pytest.mark.parametrize("dataset", [Drawing, InBatches, functools.partial(Subset, Drawing(50, BAD), range(SIZE))])
def test_replacements_do_not_depend_on_the_workers(dataset, seed_by):
    dataset = dataset()
    runs = []
    for kw in (
        dict(num_workers=0),
        dict(num_workers=1),
        dict(num_workers=2, persistent_workers=True),
        dict(num_workers=2, dispatch="shared_queue"),
        dict(num_workers=2, worker_threads=3),
    ):
        torch.manual_seed(3)
        loader = DataLoader(dataset, batch_size=4, on_error="replace", seed_by=seed_by, **kw)
        runs.append([torch.cat([*loader]) for _ in range(2)])
    base_seed = rebuilt_base_seed(3)
    failures = []
    for number in range(1 if seed_by is None else 2):
        expected, failing = replaced(index_batches(), base_seed, number)
        failures += [(i, "replaced") for i in failing]
        assert all(run[number][:, 0].tolist() == [*itertools.chain(*expected)] for run in runs)
    assert not torch.equal(runs[0][0], runs[0][1])
    if seed_by == "sample" and not isinstance(dataset, InBatches):
        # Threads share generators.
        assert all(torch.equal(a, b) for run in runs[1:4] for a, b in zip(runs[0], run, strict=True))
    assert failed(rustloader.stats(loader))[: len(failures)] == failures


def rebuilt_base_seed(seed):
    """The base seed: the first number that an iterator draws."""
    torch.manual_seed(seed)
    return torch.empty((), dtype=torch.int64).random_().item()


def test_under_torchs_seeds_persistent_workers_count_their_epochs():
    torch.manual_seed(3)
    loader = DataLoader(Broken(), batch_size=4, num_workers=2, on_error="replace", persistent_workers=True)
    for number in range(3):
        assert numbers(loader) == replaced(index_batches(), rebuilt_base_seed(3), number)[0]


@pytest.mark.parametrize("workers", [0, 2])
def test_without_batches_a_failed_sample_is_replaced(workers):
    torch.manual_seed(3)
    loader = DataLoader(Broken(), batch_size=None, num_workers=workers, on_error="replace")
    assert [int(sample[0]) for sample in loader] == replaced([range(SIZE)], rebuilt_base_seed(3), 0)[0][0]


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader], ids=["plain", "stateful"])
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_pinned(workers, kind):
    with pinning() as host:
        batches = list(kind(Broken(), batch_size=4, num_workers=workers, pin_memory=True, on_error="skip"))
        assert all(host.owns(batch) for batch in batches) and numbers(batches) == left(index_batches())
        del batches


@pytest.mark.parametrize("kw", [dict(), dict(on_error="raise"), dict(on_error="raise", max_errors=3)], ids=str)
def test_nothing_stands_between_torch_and_the_dataset_without_the_option(kw):
    for workers in (0, 1):
        assert (
            list(DataLoader(CalledByFetcher(6), batch_size=3, num_workers=workers, collate_fn=as_list, **kw))
            == [[True] * 3] * 2
        )
    guarded = DataLoader(CalledByFetcher(6), batch_size=3, num_workers=1, collate_fn=as_list, on_error="skip")
    assert list(guarded) == [[False] * 3] * 2
    iterator = iter(DataLoader(CalledByFetcher(6), **kw))
    assert (
        type(iterator._dataset_fetcher) is fetch._MapDatasetFetcher
        and type(iterator._dataset_fetcher.dataset) is CalledByFetcher
    )
    iterator = iter(DataLoader(CalledByFetcher(6), num_workers=1, **kw))
    assert iterator._epochs.failures is None and iterator._mode.config.on_error == "raise"
    with pytest.raises(ValueError, match="bad 1"):
        list(DataLoader(Broken(), batch_size=4, num_workers=1, **kw))
