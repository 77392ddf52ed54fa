"""Private memory of workers, and the attributes of a dataset that they copy."""

import dataclasses
import os
import sys

import numpy as np
import pytest
import torch
from support import TORCH_MODE, DataLoader, rustloader, wait_until

pytestmark = pytest.mark.ours

if not TORCH_MODE:
    from rustloader import LargeAttribute, Stats, WorkerStats
    from rustloader.metrics import copied, memory
    from rustloader.system import procfs

MIB = 1 << 20
# About 112 MB of strings; ten of them fit in a page.
COUNT, LENGTH = 250_000, 400


class Names(torch.utils.data.Dataset):
    """Its samples are the lengths of the strings."""

    def __init__(self, names):
        self.names = names

    def __len__(self):
        return COUNT

    def __getitem__(self, i):
        return len(self.names[i])


def names():
    return [f"{n:0{LENGTH}d}" for n in range(COUNT)]


def read(dataset, **settings):
    """Runs an epoch; returns the loader."""
    loader = DataLoader(
        dataset, batch_size=5000, num_workers=1, collate_fn=sum, multiprocessing_context="fork", **settings
    )
    assert sum(loader) == COUNT * LENGTH
    return loader


@pytest.fixture(scope="module")
def plain():
    return names()


def test_a_list_of_strings_is_copied_and_named(plain):
    loader = read(Names(plain))
    stats = rustloader.stats(loader)
    (worker,) = stats.workers
    assert not worker.alive and 90 * MIB < worker.private_bytes < 200 * MIB
    (large,) = stats.large_attributes
    assert (large.path, large.kind, large.items) == ("dataset.names", "list", COUNT)
    assert large.bytes == pytest.approx(COUNT * (LENGTH + 49), rel=0.1)
    assert "set dataset.names = rustloader.share(dataset.names) before" in stats.verdict().sentence
    # A string takes 8 bytes less from Python 3.12 on.
    size = 110 if sys.version_info >= (3, 12) else 112
    assert f"copied        dataset.names, a list of 250,000 items, about {size} MB" in str(stats)
    assert stats.as_dict(flat=True)["workers_0_private_bytes"] == worker.private_bytes


def test_a_shared_list_is_not_copied(plain):
    stats = rustloader.stats(read(Names(rustloader.share(plain))))
    (worker,) = stats.workers
    assert 0 < worker.private_bytes < 48 * MIB
    assert stats.large_attributes == () and "share" not in stats.verdict().sentence


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, i):
        return torch.tensor(float(i)).expand(8 * MIB)


def test_batches_that_wait_in_the_arena_are_not_private():
    loader = DataLoader(Rows(), num_workers=1, prefetch_factor=5, multiprocessing_context="fork")
    iterator = iter(loader)
    next(iterator)
    assert wait_until(lambda: rustloader.stats(iterator).workers[0].tasks >= 6)
    stats = rustloader.stats(iterator)
    assert stats.arena.warm_bytes >= 4 * 32 * MIB
    assert memory.private_bytes(stats.workers[0].pid) < 64 * MIB
    # The reading may be from a moment at which a batch was being made.
    assert stats.workers[0].private_bytes is None or stats.workers[0].private_bytes < (64 + 32) * MIB


def test_a_process_that_is_gone_has_no_memory(monkeypatch):
    assert memory.private_bytes(2**22 + 1) is None and procfs.rollup(2**22 + 1) == {}
    assert memory.private_bytes(os.getpid()) > MIB
    monkeypatch.setattr(procfs, "read", lambda path: None)
    assert memory.private_bytes(os.getpid()) is None


# When memory is read


class Kernel:
    """Page faults and private bytes of simulated processes. Each reading takes a tenth of a second."""

    def __init__(self, monkeypatch):
        self.now, self.faults, self.own, self.read = 0.0, {}, {}, []
        monkeypatch.setattr(memory, "_faulted", lambda pid, start=None: self.faults.get(pid))
        monkeypatch.setattr(memory, "private_bytes", self.reading)
        monkeypatch.setattr(memory.time, "monotonic", lambda: self.now)

    def reading(self, pid):
        self.now += 0.1
        self.read.append(pid)
        return self.own.get(pid)


