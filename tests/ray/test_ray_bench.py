"""`rustloader bench` with a factory whose workers run on a cluster."""

import json
import os
import subprocess
import sys

TRAIN = """
import time
import rustloader.ray
import torch
from torch.utils.data import DataLoader, Dataset

class Slow(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        time.sleep(0.001)
        return torch.full((1000,), float(index))

def local():
    return DataLoader(Slow(), batch_size=4, num_workers=2, persistent_workers=True)

def remote():
    context = rustloader.ray.RayContext()
    return DataLoader(Slow(), batch_size=4, num_workers=2, persistent_workers=True, multiprocessing_context=context)
"""


def bench(folder, address, *arguments, **variables):
    (folder / "train.py").write_text(TRAIN)
    command = [sys.executable, "-m", "rustloader", "bench", *arguments, "--timeout", "200"]
    environment = {**os.environ, "RAY_ADDRESS": address, **variables}
    return subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment, cwd=folder)


def test_a_cluster_is_another_factory(cluster, tmp_path):
    arguments = ("train.py:local", "train.py:remote", "--epochs", "2", "--json")
    process = bench(tmp_path, cluster.address, *arguments)
    assert process.returncode == 0, process.stdout + process.stderr
    alone, result = json.loads(process.stdout)["results"]
    assert (alone["workers"], alone["others"], result["workers"]) == (0, {}, 2)
    for side in (result["torch"], result["rustloader"], result["others"]["train.py:remote"]):
        assert [epoch["batches"] for epoch in side["epochs"]] == [16] * 2
        assert side["batch_bytes"] == 16000


def test_a_cluster_that_is_gone_is_an_error(tmp_path):
    # By default, Ray tries for minutes to connect.
    names = ("RAY_NUM_REDIS_GET_RETRIES", "RAY_py_gcs_connect_timeout_s", "RAY_gcs_rpc_server_connect_timeout_s")
    arguments = ("train.py:remote", "--epochs", "1")
    process = bench(tmp_path, "127.0.0.1:1", *arguments, **dict.fromkeys(names, "1"))
    assert process.returncode == 2
    assert "127.0.0.1:1" in process.stderr and "Failed to connect" in process.stderr, process.stderr
