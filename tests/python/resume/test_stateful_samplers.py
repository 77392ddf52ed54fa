"""Samplers with a state, those of torchdata and of a program, in an epoch of a loader."""

import copy
import dataclasses
import itertools
import random

import pytest
import torch
from resume_support import Holder, begin, merged, plain, typed
from stateful.datasets import IteratorWithState, OwnIteratorWithState
from torch.utils.data import BatchSampler as TorchBatchSampler
from torch.utils.data import RandomSampler as TorchRandomSampler
from torch.utils.data import Sampler, SequentialSampler

from rustloader.stateful_dataloader import recording
from rustloader.stateful_dataloader.compatibility import check
from rustloader.stateful_dataloader.next_epoch import run_out
from rustloader.stateful_dataloader.sampler import BatchSampler, RandomSampler, StatefulDistributedSampler
from rustloader.stateful_dataloader.sampling import sampling
from rustloader.stateful_dataloader.schema import SamplerState, copied

pytestmark = pytest.mark.ours


def generator(seed):
    return torch.Generator().manual_seed(seed)


def random_settings(rng):
    size = rng.randint(1, 80)
    return size, dict(replacement=rng.random() < 0.5, num_samples=rng.choice([None, rng.randint(1, 3 * size)]))


class Counted(Sampler):
    """A sampler that is itself stateful: it continues where it stopped. It keeps and changes the dict that it loads."""

    def __init__(self, size):
        self.size, self.state = size, {"at": 0}

    def __iter__(self):
        while self.state["at"] < self.size:
            self.state["at"] += 1
            yield self.state["at"] - 1
        self.state["at"] = 0

    def __len__(self):
        return self.size

    def state_dict(self):
        return self.state

    def load_state_dict(self, state_dict):
        self.state = state_dict


class Growing(Sampler):
    """A batch sampler with a state of its own."""

    def __init__(self, size):
        self.size, self.at = size, 0

    def __iter__(self):
        while self.at < self.size:
            self.at += 1
            yield [self.at * 10] * self.at
        self.at = 0

    def __len__(self):
        return self.size

    def state_dict(self):
        return vars(self)  # not a copy

    def load_state_dict(self, state_dict):
        vars(self).update(state_dict)


SAMPLERS = {
    "torchdata's batches": lambda seed: BatchSampler(RandomSampler(range(23), generator=generator(seed)), 3, False),
    "torchdata's sampler in torch's batches": lambda seed: TorchBatchSampler(
        RandomSampler(range(23), replacement=True, generator=generator(seed)), 3, True
    ),
    "torchdata's sampler without batches": lambda seed: RandomSampler(range(23), generator=generator(seed)),
    "distributed": lambda seed: TorchBatchSampler(StatefulDistributedSampler(range(23), 2, 1), 3, False),
    "distributed without batches": lambda seed: StatefulDistributedSampler(range(23), 2, 1),
    "torchdata's batches of torch's sampler": lambda seed: BatchSampler(SequentialSampler(range(23)), 3, False),
    "a stateful iterator": lambda seed: TorchBatchSampler(IteratorWithState(23), 3, False),
    "a stateful iterator without batches": lambda seed: IteratorWithState(23),
    "a stateful sampler": lambda seed: TorchBatchSampler(Counted(23), 3, True),
    "its own iterator": lambda seed: BatchSampler(OwnIteratorWithState(23), 3, False),
    "a batch sampler": lambda seed: Growing(9),
}


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("every", [0, 1, 3])
def test_every_position(name, every):
    make = SAMPLERS[name]
    reference = make(1)
    whole, following = [*reference], [*reference]
    for drawn in range(len(whole) + 1):
        # Workers have `drawn` index batches; fewer are delivered.
        first = begin(make(1), every=every)
        assert [*itertools.islice(first.iterator, drawn)] == whole[:drawn]
        for position in range(drawn + 1):
            state = first.state(position)
            assert state.own["kind"] == "stateful"
            if every == 1:
                assert state.own["state_position"] == position
            saved = merged(state)
            sampler = make(50)
            second = begin(sampler, saved, position, every=every)
            resumed_state = second.state(position)
            assert plain(resumed_state) == plain(state)
            assert [*second.iterator] == whole[position:], (drawn, position)
            assert [*begin(sampler).iterator] == following
            assert plain(saved) == plain(merged(state))
        assert [*first.iterator] == whole[drawn:]


