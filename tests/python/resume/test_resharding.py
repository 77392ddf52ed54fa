"""Resharding turns the states of all ranks of a DistributedSampler into states for another number of ranks, which
deliver each sample exactly once."""

import copy
import itertools
import json
import random
from collections import Counter

import pytest
from resume_support import Holder
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler

from rustloader import StatefulDataLoader
from rustloader.order.stream import order_of
from rustloader.stateful_dataloader.compatibility import check
from rustloader.stateful_dataloader.resharding import reshard
from rustloader.stateful_dataloader.sampler import StatefulDistributedSampler
from rustloader.stateful_dataloader.sampling import sampling
from rustloader.stateful_dataloader.schema import SamplerState

pytestmark = pytest.mark.ours


class Job:
    """The settings of the loaders on all ranks."""

    def __init__(self, size, batch_size=2, drop_last=False, epoch=0, sampler_drop_last=False, **kw):
        self.size, self.batch_size, self.drop_last, self.epoch = size, batch_size, drop_last, epoch
        # `kw`: the other settings of the sampler.
        self.sampler_drop_last, self.kw = sampler_drop_last, kw

    def __repr__(self):
        return str(vars(self))

    def sampler(self, rank, replicas):
        sampler = DistributedSampler(range(self.size), replicas, rank, drop_last=self.sampler_drop_last, **self.kw)
        sampler.set_epoch(self.epoch)
        return sampler

    def batches(self, sampler):
        return sampler if self.batch_size is None else BatchSampler(sampler, self.batch_size, self.drop_last)

    def order(self):
        """The order of the whole epoch, as torch draws it."""
        sampler = DistributedSampler(range(self.size), 1, 0, **self.kw)
        sampler.set_epoch(self.epoch)
        return [*sampler]

    def run(self, replicas, states=None, batches=None):
        """Returns the first `batches` batches of each rank, and the rank's state after them."""
        results = []
        for rank in range(replicas):
            index_sampler = self.batches(self.sampler(rank, replicas))
            own, position = None, 0
            if states is not None:
                own, position = (
                    SamplerState.of(states[rank]["_rustloader"]["sampler"]),
                    states[rank]["_sampler_iter_yielded"],
                )
                check(own, Holder(index_sampler))
            epoch = sampling(index_sampler, iter(index_sampler), own, position, (), 1, map_style=True)
            delivered = [*itertools.islice(epoch.iterator, batches)]
            results.append((delivered, state_of(epoch.state(position + len(delivered)), position + len(delivered))))
        return [delivered for delivered, _ in results], [state for _, state in results]


def state_of(sampled, position, **more):
    """The parts of a loader's state that resharding reads."""
    own = {
        "version": 1,
        "delivered": position,
        "ahead": [],
        "sampler": sampled.own,
        "dataset": {"kind": "map", "length": None, "stateful": False},
        "base_seed": 5,
    }
    state = {
        "_sampler_iter_yielded": position,
        "_num_yielded": position,
        "_sampler_iter_state": sampled.sampler_iter_state,
        "_iterator_finished": False,
        "_rustloader": own,
    }
    return state | more


def samples(ranks):
    """All samples of all ranks."""
    counts = Counter()
    for batches in ranks:
        for batch in batches:
            counts.update(batch if isinstance(batch, list) else [batch])
    return counts


def dealt(left, replicas, job):
    """The batches of each rank if torch's samplers divide the rest of an order."""
    ranks = []
    for rank in range(replicas):
        sampler = (
            DistributedSampler(left, replicas, rank, shuffle=False, drop_last=job.sampler_drop_last) if left else []
        )
        positions = [*sampler]
        ranks.append([*job.batches([left[position] for position in positions])])
    return ranks


