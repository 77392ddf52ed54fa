"""Batch samplers for sequences, and pack: what they yield, their states, and their errors."""

import copy
import itertools
import pickle
import random

import numpy as np
import pytest
import torch
import torch.distributed as dist

import rustloader
from rustloader import PackingBatchSampler, TokenBudgetBatchSampler, pack

pytestmark = pytest.mark.ours

LENGTHS = [random.Random(0).randint(1, 60) for _ in range(300)]
KINDS = {
    "budget": lambda lengths=LENGTHS, **kw: TokenBudgetBatchSampler(lengths, 120, window=50, **kw),
    "packs": lambda lengths=LENGTHS, **kw: PackingBatchSampler(lengths, 100, packs_per_batch=2, window=50, **kw),
}


@pytest.fixture(params=KINDS)
def make(request):
    return KINDS[request.param]


def test_ranks_share_the_samples_and_get_equally_many_batches(make):
    ranks = [[*make(num_replicas=3, rank=rank, drop_last=True)] for rank in range(3)]
    assert len({len(batches) for batches in ranks}) == 1
    dealt = [batch for round_of_ranks in zip(*ranks, strict=True) for batch in round_of_ranks]
    whole = [*make()]
    assert dealt == whole[: len(dealt)] and len(whole) - len(dealt) < 3
    assert sorted(itertools.chain(*whole)) == list(range(300))
    filled = [[*make(num_replicas=len(whole) - 1, rank=rank)] for rank in range(len(whole) - 1)]
    assert [len(batches) for batches in filled] == [2] * (len(whole) - 1)
    assert filled[1][1] == whole[0]


def test_an_epoch_has_its_own_order(make):
    sampler, other = make(seed=5), make(seed=5)
    first = [*sampler]
    assert [*sampler] == first and len(sampler) == len(first)
    sampler.set_epoch(1)
    other.set_epoch(1)
    assert [*sampler] == [*other] != first
    assert [*make(seed=6)] != first
    in_order = [*make(shuffle=False)]
    assert {*in_order[0]} <= {*range(50)} and {*in_order[-1]} <= {*range(250, 300)}


@pytest.mark.parametrize("as_kind", ["array", "tensor", "shared list", "shared tensor", "int32", "uint16", "file"])
def test_every_kind_of_lengths_gives_the_same_batches(make, as_kind, tmp_path):
    array = np.array(LENGTHS)
    kinds = {
        "array": lambda: array[::-1][::-1],
        "tensor": lambda: torch.tensor(LENGTHS),
        "shared list": lambda: rustloader.share(LENGTHS, threshold=0),
        "shared tensor": lambda: rustloader.share(torch.tensor(LENGTHS), threshold=0),
        "int32": lambda: array.astype(np.int32),
        "uint16": lambda: array.astype(np.uint16),
        "file": lambda: np.memmap(tmp_path / "lengths", np.int64, "w+", shape=300),
    }
    lengths = kinds[as_kind]()
    if as_kind == "file":
        lengths[:] = array
    sampler = make(lengths)
    assert [*sampler] == [*make()]
    sampler.load_state_dict(make().state_dict())