@pytest.fixture
def kernel(monkeypatch):
    return Kernel(monkeypatch)


def test_few_page_faults_take_no_reading(kernel):
    workers = memory.WorkerMemory(2, memory.Allowance())
    kernel.faults = {1: 5 * MIB}
    workers.update([(1, "a"), None])
    assert workers.sizes() == [5 * MIB, None] and kernel.read == []
    kernel.faults = {1: 15 * MIB}
    workers.update([(1, "a"), None])
    assert workers.sizes() == [15 * MIB, None] and kernel.read == []
    kernel.faults, kernel.own = {1: 16 * MIB}, {1: 3 * MIB}
    workers.update([(1, "a"), None])
    assert workers.sizes() == [3 * MIB, None] and kernel.read == [1]


def test_readings_take_a_hundredth_of_the_time(kernel):
    workers = memory.WorkerMemory(2, memory.Allowance())
    both = [(1, "a"), (2, "b")]
    kernel.faults, kernel.own = {1: 20 * MIB, 2: 30 * MIB}, {1: 7, 2: 8}
    workers.update(both)
    # The worker with more faults is read first.
    assert workers.sizes() == [None, 8] and kernel.read == [2]
    kernel.now += 5
    workers.update(both)
    assert kernel.read == [2]
    kernel.now += 6
    workers.update(both)
    assert workers.sizes() == [7, 8] and kernel.read == [2, 1]
    kernel.now += 100
    workers.update(both)
    assert kernel.read == [2, 1], "no page faults since the last reading"
    kernel.faults, kernel.own = {1: 36 * MIB, 2: 45 * MIB}, {1: 70, 2: 80}
    workers.update(both)
    assert workers.sizes() == [70, 8] and kernel.read == [2, 1, 1]


def test_loaders_epochs_share_an_allowance():
    loader = DataLoader(range(4), num_workers=1)
    list(loader)
    from rustloader.metrics import ledger

    first = ledger.of(loader).workers()
    list(loader)
    second = ledger.of(loader).workers()
    assert first is not second and first._memory._allowance is second._memory._allowance


def test_another_process_starts_from_its_own_memory(kernel):
    workers = memory.WorkerMemory(1, memory.Allowance())
    kernel.faults, kernel.own = {1: 50 * MIB, 2: 2 * MIB}, {1: 40 * MIB}
    workers.update([(1, "a")])
    kernel.faults.pop(1)
    workers.update([(1, "a")])
    assert workers.sizes() == [40 * MIB], "an ended worker keeps its figure"
    workers.update([(2, "b")])
    assert workers.sizes() == [2 * MIB]
    # An estimate from faults alone is not shown when it may be far off.
    kernel.faults[2] = 50 * MIB
    workers.update([(2, "b")])
    assert workers.sizes() == [None] and kernel.read == [1]


def test_faults_of_a_process_with_a_reused_pid():
    pid = os.getpid()
    start = procfs.stat(pid)[procfs.STARTED]
    assert memory._faulted(pid, start) > MIB and memory._faulted(pid, "1") is None
    assert memory._faulted(2**22 + 1) is None


# Attributes


class Holder:
    def __init__(self, **attributes):
        self.__dict__.update(attributes)

    @property
    def forbidden(self):
        raise AssertionError("the search runs code of the dataset")

    def __getattr__(self, name):
        raise AssertionError("the search runs code of the dataset")


class Slotted:
    __slots__ = ("empty", "rows")

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)


@dataclasses.dataclass
class Sample:
    name: str
    label: float


MANY = 200_000


def texts(count=MANY, length=60):
    return [f"{n:0{length}d}" for n in range(count)]


