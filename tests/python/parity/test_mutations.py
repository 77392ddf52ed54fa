"""What users change between epochs, in the loader and in what it holds: seen when torch sees it (T1, T3, P5)."""

import collections
import sys

import pytest
import torch
from sample_data import Numbers, Value, WhoAmI, as_list
from support import BOTH, DataLoader, epoch, outcome, values
from torch.utils.data import BatchSampler, Sampler, SequentialSampler, Subset, get_worker_info


class Listed(Numbers):
    """Samples (index, number of workers, a value of the dataset)."""

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


class Stateful(BatchSampler):
    """A batch sampler that libraries subclass and write to."""

    skip = 0

    def __iter__(self):
        for n, batch in enumerate(super().__iter__()):
            if n >= self.skip:
                yield batch


def fresh(cls, **arguments):
    return cls(Listed(6), batch_size=2, collate_fn=as_list, **arguments)


def set_seven(worker):
    get_worker_info().dataset.value = 7


def unguarded(loader, name, value):
    loader._DataLoader__initialized = False
    setattr(loader, name, value)
    loader._DataLoader__initialized = True


CHANGES = {
    "nothing": lambda loader: None,
    "the dataset's attribute": lambda loader: setattr(loader.dataset, "value", 5),
    "the dataset's list": lambda loader: loader.dataset.items.append(60),
    "the dataset's list in place": lambda loader: loader.dataset.items.__setitem__(0, 100),
    "the dataset's class": lambda loader: setattr(loader.dataset, "__class__", WhoAmI),
    "the dataset itself": lambda loader: object.__setattr__(loader, "dataset", Listed(9)),
    "collate_fn": lambda loader: setattr(loader, "collate_fn", Doubling()),
    "worker_init_fn": lambda loader: setattr(loader, "worker_init_fn", set_seven),
    "num_workers": lambda loader: setattr(loader, "num_workers", 2),
    "prefetch_factor": lambda loader: setattr(loader, "prefetch_factor", 1),
    "timeout": lambda loader: setattr(loader, "timeout", 50),
    "in_order": lambda loader: setattr(loader, "in_order", False),
    "generator": lambda loader: setattr(loader, "generator", torch.Generator().manual_seed(1)),
    "multiprocessing_context": lambda loader: setattr(loader, "multiprocessing_context", "fork"),
    "batch_sampler.sampler": lambda loader: setattr(loader.batch_sampler, "sampler", [5, 3, 1]),
    "batch_sampler.batch_size": lambda loader: setattr(loader.batch_sampler, "batch_size", 4),
    "batch_sampler.drop_last": lambda loader: setattr(loader.batch_sampler, "drop_last", True),
    "batch_sampler": lambda loader: object.__setattr__(loader, "batch_sampler", [[0], [1, 2]]),
    "batch_sampler through the flag": lambda loader: unguarded(loader, "batch_sampler", [(3,), (2, 1)]),
    "a batch sampler of a library": lambda loader: object.__setattr__(
        loader, "batch_sampler", Stateful(SequentialSampler(loader.dataset), 2, False)
    ),
    "no batch sampler": lambda loader: unguarded(loader, "batch_sampler", None),
    "sampler alone": lambda loader: object.__setattr__(loader, "sampler", [4]),
    "persistent_workers": lambda loader: object.__setattr__(
        loader, "persistent_workers", not loader.persistent_workers
    ),
}


@pytest.mark.parametrize("persistent", [False, True])
def test_t1_t3_changes_between_epochs_are_seen_when_torch_sees_them(persistent):
    def run(cls):
        seen = {}
        for name, change in CHANGES.items():
            torch.manual_seed(3)
            loader = fresh(cls, num_workers=1, persistent_workers=persistent)
            steps = [sorted(map(str, loader))]
            first = iter(loader) if persistent else None
            change(loader)
            steps += [outcome(len, loader), outcome(lambda loader=loader: sorted(map(str, loader)))]
            steps.append(torch.get_rng_state().sum().item())
            if first is not None:
                steps.append(loader._iterator is first)
                first._shutdown_workers()
            seen[name] = steps
        return seen

    theirs, ours = map(run, BOTH)
    for name in CHANGES:
        assert ours[name] == theirs[name], name
    changed = [name for name in CHANGES if ours[name][2] != ours["nothing"][2]]
    assert ("the dataset's attribute" in changed) is not persistent
    assert "batch_sampler.sampler" in changed


