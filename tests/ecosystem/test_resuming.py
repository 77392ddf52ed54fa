"""Programs of other libraries are killed in mid-epoch, with all their processes, and restarted: each step of both runs
has the loss of an uninterrupted run, to the last bit. The workers' random numbers are part of the losses."""

import ast
import re
import sys
from collections import Counter
from pathlib import Path

import pytest
from stop_and_resume import Training, stop_and_resume

pytestmark = [pytest.mark.ecosystem, pytest.mark.timeout(1800)]

EXAMPLES = Path(__file__).parents[2] / "examples" / "resuming"


def program(name, *arguments, processes=None):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes] if processes else []
    return [sys.executable, *launcher, EXAMPLES / f"{name}.py", *arguments]


@pytest.mark.parametrize("kill_at", [8, 52])
def test_lightning(tmp_path, kill_at):
    stop_and_resume(program("lightning_resume"), tmp_path, kill_at=kill_at, epoch=32)


@pytest.mark.parametrize("kill_at", [8, 52])
def test_lightning_with_a_stream_whose_batches_it_fetches_ahead(tmp_path, kill_at):
    stop_and_resume(program("lightning_resume", "--stream"), tmp_path, kill_at=kill_at, epoch=32)


# With a stream: Lightning never asks a loader with a length for more after its last batch, and so trains one epoch less
# after a resume. It does the same with torchdata's class.
def test_lightning_with_a_checkpoint_at_the_end_of_an_epoch(tmp_path):
    command = program("lightning_resume", "--every", 32, "--stream")
    stop_and_resume(command, tmp_path, kill_at=40, epoch=32, mid_epoch=False)


def test_lightning_with_ddp_that_starts_its_processes_itself(tmp_path):
    stop_and_resume(program("lightning_resume", "--devices", 2), tmp_path, kill_at=23, epoch=16, ranks=2)


@pytest.mark.parametrize("processes", [None, 2])
@pytest.mark.parametrize("kill_at", [8, 23])
def test_accelerate(tmp_path, kill_at, processes):
    command = program("accelerate_resume", processes=processes)
    stop_and_resume(command, tmp_path, kill_at=kill_at, epoch=16, ranks=processes or 1)


@pytest.mark.parametrize("kill_at", [8, 23])
def test_transformers_trainer(tmp_path, kill_at):
    stop_and_resume(program("transformers_resume"), tmp_path, kill_at=kill_at, epoch=16)


def test_datasets_with_a_checkpoint_at_the_end_of_an_epoch(tmp_path):
    command = program("datasets_resume", "--every", 16)
    stop_and_resume(command, tmp_path, kill_at=20, epoch=16, mid_epoch=False)


@pytest.mark.parametrize("kill_at", [8, 23])
@pytest.mark.parametrize("arguments", [(), ("--stream",)])
def test_datasets(tmp_path, kill_at, arguments):
    stop_and_resume(program("datasets_resume", *arguments), tmp_path, kill_at=kill_at, epoch=16)


def test_torchrun_with_the_same_number_of_processes(tmp_path):
    stop_and_resume(program("torchrun_reshard", processes=2), tmp_path, kill_at=53, epoch=48, ranks=2)


@pytest.mark.parametrize("before, after", [(2, 4), (4, 2)])
def test_torchrun_with_another_number_of_processes(tmp_path, before, after):
    """Each sample of the resumed epoch is in one step of one run; later epochs are those of the new number."""
    first, second = (program("torchrun_reshard", processes=processes) for processes in (before, after))
    stopped = Training([*first, "--folder", tmp_path, "--step-seconds", "0.05"]).run(53 if before == 2 else 28, before)
    copies = [tmp_path.with_name(f"{tmp_path.name}-copy-{number}") for number in range(2)]
    for copy in copies:
        copy.mkdir()
        for file in tmp_path.iterdir():
            (copy / file.name).write_bytes(file.read_bytes())
    resumed, repeated = (Training([*second, "--folder", copy]).run() for copy in copies)
    assert resumed.steps == repeated.steps

    def samples(steps, epoch):
        texts = [text for text in steps.values() if text.startswith(f"epoch {epoch} ")]
        return Counter(number for text in texts for number in ast.literal_eval(text.partition("samples ")[2]))

    before_checkpoint = {key: text for key, text in stopped.steps.items() if key[1] < resumed.first}
    assert (resumed.first - 1) % (768 // 8 // before), "it did not resume in mid-epoch"
    assert samples(before_checkpoint, 1).total() == 8 * before * ((resumed.first - 1) % (768 // 8 // before))
    assert samples(before_checkpoint, 1) + samples(resumed.steps, 1) == Counter(range(768))

    def last_epoch(run):
        rows = [
            (rank, text.partition("samples ")[2]) for (rank, _), text in sorted(run.steps.items()) if "epoch 2" in text
        ]
        assert len(rows) == 768 // 8
        return rows

    whole = Training([*second, "--folder", tmp_path / "whole"]).run()
    assert last_epoch(resumed) == last_epoch(whole)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_loop_in_torchtitans_manner(tmp_path, workers):
    command = program("titan_resume", "--workers", workers, processes=2)
    stop_and_resume(command, tmp_path, kill_at=23, epoch=40, ranks=2)


def test_a_loop_in_torchtitans_manner_refuses_another_number_of_ranks(tmp_path):
    Training([*program("titan_resume", processes=2), "--folder", tmp_path, "--step-seconds", "0.05"]).run(8, 2)
    text = Training([*program("titan_resume", processes=1), "--folder", tmp_path]).run(status=1).output
    assert re.search("ValueError: the checkpoint is for 2 ranks, got 1", text), text