def random_job(rng):
    return Job(
        rng.choice([1, 2, rng.randint(1, 12), rng.randint(1, 80)]),
        rng.choice([None, 1, 2, 3, rng.randint(1, 10)]),
        drop_last=rng.random() < 0.25,
        epoch=rng.randrange(3),
        seed=rng.randrange(3),
        shuffle=rng.random() < 0.5,
        sampler_drop_last=rng.random() < 0.3,
    )


@pytest.mark.parametrize("old", range(1, 5))
@pytest.mark.parametrize("new", range(1, 7))
def test_what_is_left_is_dealt_anew(old, new):
    rng = random.Random(f"{old} {new}")
    for _ in range(40):
        job = random_job(rng)
        order = job.order()
        whole, _ = job.run(old)
        at = rng.randint(0, len(whole[0]))
        before, states = job.run(old, batches=at)
        total = sum(samples(before).values())
        consumed = min(total, job.size)
        assert samples(before) == Counter(order[:total]) if total <= job.size else set(samples(before)) == set(order)
        rng.shuffle(states)
        resharded = reshard(states, new)
        assert len(resharded) == new
        if new == old:
            after, _ = job.run(new, json.loads(json.dumps(resharded)))
            assert after == [batches[at:] for batches in whole]
            continue
        after, states = job.run(new, json.loads(json.dumps(resharded)))
        assert after == dealt(order[consumed:], new, job), (job, at)
        if not job.drop_last and not job.sampler_drop_last:
            # Nothing is left out, and only the samples that pad the last round of an order are repeated.
            everything = samples(before) + samples(after)
            assert set(everything) == set(range(job.size)), (job, at)
            repeated = total - consumed + -(job.size - consumed) % new
            assert sum(everything.values()) == job.size + repeated, (job, at)
        for rank, state in enumerate(states):
            assert state["_rustloader"]["sampler"]["start"]["rank"] == rank


def test_resharded_many_times():
    rng = random.Random(7)
    for _ in range(150):
        job = random_job(rng)
        order, left = job.order(), None
        states, replicas = None, rng.randint(1, 4)
        everything, consumed, padded = Counter(), 0, False
        for _ in range(5):
            left = order[consumed:]
            delivered, states = job.run(replicas, states, batches=rng.randint(0, 3))
            expected = dealt(left, replicas, job)
            assert delivered == [batches[: len(delivered[0])] for batches in expected]
            everything += samples(delivered)
            padded |= sum(samples(delivered).values()) > len(left)
            consumed = min(consumed + sum(samples(delivered).values()), job.size)
            # To another number of ranks each time; resharding to the same number changes nothing.
            states = reshard(states, replicas)
            replicas = rng.choice([other for other in range(1, 6) if other != replicas])
            states = reshard(states, replicas)
            for state in states:
                assert state["_rustloader"]["sampler"]["start"]["consumed"] == consumed
        if not padded:
            assert everything == Counter(order[:consumed])


def loaders(replicas, states=None):
    """Loaders of all ranks over 64 samples, in batches of 4."""
    built = []
    for rank in range(replicas):
        sampler = DistributedSampler(range(64), replicas, rank, seed=3)
        built.append(StatefulDataLoader(range(64), batch_size=4, sampler=sampler))
        if states is not None:
            built[-1].load_state_dict(copy.deepcopy(states[rank]))
    return built


def first_of(loader, count):
    return [batch.tolist() for batch in itertools.islice(loader, count)]


@pytest.mark.filterwarnings("ignore:an epoch of 0 batches")
@pytest.mark.parametrize(("before", "after"), [(3, 0), (3, 1), (5, 0), (5, 1), (8, 0)])
def test_loaders_take_states_for_more_ranks_at_any_position(before, after):
    """They also take states saved afterwards. The position counts more batches than a new rank has in the epoch."""
    old = loaders(2)
    delivered = [sample for loader in old for batch in first_of(loader, before) for sample in batch]
    new = loaders(4, reshard([loader.state_dict() for loader in old], 4))
    delivered += [sample for loader in new for batch in first_of(loader, after) for sample in batch]
    resumed = loaders(4, [loader.state_dict() for loader in new])
    delivered += [sample for loader in resumed for batch in loader for sample in batch.tolist()]
    assert sorted(delivered) == [*range(64)]
    finished = loaders(4, [loader.state_dict() for loader in resumed])
    for loader, fresh in zip(finished, loaders(4), strict=True):
        loader.sampler.set_epoch(1)
        fresh.sampler.set_epoch(1)
        assert first_of(loader, 9) == first_of(fresh, 9) and len(first_of(fresh, 9)) == 4


