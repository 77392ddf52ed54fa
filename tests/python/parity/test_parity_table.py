"""Order, epochs, samplers, errors, workers, random numbers and changes look to a program as they do with torch's
loader."""

import collections
import itertools
import random

import numpy as np
import pytest
import sample_data as data
import torch
from parity_table import Raised, attempt, beyond, drain, epochs, plain, rows, take
from sample_data import (
    Draws,
    EagerSampler,
    Failing,
    FailingSampler,
    LazySampler,
    NthDraw,
    Numbers,
    Shards,
    Slow,
    Value,
    WhoAmI,
    as_list,
)
from support import gone, worker_pids
from torch._utils import ExceptionWrapper
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

BOOLS = [False, True]
WORKERS = {
    "none": dict(),
    "one": dict(num_workers=1, prefetch_factor=3),
    "two that stay": dict(num_workers=2, persistent_workers=True),
}

# --- order, epochs, the sampler's calls -----------------------------------------------------------

BATCHING = {
    "one by one": dict(),
    "batches": dict(batch_size=3),
    "drop_last": dict(batch_size=3, drop_last=True),
    "unbatched": dict(batch_size=None),
    "sampler": dict(sampler=[4, 2, 9], batch_size=2),
    "batch_sampler": dict(batch_sampler=[[1, 2, 3], [0], [5, 5]]),
    "collate_fn": dict(batch_size=4, collate_fn=as_list),
    "nothing": dict(sampler=[]),
    "larger than the data": dict(batch_size=11, drop_last=True),
}


@rows(batching=BATCHING, workers=[0, 1, 2, 3])
def test_p15_batches_come_in_order(DataLoader, batching, workers):
    loader = DataLoader(Numbers(10), num_workers=workers, **batching)
    yield attempt(len, loader)
    yield from epochs(loader)


# Options that torch does not have, and that change nothing that a program observes.
OPTIONS = {
    "shared queue": dict(dispatch="shared_queue"),
    "window 1": dict(reorder_window=1),
    "window 64": dict(reorder_window=64),
    "window of bytes": dict(reorder_window="1MiB"),
    "shared queue, window": dict(dispatch="shared_queue", reorder_window=7),
    "threads": dict(worker_threads=3),
    "restarts": dict(max_restarts=2),
    "stall timeout": dict(stall_timeout=600),
}


WITH_OPTIONS = ["batches", "drop_last", "unbatched", "batch_sampler", "nothing"]


@rows(option=OPTIONS, workers=[1, 2, 4], batching={name: BATCHING[name] for name in WITH_OPTIONS}, pairs=True)
def test_p15_options_keep_the_order(DataLoader, option, workers, batching):
    yield from epochs(beyond(DataLoader, option)(Slow(10, {1: 0.02, 4: 0.01}), num_workers=workers, **batching))


@rows(option=OPTIONS, workers=[1, 2], batch_size=[None, 1, 3], persistent=BOOLS, pairs=True)
def test_p17_options_keep_errors_in_place(DataLoader, option, workers, batch_size, persistent):
    settings = dict(num_workers=workers, batch_size=batch_size, persistent_workers=persistent)
    errors = {0: data.key_error, 5: data.runtime_error, 6: data.stop_iteration, 11: data.key_error}
    loader = beyond(DataLoader, option)(Failing(12, errors), collate_fn=as_list if batch_size else None, **settings)
    for seen in epochs(loader):
        # With threads, the traceback has other frames.
        yield seen.description[:1] if isinstance(seen, Raised) else seen


@rows(option=list(OPTIONS)[:5], in_order=BOOLS, persistent=BOOLS, pairs=True)
def test_p15_t18_options_keep_uneven_shards(DataLoader, option, in_order, persistent):
    settings = dict(num_workers=3, batch_size=None, in_order=in_order, persistent_workers=persistent)
    loader = beyond(DataLoader, OPTIONS[option])(Shards([7, 0, 30]), **settings)
    for _ in range(2):
        samples = plain(drain(loader))
        yield [[sample for sample in samples if sample[0] == worker] for worker in range(3)]


