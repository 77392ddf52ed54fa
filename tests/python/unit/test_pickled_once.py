"""What is pickled once for all workers of a start, and what is pickled for each of them (T26)."""

import collections
import copyreg
import dataclasses
import datetime
import enum
import functools
import multiprocessing
import os
import pathlib
import pickle
import re
import socket
from multiprocessing import connection, managers, reduction

import numpy as np
import pytest
import torch
from sample_data import Numbers
from support import BOTH, DataLoader, epoch, open_files

from rustloader.workers import pickled_once
from rustloader.workers.bootstrap import Payload
from rustloader.workers.pickled_once import PickledOnce

pytestmark = pytest.mark.ours


class Color(enum.Enum):
    RED = 1


Point = collections.namedtuple("Point", "x y")


@dataclasses.dataclass
class Record:
    name: str
    values: list


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    x: int


class Words(list):
    pass


class Plain:
    """A class of a program, without code that runs when it is pickled."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return type(other) is Plain and self.value == other.value

    __hash__ = None

    def __setstate__(self, state):
        self.__dict__.update(state)

    def method(self):
        return self.value


PLAIN = [
    {"a": [1, 2.5, None, (b"x", "y", {3}, frozenset([4]))], 5: bytearray(b"z"), 6: 1 + 2j},
    Point(1, [2]),
    Record("a", [1]),
    Slotted(3),
    Words("ab"),
    Plain([Color.RED, datetime.date(2020, 1, 2), pathlib.Path("/x"), re.compile("a+")]),
    collections.OrderedDict(a=collections.deque([1]), b=collections.Counter("aab"), c=collections.defaultdict(list)),
    [functools.partial(int, base=2).keywords, torch.float32, torch.Size([1, 2]), np.dtype("i4"), np.float32(1.5)],
    [len, os.path.join, Plain, Plain.method, dict.fromkeys, torch.utils.data.default_collate],
]


class Duplicate:
    """Stands in for the descriptor in the pickle of a process."""

    def __init__(self, fd):
        self.fd = fd

    def detach(self):
        return self.fd


def arrived(value, monkeypatch):
    """What a worker receives, or None if the value must be pickled for each worker."""
    before = open_files()
    once = PickledOnce.of(value)
    if once is None:
        assert open_files() == before
        return None
    monkeypatch.setattr(reduction, "DupFd", lambda fd: Duplicate(os.dup(fd)))
    values = [pickled_once.load(once.for_child()) for _ in range(2)]
    once.close()
    assert open_files() == before
    return values[0]


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: type(value).__name__)
def test_values_that_run_no_program_code_when_pickled_are_pickled_once(value, monkeypatch):
    got = arrived(value, monkeypatch)
    assert type(got) is type(value) and got == value


def test_methods_and_arrays_arrive_as_with_multiprocessing(monkeypatch):
    # Sharing an array, which another test may have done, registers a reducer for all arrays.
    monkeypatch.delitem(reduction.ForkingPickler._extra_reducers, np.ndarray, raising=False)
    plain = Plain(np.arange(6.0).reshape(2, 3))
    got, method, part = arrived((plain, plain.method, functools.partial(plain.method)), monkeypatch)
    assert method.__self__ is got and part.func.__self__ is got
    expected = pickle.loads(reduction.ForkingPickler.dumps(plain.value))
    assert got.value.tolist() == plain.value.tolist() and str(got.value.flags) == str(expected.flags)


class Counts:
    """Counts the calls of its methods by pickling."""

    calls = 0

    def __init__(self, *methods):
        for name in methods:
            assert hasattr(type(self), name)


def counting(name, result):
    def method(self, *args):
        Counts.calls += 1
        return result(self, *args)

    return type(f"Counts{name}", (Counts,), {name: method})


class Walked(list):
    def __iter__(self):
        Counts.calls += 1
        return super().__iter__()


HOOKED = [
    counting("__getstate__", lambda self: {}),
    counting("__reduce__", lambda self: (Counts, ())),
    counting("__reduce_ex__", lambda self, protocol: (Counts, ())),
    counting("__getnewargs__", lambda self: ()),
    counting("__getnewargs_ex__", lambda self: ((), {})),
    counting("__getattribute__", object.__getattribute__),
    counting("__getattr__", lambda self, name: getattr(super(Counts, self), name)),
    Walked,
]


@pytest.mark.parametrize("kind", HOOKED, ids=lambda kind: kind.__name__)
def test_values_that_run_program_code_when_pickled_are_not_pickled_once(kind):
    value = kind()
    Counts.calls = 0
    assert PickledOnce.of([1, value]) is None and Counts.calls == 0


@pytest.fixture(scope="module")
def heap():
    """Creates the heap of multiprocessing's shared values, which is never freed."""
    multiprocessing.Value("i", 0)