def test_states_are_not_changed():
    job = Job(40, 2)
    _, states = job.run(4, batches=3)
    before = copy.deepcopy(states)
    for replicas in (3, 4, 6):
        resharded = reshard(states, replicas)
        assert len({id(state["_rustloader"]["sampler"]["start"]) for state in resharded}) == replicas
        for state in resharded:
            state["_rustloader"]["sampler"]["start"].clear()
            state["_rustloader"]["dataset"].clear()
        assert states == before


def test_new_ranks_take_their_seeds_from_old_ones():
    job = Job(40, 2)
    _, states = job.run(2, batches=3)
    for rank, state in enumerate(states):
        state["_rustloader"]["base_seed"] = rank
    assert [state["_rustloader"]["base_seed"] for state in reshard(states, 5)] == [0, 1, 0, 1, 0]


def test_failures_belong_to_the_old_ranks():
    _, states = Job(40, 2).run(2, batches=3)
    for state in states:
        state["_rustloader"]["failures"] = 5
    assert [state["_rustloader"].get("failures") for state in reshard(states, 3)] == [None] * 3
    assert [state["_rustloader"].get("failures") for state in reshard(states, 2)] == [5] * 2


def test_states_with_workers():
    job = Job(40, 2)
    _, states = job.run(2, batches=3)
    for state in states:
        main = {"_sampler_iter_yielded": state.pop("_sampler_iter_yielded") - 1}
        state |= {"_snapshot": {"_main_snapshot": main}, "_steps_since_snapshot": 1}
    resharded = reshard(states, 3)
    assert {state["_rustloader"]["sampler"]["start"]["first"] for state in resharded} == {3}
    assert {state["_rustloader"]["sampler"]["start"]["consumed"] for state in resharded} == {12}


def test_states_before_the_first_epoch():
    job = Job(10)
    states = [state_of(SamplerState(**order_of(job.batches(job.sampler(rank, 2))).entries()), 0) for rank in range(2)]
    resharded = reshard(states, 3)
    after, _ = job.run(3, resharded)
    assert after == job.run(3)[0]


def test_finished_states_are_those_of_the_next_epoch():
    job = Job(10)
    _, states = job.run(2)
    resharded = reshard([state | {"_iterator_finished": True} for state in states], 3)
    for rank, state in enumerate(resharded):
        assert state["_iterator_finished"] is True
        check(SamplerState.of(state["_rustloader"]["sampler"]), Holder(job.batches(job.sampler(rank, 3))))


# States that are refused


def changed(state, *path, to):
    state = copy.deepcopy(state)
    inner = state
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = to
    return state


