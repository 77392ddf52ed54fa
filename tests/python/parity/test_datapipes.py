"""DataPipes, which always fall back to torch's iterator: same results, seeds, shards and states (P27)."""

import logging
import random
import warnings

import numpy as np
import pytest
import torch
from parity_table import drain, rows, take
from sample_data import LazySampler, as_list
from support import DataLoader, from_engine

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.utils.data.datapipes.iter import IterableWrapper
    from torch.utils.data.datapipes.map import SequenceWrapper

pytestmark = [
    pytest.mark.handover,
    # Some of torch's pipes warn that they are deprecated.
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def fail_at_five(x):
    if x == 5:
        raise KeyError("five")
    return x


def draw(x):
    return x, torch.rand(()).item(), random.random(), float(np.random.rand())


PIPES = {
    "wrapper": lambda: IterableWrapper(range(12)),
    "shards": lambda: IterableWrapper(range(12)).sharding_filter(),
    "shuffled shards": lambda: IterableWrapper(range(12)).shuffle().sharding_filter(),
    "shuffled behind the shards": lambda: IterableWrapper(range(12)).sharding_filter().shuffle(buffer_size=4),
    "batches": lambda: IterableWrapper(range(12)).shuffle().sharding_filter().batch(2).map(sum),
    "two sources": lambda: IterableWrapper(range(6)).shuffle().zip(IterableWrapper(range(6))).sharding_filter(),
    "draws": lambda: IterableWrapper(range(8)).sharding_filter().map(draw),
    "error": lambda: IterableWrapper(range(12)).sharding_filter().map(fail_at_five),
    "map style": lambda: SequenceWrapper(range(12)).map(draw),
}


def states(pipe):
    """The state that a pipe in the main process reports."""
    return str(getattr(pipe, "_snapshot_state", None)), getattr(pipe, "_number_of_samples_yielded", None)


def as_is(x):
    return x


def trace(DataLoader, pipe, epochs=(99, 3, 99), **settings):
    """Epochs (by default three, the second left early), with the states of the loader's generator and of the pipe."""
    pipe, generator = pipe(), torch.Generator().manual_seed(9)
    loader = DataLoader(pipe, batch_size=None, generator=generator, collate_fn=as_is, **settings)
    for taken in epochs:
        iterator = iter(loader)
        yield from drain(iterator, taken)
        yield generator.get_state(), states(pipe)
        if hasattr(iterator, "_shutdown_workers") and not loader.persistent_workers:
            iterator._shutdown_workers()


@rows(pipe=PIPES, workers=[0, 2], engine=False)
def test_p27_pipes_give_what_torchs_loader_gives(DataLoader, pipe, workers):
    yield from trace(DataLoader, pipe, num_workers=workers)


@rows(kind=["shuffled shards", "draws", "error"], engine=False)
def test_p27_persistent_workers_of_pipes(DataLoader, kind):
    yield from trace(DataLoader, PIPES[kind], num_workers=2, persistent_workers=True)


@rows(shuffle=[True, False], workers=[0, 1], engine=False)
def test_p27_the_shuffle_argument_reaches_the_pipe(DataLoader, shuffle, workers):
    seen = [*trace(DataLoader, PIPES["shuffled shards"], (99,), num_workers=workers, shuffle=shuffle)]
    numbers = [step for step in seen if isinstance(step, int)]
    assert sorted(numbers) == list(range(12)) and (numbers == list(range(12))) is not shuffle
    yield from seen


@rows(engine=False)
def test_p27_the_sampler_of_a_map_pipe_is_called_as_by_torch(DataLoader):
    log = []
    loader = DataLoader(SequenceWrapper(range(20)), sampler=LazySampler(7, log), num_workers=2, batch_size=2)
    for taken in (2, 9):
        iterator = iter(loader)
        for batch in drain(iterator, taken):
            yield batch, log
        iterator._shutdown_workers()


@rows(engine=False)
def test_p27_a_second_iterator_of_a_pipe_ends_the_first(DataLoader):
    loader = DataLoader(PIPES["wrapper"](), batch_size=2)
    first, second = iter(loader), iter(loader)
    yield from take(second, 1)
    (error,) = take(first, 1)
    yield error.description[1].split(".")[0]


@rows(engine=False)
def test_p27_batching_and_lengths_of_pipes(DataLoader):
    loader = DataLoader(PIPES["shards"](), batch_size=5, num_workers=2, collate_fn=as_list)
    yield from drain(loader)
    yield len(DataLoader(PIPES["wrapper"](), batch_size=5)), type(loader.dataset).__name__


@pytest.mark.ours
@pytest.mark.parametrize("kind", ["shards", "map style"])
def test_p27_one_log_line_per_loader_and_no_batch_of_the_engine(kind, caplog):
    loader = DataLoader(PIPES[kind](), batch_size=None, num_workers=1)
    with caplog.at_level(logging.WARNING, logger="rustloader"), from_engine(0):
        for _ in range(2):
            assert len(list(loader)) == 12
    lines = [r.getMessage() for r in caplog.records]
    assert lines == ["a DataLoader runs on torch's own iterator: its dataset is a DataPipe"]
    with caplog.at_level(logging.WARNING, logger="rustloader"):
        other = DataLoader(PIPES[kind](), batch_size=None, num_workers=1)
        assert len(list(other)) == 12
    assert [r.getMessage() for r in caplog.records] == lines * 2
    caplog.clear()
    assert len(list(DataLoader(PIPES[kind](), batch_size=None))) == 12 and not caplog.records