def test_a_sampler_that_is_its_own_iterator_in_torchs_batches():
    """torch calls `iter` for each batch, and would start over each time."""
    whole = [*BatchSampler(OwnIteratorWithState(23), 3, False)]
    first = begin(TorchBatchSampler(OwnIteratorWithState(23), 3, False))
    assert [*itertools.islice(first.iterator, 20)] == whole
    for at in range(len(whole)):
        second = begin(TorchBatchSampler(OwnIteratorWithState(23), 3, False), merged(first.state(at)), at)
        assert [*itertools.islice(second.iterator, 20)] == whole[at:]


@pytest.mark.parametrize("name", SAMPLERS)
def test_resumed_twice_and_with_batches_ahead(name):
    make = SAMPLERS[name]
    whole = [*make(1)]
    first = begin(make(1))
    [*itertools.islice(first.iterator, 5)]
    second = begin(make(2), merged(first.state(2)), 2, ahead=[3, 4])
    expected = [batch for at, batch in enumerate(whole) if at == 2 or at > 4]
    assert [*itertools.islice(second.iterator, 2)] == expected[:2]
    for position in range(2, 7):
        third = begin(make(3), merged(second.state(position)), position)
        assert [*third.iterator] == whole[position:]


@pytest.mark.parametrize("name", SAMPLERS)
def test_running_out(name):
    make = SAMPLERS[name]
    sampler = make(1)
    whole = [*sampler]
    following = [*sampler]
    for position in (len(whole), 3):
        first = begin(make(1), every=2)
        [*itertools.islice(first.iterator, position)]
        other = make(9)
        run_out(other, typed(merged(first.state(position))), position)
        assert [*begin(other).iterator] == following


class Endless(Sampler):
    def __init__(self):
        self.at = 0

    def __iter__(self):
        while True:
            self.at += 1
            yield self.at

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state_dict):
        self.at = state_dict["at"]


def test_running_out_a_sampler_without_an_end():
    other = Endless()
    run_out(other, SamplerState("stateful", state_position=3, index_sampler_state={"at": 3}), 5)
    assert other.at == 6


def test_state_during_the_start_of_the_sampler_is_the_loaded_one():
    """A signal handler may ask for one then."""
    states = []

    class Asking(Counted):
        def __iter__(self):
            states.append(first.state(1))
            return super().__iter__()

    first = begin(TorchBatchSampler(Asking(9), 2, False))
    whole = [*first.iterator]
    saved = merged(first.state(1))
    first = sampling(TorchBatchSampler(Asking(9), 2, False), iter(()), typed(saved), 1, (), 1, map_style=True)
    assert [*first.iterator] == whole[1:] and merged(states[-1]) == saved


def test_a_torchdata_state_in_torchs_sampler():
    """Without this package's part of the state, the rest comes in torchdata's order."""
    rng = random.Random(3)
    for case in range(60):
        size, kw = random_settings(rng)
        batch_size = rng.choice([None, 1, 2, 5])

        def batches(cls, inner, size=batch_size):
            return inner if size is None else cls(inner, size, False)

        data = range(size)
        inner = RandomSampler(data, generator=generator(case), **kw)
        iterator = iter(batches(BatchSampler, inner))
        position = len([*itertools.islice(iterator, rng.randint(0, 9))])
        saved = {"_sampler_iter_state": copy.deepcopy(iterator.state_dict())}
        rest = [*iterator]
        following = [*iter(batches(BatchSampler, inner))]
        for own in (None, generator(5)):
            before = torch.get_rng_state()
            index_sampler = batches(TorchBatchSampler, TorchRandomSampler(data, generator=own, **kw))
            assert [*begin(index_sampler, saved, position).iterator] == rest, (size, kw, batch_size, position)
            assert torch.equal(torch.get_rng_state(), before)
        # After the end of the epoch, the next one is in torchdata's order too.
        run_out(index_sampler, typed(saved), position)
        assert [*begin(index_sampler).iterator] == following


