"""One module defines the format of a state, and it reads what it writes."""

import dataclasses

import pytest
import torch

from rustloader.stateful_dataloader import StatefulDataLoader
from rustloader.stateful_dataloader.schema import DatasetState, Draws, SamplerState, State
from rustloader.workers.snapshots import WorkerStart

pytestmark = pytest.mark.ours

STARTS = [
    WorkerStart({"at": 1}, {"i": 2}, ended=True, batches=3, samples=4, delivered=5),
    WorkerStart(None, {"i": 3}, replay=2),
]


@pytest.mark.parametrize("count", [0, 2])
@pytest.mark.parametrize("kind", ["map", "iterable"])
@pytest.mark.parametrize("is_fresh", [False, True])
def test_what_is_written_is_read(count, kind, is_fresh):
    starts = STARTS[: count or 1]
    if kind == "map" or (is_fresh and count):
        starts = [dataclasses.replace(start, iterator_state=None, ended=False) for start in starts]
    if is_fresh:
        starts = [WorkerStart(start.dataset_state, start.iterator_state, start.ended) for start in starts]
    state = State(
        num_workers=count,
        low=7,
        ahead=(9, 11),
        yielded=8,
        last_worker=1 if count else -1,
        finished=True,
        sampler=SamplerState("random", 20, 3, True, 20, False, {"seed": 3}, None, None, {"samples_yielded": 21}),
        workers=starts,
        has_records=not is_fresh,
        base_seed=5,
        epoch=2,
        dataset=DatasetState(kind, 20, True),
        seeds=(4, 6),
        failures=1,
        next=Draws(8, {"seed": 9}),
    )
    written = state.to_torchdata()
    read = State.from_torchdata(written)
    assert read == state
    assert repr(read.to_torchdata()) == repr(written)


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("batches", [0, 2, 9])
def test_states_of_loaders_are_written_again_as_they_were(count, batches):
    loader = StatefulDataLoader(range(12), batch_size=2, shuffle=True, num_workers=count)
    states = [loader.state_dict()]
    iterator = iter(loader)
    for _ in range(batches):
        next(iterator, None)
    states.append(loader.state_dict())
    torch.manual_seed(3)
    for state in states:
        assert repr(State.from_torchdata(state).to_torchdata()) == repr(state)
