"""Programs with workers on a cluster: one that shuts Ray down, one that defines classes, the example, and Ray Train."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from ray_support import Stream, epochs

import rustloader.ray

pytestmark = pytest.mark.timeout(900)

EXAMPLE = Path(__file__).parents[2] / "examples" / "clusters" / "ray_train.py"
ADDRESS = "RAY_ADDRESS"


SHUT_DOWN = """
import sys
import ray, rustloader, rustloader.ray


def begun():
    context = rustloader.ray.RayContext()
    loader = rustloader.DataLoader(range(10_000), num_workers=1, multiprocessing_context=context, max_restarts=3)
    iterator = iter(loader)
    next(iterator)
    return iterator


def fails(iterator):
    try:
        for _ in iterator:
            pass
    except RuntimeError as error:
        return str(error).startswith("Ray was shut down while a DataLoader had workers on its cluster")


ray.init(sys.argv[1], log_to_driver=False)
iterator = begun()
ray.shutdown()
print(fails(iterator), fails(iterator), ray.is_initialized())
del iterator
print(ray.is_initialized())
ray.init(sys.argv[1], log_to_driver=False)
iterator = begun()
ray.shutdown()
ray.init(sys.argv[1], log_to_driver=False)
print(fails(iterator))
del iterator
iterator = begun()
print(len(list(iterator)))
"""


def test_no_worker_is_started_again_and_no_cluster_once_ray_was_shut_down(cluster):
    environment = {name: value for name, value in os.environ.items() if name != ADDRESS}
    command = [sys.executable, "-c", SHUT_DOWN, cluster.address]
    result = subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment)
    assert result.stdout.split() == ["True", "True", "False", "False", "True", "9999"], result.stdout + result.stderr


OF_THE_MAIN_SCRIPT = """
import collections, dataclasses, sys
import ray, rustloader, rustloader.ray, torch

Pair = collections.namedtuple("Pair", "x y")


class Corrupt(Exception):
    pass


@dataclasses.dataclass
class Place:
    number: int


class Data(torch.utils.data.IterableDataset):
    number = 0

    def __iter__(self):
        while self.number < 4:
            self.number += 1
            if self.number == 3:
                raise Corrupt(3)
            yield Pair(torch.zeros(2), self.number)

    def state_dict(self):
        return {"place": Place(self.number)}

    def load_state_dict(self, state):
        self.number = state["place"].number


ray.init(sys.argv[1], log_to_driver=False)
context = rustloader.ray.RayContext()
loader = rustloader.StatefulDataLoader(Data(), batch_size=None, num_workers=1, multiprocessing_context=context)
iterator = iter(loader)
print(type(next(iterator)) is Pair, next(iterator).y)
try:
    next(iterator)
except Corrupt:
    print("raised")
state = loader.state_dict()
found = state["_snapshot"]["_worker_snapshots"]["worker_0"]["dataset_state"] or {}
found |= state["_snapshot"]["_worker_snapshots"]["worker_0"]["fetcher_state"] or {}
print("Place" in str(found))
"""


def test_classes_of_the_main_script_come_back_as_its_own(cluster, tmp_path):
    (tmp_path / "train.py").write_text(OF_THE_MAIN_SCRIPT)
    environment = {name: value for name, value in os.environ.items() if name != ADDRESS}
    command = [sys.executable, str(tmp_path / "train.py"), cluster.address]
    result = subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment)
    assert result.stdout.split() == ["True", "2", "raised", "True"], result.stdout + result.stderr


def train(*arguments, **variables):
    """Runs the example; returns the lines that it prints, and its stderr."""
    environment = {name: value for name, value in os.environ.items() if name != ADDRESS} | variables
    command = [sys.executable, str(EXAMPLE), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout.splitlines(), result.stderr


def test_the_example_trains_and_prints_a_verdict_and_its_own_cluster_leaves_no_file(cluster, tmp_path):
    (*losses, verdict), err = train("--on", "far", RAY_ADDRESS=cluster.address)
    assert len(losses) == 2 and all("over 32 batches" in line for line in losses)
    assert verdict and "Started a local Ray instance" not in err
    # Without a cluster. The folder is not below `tmp_path`, because the paths of Ray's sockets must be short.
    with tempfile.TemporaryDirectory(prefix="rl-ray-") as folder:
        for name in ("home", "tmp"):
            (tmp_path / name).mkdir()
        variables = {"HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path / "tmp"), "RAY_TMPDIR": folder}
        (*own_cluster_losses, _), err = train(**variables)
        assert own_cluster_losses == losses and "Started a local Ray instance" in err
        assert os.listdir(folder)
    # torch creates a folder for a compiler's cache.
    assert [path for path in tmp_path.rglob("*") if not path.is_dir()] == []


def test_a_worker_of_ray_train_has_workers_itself(cluster, tmp_path):
    needed = "Ray Train is not installed: pip install 'ray[train]'"
    train = pytest.importorskip("ray.train", reason=needed, exc_type=ImportError)
    torch_trainer = pytest.importorskip("ray.train.torch", reason=needed, exc_type=ImportError).TorchTrainer

    def loop():
        (batches,) = epochs(Stream(), rustloader.ray.RayContext(), 1, num_workers=1)
        output.write_text(str([index for indices, _ in batches for index in indices.tolist()]))

    output, run = tmp_path / "found", train.RunConfig(storage_path=str(tmp_path / "train"))
    torch_trainer(loop, scaling_config=train.ScalingConfig(num_workers=1), run_config=run).fit()
    assert output.read_text() == str(list(range(31)))
