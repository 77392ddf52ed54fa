"""The programs that need a CUDA device (`KIND=gpu` of `make compare` and `make stress`), run without one.

They are for machines with a GPU, and must not break at their first use there.
"""

import json
import random
import xml.etree.ElementTree
from unittest import mock

import pytest
import torch
from support import HERE, ROOT, run_script, rustloader

pytestmark = [pytest.mark.ours, pytest.mark.timeout(600)]

BENCHES = ROOT / "benches"


def run(*arguments):
    """Runs a program, or a module after `-m`, as Python does. It is a fork of a process that has imported torch."""
    is_module, arguments = arguments[0] == "-m", [str(argument) for argument in arguments if argument != "-m"]
    call = "run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
    if not is_module:
        call = "run_path(sys.argv[0], run_name='__main__')"
    source = f"""
        import os, runpy, sys
        sys.argv = {arguments!r}
        sys.path[0] = os.path.dirname(sys.argv[0])
        runpy.{call}
    """
    return run_script(source, 550, cwd=HERE)


@pytest.mark.parametrize("program", ["gpu.py", "to_device.py"])
def test_a_comparison_runs_as_a_whole_without_a_card(program, tmp_path):
    step = ["--step", "1"] if program == "to_device.py" else []
    arguments = ["--device", "cpu", "--quick", "--rounds", "1", "--workers", "1", "--rows", "tokens", *step]
    arguments += ["--trace", tmp_path / "out"]
    status, out, err = run(BENCHES / program, *arguments)
    assert status == 0, out + err
    assert "no GPU: this ran on the CPU, do not quote the results" in out and "tokens" in out and "FAILED" not in out
    assert json.loads((tmp_path / "out.tokens.json").read_text())["traceEvents"]
    rows = ["cudaMemcpyAsync", "memcpy", "torch pageable", "torch pinned", "ours pageable", "ours"]
    assert all(row in out for row in rows) if program == "to_device.py" else "ratio" in out


def test_a_profile_is_drawn(tmp_path):
    def event(category, name, stream, begin, microseconds):
        times = {"ph": "X", "ts": begin, "dur": microseconds}
        return {"cat": category, "name": name, "args": {"stream": stream}} | times

    events = [
        event("kernel", "gemm", 7, 0, 3000),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 13, 2000, 2000),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 7, 5000, 100),
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 9000},
    ]
    trace, picture = tmp_path / "trace.json", tmp_path / "overlap.svg"
    trace.write_text(json.dumps({"traceEvents": events}))
    status, out, err = run(BENCHES / "overlap.py", trace, picture)
    assert status == 0, err
    assert out.startswith("A kernel also ran during 50% of the time spent on copies to the device")
    root = xml.etree.ElementTree.parse(picture).getroot()
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "5.1 ms: 50% of the copies to the device overlap with kernels" in texts
    assert "stream 7" in texts and "stream 13" in texts
    trace.write_text(json.dumps({"traceEvents": events[3:]}))
    status, _, err = run(BENCHES / "overlap.py", trace, picture)
    assert status == 2 and "has no copies and no kernels" in err


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a CUDA device")
@pytest.mark.parametrize("program", [BENCHES / "gpu.py", BENCHES / "to_device.py", f"{HERE}/faults/device_stress.py"])
def test_without_a_card_they_say_that_they_need_one(program):
    status, out, err = run(program)
    assert (status, out) == (2, "") and err.startswith("no CUDA device: this measurement needs one")


def test_the_stress_finds_nothing_wrong_on_the_stand_in():
    status, out, err = run("-m", "faults.device_stress", "--stand-in", "--epochs", "12", "--seed", "3")
    assert status == 0, out + err
    assert out.startswith("12 epochs, ") and "on a simulated device: all sums are right (--seed 3)" in out


def test_the_stress_notices_a_stream_that_does_not_wait():
    from faults import device_stress
    from standin import StandIn

    rng = random.Random(1)
    loader = rustloader.DataLoader(device_stress.Stamped(160, 64), batch_size=4, num_workers=1)
    side = device_stress.WithoutHardware(rng)
    with (
        mock.patch("rustloader.device.prefetch.loader.streams_of", lambda asked: side.device),
        mock.patch.object(StandIn, "wait", lambda self, stream, event: None),
        pytest.raises(device_stress.Wrong),
    ):
        device_stress.epoch(loader, side, rng)
