"""Batch samplers for sequences under Lightning and accelerate: the programs in examples/sequences/ on two ranks; no
framework deals the batches a second time."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import rustloader

pytestmark = [pytest.mark.ecosystem, pytest.mark.timeout(600)]

EXAMPLES = Path(__file__).parents[2] / "examples" / "sequences"
TWO_RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def sampler(**kw):
    return rustloader.TokenBudgetBatchSampler([*range(1, 41)], 80, window=10, **kw)


def loader(**kw):
    return rustloader.StatefulDataLoader(range(40), batch_sampler=sampler(**kw), collate_fn=torch.tensor)


@pytest.mark.parametrize(
    "command", [("lightning_tokens.py", "--devices", "2"), (*TWO_RANKS, "accelerate_packs.py")], ids=lambda it: it[0]
)
def test_two_ranks_share_the_sequences(command):
    run = subprocess.run([sys.executable, *command], cwd=EXAMPLES, capture_output=True, text=True, timeout=500)
    assert run.returncode == 0, run.stdout + run.stderr
    counts = [int(count) for count in re.findall(r": (\d+) sequences", run.stdout)][-2:]
    # Two epochs of 500 sequences, and at most a batch more in each.
    assert 1000 <= sum(counts) <= 1200
    if "lightning" in command[0]:
        assert {"0", "1"} == {*re.findall(r"epoch (\d)", run.stdout)}


@pytest.mark.parametrize("even_batches", [True, False])
def test_accelerate_does_not_deal_batches_again(even_batches):
    from accelerate.data_loader import prepare_data_loader

    options = {"num_processes": 2, "process_index": 1, "even_batches": even_batches, "put_on_device": False}
    again = prepare_data_loader(loader(num_replicas=2, rank=1), **options)
    with pytest.raises(RuntimeError, match="do not pass the loader to prepare"):
        list(again)
    dealt = prepare_data_loader(loader(num_replicas=1, rank=0, drop_last=True), **options)
    assert [batch.tolist() for batch in dealt] == [*sampler()][1::2]


def test_accelerate_sets_the_epoch():
    from accelerate.data_loader import prepare_data_loader

    alone = prepare_data_loader(loader(), num_processes=1, process_index=0, put_on_device=False)
    alone.set_epoch(3)
    expected = sampler()
    expected.set_epoch(3)
    assert [batch.tolist() for batch in alone] == [*expected]


def test_lightning_says_how_to_keep_the_sampler():
    from lightning.pytorch.utilities.data import _update_dataloader

    with pytest.raises(TypeError, match=r"Trainer\(use_distributed_sampler=False\)"):
        _update_dataloader(loader(), torch.utils.data.DistributedSampler(range(40), 2, 0))
