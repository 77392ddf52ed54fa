"""Snapshots of datasets: when they are taken, the limit on their cost, and their content."""

import copyreg
import itertools
import pickle
import random
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch
from sample_data import Numbers
from support import same
from torch._utils import ExceptionWrapper
from torch.utils.data import IterableDataset, _DatasetKind

from rustloader.fetch.seeds import Seeding, Seeds
from rustloader.workers import by_value, snapshots
from rustloader.workers.snapshots import Publisher, SnapshotPolicy, Snapshots, is_stateful

pytestmark = pytest.mark.ours

MAP, ITERABLE = _DatasetKind.Map, _DatasetKind.Iterable


class Counter:
    """An object with a state, which counts how often the state was asked for."""

    def __init__(self):
        self.asked = 0

    def state_dict(self):
        self.asked += 1
        return {"asked": self.asked}

    def load_state_dict(self, state):
        self.asked = state["asked"]


class CountingNumbers(Numbers, Counter):
    def __init__(self, n):
        Numbers.__init__(self, n)
        Counter.__init__(self)


class Plain(IterableDataset):
    def __iter__(self):
        return iter([1, 2, 3])


class OfDataset(Plain, Counter):
    """The dataset has a state, its iterator has none."""

    def __init__(self):
        Counter.__init__(self)


def fetcher_of(dataset, kind):
    return _DatasetKind.create_fetcher(kind, dataset, True, list, False)


# When they are taken


def due(every, workers, ordinals=range(40)):
    """The ordinals after which a snapshot is taken."""
    maker, dataset = Snapshots(SnapshotPolicy(every), workers, MAP), CountingNumbers(3)
    fetcher = fetcher_of(dataset, MAP)
    maker.first(fetcher, dataset)
    return [it for it in ordinals if maker.after(it, fetcher, dataset) is not None]


def test_a_worker_makes_one_in_the_last_turn_before_a_multiple():
    assert due(5, 2, range(12)) == [3, 4, 8, 9]
    assert due(5, 1, range(12)) == due(5, 0, range(12)) == [4, 9]
    assert due(4, 3, range(9)) == [1, 2, 3, 5, 6, 7]
    for every, workers in [(1, 0), (1, 1), (1, 3), (3, 3), (2, 5)]:
        assert due(every, workers) == list(range(40))
    assert due(0, 2) == []


def test_each_worker_has_one_just_before_each_multiple():
    for every, workers in itertools.product(range(1, 9), range(1, 6)):
        ordinals = set(due(every, workers))
        for position in range(every, 40, every):
            assert ordinals.issuperset(range(max(position - workers, 0), position))


def test_a_dataset_without_a_state_has_the_first_one_alone():
    maker, dataset = Snapshots(SnapshotPolicy(1), 1, MAP), Numbers(3)
    fetcher = fetcher_of(dataset, MAP)
    maker.first(fetcher, dataset)
    assert maker.has_state is False
    assert not any(map(maker.is_due, range(9)))


@pytest.fixture
def clocks(monkeypatch):
    """Clocks that a test moves: `cpu` and `wall`, in seconds. The limits are powers of two, so sums are exact."""

    class Clocks:
        cpu = wall = 0.0

    monkeypatch.setattr(snapshots, "thread_time", lambda: Clocks.cpu)
    monkeypatch.setattr(snapshots, "monotonic", lambda: Clocks.wall)
    monkeypatch.setattr(snapshots, "SNAPSHOT_ALLOWANCE", 16.0)
    monkeypatch.setattr(snapshots, "SNAPSHOT_SHARE", 1 / 64)
    return Clocks


class Costly(Numbers):
    """Reading its state takes `cost` seconds of CPU time."""

    def __init__(self, clocks, cost):
        super().__init__(3)
        self.clocks, self.cost = clocks, cost

    def state_dict(self):
        self.clocks.cpu += self.cost
        return {}

    def load_state_dict(self, state):
        raise AssertionError


