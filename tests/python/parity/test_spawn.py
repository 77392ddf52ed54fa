"""Spawned workers: cases that test_start_methods.py does not have (P14, P15, P17, P22, P25)."""

import os
from functools import partial

import numpy as np
import pytest
import torch
from parity_table import drain, rows
from sample_data import (
    Draws,
    Failing,
    Images,
    Labelled,
    Numbers,
    Pair,
    as_list,
    key_error,
    worker_id,
)
from support import DataLoader, epoch, gone, outcomes, same, worker_pids

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")

SPAWN = dict(multiprocessing_context="spawn")


class Everything(Numbers):
    """Each sample has a value of each kind that takes a path of its own through the arena."""

    def __getitem__(self, i):
        if i == 3:
            raise KeyError("three")
        large = torch.arange(50_000) + i
        labelled = torch.ones(4).as_subclass(Labelled)
        labelled.label = i
        return {
            "id": worker_id(),
            "pid": os.getpid(),
            "large": large,
            "same": large,
            "small": torch.tensor(i),
            "empty": torch.zeros(0, 2),
            "array": np.arange(30_000) * i,
            "pair": Pair(i, "x"),
            "labelled": labelled,
            "text": "y" * i,
            "sparse": torch.eye(3).to_sparse(),
            "none": None,
            "threads": torch.get_num_threads(),
            "initial": torch.initial_seed(),
            "bytes": b"z" * 100_000,
        }


def init(worker):
    assert torch.utils.data.get_worker_info().id == worker


def test_map_style_persistent_with_all_kinds_and_an_error():
    torch.manual_seed(4)
    loader = DataLoader(
        Everything(7),
        num_workers=2,
        batch_size=None,
        collate_fn=dict,
        persistent_workers=True,
        worker_init_fn=init,
        **SPAWN,
    )
    iterator = iter(loader)
    assert all(w.is_alive() for w in iterator._workers)
    for _ in range(2):
        iterator, batches = iter(loader), []
        for i in range(7):
            if i == 3:
                assert outcomes(iterator, 1) == [("error", KeyError, "Caught KeyError in DataLoader worker process 1.")]
            else:
                batches.append((i, next(iterator)))
        assert outcomes(iterator, 2) == [("end",)] * 2
        for i, batch in batches:
            assert batch["id"] == i % 2 and batch["pid"] == worker_pids(iterator)[i % 2] and batch["threads"] == 1
            assert torch.equal(batch["large"], torch.arange(50_000) + i) and batch["same"] is batch["large"]
            assert batch["small"].item() == i and batch["empty"].shape == (0, 2) and batch["none"] is None
            assert batch["array"].tolist() == (np.arange(30_000) * i).tolist() and batch["pair"] == Pair(i, "x")
            assert type(batch["labelled"]) is Labelled and batch["labelled"].label == i
            assert batch["sparse"].is_sparse and batch["text"] == "y" * i and batch["bytes"] == b"z" * 100_000
            assert batch["initial"] == iterator._base_seed + i % 2
    pids = worker_pids(iterator)
    del iterator
    loader._iterator._shutdown_workers()
    assert all(map(gone, pids))


@rows()
def test_p14_seeds_are_torchs_under_spawn(DataLoader):
    yield from drain(DataLoader(Draws(4), num_workers=2, batch_size=None, **SPAWN))


def test_default_collate_and_kept_batches():
    dataset = Images(12, (3, 50, 50))
    expected = list(DataLoader(dataset, batch_size=5, shuffle=True, generator=torch.Generator().manual_seed(1)))
    batches = epoch(
        DataLoader(
            dataset,
            batch_size=5,
            shuffle=True,
            num_workers=1,
            generator=torch.Generator().manual_seed(1),
            **SPAWN,
        )
    )
    assert same(batches, expected)


def test_errors_of_a_loader_that_cannot_be_sent():
    generator = (i for i in ())
    for bad in (dict(collate_fn=partial(as_list, generator)), dict(worker_init_fn=partial(init, generator))):
        with pytest.warns(UserWarning, match="Got pickle error"), pytest.raises(TypeError, match="generator"):
            iter(DataLoader(Numbers(3), num_workers=1, **bad, **SPAWN))


def test_out_of_order_and_collate_fn():
    loader = DataLoader(Failing(9, {4: key_error}), num_workers=2, in_order=False, collate_fn=as_list, **SPAWN)
    results = outcomes(iter(loader), 10)
    assert sorted(o[1][0] for o in results if o[0] == "value") == [0, 1, 2, 3, 5, 6, 7, 8]
    assert [o[0] for o in results].count("error") == 1 and results[-1] == ("end",)