@pytest.mark.parametrize(
    "name, state",
    [
        ("torchdata's batches", {"sampler_iter_state": {"yielded": 6, "generator": generator(1).get_state()}}),
        ("distributed", {"sampler_state": {"yielded": 6}}),
    ],
)
def test_checkpoints_of_the_samplers_of_rustloader_0_1_0_load(name, state):
    whole = [*SAMPLERS[name](1)]
    saved = {"kind": "stateful", "state_position": 2, "_sampler_iter_state": {"samples_yielded": 6, **state}}
    assert [*begin(SAMPLERS[name](50), saved, 2).iterator] == whole[2:]


def test_a_torchdata_state_of_other_samplers():
    iterator = iter(BatchSampler(SequentialSampler(range(20)), 3, False))
    drawn = [next(iterator), next(iterator)]
    saved = {"_sampler_iter_state": iterator.state_dict()}
    rest = [*iterator]
    for cls in (TorchBatchSampler, BatchSampler):
        assert [*begin(cls(SequentialSampler(range(20)), 3, False), saved, 2).iterator] == rest
    # Two batches were delivered after the state.
    iterator = begin(BatchSampler(SequentialSampler(range(20)), 3, False), saved | {"state_position": 2}, 4).iterator
    assert [*iterator] == rest[2:]
    assert len(drawn) == 2


def test_a_position_that_a_program_set_back():
    """accelerate's dispatcher does this; torchdata takes the sampler's state as it is."""
    first = begin(SAMPLERS["torchdata's batches"](1))
    whole = [*first.iterator]
    saved = merged(first.state(4))
    second = begin(SAMPLERS["torchdata's batches"](2), saved, 3)
    assert [*second.iterator] == whole[4:]


def test_a_state_for_a_sampler_that_has_none():
    for index_sampler in (IteratorWithState(5), TorchBatchSampler(IteratorWithState(5), 2, False)):
        saved = {"_index_sampler_state": {"at": 3}}
        if isinstance(index_sampler, TorchBatchSampler):
            saved = {"_sampler_iter_state": {"samples_yielded": 2, "sampler_state": {"at": 3}}}
        with pytest.raises(ValueError, match="IteratorWithState lacks state_dict or load_state_dict"):
            next(begin(index_sampler, saved, 1).iterator)


def test_copies_of_all_kinds_of_values():
    class Box:
        def __init__(self):
            self.items = [1]

    tensor = torch.arange(3)
    value = {"a": [1, (2.5, "x", None, [b"y"])], 5: {True}, "t": tensor, "box": Box()}
    result = copied(value)
    assert result["a"] == value["a"] and result[5] == value[5] and torch.equal(result["t"], tensor)
    result["a"][1][3].append(1)
    result["a"].append(1)
    result[5].add(7)
    result["t"][0] = 9
    result["box"].items.append(2)
    result["new"] = 1
    assert value.keys() == {"a", 5, "t", "box"}
    assert value["a"] == [1, (2.5, "x", None, [b"y"])] and value[5] == {True} and value["box"].items == [1]
    assert tensor.tolist() == [0, 1, 2]


def test_how_often_states_are_made():
    counts = []

    class Watched(Growing):
        def state_dict(self):
            counts.append(self.at)
            return dict(vars(self))

    for every, expected in [(0, [0]), (1, [0, 1, 2, 3, 4, 5, 6]), (3, [0, 3, 6]), (4, [0, 4])]:
        counts.clear()
        first = begin(Watched(7), every=every)
        [*itertools.islice(first.iterator, 6)]
        assert counts == expected
        assert first.state(5).own["state_position"] == max(at for at in expected if at <= 5)


