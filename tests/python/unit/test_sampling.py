"""The index batches of an epoch from any position are torch's own, in any process that continues the epoch."""

import dataclasses
import io
import itertools
import json
import random
import sys

import numpy as np
import pytest
import torch
from generators import torch_states
from resume_support import Holder, begin, merged, plain, typed
from sampler_plans import KINDS, Plan, Sized, random_plan
from support import outcome, within
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    SequentialSampler,
)

from rustloader._core import IndexStream
from rustloader.stateful_dataloader.compatibility import check
from rustloader.stateful_dataloader.next_epoch import draw, restore, run_out
from rustloader.stateful_dataloader.sampling import sampling
from rustloader.stateful_dataloader.schema import Draws

pytestmark = pytest.mark.ours


def steps(iterator, generator, count=sys.maxsize):
    """The outcome of each call and the states of the generators after it, up to two calls beyond the end."""
    seen, ends = [torch_states(generator)], 0
    while ends < 2 and len(seen) <= count:
        seen.append((outcome(next, iterator), torch_states(generator)))
        ends += seen[-1][0][0] != "value"
    return seen


def saved_and_loaded(saved):
    """A state after it was written to a file and read back."""
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# An epoch that is not interrupted


@pytest.mark.parametrize("kind", [*KINDS, "other"])
@pytest.mark.parametrize("asked", [False, True])
def test_an_epoch_from_its_beginning_is_torchs(kind, asked):
    rng = random.Random(kind)
    for seed in range(60):
        plan = random_plan(rng, kind)
        torch.manual_seed(seed)
        sampler, generator = plan.make()
        expected = steps(iter(sampler), generator)
        torch.manual_seed(seed)
        sampler, generator = plan.make()
        iterator = iter(sampler)
        before = torch_states(generator)
        own = sampling(sampler, iterator, None, 0, (), 1, map_style=True)
        assert torch_states(generator) == before, plan
        seen = [before]
        for call in range(1, len(expected)):
            seen.append((outcome(next, own.iterator), torch_states(generator)))
            if asked:
                own.state(call)
                assert torch_states(generator) == seen[-1][1], plan
        assert seen == expected, plan


def test_streams_stay_streams():
    shard = Plan("distributed", 10, num_replicas=2, rank=1)
    for plan in (Plan("sequential", 10), Plan("random", 10), shard, Plan("random", 10, None)):
        assert type(begin(plan.make()[0]).iterator) is IndexStream
    for plan in (Plan("sequential", 10, None), Plan("other", 10)):
        index_sampler = plan.make()[0]
        iterator = iter(index_sampler)
        assert sampling(index_sampler, iterator, None, 0, (), 1, map_style=True).iterator is iterator


@pytest.mark.parametrize("kind", ["random", "subset", "weighted"])
@pytest.mark.parametrize("given", [False, True])
def test_a_state_before_the_first_batch_makes_the_draws_that_follow(kind, given):
    kw = dict(replacement=True, num_samples=40) if kind == "weighted" else {}
    for replacement in (False, True) if kind == "random" else (None,):
        plan = Plan(kind, 20, given=given, **(kw if replacement is None else dict(replacement=replacement)))
        torch.manual_seed(3)
        sampler, generator = plan.make()
        expected = [*sampler], torch_states(generator)
        torch.manual_seed(3)
        sampler, generator = plan.make()
        own = begin(sampler)
        first = own.state(0)
        after = torch_states(generator)
        assert plain(own.state(0)) == plain(first)
        own.draw()
        assert torch_states(generator) == after
        assert ([*own.iterator], torch_states(generator)) == expected
        assert plain(own.state(0)) == plain(first)
        torch.manual_seed(4)
        assert [*begin(plan.make(9)[0], merged(first)).iterator] == expected[0]


