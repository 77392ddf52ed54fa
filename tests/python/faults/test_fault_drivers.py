"""A few rounds of each fault driver of `make stress`. A driver that finds a fault prints its seed and round."""

import os
import subprocess
import sys

import pytest
import refusals

pytestmark = [pytest.mark.random, pytest.mark.ours, pytest.mark.timeout(400)]


def drive(module, *arguments):
    path = os.pathsep.join([refusals.HERE, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    command = [sys.executable, "-m", f"faults.{module}", *map(str, arguments)]
    environment = dict(os.environ, PYTHONPATH=path)
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=380
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_s3_workers_are_gone_whatever_ends_main():
    # The machine may be busy: `make stress KIND=ends` has a limit of one second for the workers.
    drive("ends", "--count", 20, "--seed", 104, "--limit", 60, "--outlive", 20)


def test_an_iterator_may_be_dropped_at_any_moment_in_any_way():
    drive("drops", "--count", 20, "--seed", 1)


def test_connections_may_fail_at_any_byte():
    drive("connections", "--epochs", 8, "--seed", 2)


def test_programs_over_caches_have_their_datasets_samples():
    drive("cache_programs", "--programs", 30, "--seed", 1)


@pytest.mark.forks
def test_forks_while_other_loaders_work():
    drive("forks", "--forks", 8, "--seed", 1)


def test_a_failed_call_is_tolerated_or_named():
    if not os.path.exists(refusals.CORE):
        reason = "the extension with failpoints is not built: make failpoints"
        (pytest.fail if os.environ.get("RUSTLOADER_REQUIRE_ALL") else pytest.skip)(reason)
    drive("failures", "--some", 15)
