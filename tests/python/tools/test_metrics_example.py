"""examples/measuring/metrics_tensorboard.py: what it writes can be read back."""

import importlib.util
import json
import os
import re
import subprocess
import sys

import pytest
from support import ROOT, STARTED

pytestmark = [pytest.mark.ours, pytest.mark.timeout(600)]

EXAMPLE = ROOT / "examples/measuring/metrics_tensorboard.py"
READ = """
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

events = EventAccumulator(sys.argv[1]).Reload()
print(json.dumps({tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}))
"""


def run(*command):
    process = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, timeout=STARTED)
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.fixture(scope="module", autouse=True)
def tensorboard():
    if importlib.util.find_spec("tensorboard") is None:
        reason = "tensorboard comes with the extras tensorboard and dev, and is not installed"
        (pytest.fail if os.environ.get("RUSTLOADER_REQUIRE_ALL") else pytest.skip)(reason)


def test_the_curves_of_a_loader_in_event_files(tmp_path):
    options = ("--epochs", 2, "--batches", 12, "--sample-ms", 1, "--step-ms", 2, "--every", 1e-6)
    out = run(EXAMPLE, *options, "--logdir", tmp_path)
    assert out.startswith("24 batches") and "worker 1" in out
    curves = json.loads(run("-c", READ, tmp_path))
    batches = curves["loader/batches"]
    # One point at each `next` after the first, and one at the end.
    steps = [step for step, _ in batches]
    assert steps == sorted(steps) and len(steps) > 20 and batches[-1] == [24, 24.0]
    assert all(step == value for step, value in batches)
    for name in ("wait_seconds", "step_seconds", "worker_fetch_seconds", "arena_bytes", "wait_share"):
        values = [value for _, value in curves[f"loader/{name}"]]
        assert len(values) >= len(set(steps)), name
        assert re.search("bytes$|share$", name) or values == sorted(values), name
    assert curves["loader/workers"][-1][1] == 2
    assert curves["loader/worker_fetch_seconds"][-1][1] > 0 and curves["loader/step_seconds"][-1][1] >= 22 * 0.002
