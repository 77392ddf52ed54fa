"""A worker in another network namespace, as if on another machine, falls silent in mid-epoch."""

import os
import subprocess
import sys

import pytest
import refusals
from two_hosts import NOT_PERMITTED

pytestmark = [pytest.mark.ours, pytest.mark.warns]


def test_a_host_that_falls_silent_is_a_death():
    # The main process notices only that nothing arrives any more, and so does the worker.
    path = os.pathsep.join([refusals.HERE, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    command = ["unshare", "--net", "--map-root-user", sys.executable, "-m", "two_hosts"]
    try:
        result = subprocess.run(
            command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=280
        )
    except FileNotFoundError as error:
        pytest.skip(f"no {error.filename} here")
    if result.returncode == NOT_PERMITTED or "unshare" in result.stderr:
        pytest.skip(f"network namespaces are not permitted: {result.stdout}{result.stderr}")
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout == "batches are equal\nworkers are gone\n"
