"""Random programs, with torch's workers on this machine and rustloader's on the cluster.

`make stress KIND=ray-programs` runs more of them.
"""

import os
import subprocess
import sys

import ray_cluster


def test_programs_give_the_same_records(cluster):
    command = ["-m", "differential", "--start-method", "ray", "--programs", "10", "--seconds", "25", "--seed", "4"]
    environment = {**os.environ, "RUSTLOADER_TEST_RAY_ADDRESS": cluster.address}
    result = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=280, env=environment, cwd=ray_cluster.HERE
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert " programs in " in result.stdout and not result.stdout.startswith("0 programs")