CONTEXT = multiprocessing.get_context("spawn")
FOR_EACH = {
    **{name: getattr(CONTEXT, name) for name in ("Lock", "Event", "Queue", "Pipe")},
    "Value": lambda: CONTEXT.Value("i", 0),
    "Array": lambda: CONTEXT.Array("i", 2),
    # The pickle of a manager's proxy contains its key only if a process is being started. Each proxy has a token.
    "manager's proxy": lambda: managers.Token("list", "address", "id"),
    "socket": socket.socket,
    "tensor": lambda: torch.zeros(2),
    "parameter": lambda: torch.nn.Parameter(torch.zeros(2)),
    "storage": lambda: torch.zeros(2).untyped_storage(),
    "sparse tensor": lambda: torch.ones(2).to_sparse(),
    "generator of numbers": torch.Generator,
    "lambda": lambda: lambda: 0,
    "generator": lambda: (i for i in ()),
}


@pytest.mark.usefixtures("heap")
@pytest.mark.parametrize("make", FOR_EACH.values(), ids=FOR_EACH)
def test_other_values_are_pickled_for_each_worker(make, monkeypatch):
    """What belongs to processes, what multiprocessing's and torch's reducers send, and what cannot be pickled."""
    value = make()
    assert arrived([0, value], monkeypatch) is None
    for part in value if isinstance(value, tuple) else [value]:
        if isinstance(part, socket.socket | connection.Connection):
            part.close()


def test_reducers_that_a_program_has_registered(monkeypatch):
    def reducer(value):
        raise AssertionError("must not be called")

    assert arrived(Plain(1), monkeypatch) == Plain(1)
    with monkeypatch.context() as patch:
        patch.setitem(reduction.ForkingPickler._extra_reducers, Plain, reducer)
        assert PickledOnce.of(Plain(1)) is None
    with monkeypatch.context() as patch:
        patch.setitem(copyreg.dispatch_table, Plain, reducer)
        assert PickledOnce.of(Plain(1)) is None


class Collates(Numbers):
    """A dataset that collates its own samples."""

    def __init__(self, n):
        super().__init__(n)
        self.ballast = bytes(1 << 20)

    def collate(self, samples):
        return samples, self is torch.utils.data.get_worker_info().dataset


class CountsPickles(Collates):
    def __getstate__(self):
        Counts.calls += 1
        return self.__dict__


@pytest.fixture
def files(monkeypatch):
    """The (inode, size) of each file that is sent: the files for all workers, and those for one worker."""
    common, own = [], []

    def note(sent, fd):
        status = os.fstat(fd)
        sent.append((status.st_ino, status.st_size))

    for_child, close = PickledOnce.for_child, Payload.close

    def note_common(once):
        note(common, once._file.fileno())
        return for_child(once)

    def note_own(payload):
        if payload._file is not None:
            note(own, payload._file.fileno())
        close(payload)

    monkeypatch.setattr(PickledOnce, "for_child", note_common)
    monkeypatch.setattr(Payload, "close", note_own)
    return common, own


def batches(dataset, cls=DataLoader, **kw):
    loader = cls(
        dataset, batch_size=2, num_workers=2, collate_fn=dataset.collate, multiprocessing_context="forkserver", **kw
    )
    return epoch(loader)


def test_t26_a_plain_dataset_is_in_memory_once_for_all_workers(files):
    common, own = files
    assert batches(Collates(4)) == [([0, 1], True), ([2, 3], True)]
    assert len(common) == 2 and len(set(common)) == 1 and common[0][1] > 1 << 20
    assert len(own) == 2 and all(size < 1 << 16 for _, size in own)


def test_t26_the_code_of_a_dataset_is_asked_as_often_as_by_torch(files):
    counts = []
    for cls in BOTH:
        Counts.calls = 0
        assert batches(CountsPickles(4), cls) == [([0, 1], True), ([2, 3], True)]
        counts.append(Counts.calls)
    common, own = files
    assert counts == [2, 2] and common == [] and all(size > 1 << 20 for _, size in own)