# Resuming


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", range(4))
def test_any_position_in_a_new_process(kind, part):
    rng = random.Random(f"{kind} {part}")
    for seed in range(12):
        plan = random_plan(rng, kind)
        torch.manual_seed(seed)
        sampler, generator = plan.make()
        expected = [*sampler]
        following = [*sampler]
        for position in {0, len(expected), rng.randint(0, len(expected)), rng.randint(0, len(expected))}:
            torch.manual_seed(seed)
            first = begin(plan.make()[0])
            assert [*itertools.islice(first.iterator, position)] == expected[:position]
            state = first.state(position)

            torch.manual_seed(seed + 100)
            sampler, generator = plan.make(seed=50)
            if kind == "distributed":
                sampler_of(sampler).set_epoch(plan.kw["epoch"])
            before, own = torch.get_rng_state(), torch_states(generator)
            second = begin(sampler, saved_and_loaded(merged(state)), position)
            assert torch_states(generator) == own, "nothing is drawn or loaded before the first batch"
            assert plain(second.state(position)) == plain(state), plan
            cut = rng.randint(0, len(expected) - position)
            assert [*itertools.islice(second.iterator, cut)] == expected[position : position + cut], plan
            state = second.state(position + cut)
            # A third process continues from there, and so does the second. Some batches were delivered ahead.
            low = position + cut
            ahead = [at for at in range(low + 1, len(expected)) if rng.random() < 0.2]
            third = begin(plan.make(seed=60)[0], saved_and_loaded(merged(state)), low, ahead=ahead)
            assert [*third.iterator] == [expected[at] for at in range(low, len(expected)) if at not in ahead], plan
            assert [*second.iterator] == expected[position + cut :], plan
            # The global generator is left alone, and the sampler's own generator is in its state after the epoch.
            assert torch.equal(torch.get_rng_state(), before), plan
            if generator is not None or kind in ("sequential", "distributed"):
                assert [*sampler] == following, plan


def sampler_of(index_sampler):
    return index_sampler.sampler if isinstance(index_sampler, BatchSampler) else index_sampler


