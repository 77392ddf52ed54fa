"""examples/measuring/logging_callbacks.py: TensorBoard and Weights & Biases get a point for each epoch."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ecosystem, pytest.mark.timeout(600)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "measuring" / "logging_callbacks.py"


@pytest.mark.parametrize("library", ["lightning", "transformers", "accelerate"])
def test_curves_of_a_loader(library, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    command = [sys.executable, str(EXAMPLE), library, "--folder", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0 and "32 batches from the engine" in result.stdout, result.stdout + result.stderr
    points = {}
    for file in tmp_path.rglob("events.out.tfevents.*"):
        events = EventAccumulator(str(file)).Reload()
        for tag in events.Tags()["scalars"]:
            # Trainer writes train/loader/ where the others write loader/.
            points[tag.removeprefix("train/")] = [(event.step, event.value) for event in events.Scalars(tag)]
    assert points["loader/batches"] == [(16, 16), (32, 32)]
    assert len(points["loader/step_seconds"]) == len(points["loader/wait_share"]) == 2
    (offline_run,) = tmp_path.rglob("run-*.wandb")
    assert offline_run.read_bytes().count(b"loader/turnaround_seconds") >= 2