def begun(dataset, every=1):
    maker, fetcher = Snapshots(SnapshotPolicy(every), 1, MAP), fetcher_of(dataset, MAP)
    maker.first(fetcher, dataset)
    return maker, lambda: maker.after(0, fetcher, dataset) is not None


def test_the_first_ones_use_up_the_allowance(clocks):
    _, after = begun(Costly(clocks, 2.0))
    assert [after() for _ in range(9)] == [True] * 7 + [False] * 2
    # A cost of 18 is allowed after 128 s: 16, and a 64th of 128.
    clocks.wall = 127.0
    assert not after()
    clocks.wall = 128.0
    assert after() and not after()
    clocks.wall = 256.0
    assert after() and not after()


def test_the_time_is_cpu_time_of_the_epoch(clocks):
    dataset = Costly(clocks, 16.0)
    maker, after = begun(dataset)
    assert not after()
    # Another epoch has its own allowance.
    dataset.cost = 1.0
    clocks.wall, clocks.cpu = 5.0, 700.0
    maker.first(fetcher_of(dataset, MAP), dataset)
    assert after()
    # Waiting costs nothing.
    dataset.state_dict = lambda: setattr(clocks, "wall", clocks.wall + 50.0) or {}
    assert all(after() for _ in range(9))


def test_the_cost_stays_below_the_limit_whatever_happens(clocks):
    dice = random.Random(1)
    for _ in range(50):
        clocks.cpu, clocks.wall = 0.0, dice.choice([0.0, 1000.0])
        dataset = Costly(clocks, last := dice.choice([0.5, 1.0, 4.0, 30.0]))
        _, after = begun(dataset)
        began, taken = clocks.wall, 0
        for _ in range(200):
            clocks.wall += dice.choice([0.0, 1.0, 64.0, 500.0])
            # The cost of the last snapshot counts, not that of the next.
            fits = clocks.cpu + last <= 16 + (clocks.wall - began) / 64
            dataset.cost = dice.choice([0.5, 4.0, 30.0])
            assert after() is fits
            last = dataset.cost if fits else last
            taken += fits
        assert taken


# What they contain


def test_the_counters_of_the_seeds():
    seeds = Seeds(Seeding(True, 1, 0), 2)
    maker, dataset = Snapshots(SnapshotPolicy(1), 1, ITERABLE, seeds), OfDataset()
    seeds.batches, seeds.samples = 5, 17
    start = snapshots.read(maker.first(fetcher_of(dataset, ITERABLE), dataset))
    assert (start.batches, start.samples, maker.has_state) == (5, 17, True)


def test_what_is_stateful():
    assert is_stateful(Counter()) and is_stateful(torch.nn.Linear(1, 1))
    assert not is_stateful(None) and not is_stateful(Numbers(2))
    dataset = Numbers(2)
    dataset.state_dict = dict
    assert not is_stateful(dataset)
    dataset.load_state_dict = None
    assert not is_stateful(dataset)
    dataset.load_state_dict = dict
    assert is_stateful(dataset)
    assert not is_stateful(torch.utils.data.datapipes.iter.IterableWrapper([1]))


# How they are sent


class FakePort:
    def __init__(self):
        self.sent = []

    def send_snapshot(self, count, payload, is_error):
        content = snapshots.read_error(payload)[0] if is_error else snapshots.read(payload)
        self.sent.append((count, content, is_error))
        return True


def publisher(dataset, kind, every=1, workers=1, first_ordinal=0):
    port = FakePort()
    maker = Snapshots(SnapshotPolicy(every, first_ordinal), workers, kind)
    return port, Publisher(port, maker, first_ordinal, "in a test"), fetcher_of(dataset, kind)


def counts(port):
    return [count for count, _, is_error in port.sent if not is_error]


