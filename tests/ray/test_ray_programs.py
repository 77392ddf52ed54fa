"""Random programs, with torch's workers here and ours on the cluster: `make stress KIND=ray-programs` runs more."""

import os
import subprocess
import sys

import ray_cluster


def test_programs_give_the_same_records(cluster):
    command = ["-m", "differential", "--start-method", "ray", "--programs", "10", "--seconds", "25", "--seed", "4"]
    environment = {**os.environ, "RUSTLOADER_TEST_RAY_ADDRESS": cluster.address}
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=280, env=environment, cwd=ray_cluster.HERE
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " programs in " in done.stdout and not done.stdout.startswith("0 programs")
