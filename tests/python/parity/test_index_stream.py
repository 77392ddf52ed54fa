"""The index stream has torch's indices and draws, at the same calls, without a list of all indices."""

import gc
import itertools
import os
import random
import signal
import sys
import threading
import types
import weakref

import pytest
import torch
import torch.utils.data.sampler as torch_sampler
from generators import torch_states
from sample_data import untouched
from sampler_plans import OwnRandom, Plan, Sized, random_plan
from support import DataLoader, TorchDataLoader, outcome, run_script
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
)

from rustloader._core import IndexStream
from rustloader.order.stream import stream

pytestmark = pytest.mark.ours

ORDER = os.path.dirname(stream.__code__.co_filename)


def built(cls, plan):
    """A loader with the sampler of a plan, and the generator that the program can see."""
    index_sampler, generator = plan.make()
    given = dict(sampler=index_sampler) if plan.batch_size is None else dict(batch_sampler=index_sampler)
    batch = dict(batch_size=None) if plan.batch_size is None else {}
    return cls(Sized(plan.size), collate_fn=untouched, **given, **batch), generator


def indices_of(loader):
    """The iterator over index batches that a loader's iterator without workers has."""
    return iter(loader)._sampler_iter


def steps(cls, plan, seed, count=None, disturb=lambda step, sampler: None):
    """The outcome of each call, and the states of the generators after it, until two calls have returned no batch.

    Args:
        count: The largest length of the result.
        disturb: Called before each call with its number and the BatchSampler.
    """
    torch.manual_seed(seed)
    loader, generator = built(cls, plan)
    iterator = indices_of(loader)
    if cls is DataLoader:
        assert type(iterator) is IndexStream
    seen = [torch_states(generator)]
    ends = 0
    while ends < 2 and len(seen) != count:
        disturb(len(seen), loader.batch_sampler)
        seen.append((outcome(next, iterator), torch_states(generator)))
        ends += seen[-1][0][0] != "value"
    return seen


def same_steps(plan, seed=0, **kw):
    expected = steps(TorchDataLoader, plan, seed, **kw)
    assert steps(DataLoader, plan, seed, **kw) == expected
    return [step for step, _ in expected[1:]]


def has_stream(plan):
    """Whether the samplers of a plan are those that the stream replaces."""
    is_torchs = plan.cls is None and not plan.kw.get("replacement")
    return is_torchs and (plan.batch_size is not None or plan.kind == "random")


@pytest.mark.parametrize("part", range(10))
def test_thousand_random_cases(part):
    rng = random.Random(part)
    plans = (random_plan(rng, rng.choice(["sequential", "random", "random", "distributed"])) for _ in range(200))
    for number, plan in enumerate(filter(has_stream, plans)):
        assert same_steps(plan, seed=number % 7), plan


@pytest.mark.parametrize("size", [0, 8192, 20_000])
def test_long_epochs_in_order(size):
    assert same_steps(Plan("sequential", size, batch_size=400))


@pytest.mark.parametrize("batch_size", [3, None])
def test_yields_plain_lists_of_plain_ints(batch_size):
    stream = indices_of(DataLoader(Sized(10), batch_size=batch_size, shuffle=True))
    assert iter(stream) is stream
    for batch in stream:
        assert type(batch) is (list if batch_size else int)
        assert {type(index) for index in (batch if batch_size else [batch])} == {int}


# Which samplers get a stream


class OwnBatches(BatchSampler):
    pass


class OwnShard(DistributedSampler):
    pass