def test_a_position_costs_no_walk():
    huge = 2**60
    index_sampler = BatchSampler(SequentialSampler(range(huge)), 32, False)
    saved = merged(begin(index_sampler).state(0))
    with within(10):
        assert next(begin(index_sampler, saved, huge // 64).iterator) == [*range(huge // 2, huge // 2 + 32)]
        assert next(begin(SequentialSampler(range(huge)), None, huge - 1).iterator) == huge - 1
        assert [*begin(SequentialSampler(range(huge)), None, huge).iterator] == []


def test_what_a_state_says():
    first = begin(Plan("random", 20, drop_last=True, num_samples=25).make()[0])
    torch.manual_seed(4)
    next(first.iterator)
    torch.manual_seed(4)
    seed = int(torch.empty((), dtype=torch.int64).random_().item())
    fields = dict(kind="random", length=25, batch_size=3, drop_last=True, data_length=20, replacement=False)
    state = first.state(2)
    assert state == typed(fields | {"start": {"seed": seed}, "_sampler_iter_state": {"samples_yielded": 6}})
    assert json.loads(json.dumps(state.own)) == state.own
    assert first.state(9).sampler_iter_state == {"samples_yielded": 25}

    state = begin(Plan("sequential", 20, None).make()[0]).state(5)
    fields = dict(kind="sequential", length=20, batch_size=None, drop_last=None, start={})
    assert state == typed(fields)

    shard = dict(num_replicas=3, rank=1, shuffle=True, seed=5, drop_last=True)
    sampler = DistributedSampler(Sized(20), **shard)
    sampler.set_epoch(np.int64(4))
    start = begin(BatchSampler(sampler, 2, False)).state(0).own["start"]
    assert start == shard | dict(epoch=4, dataset_length=20, consumed=0, first=0)
    assert {type(start[name]) for name in ("epoch", "seed", "rank")} == {int}

    sampler, _generator = Plan("weighted", 9, given=True, num_samples=4, replacement=True).make()
    state = begin(sampler).state(0)
    expected = torch.Generator().manual_seed(1).get_state()
    fields = state.own
    assert torch.equal(fields.pop("start")["generator"], expected)
    assert fields == dict(kind="weighted", length=4, batch_size=3, drop_last=False, data_length=9, replacement=True)
    assert begin(Plan("subset", 9).make()[0]).state(0).own["start"].keys() == {"global_generator"}
    assert begin(Plan("other", 9).make()[0]).state(2) == typed(
        dict(kind="other", length=9, batch_size=3, drop_last=False, start=None)
        | {"_sampler_iter_state": {"samples_yielded": 6}}
    )


def test_unusual_batch_sizes_are_left_to_torch():
    index_sampler = BatchSampler(SequentialSampler(range(9)), 3, False)
    index_sampler.batch_size = np.int64(4)
    epoch = begin(index_sampler, None, 1)
    assert [*epoch.iterator] == [[4, 5, 6, 7], [8]]
    assert epoch.state(2).own["batch_size"] is None
    index_sampler.batch_size = None
    assert [*begin(index_sampler, None, 1).iterator] == []
    assert [*begin(index_sampler).iterator] == [[*range(9)]]


@pytest.mark.warns
def test_the_saved_epoch_of_a_distributed_sampler_counts(caplog):
    plan = Plan("distributed", 20, num_replicas=2, rank=1, epoch=3)
    whole = [*plan.make()[0]]
    saved = merged(begin(plan.make()[0]).state(1))
    sampler, _ = plan.make()
    assert [*begin(sampler, saved, 1).iterator] == whole[1:]
    assert not caplog.records
    sampler.sampler.set_epoch(0)
    assert [*begin(sampler, saved, 1).iterator] == whole[1:]
    assert sampler.sampler.epoch == 0
    (record,) = caplog.records
    assert "epoch 3" in record.getMessage() and "now 0" in record.getMessage()
    assert [*sampler] != whole


def test_the_state_of_one_rank_resumes_all():
    """Frameworks save the state of one rank and load it on each."""
    saved = merged(begin(Plan("distributed", 20, num_replicas=3, rank=1).make()[0]).state(1))
    for rank in range(3):
        plan = Plan("distributed", 20, num_replicas=3, rank=rank)
        sampler, _ = plan.make()
        check_saved(saved, Holder(sampler))
        resumed = begin(sampler, saved, 1)
        assert resumed.state(1).own["start"]["rank"] == rank
        assert [*resumed.iterator] == [*plan.make()[0]][1:]


def test_shards_whose_settings_are_no_numbers():
    sampler = DistributedSampler(Sized(9), 2, 0, shuffle=False)
    sampler.set_epoch(None)
    epoch = begin(BatchSampler(sampler, 2, False))
    assert epoch.state(0).own["start"] is None
    assert [*epoch.iterator] == [[0, 2], [4, 6], [8]]


# The draws of the next epoch


class Loader:
    """The attributes of a loader that `draw` uses."""

    def __init__(self, generator=None, dataset=None):
        self.generator, self.dataset = generator, dataset


def base_seed(generator):
    return torch.empty((), dtype=torch.int64).random_(generator=generator).item()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("between", [False, True])
def test_the_next_epoch_has_torchs_order(kind, between):
    """Two epochs as torch runs them, and two with a state between them that makes the draws of the second epoch."""
    rng = random.Random(kind)
    for seed in range(20):
        plan = random_plan(rng, kind)
        torch.manual_seed(seed)
        sampler, generator = plan.make()
        expected = []
        for _ in range(2):
            expected.append((base_seed(generator), [*sampler]))
        expected.append(torch_states(generator))

        torch.manual_seed(seed)
        sampler, generator = plan.make()
        own = [(base_seed(generator), [*begin(sampler).iterator])]
        draws = draw(Loader(generator), sampler, with_base_seed=True)
        start = draws.sampler
        # Only drawn values are kept. A sampler with its own generator draws from it by itself.
        kept = {"start": start} if start is not None and "generator" not in start else None
        if between:
            other = torch.get_rng_state()
            torch.rand(7)
        batches = [*begin(sampler, kept).iterator]
        if between:
            torch.set_rng_state(other)
        own += [(draws.base_seed, batches), torch_states(generator)]
        if not between or kept is not None or generator is not None or kind in ("sequential", "distributed"):
            assert own == expected, plan

        # In another process, the state leads to the same order.
        torch.manual_seed(seed + 1)
        sampler, other = plan.make(seed=70)
        assert [*begin(sampler, start and {"start": saved_and_loaded(start)}).iterator] == expected[1][1], plan
        if other is not None:
            sampler, other = plan.make(seed=80)
            restore(sampler, start)
            assert [*begin(sampler).iterator] == expected[1][1], plan


def test_draws_for_a_datapipe_leave_all_to_torch():
    from torch.utils.data.datapipes.iter import IterableWrapper

    torch.manual_seed(3)
    before = torch.get_rng_state()
    draws = draw(Loader(dataset=IterableWrapper(range(3))), Plan("random", 9).make()[0], with_base_seed=True)
    assert draws == Draws(None, None)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("kind", ["random", "subset", "weighted"])
def test_running_out_an_epoch(kind):
    rng = random.Random(kind)
    for _ in range(30):
        plan = random_plan(rng, kind)
        plan.given = True
        sampler, generator = plan.make()
        first = begin(sampler)
        next(first.iterator, None)
        saved = merged(first.state(1))
        list(first.iterator)
        after = generator.get_state()
        other, generator = plan.make(seed=9)
        before = torch.get_rng_state()
        run_out(other, typed(saved_and_loaded(saved)), 1)
        assert torch.equal(generator.get_state(), after) and torch.equal(torch.get_rng_state(), before), plan
        run_out(other, None)
        assert torch.equal(generator.get_state(), after)


# Checks


def check_saved(fields, loader):
    check(typed(fields), loader)


def refusal(saved, index_sampler):
    with pytest.raises(ValueError) as caught:
        check_saved(saved, Holder(index_sampler))
    return str(caught.value)


def saved_of(plan):
    return begin(plan.make()[0]).state(0).own


def test_differences_are_named():
    saved = saved_of(Plan("random", 100, 4))
    text = refusal(saved, Plan("random", 90, 4).make()[0])
    assert text == (
        "the state was saved with a sampler of length 100, but this loader has a sampler of length 90: load it into a "
        "loader over the same dataset, or start without a state"
    )
    text = refusal(saved, Plan("random", 90, 4, num_samples=100).make()[0])
    assert "over 100 indices" in text and "90" in text
    text = refusal(saved, Plan("random", 100, 8).make()[0])
    assert "with batch_size=4" in text and "has batch_size=8" in text
    text = refusal(saved, Plan("random", 100, 4, drop_last=True).make()[0])
    assert "with drop_last=False" in text and "has drop_last=True" in text
    text = refusal(saved, Plan("random", 100, 4, replacement=True).make()[0])
    assert "with replacement=False" in text and "has a sampler with replacement=True" in text
    text = refusal(saved, Plan("sequential", 100, 4).make()[0])
    assert "a RandomSampler" in text and "a SequentialSampler" in text
    text = refusal(saved, Plan("other", 100, 4).make()[0])
    assert "a RandomSampler" in text and "a sampler of another class" in text
    text = refusal(saved_of(Plan("other", 100, 4)), Plan("other", 90, 4).make()[0])
    assert "length 100" in text
    # A length that only one of them has is no difference.
    check_saved(saved | {"length": None}, Holder(Plan("random", 100, 4).make()[0]))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(num_replicas=3), ["2 ranks", "has 3 ranks", "reshard"]),
        (dict(seed=5), ["seed=0", "has a DistributedSampler with seed=5"]),
        (dict(shuffle=False), ["shuffle=True", "has a DistributedSampler with shuffle=False"]),
        (dict(cut=True), ["drop_last=False", "has a DistributedSampler with drop_last=True"]),
        (dict(size=99), ["over 100 indices", "over 99 indices"]),
        (dict(size=101), ["over 100 indices", "over 101 indices"]),
    ],
)
def test_differences_of_distributed_samplers_are_named(change, words):
    settings = dict(num_replicas=2, rank=1, size=100)
    saved = saved_of(Plan("distributed", **settings))
    text = refusal(saved, Plan("distributed", **settings | change).make()[0])
    for word in words:
        assert word in text