def test_t3_a_change_in_the_middle_of_an_epoch():
    """What was sent is sent; the sampler's attributes count from the next index on."""

    def run(cls):
        loader = cls(Numbers(40), batch_size=2, num_workers=2, prefetch_factor=1)
        seen = []
        for n, batch in enumerate(loader):
            seen.append(batch.tolist())
            if n == 2:
                loader.collate_fn = None
                loader.num_workers = 7
                loader.dataset.n = 3
        return seen

    theirs, ours = map(run, BOTH)
    assert ours == theirs and len(ours) == 20


class Logged(Sampler):
    """Records whatever is done to it; accelerate replaces attributes of such an object."""

    def __init__(self, n):
        self.order, self.log = list(range(n)), []

    def __len__(self):
        self.log.append("len")
        return len(self.order)

    def __iter__(self):
        self.log.append("iter")
        for i in self.order:
            self.log.append(i)
            yield i


@pytest.mark.parametrize("persistent", [False, True])
def test_t2_t3_a_sampler_that_grows_while_it_is_walked(persistent):
    def run(cls):
        sampler = Logged(5)
        loader = cls(Numbers(99), sampler=sampler, batch_size=2, num_workers=2, persistent_workers=persistent)
        seen = []
        for _ in range(2):
            for batch in loader:
                seen.append(batch.tolist())
                if len(sampler.order) < 12:
                    sampler.order.append(50 + len(sampler.order))
            sampler.order.reverse()
        if persistent:
            loader._iterator._shutdown_workers()
        return seen, sampler.log, len(loader)

    theirs, ours = map(run, BOTH)
    assert ours == theirs


def test_t3_a_random_sampler_gets_another_generator():
    def run(cls):
        loader = cls(Numbers(9), batch_size=None, shuffle=True, num_workers=2, persistent_workers=True)
        seen = []
        for seed in range(3):
            loader.sampler.generator = torch.Generator().manual_seed(seed)
            seen.append(values(loader))
        loader._iterator._shutdown_workers()
        return seen

    theirs, ours = map(run, BOTH)
    assert ours == theirs and len({str(e) for e in ours}) == 3


def test_t1_a_subset_and_a_shared_list_are_new_at_each_epoch():
    base = Value(8)
    subset = Subset(base, [1, 2])
    loader = DataLoader(subset, num_workers=1, batch_size=None)
    assert epoch(loader) == [0, 0]
    base.value = 3
    subset.indices.append(5)
    assert epoch(loader) == [3, 3, 3]


def test_t1_what_a_worker_changes_stays_in_the_worker():
    def run(cls):
        dataset = collections.defaultdict(int)
        dataset[0] = 1
        loader = cls(dataset, sampler=[0, 5, 6], num_workers=1, batch_size=None)
        return [list(loader) for _ in range(2)], dict(dataset)

    theirs, ours = map(run, BOTH)
    assert ours == theirs == ([[1, 0, 0]] * 2, {0: 1})


def test_p5_late_workers_without_a_prefetch_factor_fail_as_in_torch():
    """A loader without workers has prefetch_factor None, and torch does not say what it would be."""

    def run(cls):
        loader = cls(Numbers(3))
        loader.num_workers = 2
        kind, error, text = outcome(iter, loader)
        loader.prefetch_factor = 2
        # Versions of torch differ in what they ask: `<= 0` or `> 0`.
        return kind, error, text.split(" not ")[1], values(loader)

    theirs, ours = (quietly(run, cls) for cls in BOTH)
    assert ours == theirs and ours[1] is TypeError


def quietly(fn, *args):
    """torch's iterator prints an error of its `__del__` when its construction has failed."""
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        return fn(*args)
    finally:
        sys.unraisablehook = hook