DATA = Sized(10)
OTHERS = {
    "a subclass": dict(sampler=OwnRandom(DATA)),
    "a subclass of the batch sampler": dict(batch_sampler=OwnBatches(RandomSampler(DATA), 3, False)),
    "a subclass of the distributed sampler": dict(sampler=OwnShard(DATA, 2, 0)),
    "a subset": dict(sampler=SubsetRandomSampler(range(5))),
    "with replacement": dict(sampler=RandomSampler(DATA, replacement=True)),
    "an iterable in batches": dict(batch_sampler=BatchSampler([1, 2, 3], 2, False)),
    "nested": dict(batch_sampler=BatchSampler(BatchSampler(RandomSampler(DATA), 2, False), 2, False)),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_samplers_keep_torchs_iterator(kind):
    batch = {} if "batch_sampler" in OTHERS[kind] else dict(batch_size=2)
    iterator = indices_of(DataLoader(DATA, **OTHERS[kind], **batch))
    assert type(iterator) is types.GeneratorType
    assert iterator.gi_code.co_qualname == "BatchSampler.__iter__"


def test_a_sampler_alone_in_order_keeps_torchs_iterator():
    assert type(indices_of(DataLoader(DATA, batch_size=None))) is type(iter(range(3)))
    assert type(indices_of(DataLoader(DATA, batch_size=None, sampler=DistributedSampler(DATA, 2, 0)))) is type(iter([]))


@pytest.mark.parametrize("cls", [RandomSampler, BatchSampler, DistributedSampler])
def test_replaced_methods_take_the_ordinary_way(cls, monkeypatch):
    calls = []
    original = cls.__iter__

    def counted(self):
        calls.append(self)
        return original(self)

    inner = DistributedSampler(DATA, 2, 0) if cls is DistributedSampler else RandomSampler(DATA)
    loader = DataLoader(DATA, batch_sampler=BatchSampler(inner, 3, False), collate_fn=untouched)
    monkeypatch.setattr(cls, "__iter__", counted)
    iterator = indices_of(loader)
    if cls is not BatchSampler:  # the wrapper still returns torch's generator
        assert type(iterator) is types.GeneratorType
    list(iterator)
    assert len(calls) == 1


def test_a_replaced_method_of_an_iterable_datasets_sampler_is_called(monkeypatch):
    cls = torch.utils.data.dataloader._InfiniteConstantSampler
    index_sampler = BatchSampler(cls(), 2, False)
    assert next(stream(index_sampler, iter(index_sampler))) == [None, None]
    monkeypatch.setattr(cls, "__iter__", lambda self: iter("abc"))
    assert [*stream(index_sampler, iter(index_sampler))] == [["a", "b"], ["c"]]


# When things happen


def test_permutations_are_drawn_when_torch_draws_them(monkeypatch):
    def drawn(cls, plan):
        counts = []
        draws = []
        with monkeypatch.context() as patch:
            patch.setattr(torch, "randperm", lambda *args, **kw: draws.append(args) or original(*args, **kw))
            iterator = indices_of(built(cls, plan)[0])
            counts.append(len(draws))
            for _ in iterator:
                counts.append(len(draws))
            counts.append(len(draws))
        return counts

    original = torch.randperm
    for kw in (dict(), dict(num_samples=25), dict(num_samples=30), dict(num_samples=4)):
        visible = Plan("random", 10, given=True, **kw)
        assert drawn(DataLoader, visible) == drawn(TorchDataLoader, visible)
    # From a generator that no program can see, only what is needed is drawn.
    assert drawn(DataLoader, Plan("random", 10, batch_size=5)) == [0, 1, 1, 1]
    assert drawn(TorchDataLoader, Plan("random", 10, batch_size=5)) == [0, 1, 1, 2]
    assert drawn(DataLoader, Plan("random", 10, batch_size=5, num_samples=11)) == [0, 1, 1, 2, 2]


def test_attributes_are_read_when_torch_reads_them():
    def set_size(size, at=2):
        def disturb(step, batches):
            if step == at:
                batches.batch_size = size

        return disturb

    for size in (1, 5, 0, -1, True, None, 2.5, "3", 2**40, 2**70, torch.tensor(2)):
        for at in (1, 2, 5):  # the last one after an incomplete batch
            assert same_steps(Plan("random", 10), disturb=set_size(size, at))
        if size not in (2**40,):  # torch would make a list of that size
            assert same_steps(Plan("random", 10, drop_last=True), disturb=set_size(size, 1))
    assert same_steps(Plan("random", 10, drop_last=True), disturb=set_size(2))

    def drop_last(at):
        def disturb(step, batches):
            batches.drop_last = step >= at

        return disturb

    for at in (1, 2):
        assert same_steps(Plan("random", 10), disturb=drop_last(at))


@pytest.mark.parametrize("at", [1, 2, 4])
@pytest.mark.parametrize("to", [0, 3, 13, 25])
@pytest.mark.parametrize("given", [False, True])
def test_a_dataset_that_changes_its_length(at, to, given):
    def disturb(step, batches):
        if step == at:
            batches.sampler.data_source.size = to

    same_steps(Plan("random", 10, given=given), disturb=disturb)
    same_steps(Plan("random", 10, given=given, num_samples=17), disturb=disturb)


@pytest.mark.parametrize("size", [0, 1, 5, 9, 12])
@pytest.mark.parametrize("rank", range(3))
def test_a_shard_whose_dataset_changes_its_length(size, rank):
    def disturb(step, batches):
        if step == 1:
            batches.sampler.dataset.size = size

    for cut in (False, True):
        same_steps(Plan("distributed", 10, num_replicas=3, rank=rank, cut=cut), disturb=disturb)


@pytest.mark.parametrize("change", [dict(num_samples=7), dict(rank=5), dict(rank=-1), dict(total_size=12.0)], ids=str)
def test_a_shard_whose_numbers_change(change):
    def disturb(step, batches):
        if step == 1:
            vars(batches.sampler).update(change)

    same_steps(Plan("distributed", 10, num_replicas=3, rank=1), disturb=disturb)


@pytest.mark.parametrize("other", [[7, 8, 9, 1], SequentialSampler(Sized(5)), RandomSampler(Sized(7))])
def test_a_sampler_that_is_replaced_before_the_first_call(other):
    def disturb(step, batches):
        if step == 1:
            batches.sampler = other

    assert same_steps(Plan("random", 10), disturb=disturb)


# Errors


class Failing(Sized):
    error = None

    def __len__(self):
        if self.error is not None:
            raise self.error
        return self.size


@pytest.mark.parametrize("error", [ValueError("no length"), StopIteration(), TypeError("none"), RuntimeError()])
@pytest.mark.parametrize("at", [1, 4])
def test_an_error_ends_the_stream_as_it_ends_a_generator(error, at):
    def disturb(step, batches):
        batches.sampler.data_source.error = error if step == at else None

    seen = same_steps(Plan("random", 10, dataset=Failing), disturb=disturb)
    assert seen[-2][0] == "error" and seen[-1] == ("end",)


def test_a_permutation_that_is_no_ordinary_tensor(monkeypatch):
    class Own(torch.Tensor):
        pass

    original = torch.randperm
    monkeypatch.setattr(torch, "randperm", lambda *args, **kw: original(*args, **kw).as_subclass(Own))
    assert len(same_steps(Plan("random", 10, num_samples=14))) == 7
    assert len(same_steps(Plan("distributed", 10, num_replicas=3, rank=2))) == 4


# Skipping


def stream_of(plan, seed=0, skip=0):
    """A stream that skips some batches, and the generator that the program can see."""
    torch.manual_seed(seed)
    loader, generator = built(DataLoader, plan)
    stream = indices_of(loader)
    stream.skip(skip)
    return stream, generator


def skipped(plan, count):
    """The batches of a stream that skips `count` of them, and the states of the generators after the last one."""
    stream, generator = stream_of(plan, skip=count)
    return list(stream), torch_states(generator)


@pytest.mark.parametrize("count", [0, 1, 5, 6, 7, 1000, sys.maxsize])
def test_a_skip_ends_at_the_end(count):
    for kw in (dict(num_samples=16), dict(num_samples=18, drop_last=True), dict(num_samples=18, given=True)):
        plan = Plan("random", 7, **kw)
        whole, after = skipped(plan, 0)
        assert skipped(plan, count) == (whole[count:], after)
        assert len(whole) == 6 - (kw.get("drop_last", False) and 18 % 3 != 0)


def test_a_skip_draws_no_permutation_before_torch_would():
    # A permutation is two batches: the second one is drawn with the third batch, with a skip or without.
    plan = Plan("random", 6, num_samples=12, given=True)
    stream, generator = stream_of(plan)
    next(stream), next(stream)
    expected = torch_states(generator), next(stream), torch_states(generator)
    stream, generator = stream_of(plan, skip=1)
    next(stream)
    assert (torch_states(generator), next(stream), torch_states(generator)) == expected


def test_a_skip_comes_before_the_first_next():
    for size in (2, 10):
        stream = indices_of(DataLoader(Sized(size), shuffle=True, batch_size=10))
        next(stream)
        with pytest.raises(ValueError, match="skip must be called before the first next"):
            stream.skip(1)
    with pytest.raises(OverflowError):
        indices_of(DataLoader(Sized(3), shuffle=True)).skip(-1)


# Interrupts, threads, memory


class Interrupt(Exception):
    pass


def raise_interrupt(signum, frame):
    raise Interrupt


def interrupted(plan, at, skip=0):
    """All batches of a stream, although a signal handler raises at the `at`-th point where one can run, and the states
    of the generators. The batches are None if there is no such point."""
    stream, generator = stream_of(plan, 1, skip)
    points = itertools.count()

    def profile(frame, event, arg):
        # Handlers run when a Python function begins and when a C function has returned.
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith(ORDER) and next(points) == at:
            signal.raise_signal(signal.SIGUSR1)

    batches, interrupts = [], 0
    before = signal.signal(signal.SIGUSR1, raise_interrupt)
    try:
        while True:
            sys.setprofile(profile)
            try:
                batches.append(next(stream))
            except Interrupt:
                interrupts += 1
            except StopIteration:
                break
            finally:
                sys.setprofile(None)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert interrupts == (next(points) > at)
    return batches if interrupts else None, torch_states(generator)


@pytest.mark.parametrize(
    "plan",
    [
        Plan("random", 7, num_samples=16, batch_size=3),
        Plan("random", 7, num_samples=16, batch_size=3, given=True),
        Plan("random", 7, batch_size=7, given=True),
        Plan("random", 7, batch_size=3, drop_last=True),
        Plan("random", 7, num_samples=9, batch_size=None),
        Plan("distributed", 7, num_replicas=3, rank=2, batch_size=2),
    ],
)
@pytest.mark.parametrize("skip", [0, 3])
def test_an_interrupt_loses_and_doubles_nothing(plan, skip):
    stream, generator = stream_of(plan, 1)
    expected = list(stream)[skip:], torch_states(generator)
    at = 0
    while True:
        batches, after = interrupted(plan, at, skip)
        if batches is None:
            break
        assert (batches, after) == expected, at
        at += 1
    assert at >= 5


def test_next_in_two_threads_raises_as_a_generator_does():
    inside, release = threading.Event(), threading.Event()

    class Waiting(Sized):
        waits = False

        def __len__(self):
            if self.waits:
                inside.set()
                assert release.wait(60)
            return self.size

    data = Waiting(10)
    stream = indices_of(DataLoader(data, shuffle=True, batch_size=4))
    data.waits = True
    first = []
    thread = threading.Thread(target=lambda: first.append(next(stream)))
    thread.start()
    assert inside.wait(60)
    with pytest.raises(ValueError, match="generator already executing"):
        next(stream)
    release.set()
    thread.join()
    assert sorted(itertools.chain(*first, *stream)) == list(range(10))


def test_a_stream_in_a_cycle_is_collected():
    data = Sized(10)
    loader = DataLoader(data, shuffle=True, batch_size=4)
    data.stream = indices_of(loader)
    next(data.stream)
    reference = weakref.ref(loader.batch_sampler)
    del data, loader
    gc.collect()
    assert reference() is None


def test_memory_of_two_million_indices():
    status, out, err = run_script(
        """
        import tracemalloc
        import torch, rustloader
        from sampler_plans import Sized

        def resident():
            return int(open("/proc/self/statm").read().split()[1]) * 4096

        def grown(size):
            loader = rustloader.DataLoader(Sized(size), batch_size=64, shuffle=True)
            before = resident()
            iterator = iter(loader)
            next(iterator)
            return resident() - before

        grown(1000)
        print(grown(2_000_000))
        loader = rustloader.DataLoader(Sized(200_000), batch_size=2048, shuffle=True)
        tracemalloc.start()
        for _ in iter(loader)._sampler_iter:
            pass
        print(tracemalloc.get_traced_memory()[1])
        """
    )
    assert status == 0, err
    grown, of_python = map(int, out.split())
    assert 15_000_000 < grown < 18_000_000  # 8 bytes per index, and some noise
    assert of_python < 300_000  # a batch or two; NumPy's views share torch's memory


def test_the_known_code_is_that_of_the_installed_torch():
    from rustloader.order import stream

    assert stream.BATCHES is torch_sampler.BatchSampler.__iter__.__code__
    for cls in stream._CLASSES:
        assert cls.code is cls.sampler_class.__iter__.__code__


def test_unknown_code_keeps_torchs_iterator(monkeypatch):
    from rustloader.order.stream import _CLASS_OF_CODE
    from rustloader.system.torch_side import known_code

    def other(self):
        return iter([self.surprise for _ in self.other])

    here = sys.modules[__name__]
    assert known_code(other, here, "iter other") is None
    assert known_code(other, here, "iter", "iter other surprise") is other.__code__
    assert known_code(other, torch_sampler, "iter other surprise") is None
    assert known_code(len, here, "") is None
    monkeypatch.delitem(_CLASS_OF_CODE, RandomSampler.__iter__.__code__)
    assert type(indices_of(DataLoader(DATA, shuffle=True))) is types.GeneratorType