@rows(size=[0, 1, 2, 7, 14, 50], prefetch=[1, 2, 7], pairs=True)
def test_p16_prefetch_factor(DataLoader, size, prefetch):
    yield from drain(DataLoader(Numbers(size), num_workers=2, prefetch_factor=prefetch, batch_size=None))


@rows()
def test_p15_order_holds_when_workers_are_not_equally_fast(DataLoader):
    yield from drain(DataLoader(Slow(12, {0: 0.2, 1: 0.05, 7: 0.1}), num_workers=3, batch_size=None))


@rows(persistent=BOOLS)
def test_p15_batch_i_goes_to_worker_i_mod_n_in_each_epoch(DataLoader, persistent):
    loader = DataLoader(WhoAmI(7), num_workers=2, batch_size=None, persistent_workers=persistent)
    yield from epochs(loader, 3)


@rows(settings={"none": dict(), "all": dict(batch_size=2, drop_last=True, prefetch_factor=5, timeout=30)})
def test_p10_attributes_of_the_iterator(DataLoader, settings):
    loader = DataLoader(Numbers(9), num_workers=2, worker_init_fn=data.untouched, **settings)
    iterator = iter(loader)
    yield loader
    yield iterator
    yield len(iterator), iter(iterator) is iterator
    yield from take(iterator, 1)
    yield iterator
    yield iter(DataLoader(Numbers(3)))


@rows(taken=[0, 1, 3, 6])
def test_p11_persistent_workers_serve_every_epoch(DataLoader, taken):
    loader = DataLoader(Numbers(6), num_workers=2, persistent_workers=True, batch_size=None)
    first = iter(loader)
    pids = worker_pids(first)
    for _ in range(3):
        iterator = iter(loader)
        yield from take(iterator, taken)
        yield from drain(loader)
        yield iterator is first is loader._iterator, worker_pids(iterator) == pids
        yield iterator


@rows(workers=WORKERS, sampler=[LazySampler, EagerSampler], batch_size=[None, 2])
def test_p12_t2_the_sampler_is_advanced_when_torch_does_it(DataLoader, workers, sampler, batch_size):
    log = []
    loader = DataLoader(Numbers(9), sampler=sampler(9, log), batch_size=batch_size, **workers)
    for taken in (2, 9):
        iterator = iter(loader)
        yield log
        for batch in drain(iterator, taken):
            yield batch
            yield log


@rows()
def test_t3_samplers_that_are_changed_after_construction(DataLoader):
    loader = DataLoader(Numbers(9), num_workers=1, batch_size=3, shuffle=True)
    loader.batch_sampler.sampler = [1, 2, 3, 4]
    yield from drain(loader)
    loader.batch_sampler.batch_size = 2
    yield from drain(loader)


TORCHS_SAMPLERS = {
    "shuffle": lambda: dict(shuffle=True),
    "generator": lambda: dict(shuffle=True, generator=torch.Generator().manual_seed(4)),
    "generator alone": lambda: dict(generator=torch.Generator().manual_seed(4)),
    "replacement": lambda: dict(sampler=RandomSampler(range(30), replacement=True, num_samples=12), batch_size=None),
    "subset": lambda: dict(sampler=SubsetRandomSampler([3, 4, 5, 6])),
    "weighted": lambda: dict(sampler=WeightedRandomSampler([0.1, 0.9, 0.5], 10), batch_size=4),
    "distributed": lambda: dict(sampler=DistributedSampler(range(30), num_replicas=2, rank=1), batch_size=2),
    "array of batches": lambda: dict(batch_sampler=np.arange(6).reshape(2, 3)),
    "lazy": lambda: dict(sampler=LazySampler(9, [], draw=True), batch_size=2),
    "eager": lambda: dict(sampler=EagerSampler(9, [], draw=True), batch_size=2),
    "by Python's generator": lambda: dict(sampler=sorted(range(9), key=lambda i: random.random())),
}