OWN, START = ("_rustloader",), ("_rustloader", "sampler", "start")
# The states, and words of the error. `one` and `two` are the states of two ranks.
REFUSED = {
    "no states": (lambda one, two: [], "got none"),
    "a missing rank": (lambda one, two: [two], "all 2 ranks"),
    "a doubled rank": (lambda one, two: [one, two, one], "all 2 ranks.*0, 1, 0"),
    "another position": (lambda one, two: [one, state_of_rank_1(batches=2)], "number of batches.*1 and 2.*same batch"),
    "another epoch": (lambda one, two: [one, state_of_rank_1(epoch=1)], "differ in the"),
    "another seed": (lambda one, two: [one, state_of_rank_1(seed=1)], "differ in the"),
    "another order": (lambda one, two: [one, state_of_rank_1(shuffle=False)], "differ in the"),
    "another length": (lambda one, two: [one, state_of_rank_1(size=21)], "differ in the"),
    "drop_last": (lambda one, two: [one, state_of_rank_1(drop_last=True)], "differ in the"),
    "drop_last of samplers": (lambda one, two: [one, state_of_rank_1(sampler_drop_last=True)], "differ in the"),
    "another batch size": (lambda one, two: [one, state_of_rank_1(batch_size=4)], "batch_size.*2 and 4"),
    "one finished": (lambda one, two: [one, two | {"_iterator_finished": True}], "_iterator_finished"),
    "one not begun": (lambda one, two: [one, changed(two, *START, to=None)], "begun' and 'not begun"),
    "the first not begun": (lambda one, two: [changed(one, *START, to=None), two], "not begun' and 'begun"),
    "another reshard": (lambda one, two: [one, changed(two, *START, "consumed", to=2)], "consumed"),
    "out of order": (lambda one, two: [one, changed(two, *OWN, "ahead", to=[3, 4])], r"\[3, 4\].*in_order=True"),
    "a dataset's state": (
        lambda one, two: [changed(state, *OWN, "dataset", "stateful", to=True) for state in (one, two)],
        "dataset has a state",
    ),
    "None": (lambda one, two: [None], "StatefulDataLoader"),
    "an empty dict": (lambda one, two: [{}], "StatefulDataLoader"),
    "no own part": (lambda one, two: [{"_rustloader": 3}], "StatefulDataLoader"),
    "no sampler": (lambda one, two: [{"_rustloader": {"sampler": []}}], "StatefulDataLoader"),
    "no position": (
        lambda one, two: [{name: one[name] for name in one if name != "_sampler_iter_yielded"}],
        "_sampler_iter_yielded",
    ),
    "a text": (lambda one, two: [one | {"_sampler_iter_yielded": "x"}], "non-negative integer.*'x'"),
    "a negative position": (lambda one, two: [one | {"_sampler_iter_yielded": -1}], "non-negative integer.*-1"),
    "no main snapshot": (lambda one, two: [one | {"_snapshot": {}}], "_main_snapshot"),
}


def state_of_rank_1(size=20, batches=1, **kw):
    return Job(size, **kw).run(2, batches=batches)[1][1]


@pytest.mark.parametrize("case", REFUSED)
def test_states_that_do_not_fit_are_refused(case):
    make, words = REFUSED[case]
    with pytest.raises(ValueError, match=words):
        reshard(make(*Job(20).run(2, batches=1)[1]), 3)


@pytest.mark.parametrize("replicas", [0, -1, 2.0, "2", True, None])
def test_numbers_of_ranks(replicas):
    with pytest.raises(ValueError, match=f"num_replicas must be a positive integer.*{replicas!r}"):
        reshard(Job(10).run(2, batches=1)[1], replicas)


@pytest.mark.parametrize("name", ["epoch", "rank", "num_replicas", "dataset_length", "consumed", "first", "shuffle"])
def test_junk_in_a_start_is_named(name):
    (state,) = Job(20).run(1, batches=1)[1]
    with pytest.raises(ValueError, match=repr(name)):
        reshard([changed(state, *START, name, to="x")], 3)


SAMPLERS = {
    "random": RandomSampler(range(9)),
    "sequential": SequentialSampler(range(9)),
    "stateful": StatefulDistributedSampler(range(9), 2, 0),
    "other": [1, 2, 3],
}


@pytest.mark.parametrize("kind", SAMPLERS)
def test_other_samplers(kind):
    batches = BatchSampler(SAMPLERS[kind], 2, False)
    epoch = sampling(batches, iter(batches), None, 0, (), 1, True)
    with pytest.raises(ValueError, match=f"{kind!r}.*torch's DistributedSampler"):
        reshard([state_of(epoch.state(0), 0)], 3)
