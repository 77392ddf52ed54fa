"""A worker in another network namespace, as on another machine, which falls silent in mid-epoch."""

import os
import subprocess
import sys

import pytest
import refusals
from two_hosts import NOT_PERMITTED

pytestmark = [pytest.mark.ours, pytest.mark.warns]


def test_a_host_that_falls_silent_is_a_death():
    # Nothing tells the main process but the want of an answer, and the same holds for the worker.
    path = os.pathsep.join([refusals.HERE, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    command = ["unshare", "--net", "--map-root-user", sys.executable, "-m", "two_hosts"]
    try:
        done = subprocess.run(
            command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=280
        )
    except FileNotFoundError as error:
        pytest.skip(f"no {error.filename} here")
    if done.returncode == NOT_PERMITTED or "unshare" in done.stderr:
        pytest.skip(f"network namespaces are not permitted: {done.stdout}{done.stderr}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "batches are equal\nworkers are gone\n"