@rows(sampler=TORCHS_SAMPLERS, workers=WORKERS)
def test_p13_p15_t17_batches_and_mains_generators(DataLoader, sampler, workers):
    settings = sampler()
    loader = DataLoader(Numbers(30), **workers, **settings)
    for taken in (2, 99, 99):
        iterator = iter(loader)
        yield None
        for batch in drain(iterator, taken):
            yield batch
            yield settings["generator"].get_state() if "generator" in settings else None
        del iterator


@rows()
def test_p18_the_end_joins_the_workers_and_repeats(DataLoader):
    iterator = iter(DataLoader(Numbers(4), num_workers=2, batch_size=None))
    pids = worker_pids(iterator)
    yield from take(iterator, 5)
    yield iterator
    yield [*map(gone, pids)]
    yield from take(iterator, 3)


@rows()
def test_s1_the_last_reference_ends_the_workers(DataLoader):
    iterator = iter(DataLoader(Numbers(40), num_workers=2))
    yield from take(iterator, 1)
    pids = worker_pids(iterator)
    del iterator
    yield [*map(gone, pids)]


@rows()
def test_p18_shutdown_is_idempotent_and_users_call_it(DataLoader):
    loader = DataLoader(Numbers(40), num_workers=1, persistent_workers=True)
    iterator = iter(loader)
    yield from take(iterator, 1)
    for _ in range(3):
        iterator._shutdown_workers()
    yield iterator
    yield [*map(gone, worker_pids(iterator))]
    yield from take(iterator, 3)
    loader._iterator = None
    yield from drain(loader)


@rows()
def test_iterators_are_interleaved(DataLoader):
    loader = DataLoader(Numbers(8), num_workers=1, batch_size=None)
    pair = DataLoader(Numbers(20), num_workers=2, batch_size=2)
    yield from zip(drain(loader), drain(loader), drain(pair), *(drain(loader) for _ in range(4)), strict=False)


@rows(persistent=BOOLS)
def test_t1_datasets_and_functions_are_new_at_each_epoch_but_not_in_persistent_workers(DataLoader, persistent):
    base = Value(8)
    subset = Subset(base, [1, 2])
    loader = DataLoader(subset, num_workers=2, batch_size=None, persistent_workers=persistent)
    yield from drain(loader)
    base.value = 7
    subset.indices.append(5)
    yield from drain(loader)
    loader.collate_fn = str
    yield from drain(loader)


@rows()
def test_p24_datasets_with_getitems(DataLoader):
    subset = Subset(TensorDataset(torch.arange(40).reshape(10, 4)), [9, 1, 5])
    yield from drain(DataLoader(subset, batch_size=3, num_workers=1))


# --- errors ---------------------------------------------------------------------------------------

ERRORS = {3: data.key_error, 5: data.runtime_error}


@rows(
    workers=[0, 1, 2], batching={"batched": dict(batch_size=1, collate_fn=as_list), "unbatched": dict(batch_size=None)}
)
def test_p17_errors_come_at_their_place_and_next_goes_on(DataLoader, workers, batching):
    seen = [*drain(DataLoader(Failing(8, ERRORS), num_workers=workers, **batching))]
    assert len(seen) == 11
    yield from seen


@rows(name=["key_error", "runtime_error", "stop_iteration", "two_arguments", "with_message", "os_error"])
def test_p17_the_class_and_the_text_of_an_error(DataLoader, name):
    yield from drain(DataLoader(Failing(5, {2: getattr(data, name)}), num_workers=2, batch_size=None))


def broken_collate(samples):
    if samples[0] == 2:
        raise IndexError("collate")
    return samples


@rows()
def test_p17_an_error_of_the_collate_function(DataLoader):
    yield from drain(DataLoader(Failing(6, {}), num_workers=2, batch_size=2, collate_fn=broken_collate))


