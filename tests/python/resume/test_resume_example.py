"""examples/resuming/resume_train.py: killed and restarted, it prints the losses of an uninterrupted run."""

import sys

import pytest
from stop_and_resume import stop_and_resume
from support import ROOT

pytestmark = [pytest.mark.ours, pytest.mark.timeout(1800)]

EXAMPLE = [sys.executable, ROOT / "examples/resuming/resume_train.py"]
STEPS = 16  # per epoch; there are three epochs


def test_the_losses_are_those_of_one_run_whatever_the_number_of_workers(tmp_path):
    def with_workers(number):
        return [*EXAMPLE, "--workers", number]

    then = [(with_workers(2), 23), (with_workers(3), 30), (with_workers(1), None)]
    stop_and_resume(with_workers(0), tmp_path, kill_at=7, epoch=STEPS, then=then)


def test_a_checkpoint_after_the_last_batch_of_an_epoch(tmp_path):
    stop_and_resume([*EXAMPLE, "--every", 16], tmp_path, kill_at=19, epoch=STEPS, mid_epoch=False)
