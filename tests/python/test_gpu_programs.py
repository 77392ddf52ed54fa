"""The programs that need a CUDA device, as far as they run without one: `make compare-gpu`, `make stress-gpu`.

They are for machines with a card, and must not break at their first use there.
"""

import os
import pathlib
import random
import subprocess
import sys
from unittest import mock

import pytest
import torch
from support import HERE, rustloader

pytestmark = [pytest.mark.ours, pytest.mark.timeout(600)]

BENCHES = pathlib.Path(HERE).parents[1] / "benches"


def run(*command, folder=HERE):
    arguments = [sys.executable, *map(str, command)]
    path = os.pathsep.join([HERE, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    environment = dict(os.environ, PYTHONPATH=path)
    done = subprocess.run(
        arguments, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=550
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("program", ["gpu.py", "to_device.py"])
def test_a_comparison_runs_as_a_whole_without_a_card(program):
    step = ["--step", "1"] if program == "to_device.py" else []
    arguments = ["--device", "cpu", "--quick", "--rounds", "1", "--workers", "1", "--rows", "tokens", *step]
    status, out, err = run(BENCHES / program, *arguments)
    assert status == 0, out + err
    assert "no card: the CPU, no figures to quote" in out and "tokens" in out and "FAILED" not in out
    rows = ["cudaMemcpyAsync", "memcpy", "torch pageable", "torch pinned", "ours pageable", "ours"]
    assert all(row in out for row in rows) if program == "to_device.py" else "ratio" in out


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a CUDA device")
@pytest.mark.parametrize("program", [BENCHES / "gpu.py", BENCHES / "to_device.py", "faults/device_stress.py"], ids=str)
def test_without_a_card_they_say_that_they_need_one(program):
    status, out, err = run(program)
    assert (status, out) == (2, "") and err.startswith("no CUDA device: this ") and "for a machine that has one" in err


def test_the_stress_finds_nothing_wrong_on_the_stand_in():
    status, out, err = run("-m", "faults.device_stress", "--stand-in", "--epochs", "12", "--seed", "3")
    assert status == 0, out + err
    assert out.startswith("12 epochs, ") and "on a device without hardware: all sums right (--seed 3)" in out


def test_the_stress_notices_a_stream_that_does_not_wait():
    from faults import device_stress
    from standin import StandIn

    rng = random.Random(1)
    loader = rustloader.DataLoader(device_stress.Stamped(160, 64), batch_size=4, num_workers=1)
    side = device_stress.WithoutHardware(rng)
    with (
        mock.patch("rustloader.prefetch.loader.streams_of", lambda asked: side.device),
        mock.patch.object(StandIn, "wait", lambda self, stream, event: None),
        pytest.raises(device_stress.Wrong),
    ):
        device_stress.epoch(loader, side, rng)