@rows()
def test_p17_an_error_of_default_convert_has_torchs_frames(DataLoader):
    yield from drain(DataLoader([[np.datetime64(1, "D")]], batch_size=None, num_workers=1))


@rows()
def test_p17_an_error_in_each_batch(DataLoader):
    yield from drain(DataLoader(Failing(20, dict.fromkeys(range(20), data.runtime_error)), num_workers=2))


@rows()
def test_p17_s6_an_error_leaves_the_workers_alone_and_a_new_epoch_begins(DataLoader):
    loader = DataLoader(Failing(8, ERRORS), num_workers=2, batch_size=None, persistent_workers=True)
    iterator = iter(loader)
    pids = worker_pids(iterator)
    yield from take(iterator, 4)
    yield from epochs(loader, 2)
    yield iterator
    yield worker_pids(iterator) == pids


@rows(at=[0, 1, 3])
def test_p12_an_error_of_the_sampler_in_iter(DataLoader, at):
    yield attempt(iter, DataLoader(Numbers(9), sampler=FailingSampler(9, at), num_workers=2, batch_size=None))


@rows(timeout=[1, 30], workers=[0, 2])
def test_p19_timeouts_that_are_not_reached(DataLoader, timeout, workers):
    yield from drain(DataLoader(Numbers(9), num_workers=workers, timeout=timeout * 30))


class Nested(Numbers):
    def __getitem__(self, i):
        return list(torch.utils.data.DataLoader(Numbers(2), num_workers=1, batch_size=None))


@rows()
def test_p17_nested_loader_in_a_dataset_is_refused_with_torchs_text(DataLoader):
    yield from drain(DataLoader(Nested(1), num_workers=1, batch_size=None))


@rows()
def test_p17_no_workers_raises_the_original(DataLoader):
    error = ValueError("mine")

    def fail(samples):
        raise error

    try:
        next(iter(DataLoader(Numbers(2), collate_fn=fail)))
    except ValueError as raised:
        yield raised is error


class Wrapping(Numbers):
    """Sample 1 is an error that the dataset has wrapped itself."""

    def __getitem__(self, i):
        try:
            if i == 1:
                raise KeyError("a reader's")
            return i
        except KeyError:
            return ExceptionWrapper(where="in a reader")


@rows()
def test_p17_an_error_that_the_dataset_has_wrapped_is_raised(DataLoader):
    yield from drain(DataLoader(Wrapping(3), num_workers=1, batch_size=None))


# --- random numbers of the workers ----------------------------------------------------------------


@rows(workers=[1, 2], persistent=BOOLS, shuffle=BOOLS, pairs=True)
def test_p14_seeds_of_the_workers_are_torchs(DataLoader, workers, persistent, shuffle):
    loader = DataLoader(
        Draws(9), num_workers=workers, batch_size=2, collate_fn=as_list, persistent_workers=persistent, shuffle=shuffle
    )
    seen = [*epochs(loader, 3)]
    seeds = [batch[0]["seed"] for batch in seen if isinstance(batch, list) and batch[0]["id"] == 0]
    assert (len({*seeds}) == 1) == persistent, "persistent workers keep their seed, new ones get a new one"
    yield from seen


class DrawsOfInit(Numbers):
    """Sample i is (i, what worker_init_fn drew)."""

    drawn = None

    def __getitem__(self, i):
        return i, self.drawn


def draw_in_init(worker_id):
    dataset = get_worker_info().dataset
    dataset.drawn = (worker_id, torch.initial_seed(), torch.rand(()).item(), random.random(), float(np.random.rand()))


@rows(workers=[1, 2], persistent=BOOLS)
def test_p14_worker_init_fn_draws_torchs_numbers(DataLoader, workers, persistent):
    settings = dict(num_workers=workers, persistent_workers=persistent, worker_init_fn=draw_in_init)
    yield from epochs(DataLoader(DrawsOfInit(5), batch_size=None, **settings), 2)