def test_a_snapshot_says_after_how_many_answers_it_was_made():
    dataset = CountingNumbers(3)
    port, it, fetcher = publisher(dataset, MAP, every=3, first_ordinal=4)
    it.first(None, fetcher, dataset)
    for task in range(6):
        it.after(task, fetcher, dataset)
    # Ordinals 5 and 8.
    assert counts(port) == [0, 2, 5]
    it.begin_epoch(10)
    it.first(None, fetcher, dataset)
    for task in range(10, 14):
        it.after(task, fetcher, dataset)
    assert counts(port)[3:] == [0, 3]


def test_the_end_has_one_whatever_it_costs(clocks):
    class CostlyStream(Plain, Costly):
        def __init__(self):
            Costly.__init__(self, clocks, 99.0)

    dataset = CostlyStream()
    port, it, fetcher = publisher(dataset, ITERABLE)
    it.first(None, fetcher, dataset)
    it.after(0, fetcher, dataset)
    it.at_end(fetcher, dataset)
    assert [(count, state.ended) for count, state, _ in port.sent] == [
        (0, False),
        (2, True),
    ]


@pytest.mark.parametrize("make", [Plain, OfDataset])
def test_the_end_counts_one_answer_more(make):
    dataset = make()
    port, it, fetcher = publisher(dataset, ITERABLE)
    it.first(None, fetcher, dataset)
    it.at_end(fetcher, dataset)
    assert counts(port) == [0, 1]
    it.begin_epoch(3)
    it.first(None, fetcher, dataset)
    it.at_end(fetcher, dataset)
    assert counts(port)[-2:] == [0, 1]


def test_sending_costs_too(clocks):
    dataset = Costly(clocks, 1.0)
    port, it, fetcher = publisher(dataset, MAP)
    send = port.send_snapshot

    def costly(*args):
        clocks.cpu += 7.0
        return send(*args)

    it.first(None, fetcher, dataset)
    port.send_snapshot = costly
    for task in range(9):
        it.after(task, fetcher, dataset)
    # The sums are 1 and 9; 17 would be too much.
    assert counts(port) == [0, 1]


class Failing(CountingNumbers):
    def state_dict(self):
        state = super().state_dict()
        if self.asked in self.bad:
            raise KeyError("no state")
        return state | ({"open": lambda: None} if self.asked in self.unpicklable else {})

    bad = unpicklable = ()


@pytest.mark.parametrize("kind", ["bad", "unpicklable"])
@pytest.mark.parametrize("at", [1, 3])
def test_an_error_is_sent_once_an_epoch(kind, at):
    dataset = Failing(3)
    setattr(dataset, kind, {at})
    port, it, fetcher = publisher(dataset, MAP)
    it.first(None, fetcher, dataset)
    for task in range(5):
        it.after(task, fetcher, dataset)
    *before, (count, error, is_error) = port.sent
    assert [it[0] for it in before] == list(range(at - 1)) and (count, is_error) == (at - 1, True)
    assert "in a test" in error.where and ("no state" if kind == "bad" else "lambda") in error.exc_msg
    it.begin_epoch(0)
    it.first(None, fetcher, dataset)
    it.after(0, fetcher, dataset)
    assert [(count, is_error) for count, _, is_error in port.sent[-2:]] == [(0, False), (1, False)]


def test_a_broken_worker_sends_its_error_in_place_of_the_first():
    dataset = OfDataset()
    port, it, fetcher = publisher(dataset, ITERABLE)
    try:
        raise ValueError("no file")
    except ValueError:
        error = ExceptionWrapper(where="in worker 1")
    it.first(error, None, dataset)
    it.after(0, None, dataset)
    assert dataset.asked == 0
    ((count, result, is_error),) = port.sent
    assert (count, is_error, result.exc_type, result.where) == (0, True, ValueError, "in worker 1")
    it.begin_epoch(1)
    it.first(None, fetcher, dataset)
    it.at_end(fetcher, dataset)
    assert counts(port) == [0, 1]