def test_junk_is_refused():
    random_sampler = Plan("random", 9).make()[0]
    saved = saved_of(Plan("random", 9))
    for start in ({}, {"seed": -1}, {"seed": "x"}, {"seed": True}, {"generator": 3}, [1], "x", 5):
        assert "start" in refusal(saved | {"start": start}, random_sampler)
    assert "start" in refusal(saved | {"start": {"generator": torch.zeros(3)}}, random_sampler)
    for kind in (None, "fancy", 3, ["random"]):
        assert "kind of sampler must be one of" in refusal(saved | {"kind": kind}, random_sampler)
    plan = Plan("distributed", 9, num_replicas=2, rank=0)
    saved = saved_of(plan)
    for name in (
        "epoch",
        "seed",
        "rank",
        "num_replicas",
        "dataset_length",
        "consumed",
        "first",
        "shuffle",
        "drop_last",
    ):
        for value in (None, "x", 1.5):
            assert repr(name) in refusal(saved | {"start": saved["start"] | {name: value}}, plan.make()[0])
        rest = {key: value for key, value in saved["start"].items() if key != name}
        assert repr(name) in refusal(saved | {"start": rest}, plan.make()[0])
    for name in ("rank", "consumed", "first"):
        assert "non-negative" in refusal(saved | {"start": saved["start"] | {name: -1}}, plan.make()[0])


