"""`rustloader bench --ray` on a cluster."""

import json
import os
import subprocess
import sys

TRAIN = """
import time
import torch
from torch.utils.data import DataLoader, Dataset

class Slow(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        time.sleep(0.001)
        return torch.full((1000,), float(index))

def make_loader():
    return DataLoader(Slow(), batch_size=4, num_workers=2, persistent_workers=True)
"""


def bench(folder, address, *arguments):
    (folder / "train.py").write_text(TRAIN)
    command = [sys.executable, "-m", "rustloader", "bench", "train.py:make_loader", "--ray", "--timeout", "200"]
    environment = {**os.environ, "RAY_ADDRESS": address}
    command += arguments
    return subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment, cwd=folder)


def test_bench_measures_workers_on_the_cluster_beside_local_ones(cluster, tmp_path):
    process = bench(tmp_path, cluster.address, "--epochs", "2", "--json")
    assert process.returncode == 0, process.stdout + process.stderr
    results = {result["workers"]: result for result in json.loads(process.stdout)["results"]}
    assert results.keys() == {0, 2} and "ray" not in results[0]
    result = results[2]
    for engine in ("torch", "rustloader", "ray"):
        assert [epoch["batches"] for epoch in result[engine]["epochs"]] == [16] * 2
        assert result[engine]["batch_bytes"] == 16000
    price = result["price"]
    assert price["cluster"]["nodes"] == 1 and 2 <= price["cluster"]["cpus"] <= 4
    assert price["carried_batches_per_second"] == price["cluster"]["link"] / 16000 > 0
    assert price["cpu_seconds"] == result["rustloader"]["cpu_seconds_per_batch"]


def test_a_cluster_that_is_gone_is_an_error_with_a_remedy(tmp_path):
    process = bench(tmp_path, "127.0.0.1:1", "--epochs", "1")
    assert process.returncode == 2
    assert "--ray: no Ray cluster answers at 127.0.0.1:1" in process.stderr and "`ray start --head`" in process.stderr