def test_an_error_at_the_end_comes_after_no_other():
    class Bad(OfDataset):
        def state_dict(self):
            raise KeyError("no state")

    dataset = Bad()
    port, it, fetcher = publisher(dataset, ITERABLE)
    it.first(None, fetcher, dataset)
    it.at_end(fetcher, dataset)
    assert [(count, is_error) for count, _, is_error in port.sent] == [(0, True)]


def test_the_main_process_does_without_one_that_cannot_be_made():
    dataset = Failing(3)
    dataset.unpicklable = {3}
    maker, fetcher = Snapshots(SnapshotPolicy(1), 0, MAP), fetcher_of(dataset, MAP)
    maker.first(fetcher, dataset)
    assert [maker.after(0, fetcher, dataset) is None for _ in range(4)] == [False, True, True, True]
    dataset.bad = {4}
    with pytest.raises(KeyError):
        maker.first(fetcher, dataset)
    assert maker.after(0, fetcher, dataset) is None
    dataset.bad = {dataset.asked + 1}
    assert snapshots.state_of(dataset) is None and snapshots.state_of(dataset) is not None


# The pickle


def tensors():
    base = torch.arange(24, dtype=torch.float32)
    yield from (base, base.view(2, 3, 4), base.view(4, 6).t(), base[3:9], base[::2], base[:0], torch.tensor(5))
    yield from (torch.arange(6).to(dtype) for dtype in (torch.bfloat16, torch.bool, torch.int16, torch.complex64))
    yield from (torch.ones(2, requires_grad=True), torch.complex(base, base).conj(), base.view(4, 6).to_sparse())
    yield from (torch.complex(base, base).conj().imag, base.to(torch.float8_e4m3fn), torch.ones(4).share_memory_())
    yield from (torch.empty(0, 3), torch.Generator().get_state(), torch.nn.Parameter(base.clone()))


@pytest.mark.parametrize("number", range(len(list(tensors()))))
def test_a_tensor_comes_back_by_value(number):
    tensor = list(tensors())[number]
    result = pickle.loads(by_value.dumps({"state": [tensor]}))["state"][0]
    assert same(result, tensor) and type(result) is type(tensor)
    if tensor.layout == torch.strided:
        assert not result.is_shared()
        before = tensor.detach().clone()
        result.detach().zero_()
        assert same(tensor.detach().clone(), before)


def test_a_view_has_its_own_bytes_alone():
    view = torch.zeros(1 << 20)[7:9]
    assert len(by_value.dumps(view)) < 500
    generator = torch.Generator().manual_seed(4)
    copy = torch.Generator()
    copy.set_state(pickle.loads(by_value.dumps(generator.get_state())))
    assert torch.rand((), generator=copy) == torch.rand((), generator=generator)


def test_arrays_and_subclasses_come_back():
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(2)])
    value = {"a": np.arange(5), "p": torch.Size([1]), "s": packed, 3: (None, {1}, b"x")}
    result = pickle.loads(by_value.dumps(value))
    assert (result["a"] == value["a"]).all() and result["a"].flags.writeable and result["p"] == value["p"]
    assert torch.equal(result["s"].data, packed.data) and result[3] == value[3]


def test_reducers_for_multiprocessing_have_no_effect(monkeypatch):
    class Own:
        pass

    def fail(obj):
        raise AssertionError("called")

    monkeypatch.setitem(ForkingPickler._extra_reducers, complex, fail)
    assert pickle.loads(by_value.dumps([3j, torch.ones(2)]))[0] == 3j
    # A program's reducers for all pickles have an effect.
    monkeypatch.setitem(copyreg.dispatch_table, torch.Tensor, lambda tensor: (len, ("abc",)))
    monkeypatch.setitem(copyreg.dispatch_table, Own, lambda own: (len, ("ab",)))
    assert pickle.loads(by_value.dumps([torch.ones(2), Own()])) == [3, 2]