# Interrupts and threads


@pytest.mark.parametrize("batch_size", [3, None])
@pytest.mark.parametrize(
    ("kind", "kw", "during"),
    [
        ("random", dict(), "empty"),
        ("random", dict(replacement=True), "empty"),
        ("random", dict(replacement=True), "randint"),
        ("subset", dict(), "get_rng_state"),
        ("subset", dict(), "randperm"),
        ("weighted", dict(num_samples=9, replacement=False), "multinomial"),
        ("weighted", dict(num_samples=9, replacement=False, given=True), "multinomial"),
    ],
)
def test_a_start_that_is_asked_for_while_it_is_drawn(kind, kw, during, batch_size, monkeypatch):
    """A signal handler may ask for the state while the first batch is drawn, before the draw and after it. The order
    stays torch's."""
    for after in (False, True):
        plan = Plan(kind, 20, batch_size, **kw)
        torch.manual_seed(3)
        expected = [*plan.make()[0]]
        torch.manual_seed(3)
        first = begin(plan.make()[0])
        seen = []
        original = getattr(torch, during)

        def interrupted(*args, first=first, seen=seen, after=after, original=original, **kw):
            monkeypatch.setattr(torch, during, original)
            if after:
                result = original(*args, **kw)
                seen.append(first.state(0))
                return result
            seen.append(first.state(0))
            return original(*args, **kw)

        monkeypatch.setattr(torch, during, interrupted)
        whole = [*first.iterator]
        assert len(seen) == 1 and whole == expected
        assert [*begin(plan.make()[0], merged(seen[0])).iterator] == whole
        assert plain(first.state(0)) == plain(seen[0])


@pytest.mark.parametrize("kind", ["random", "subset"])
@pytest.mark.parametrize("asked", [True, False])
def test_a_draw_that_torch_still_makes_precedes_a_state(kind, asked):
    torch.manual_seed(3)
    first = begin(Plan(kind, 20).make()[0])
    saved = dataclasses.replace(first.state(0), owes_draws=True)
    after = torch.get_rng_state()
    torch.manual_seed(3)
    sampler = Plan(kind, 20).make()[0]
    owing = sampling(sampler, iter(sampler), saved, 0, (), 1, map_style=True)
    if asked:
        owing.draw()
        assert torch.equal(torch.get_rng_state(), after)
    assert [*owing.iterator] == [*first.iterator] and torch.equal(torch.get_rng_state(), after)
