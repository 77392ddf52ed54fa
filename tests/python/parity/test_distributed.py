"""Several ranks with a loader each: every sample and every random number is as with torch (P13 to P15, T2)."""

import random
import tempfile
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from sample_data import Draws, Shards
from support import DataLoader, TorchDataLoader, rng_states, values
from torch.utils.data import DistributedSampler

# Gloo's threads of earlier groups may still run when workers are forked.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")

RANKS = 4
EPOCHS = 3


def rank_main(rank, meeting, work, kind, out):
    """One rank; it reports what it saw, or its error."""
    try:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
        cls = TorchDataLoader if kind == "torch" else DataLoader
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = work(cls, rank)
        dist.barrier()
        dist.destroy_process_group()
        out.put((rank, None, result))
    except BaseException as error:
        out.put((rank, repr(error), None))
        raise


def on_every_rank(work, kind):
    """The results of `work(loader class, rank)` of all ranks."""
    context = torch.multiprocessing.get_context("fork")
    out = context.SimpleQueue()
    # They rendezvous through a file: a free port may be taken a moment later.
    with tempfile.TemporaryDirectory() as folder:
        arguments = (f"{folder}/meeting", work, kind, out)
        ranks = [context.Process(target=rank_main, args=(rank, *arguments)) for rank in range(RANKS)]
        for process in ranks:
            process.start()
        reports = sorted(out.get() for _ in ranks)
        for process in ranks:
            process.join(240)
    assert [process.exitcode for process in ranks] == [0] * RANKS, reports
    return [result for _, _, result in reports]


def seed(value):
    torch.manual_seed(value), random.seed(value), np.random.seed(value)


def three_epochs(cls, rank):
    seed(100 + rank)
    dataset = Draws(22)
    seen = []
    for shuffle, drop_last, persistent in ((True, False, False), (False, True, True)):
        sampler = DistributedSampler(dataset, shuffle=shuffle, drop_last=drop_last, seed=7)
        loader = cls(dataset, sampler=sampler, batch_size=2, num_workers=2, persistent_workers=persistent)
        for epoch in range(EPOCHS):
            sampler.set_epoch(epoch)
            iterator = iter(loader)
            seen.append((iterator._world_size, iterator._rank, list(sampler), rng_states()))
            for batch in iterator:
                seen.append(({name: value.tolist() for name, value in batch.items()}, rng_states()))
        if persistent:
            loader._iterator._shutdown_workers()
    iterable = cls(Shards([3, 2]), num_workers=2, batch_size=2)
    seen.append(values(iterable))
    return seen


def test_four_ranks_see_what_they_see_with_torch():
    expected, actual = (on_every_rank(three_epochs, kind) for kind in ("torch", "ours"))
    for rank in range(RANKS):
        assert actual[rank] == expected[rank], rank
        assert actual[rank][0][:2] == (RANKS, rank)
    assert len({str(result) for result in actual}) == RANKS


def shared_pipe(cls, rank):
    from torch.utils.data.datapipes.iter import IterableWrapper

    seed(rank)
    pipe = IterableWrapper(range(24)).shuffle().sharding_filter()
    loader = cls(pipe, batch_size=None, num_workers=2)
    return [list(loader) for _ in range(2)] + [rng_states()]


def test_p27_ranks_share_the_seed_of_a_pipe_and_divide_it():
    expected, actual = (on_every_rank(shared_pipe, kind) for kind in ("torch", "ours"))
    assert actual == expected
    for epoch in range(2):
        assert sorted(x for result in actual for x in result[epoch]) == list(range(24))
