"""Whole epochs with ``max_restarts``: workers die, and the batches are those of a run without deaths.

`make stress KIND=restarts` draws combinations of datasets and options, which are not repeated here; `KIND=matrix` ends
workers in every way at every place.
"""

import os

import pytest
import torch
from restart_support import (
    Deaths,
    Mortal,
    MortalStream,
    ShuffledStream,
    StatefulStream,
    epochs,
    kill,
    loader_of,
)
from support import TORCH_MODE, worker_pids

if not TORCH_MODE:
    import rustloader

pytestmark = [pytest.mark.ours, pytest.mark.warns]

N = 24
OF_MAP = {0: 1, 5: 2, 6: 1, 13: 1, N - 1: 1}
OF_STREAMS = {(0, 0): 1, (0, 7): 2, (1, 3): 1, (0, 10): 1}
SAVING = {"cls": "StatefulDataLoader"}


@pytest.mark.parametrize(
    ("dataset", "lengths", "fatal", "kw"),
    [
        (Mortal, N, OF_MAP, {}),
        (Mortal, N, OF_MAP, {"multiprocessing_context": "spawn", "persistent_workers": True}),
        (MortalStream, [11, 4], OF_STREAMS, {"persistent_workers": True}),
        (StatefulStream, [11, 4], OF_STREAMS, {"multiprocessing_context": "spawn"}),
        (StatefulStream, [11, 4], OF_STREAMS, SAVING | {"snapshot_every_n_steps": 3, "persistent_workers": True}),
        (StatefulStream, [11, 4], OF_STREAMS, SAVING | {"snapshot_every_n_steps": 0}),
    ],
)
def test_the_batches_are_those_of_a_run_without_deaths(dataset, lengths, fatal, kw, tmp_path):
    if "cls" in kw:
        kw = kw | {"cls": rustloader.StatefulDataLoader}
    deaths = Deaths(tmp_path, fatal)
    actual, expected = (epochs(loader_of(dataset(lengths, it), **kw), 2) for it in (deaths, Deaths()))
    assert actual == expected
    assert deaths.count() == sum(fatal.values()), "not all deaths have occurred"


@pytest.mark.parametrize("kw", [{}, {"dispatch": "shared_queue"}, {"persistent_workers": True}])
def test_a_sample_that_kills_each_worker_is_skipped_with_on_error(tmp_path, kw):
    loader = loader_of(Mortal(N, Deaths(tmp_path, {7: 3})), on_error="skip", **kw)
    actual, expected = epochs(loader), epochs(loader_of(Mortal(N), **kw))
    assert actual == [[[sample for sample in batch if sample[0] != 7] for batch in epoch] for epoch in expected]
    assert len(os.listdir(tmp_path)) == 3
    faults = rustloader.stats(loader).faults
    assert (faults.restarts, faults.skipped, len(faults.deaths)) == (3, 1, 3)
    assert faults.failures[0].index == 7 and "3 workers have died at this sample" in faults.failures[0].error_text
    assert faults.deaths[0].endswith("was killed by signal: Killed, at batch 3 (index [6, 7])")


@pytest.mark.parametrize("fatal", [{(0, 5): 2, (1, 2): 1}, {"start": 1}])
def test_an_iterable_dataset_without_a_state_repeats_its_order_with_torchs_seeds(tmp_path, fatal):
    """Its first samples are drawn again, with the same random numbers."""
    deaths = Deaths(tmp_path, fatal)
    kw = dict(seed_by="worker", worker_init_fn=lambda worker: deaths.pass_by("start"))
    assert epochs(loader_of(MortalStream([9, 5], deaths), **kw)) == epochs(
        loader_of(MortalStream([9, 5]), seed_by="worker")
    )
    assert deaths.count() == sum(fatal.values())


@pytest.mark.parametrize("persistent", [False, True], ids=["", "persistent"])
@pytest.mark.parametrize("seed_by", ["sample", "batch"])
@pytest.mark.parametrize("cls", ["DataLoader", "StatefulDataLoader"])
def test_an_order_that_iter_draws_is_drawn_again_in_each_epoch(cls, seed_by, persistent):
    kw = {"cls": getattr(rustloader, cls), "seed_by": seed_by, "persistent_workers": persistent}
    expected = epochs(loader_of(ShuffledStream([24, 24]), **kw), 4)
    assert len({str(epoch) for epoch in expected}) == 4
    torch.manual_seed(3)
    loader, actual = loader_of(ShuffledStream([24, 24]), **kw), []
    for number in range(4):
        iterator = iter(loader)
        actual.append([next(iterator), next(iterator), next(iterator)])
        kill(*worker_pids(iterator))
        actual[-1] += iterator
        if persistent and number == 1:
            # A death between two epochs.
            kill(*worker_pids(iterator))
    assert actual == expected


class Reusing:
    """A batch sampler that reuses one list for all batches."""

    def __len__(self):
        return 10

    def __iter__(self):
        batch = []
        for index in range(40):
            batch.append(index)
            if len(batch) == 4:
                yield batch
                batch.clear()


@pytest.mark.parametrize("dispatch", ["round_robin", "shared_queue"])
def test_a_sampler_may_reuse_its_list(dispatch, tmp_path):
    options = dict(batch_sampler=Reusing(), batch_size=1, num_workers=1, prefetch_factor=4, dispatch=dispatch)
    loader = loader_of(Mortal(40, Deaths(tmp_path, {9: 1})), **options)
    assert [sample[0] for batch in loader for sample in batch] == list(range(40))
    assert len(os.listdir(tmp_path)) == 1