def test_states_that_take_long_are_left_out(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(recording.time, "thread_time", lambda: now[0])
    monkeypatch.setattr(recording.time, "monotonic", lambda: 100.0)

    class Slow(Growing):
        def state_dict(self):
            now[0] += 0.006
            return dict(vars(self))

    first = begin(Slow(9))
    [*itertools.islice(first.iterator, 8)]
    # 24 ms exceed the limit of 20 ms.
    assert [first.state(at).own["state_position"] for at in range(9)] == [0, 1, 2, 3, 3, 3, 3, 3, 3]
    whole = [*Growing(9)]
    for at in range(9):
        assert [*begin(Slow(9), merged(first.state(at)), at).iterator] == whole[at:]
    # After a second, 20 ms more are allowed.
    monkeypatch.setattr(recording.time, "monotonic", lambda: 101.0)
    next(first.iterator)
    assert first.state(9).own["state_position"] == 9


def test_old_states_are_thinned_out(monkeypatch):
    monkeypatch.setattr(recording, "SNAPSHOT_ALLOWANCE", 100)
    first = begin(RandomSampler(range(1000), generator=generator(1)))
    whole = [*itertools.islice(first.iterator, 900)]
    assert len(first._recorder._entries) <= recording._MAX_STATES
    rest = [*first.iterator]
    whole += rest
    # All recent states are kept; older ones are farther apart.
    positions = [first.state(at).own["state_position"] for at in range(1001)]
    assert positions[-30:] == [*range(971, 1001)]
    assert len({*positions}) <= recording._MAX_STATES and positions[0] == 0
    for at in (0, 1, 333, 970, 1000):
        sampler = RandomSampler(range(1000), generator=generator(2))
        assert [*begin(sampler, merged(first.state(at)), at).iterator] == whole[at:]


def test_an_error_of_state_dict_is_raised_when_a_state_is_asked_for():
    class Broken(Counted):
        def state_dict(self):
            if self.state["at"] > 2:
                raise RuntimeError("no state today")
            return super().state_dict()

    first = begin(Broken(6))
    assert [*itertools.islice(first.iterator, 2)] == [0, 1]
    assert first.state(2).index_sampler_state == {"at": 2}
    assert [*first.iterator] == [2, 3, 4, 5]
    with pytest.raises(RuntimeError, match="no state today"):
        first.state(6)


def test_an_interrupted_state_loses_no_index_batch():
    class Interrupted(Counted):
        raises = 0

        def state_dict(self):
            if self.raises:
                self.raises -= 1
                raise KeyboardInterrupt
            return super().state_dict()

    for batches in (False, True):
        for at in range(4):
            sampler = Interrupted(8)
            index_sampler = TorchBatchSampler(sampler, 2, False) if batches else sampler
            whole = [*index_sampler]
            first = begin(index_sampler)
            delivered = [*itertools.islice(first.iterator, at)]
            sampler.raises = 1
            with pytest.raises(KeyboardInterrupt):
                next(first.iterator)
            assert first.state(at).own["state_position"] == at
            delivered += first.iterator
            assert delivered == whole
            assert first.state(at + 1).own["state_position"] == at + 1
            other = Interrupted(8)
            other = TorchBatchSampler(other, 2, False) if batches else other
            assert [*begin(other, merged(first.state(at + 1)), at + 1).iterator] == whole[at + 1 :]


def test_checks_of_samplers_with_a_state():
    for make in SAMPLERS.values():
        first = begin(make(1))
        next(first.iterator)
        check(first.state(1), Holder(make(2)))
        check(dataclasses.replace(first.state(1), kind="other"), Holder(make(2)))
    saved = begin(SAMPLERS["torchdata's batches"](1)).state(0)
    assert saved.batch_size == 3
    with pytest.raises(ValueError, match="batch_size=3"):
        check(saved, Holder(BatchSampler(RandomSampler(range(31)), 4, False)))
    with pytest.raises(ValueError, match="length 8"):
        check(saved, Holder(BatchSampler(RandomSampler(range(29)), 3, False)))
    with pytest.raises(ValueError, match="another class"):
        check(saved, Holder(TorchBatchSampler(TorchRandomSampler(range(23)), 3, False)))
