"""States of loaders with batch samplers for sequences: exact in workers, after restarts, and on other ranks."""

import itertools
import logging
import random

import pytest
from sample_data import Held
from torch.utils.data import DistributedSampler

from rustloader import PackingBatchSampler, StatefulDataLoader, TokenBudgetBatchSampler

pytestmark = pytest.mark.ours

LENGTHS = [random.Random(1).randint(1, 40) for _ in range(240)]
SAMPLERS = {
    "budget": lambda **kw: TokenBudgetBatchSampler(LENGTHS, 80, window=60, **kw),
    "packs": lambda **kw: PackingBatchSampler(LENGTHS, 64, window=60, **kw),
}


def make_loader(kind="budget", dataset=range(240), num_workers=0, epoch=0, ranks=None, **kw):
    place = {} if ranks is None else {"num_replicas": ranks[0], "rank": ranks[1]}
    sampler = SAMPLERS[kind](drop_last=True, **place)
    sampler.set_epoch(epoch)
    return StatefulDataLoader(dataset, batch_sampler=sampler, num_workers=num_workers, collate_fn=list, **kw)


@pytest.mark.parametrize("steps", [((4, 3), (2, 5)), ((2, 7), (4, 1), (3, 2), (1, 1)), ((1, 9), (8, 1), (1, 0))])
@pytest.mark.parametrize("kind", SAMPLERS)
def test_ranks_may_change_at_any_batch(kind, steps):
    """Each step is a number of ranks, and the number of batches that each of them delivers."""
    whole = [*make_loader(kind)]
    delivered, state = [], None
    for replicas, rounds in steps:
        for rank in range(replicas):
            loader = make_loader(kind, ranks=(replicas, rank), num_workers=rank % 2)
            if state is not None:
                loader.load_state_dict(state)
            iterator = iter(loader)
            delivered += itertools.islice(iterator, rounds)
            # A framework saves the state of one rank and loads it on all.
            following = loader.state_dict()
            del iterator
        state = following
        assert sorted(delivered) == sorted(whole[: len(delivered)])
    for rank in range(2):
        loader = make_loader(kind, ranks=(2, rank))
        loader.load_state_dict(state)
        delivered += loader
    assert len(whole) - len(delivered) in (0, 1) and sorted(delivered) == sorted(whole[: len(delivered)])


def test_a_loader_refuses_the_state_of_another_sampler():
    state = make_loader().state_dict()
    with pytest.raises(ValueError, match="saved with a batch sampler for sequences, but this loader has"):
        StatefulDataLoader(range(240), shuffle=True).load_state_dict(state)
    loader = make_loader()
    next(iter(loader))
    other = TokenBudgetBatchSampler(LENGTHS, 90, window=60)
    with pytest.raises(ValueError, match="saved with max_tokens=80, but this sampler has max_tokens=90"):
        StatefulDataLoader(range(240), batch_sampler=other).load_state_dict(loader.state_dict())


def distributed(dataset, ranks, **kw):
    sampler = DistributedSampler(range(240), num_replicas=ranks[0], rank=ranks[1], shuffle=False)
    return StatefulDataLoader(dataset, sampler=sampler, batch_size=3, collate_fn=list, **kw)


@pytest.mark.parametrize("make", [make_loader, distributed])
def test_batches_out_of_order_bind_a_state_to_its_rank(make, tmp_path):
    whole = [*make(dataset=range(240), ranks=(2, 0))]
    dataset = Held(240, whole[0][0], tmp_path / "go")
    loader = make(dataset=dataset, ranks=(2, 0), num_workers=2, in_order=False)
    iterator = iter(loader)
    early = [sample.item() for sample in next(iterator)]
    state = loader.state_dict()
    (tmp_path / "go").touch()
    for in_order in (False, True):
        with pytest.raises(ValueError, match="saved on rank 0 of 2, and this is rank 1 of 2: with in_order=False"):
            make(dataset=range(240), ranks=(2, 1), in_order=in_order).load_state_dict(state)
    resumed = make(dataset=range(240), ranks=(2, 0), in_order=False)
    resumed.load_state_dict(state)
    assert sorted([*resumed, early]) == sorted(whole)


@pytest.mark.warns
def test_a_state_of_another_epoch_is_announced(caplog):
    loader = make_loader(epoch=4)
    next(iter(loader))
    resumed = make_loader()
    resumed.load_state_dict(loader.state_dict())
    with caplog.at_level(logging.WARNING, "rustloader"):
        assert list(resumed) == [*make_loader(epoch=4)][1:]
    assert "of epoch 4 of the TokenBudgetBatchSampler, whose epoch is now 0" in caplog.text
