"""examples/resuming/resume_train.py: killed and restarted, it prints the losses of an uninterrupted run."""

import sys

import pytest
from stop_and_resume import stop_and_resume
from support import ROOT

pytestmark = [pytest.mark.ours, pytest.mark.timeout(1800)]

EXAMPLE = [sys.executable, ROOT / "examples/resuming/resume_train.py"]
STEPS = 16  # per epoch; there are three epochs


@pytest.mark.parametrize("kill_at", [7, 23, 30])
def test_the_losses_of_both_runs_are_those_of_one(tmp_path, kill_at):
    stop_and_resume(EXAMPLE, tmp_path, kill_at=kill_at, epoch=STEPS)


@pytest.mark.parametrize("workers", [(0, 2), (2, 0), (3, 1)])
def test_another_number_of_workers_resumes_it(tmp_path, workers):
    first, second = ([*EXAMPLE, "--workers", number] for number in workers)
    stop_and_resume(first, tmp_path, kill_at=23, epoch=STEPS, resume=second)


def test_a_checkpoint_after_the_last_batch_of_an_epoch(tmp_path):
    stop_and_resume([*EXAMPLE, "--every", 16], tmp_path, kill_at=19, epoch=STEPS, mid_epoch=False)
