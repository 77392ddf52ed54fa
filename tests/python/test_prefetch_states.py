"""States through `prefetch_to_device`, and what it tells the program, on a device without hardware (`standin.py`)."""

import contextlib
import dataclasses
import logging

import pytest
import torch
from prefetch_support import prefetch, tensors
from sample_data import Images, Numbers
from support import DataLoader, TorchDataLoader, rustloader, values

pytestmark = pytest.mark.ours

if rustloader is not None:
    pass


@dataclasses.dataclass
class Sample:
    x: torch.Tensor
    name: str


def stateful(**kw):
    options = {"batch_size": 4, "num_workers": 2, "shuffle": True, "generator": torch.Generator().manual_seed(3)}
    return rustloader.StatefulDataLoader(Numbers(40), **(options | kw))


def rest_of(device, batches):
    got = [batch for batch in batches]
    device.run_all()
    return values(got)


# As without a prefetcher: the state was taken before the end of the loop.
@pytest.mark.filterwarnings("ignore:an epoch of 0 batches")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("depth", [1, 3, 8])
@pytest.mark.parametrize("taken", [0, 1, 5, 9, 10])
@pytest.mark.parametrize("breaks_off", [False, True])
def test_a_state_counts_the_batches_that_the_program_got(device, workers, depth, taken, breaks_off):
    expected = values(stateful(num_workers=workers))
    batches = prefetch(stateful(num_workers=workers), depth=depth)
    iterator = iter(batches)
    got = [next(iterator) for _ in range(taken)]
    if breaks_off:
        del iterator
    state = batches.state_dict()
    device.run_all()
    assert values(got) == expected[:taken]
    resumed = prefetch(stateful(num_workers=workers), depth=depth)
    resumed.load_state_dict(state)
    assert rest_of(device, resumed) == expected[taken:]
    # The whole next epoch after it, and not what was ahead.
    assert len(rest_of(device, resumed)) == 10


def test_a_finished_epoch_is_finished_and_one_batch_before_it_is_not(device):
    batches = prefetch(stateful())
    for k, _ in enumerate(batches):
        last = batches.state_dict()
        assert last["_iterator_finished"] is False, k
    assert batches.state_dict()["_iterator_finished"] is True
    device.run_all()


def test_a_loader_without_a_state_has_none_here(device):
    batches = prefetch(TorchDataLoader(Numbers(4)))
    assert not hasattr(batches, "state_dict") and not hasattr(batches, "load_state_dict")
    assert batches.batch_size == 1 and isinstance(batches.dataset, Numbers)
    with pytest.raises(AttributeError):
        _ = batches.no_such_name


def test_a_state_that_cannot_go_back_says_so(device):
    class Other(list):
        def state_dict(self):
            return {"place": 1}

    batches = prefetch(Other(tensors(5)))
    assert batches.state_dict() == {"place": 1}
    iterator = iter(batches)
    next(iterator)
    next(iterator)
    with pytest.raises(TypeError, match=r"state_dict\(\) of .*Other cannot go back by the 1 batches"):
        batches.state_dict()
    device.run_all()


# What it tells


def test_pageable_batches_are_told_once_per_loader(device, caplog):
    device.pinned = False
    loader = DataLoader(Images(8), batch_size=2, num_workers=1)
    with caplog.at_level(logging.INFO, "rustloader"):
        for _ in range(2):
            for _ in prefetch(loader):
                pass
    lines = [it.getMessage() for it in caplog.records if "prefetch_to_device" in it.getMessage()]
    assert lines == [
        "prefetch_to_device: batches are copied from pageable memory, which holds up the program: set pin_memory=True "
        "in the loader"
    ]


def test_a_type_that_torch_does_not_pin_is_named(device, caplog):
    device.pinned = False

    class Loader(list):
        pin_memory = True

    with caplog.at_level(logging.INFO, "rustloader"):
        list(prefetch(Loader([Sample(torch.ones(2), "n")])))
    assert "a batch of type Sample is not pinned: it has no pin_memory()" in caplog.text


def test_pinned_batches_are_told_nothing(device, caplog):
    with caplog.at_level(logging.INFO, "rustloader"):
        list(prefetch(DataLoader(Images(8), batch_size=2, num_workers=1)))
    assert "prefetch_to_device" not in caplog.text


def test_statistics_are_those_of_the_loader(device):
    loader = DataLoader(Images(8), batch_size=2, num_workers=1)
    batches = prefetch(loader)
    assert len(list(batches)) == 4
    assert rustloader.stats(batches).batches == 4
    device.run_all()


def test_a_prefetcher_needs_no_engine():
    with contextlib.closing(prefetch(TorchDataLoader(Numbers(4), batch_size=2), device="cpu")) as batches:
        assert values(batches) == [[0, 1], [2, 3]]