@pytest.mark.parametrize(
    "make, size",
    [
        (lambda: texts(), MANY * 109),
        (lambda: tuple(texts()), MANY * 109),
        (lambda: [(text, n + 1000) for n, text in enumerate(texts())], MANY * (109 + 28 + 56 + 16)),
        (lambda: {text: n + 1000 for n, text in enumerate(texts())}, MANY * (109 + 28)),
        (lambda: [Sample(text, float(n)) for n, text in enumerate(texts())], None),
        (lambda: [{"path": text} for text in texts()], None),
        (lambda: [[text, text + "x"] for text in texts()], None),
    ],
)
def test_large_containers_are_found_and_measured(make, size):
    (large,) = copied.find(Holder(rows=make(), other=[1, 2]))
    assert (large.path, large.items) == ("dataset.rows", MANY)
    assert size is None or large.bytes == pytest.approx(size, rel=0.15)
    assert large.bytes >= MANY * 109 * 0.9


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(10_000_000),
        lambda: torch.zeros(10_000_000).numpy(),
        lambda: b"x" * 50_000_000,
        lambda: "x" * 50_000_000,
        lambda: [7] * 10_000_000,
        lambda: ["x" * 1000] * 10_000_000,
        lambda: [True, None] * 5_000_000,
        lambda: range(10**9),
        lambda: [torch.zeros(100_000) for _ in range(70)],
        lambda: [np.zeros(100_000) for _ in range(70)],
        lambda: texts(1000),
        lambda: copied,
        lambda: Holder,
        lambda: None,
    ],
)
def test_what_is_not_copied_is_not_found(make):
    assert copied.find(Holder(rows=make())) == ()


def test_paths():
    rows, more = texts(), texts(length=80)
    inner = Holder(rows=rows, parts={"train": rows, 3: texts(length=90), (1, 2): texts()})
    inner.again = inner
    concat = torch.utils.data.ConcatDataset([torch.utils.data.TensorDataset(torch.zeros(4)), Slotted(more)])
    attributes = copied.find(torch.utils.data.Subset(Holder(first=inner, second=concat.datasets), range(4)))
    # Each object is named once, the largest first.
    paths = ["dataset.dataset.first.parts[3]", "dataset.dataset.second[1].rows", "dataset.dataset.first.rows"]
    assert [large.path for large in attributes] == paths
    assert copied.find(Holder(rows={"train": rows}))[0].path == "dataset.rows['train']"
    assert copied.find(rows)[0].path == "dataset"


def test_the_search_ends(monkeypatch):
    deep = last = Holder()
    for _ in range(20):
        last.next = Holder()
        last = last.next
    last.rows = texts()
    assert copied.find(deep) == ()
    wide = Holder(**{f"n{n}": Holder() for n in range(100)}, rows=texts())
    assert copied.find(wide) != ()
    monkeypatch.setattr(copied, "_MAX_OBJECTS", 50)
    assert copied.find(wide) == ()
    monkeypatch.setattr(copied, "_MAX_OBJECTS", 10_000)
    monkeypatch.setattr(copied, "_MAX_SECONDS", -1.0)
    assert copied.find(wide) == ()


# The verdict


def grown(**more):
    workers = (WorkerStats(0, private_bytes=None), WorkerStats(1, private_bytes=312_000_000))
    large = tuple(LargeAttribute(f"dataset.{name}", "list", 1_000_000, 57_000_000) for name in "abcd")
    return Stats(**{"workers": workers, "large_attributes": large[:1], "batches": 3} | more)


def test_the_verdict_names_the_attribute():
    text = (
        "Workers have up to 312 MB of private memory each, including copies of the Python objects of dataset.a "
        "(a list of 1,000,000 items, about 57.0 MB): set dataset.a = rustloader.share(dataset.a) before creating the "
        "loader."
    )
    verdict = grown().verdict()
    assert verdict.kind == "too_few" and verdict.sentence == f"Too few batches to tell; ask again after 20. {text}"
    step = grown(batches=100, step_seconds=5.0, epochs=1).verdict()
    assert step.kind == "step" and step.sentence.endswith(text)
    assert "share" not in grown(large_attributes=()).verdict().sentence
    large = tuple(LargeAttribute(f"dataset.{name}", "dict", 10, 57_000_000) for name in "abcd")
    several = grown(large_attributes=large).verdict().sentence
    assert "dataset.a (a dict" in several and " and dataset.c (" in several and "dataset.d" not in several


def test_memory_of_workers_is_printed():
    running = WorkerStats(0, pid=7, alive=True, rss_bytes=500_000_000, private_bytes=20_000_000, tasks=1)
    text = str(grown(workers=(running, WorkerStats(1, private_bytes=312_000_000, tasks=1)), iterators=1))
    assert "(pid 7, 500 MB, 20.0 MB private)" in text and "(ended, 312 MB private)" in text