@rows(seed=[1, 2])
def test_p14_the_base_seed_comes_from_the_loaders_generator_and_is_kept_by_the_iterator(DataLoader, seed):
    generator = torch.Generator().manual_seed(seed)
    iterator = iter(DataLoader(Draws(2), num_workers=1, batch_size=None, generator=generator))
    (first,) = take(iterator, 1)
    assert first["seed"] == iterator._base_seed
    yield first


@rows(
    taken=[0, 1, 2, 3, 4],
    dataset={"draws": lambda: Draws(30), "counts": lambda: NthDraw(30)},
    workers=[1, 2],
    pairs=True,
)
def test_t25_streams_go_on_behind_stale_tasks(DataLoader, taken, dataset, workers):
    loader = DataLoader(dataset(), num_workers=workers, prefetch_factor=4, batch_size=None, persistent_workers=True)
    for limit in (taken, taken, 99):
        yield from drain(iter(loader), limit)


# --- what is changed between epochs ---------------------------------------------------------------


class Listed(Numbers):
    """Sample i is (item i, number of workers, the dataset's `value`)."""

    value = 0

    def __init__(self, n):
        super().__init__(n)
        self.items = list(range(n))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        info = get_worker_info()
        return self.items[i], 0 if info is None else info.num_workers, self.value


class Doubling:
    factor = 2

    def __call__(self, samples):
        return [(i * self.factor, workers, value) for i, workers, value in samples]


class Skipping(BatchSampler):
    """A batch sampler that libraries subclass and write to."""

    skip = 0

    def __iter__(self):
        return itertools.islice(super().__iter__(), self.skip, None)


def set_seven(worker):
    get_worker_info().dataset.value = 7


def to(name, make):
    return lambda loader: setattr(loader, name, make())


def around(name, make):
    """A change that bypasses the guard."""
    return lambda loader: object.__setattr__(loader, name, make())


def through_the_flag(name, make):
    def change(loader):
        loader._DataLoader__initialized = False
        setattr(loader, name, make())
        loader._DataLoader__initialized = True

    return change


CHANGES = {
    "the dataset's attribute": lambda loader: setattr(loader.dataset, "value", 5),
    "the dataset's list": lambda loader: loader.dataset.items.append(60),
    "the dataset's list in place": lambda loader: loader.dataset.items.__setitem__(0, 100),
    "the dataset's class": lambda loader: setattr(loader.dataset, "__class__", WhoAmI),
    "the dataset itself": around("dataset", lambda: Listed(9)),
    "collate_fn": to("collate_fn", Doubling),
    "worker_init_fn": to("worker_init_fn", lambda: set_seven),
    "num_workers": to("num_workers", lambda: 2),
    "no workers": to("num_workers", lambda: 0),
    "prefetch_factor": to("prefetch_factor", lambda: 1),
    "timeout": to("timeout", lambda: 50),
    "in_order": to("in_order", lambda: False),
    "generator": to("generator", lambda: torch.Generator().manual_seed(1)),
    "multiprocessing_context": to("multiprocessing_context", lambda: "fork"),
    "batch_sampler.sampler": lambda loader: setattr(loader.batch_sampler, "sampler", [5, 3, 1]),
    "batch_sampler.batch_size": lambda loader: setattr(loader.batch_sampler, "batch_size", 4),
    "batch_sampler.drop_last": lambda loader: setattr(loader.batch_sampler, "drop_last", True),
    "batch_sampler": around("batch_sampler", lambda: [[0], [1, 2]]),
    "batch_sampler through the flag": through_the_flag("batch_sampler", lambda: [(3,), (2, 1)]),
    "a batch sampler of a library": around("batch_sampler", lambda: Skipping(SequentialSampler(range(6)), 2, False)),
    "no batch sampler": through_the_flag("batch_sampler", lambda: None),
    "sampler alone": around("sampler", lambda: [4]),
    "persistent_workers": lambda loader: around("persistent_workers", lambda: not loader.persistent_workers)(loader),
}