BAD = {
    "a length of 0": (
        lambda: TokenBudgetBatchSampler([3, 0], 8),
        "positive and .*, got 0 for sample 1",
    ),
    "a fraction": (lambda: TokenBudgetBatchSampler([3, 2.5], 8), "must be integers, got 3.0 for sample 0"),
    "a text": (lambda: TokenBudgetBatchSampler([3, "x"], 8), "must be integers"),
    "a bool": (lambda: TokenBudgetBatchSampler(np.array([True]), 8), "must be integers"),
    "a table": (lambda: TokenBudgetBatchSampler([[3], [4]], 8), r"must have one dimension .* got the shape \(2, 1\)"),
    "no lengths": (lambda: TokenBudgetBatchSampler([], 8), r"got the shape \(0,\)"),
    "a long sample": (lambda: TokenBudgetBatchSampler([3, 9], 8), "sample 1 has length 9, .* exceeds max_tokens=8"),
    "a padded sample": (
        lambda: TokenBudgetBatchSampler([3, 7], 10, pad_to_multiple_of=6),
        "sample 1 has length 7, which takes 12 tokens",
    ),
    "a long pack": (lambda: PackingBatchSampler([3, 9], 8), "sample 1 has length 9, .* or pass too_long='truncate'"),
    "a choice": (lambda: PackingBatchSampler([3], 8, too_long="drop"), "too_long one of 'error', .* got 8 and 'drop'"),
    "a large capacity": (lambda: PackingBatchSampler([3], 1 << 25), "capacity must be at most 16,777,216"),
    "a budget": (lambda: TokenBudgetBatchSampler([3], 0), "max_tokens must be an integer from 1"),
    "a word": (lambda: TokenBudgetBatchSampler([3], "8"), "max_tokens must be an integer, got '8'"),
    "a window": (lambda: TokenBudgetBatchSampler([3], 8, window=0), "window must be an integer from 1"),
    "a rank": (lambda: TokenBudgetBatchSampler([3], 8, num_replicas=2, rank=2), "rank must be from 0 to 1"),
    "no rank": (lambda: len(TokenBudgetBatchSampler([3], 8, num_replicas=2)), "pass both or neither"),
    "no samples": (lambda: pack([]), "at least one sample"),
    "an empty sample": (
        lambda: pack([[1], []]),
        r"'input_ids' of sample 1 .* must have one dimension and items, got shape \(0,\)",
    ),
    "no IDs": (lambda: pack([{"ids": [1]}]), "sample 0 of the batch has no 'input_ids', only 'ids'"),
    "floats": (lambda: pack([[1.5]]), "sample 0 of the batch must be integers, got float64"),
    "labels": (lambda: pack([{"input_ids": [1, 2], "labels": [1]}]), "sample 0 .* 2 token IDs, but 1 labels"),
    "cut labels": (
        lambda: pack([{"input_ids": [1, 2, 3], "labels": [1, 2]}], max_length=2),
        "sample 0 .* 3 token IDs, but 2 labels",
    ),
    "some labels": (lambda: pack([[1], {"input_ids": [1], "labels": [1]}]), "sample 0 of the batch has no 'labels'"),
    "a length": (lambda: pack([[1, 2]], max_length=-1), "max_length must be an integer from 1"),
    "a seed": (lambda: TokenBudgetBatchSampler([3], 8, seed=0.5), "seed must be an integer, got 0.5"),
    "an epoch": (lambda: TokenBudgetBatchSampler([3], 8).set_epoch("1"), "epoch must be an integer, got '1'"),
    "a sampler": (
        lambda: rustloader.DataLoader(range(1), sampler=TokenBudgetBatchSampler([3], 8)),
        "a TokenBudgetBatchSampler yields batches: pass it as batch_sampler",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_an_error_names_the_value(name):
    make, text = BAD[name]
    with pytest.raises((TypeError, ValueError), match=text):
        make()


def test_loaders_check_the_number_of_samples(make):
    with pytest.raises(ValueError, match="the dataset has 299 samples, but the batch sampler has lengths of 300"):
        rustloader.DataLoader(range(299), batch_sampler=make())


def test_ranks_are_those_of_the_process_group(make, monkeypatch):
    sampler = make()
    whole = [*sampler]
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    rounds = -(-len(whole) // 2)
    assert [*sampler] == [whole[(2 * number + 1) % len(whole)] for number in range(rounds)] and len(sampler) == rounds


def test_accelerate_does_not_deal_a_second_time(make):
    class BatchSamplerShard:
        def __init__(self, sampler):
            self.sampler = sampler

        def __iter__(self):
            yield from self.sampler

    with pytest.raises(RuntimeError, match=r"accelerate's prepare would deal the batches of a .* a second time"):
        list(BatchSamplerShard(make(num_replicas=2, rank=0)))
    assert [*BatchSamplerShard(make(num_replicas=1, rank=0))] == [*make()]


@pytest.mark.parametrize("old, new, rounds", [(1, 1, 3), (4, 2, 3), (2, 4, 2), (3, 2, 1), (2, 3, 3)])
def test_a_state_resumes_on_any_number_of_ranks(make, old, new, rounds):
    whole = [*make()]
    delivered, states = [], []
    for rank in range(old):
        sampler = make(num_replicas=old, rank=rank)
        delivered += itertools.islice(sampler, rounds)
        states.append(sampler.state_dict())
    assert all(state == states[0] for state in states) and len(pickle.dumps(states[0])) < 1024
    for rank in range(new):
        sampler = make(num_replicas=new, rank=rank, drop_last=True)
        sampler.load_state_dict(copy.deepcopy(states[0]))
        assert sampler.state_dict() == states[0]
        delivered += sampler
    left_out = len(whole) - len(delivered)
    assert 0 <= left_out < new
    assert sorted(delivered) == sorted(whole[: len(delivered)])


def test_a_position_belongs_to_its_epoch(make):
    sampler = make()
    sampler.set_epoch(3)
    whole = [*sampler]
    iterator = iter(sampler)
    next(iterator)
    resumed = make()
    resumed.load_state_dict(sampler.state_dict())
    resumed.set_epoch(3)
    # A loader creates iterators that it does not use.
    iter(resumed)
    assert [*resumed] == whole[1:] and [*resumed] == whole
    resumed.load_state_dict(sampler.state_dict())
    resumed.set_epoch(4)
    assert len([*resumed]) == len(resumed) and resumed.state_dict()["epoch"] == 4
    assert [*pickle.loads(pickle.dumps(sampler))] == whole


@pytest.mark.parametrize(
    "change, text",
    [
        (lambda state: state.update(consumed=-1), "'consumed' in the state must be a non-negative int"),
        (lambda state: state.pop("consumed"), "'consumed' in the state must be a non-negative int"),
        (lambda state: state.pop("settings"), "must have 'settings'"),
        (lambda state: state["settings"].update(window=7), "saved with window=7, but this sampler has window=50"),
        (lambda state: state["settings"].update(lengths="9 samples"), "saved with lengths='9 samples', but this"),
    ],
)
def test_a_state_of_another_sampler_is_refused(change, text):
    state = KINDS["budget"]().state_dict()
    change(state)
    with pytest.raises(ValueError, match=text):
        KINDS["budget"]().load_state_dict(state)


def test_an_interrupt_during_planning_loses_no_batch(make):
    sampler, whole = make(), [*make()]
    plan, calls = sampler._plan, []

    def interrupted(order):
        calls.append(order)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return plan(order)

    sampler._plan = interrupted
    loader = rustloader.StatefulDataLoader(range(300), batch_sampler=sampler, collate_fn=list)
    batches = iter(loader)
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    assert [*batches] == whole and len(calls) == 2


def test_too_long_samples_are_skipped_or_fill_a_pack():
    skipping = PackingBatchSampler([3, 9, 4, 20], 8, too_long="skip", shuffle=False)
    assert [*skipping] == [[2, 0]]
    truncating = PackingBatchSampler([3, 9, 4, 20], 8, too_long="truncate", shuffle=False)
    assert [*truncating] == [[3], [1], [2, 0]]


def flattened(samples):
    """What transformers' collator makes of samples, as lists."""
    batch = {"input_ids": [], "labels": [], "position_ids": [], "cu_seqlens": [0]}
    for sample in samples:
        ids = list(sample["input_ids"])
        batch["input_ids"] += ids
        batch["labels"] += [-100, *list(sample.get("labels", ids))[1:]]
        batch["position_ids"] += range(len(ids))
        batch["cu_seqlens"].append(len(batch["input_ids"]))
    return batch


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor, lambda it: torch.tensor(it, dtype=torch.int32)])
@pytest.mark.parametrize("has_labels", [False, True])
def test_pack_gives_what_transformers_gives(kind, has_labels):
    lists = [{"input_ids": [*range(n)], "labels": [*range(7, 7 + n)]} for n in (4, 1, 9, 1)]
    names = ("input_ids", "labels") if has_labels else ("input_ids",)
    packed = pack([{name: kind(sample[name]) for name in names} for sample in lists])
    expected = flattened([{name: sample[name] for name in names} for sample in lists])
    for name, values in expected.items():
        is_bounds = name == "cu_seqlens"
        assert packed[name].dtype == (torch.int32 if is_bounds else torch.int64)
        assert packed[name].tolist() == (values if is_bounds else [values])
    assert packed["max_seqlen"] == 9 and type(packed["max_seqlen"]) is int


def test_pack_truncates_and_takes_token_ids_alone():
    packed = pack([[5, 6, 7], [8]], max_length=2)
    assert packed["input_ids"].tolist() == [[5, 6, 8]] and packed["labels"].tolist() == [[-100, 6, -100]]
    assert packed["max_seqlen"] == 2


@pytest.mark.parametrize("num_workers", [0, 2])
def test_packs_arrive_from_workers(num_workers):
    dataset = [{"input_ids": np.arange(n) + n} for n in LENGTHS]
    sampler = KINDS["packs"]()
    loader = rustloader.DataLoader(dataset, batch_sampler=sampler, collate_fn=pack, num_workers=num_workers)
    for indices, batch in zip(sampler, loader, strict=True):
        expected = flattened([dataset[index] for index in indices])
        assert {name: batch[name].flatten().tolist() for name in expected} == {
            name: [int(value) for value in values] for name, values in expected.items()
        }
        assert batch["input_ids"].shape[1] <= 200