@rows(change=CHANGES, persistent=BOOLS)
def test_t1_t3_p5_changes_between_epochs_are_seen_when_torch_sees_them(DataLoader, change, persistent):
    dataset = Listed(6)
    loader = DataLoader(dataset, batch_size=2, collate_fn=as_list, num_workers=1, persistent_workers=persistent)
    yield from drain(loader)
    first = loader._iterator
    change(loader)
    yield attempt(len, loader)
    yield loader
    iterator = iter(loader)
    yield iterator
    yield loader._iterator is first
    yield sorted(map(str, plain(drain(iterator))))  # unordered if `in_order` was changed


@rows()
def test_t3_a_change_in_the_middle_of_an_epoch(DataLoader):
    """Tasks that were sent stay as they are; the sampler's attributes apply from the next index on."""
    loader = DataLoader(Numbers(40), batch_size=2, num_workers=2, prefetch_factor=1)
    for n, batch in enumerate(drain(loader)):
        yield batch
        if n == 2:
            loader.collate_fn, loader.num_workers, loader.dataset.n = None, 7, 3


@rows(persistent=BOOLS)
def test_t2_t3_a_sampler_that_grows_while_it_is_walked(DataLoader, persistent):
    log, order = [], list(range(5))

    class Logged(Sampler):
        def __len__(self):
            log.append("len")
            return len(order)

        def __iter__(self):
            log.append("iter")
            for i in order:
                log.append(i)
                yield i

    loader = DataLoader(Numbers(99), sampler=Logged(), batch_size=2, num_workers=2, persistent_workers=persistent)
    for _ in range(2):
        for batch in drain(loader):
            yield batch
            if len(order) < 12:
                order.append(50 + len(order))
        order.reverse()
    yield log
    yield len(loader)


@rows()
def test_t3_a_random_sampler_gets_another_generator(DataLoader):
    loader = DataLoader(Numbers(9), batch_size=None, shuffle=True, num_workers=2, persistent_workers=True)
    for seed in range(3):
        loader.sampler.generator = torch.Generator().manual_seed(seed)
        yield from drain(loader)


@rows()
def test_t1_what_a_worker_changes_stays_in_the_worker(DataLoader):
    dataset = collections.defaultdict(int, {0: 1})
    yield from epochs(DataLoader(dataset, sampler=[0, 5, 6], num_workers=1, batch_size=None))
    yield dataset


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # from torch's half-built iterator
@rows()
def test_p5_late_workers_without_a_prefetch_factor_fail_as_in_torch(DataLoader):
    """A loader without workers has prefetch_factor None, and torch sets no default later."""
    loader = DataLoader(Numbers(3))
    loader.num_workers = 2
    kind, text = attempt(iter, loader).description[:2]
    torch.manual_seed(3)  # torch fails after it has drawn a seed, rustloader before
    yield kind, text.split(" not ")[1]  # Versions of torch differ in the comparison: `<= 0` or `> 0`.
    loader.prefetch_factor = 2
    yield from drain(loader)


# --- internals of the iterator that programs use --------------------------------------------------


@rows()
def test_table_a_sampler_iter_of_none_resets_and_says_what_is_missing(DataLoader):
    iterator = iter(DataLoader(Numbers(4), num_workers=1))
    iterator._sampler_iter = None
    kind, text = attempt(next, iterator).description[:2]
    yield kind, text.split(".")[-1]


@rows(taken=[0, 1, 3])
def test_table_reset_by_hand_begins_a_new_epoch(DataLoader, taken):
    loader = DataLoader(Numbers(5), num_workers=2, batch_size=None, persistent_workers=True)
    iterator = iter(loader)
    yield from take(iterator, taken)
    iterator._reset(loader)
    yield from drain(iterator)
    iterator._reset(loader, first_iter=False)
    yield from drain(iterator)
