"""Workers as Ray actors: batches and faults are those of local workers."""

import copy
import json
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import time

import pytest
import ray
from ray_support import Stream, epochs, is_gone, noisy, same, wait_until
from torch.utils.data import Dataset

import rustloader
import rustloader.ray
from rustloader.workers import group


def init(worker_id):
    random.seed(100 + worker_id)


def test_batches_are_those_of_local_workers(cluster):
    context = rustloader.ray.RayContext(num_cpus=1)
    options = {"shuffle": True, "worker_init_fn": init, "prefetch_factor": 3, "timeout": 200}
    assert same(epochs(noisy(), context, **options), epochs(noisy(), "fork", **options))
    assert same(epochs(Stream(), context), epochs(Stream(), "fork"))


def test_any_order_in_a_placement_group_has_all_batches(cluster):
    group = ray.util.placement_group([{"CPU": 1}] * 2)
    options = {"in_order": False, "seed_by": "sample"}
    (batches,) = epochs(noisy(), rustloader.ray.RayContext(placement_group=group), 1, **options)
    (expected,) = epochs(noisy(), "fork", 1, **options)
    ray.util.remove_placement_group(group)
    for each in batches, expected:
        each.sort(key=lambda batch: int(batch[0][0]))
        for batch in each:
            del batch[-1]  # which worker made it
    assert same(batches, expected)


class FaultyAndSlow(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        if index == 13:
            raise KeyError("no sample 13")
        if index == 21:
            time.sleep(10_000)
        return index, os.getpid()


def test_errors_and_timeouts_are_those_of_local_workers(cluster):
    loader = rustloader.DataLoader(
        FaultyAndSlow(),
        batch_size=4,
        num_workers=1,
        multiprocessing_context=rustloader.ray.RayContext(),
        on_error="skip",
        timeout=5,
        collate_fn=lambda samples: samples,
    )
    batches = []
    with pytest.raises(RuntimeError, match=r"timed out after 5 seconds"):
        for batch in loader:
            batches.append(batch)
    assert [index for batch in batches for index, _ in batch] == [at for at in range(20) if at != 13]
    # The worker must not sleep on.
    pid = batches[0][0][1]
    del loader
    wait_until(lambda: is_gone(pid))


def test_a_driver_that_is_a_task_or_an_actor_itself_has_workers(cluster):
    def train(*_):
        return epochs(Stream(), rustloader.ray.RayContext(), 1, num_workers=1)

    task = ray.remote(num_cpus=0)(train)
    actor = ray.remote(num_cpus=0)(type("Driver", (), {"train": train})).remote()
    expected = epochs(Stream(), "fork", 1, num_workers=1)
    for result in task.remote(), actor.train.remote():
        assert same(ray.get(result, timeout=200), expected)


class Stopping(Dataset):
    """The first actor is stopped at sample 5."""

    def __init__(self, mark):
        self.mark = mark

    def __len__(self):
        return 12

    def __getitem__(self, index):
        if index == 5 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGSTOP)
        return index


def test_a_stopped_actor_is_replaced_where_nothing_is_free(cluster, tmp_path, monkeypatch):
    monkeypatch.setenv("RUSTLOADER_REMOTE_START_SECONDS", "60")
    loader = rustloader.DataLoader(
        Stopping(tmp_path / "stopped"),
        num_workers=2,
        multiprocessing_context=rustloader.ray.RayContext(num_cpus=2),
        stall_timeout=2.0,
        max_restarts=1,
    )
    assert [int(index) for index in loader] == [*range(12)]
    assert rustloader.stats(loader).faults.stalls == 1


def test_all_actors_have_one_class(cluster):
    misses = rustloader.ray._actor_class.cache_info().misses
    for cpus in (1, 0.5):
        epochs(Stream(), rustloader.ray.RayContext(num_cpus=cpus), 1)
    assert rustloader.ray._actor_class.cache_info().misses <= max(misses, 1)


def test_the_error_of_a_death_says_how_its_connection_ended_or_what_ray_knows(cluster):
    iterator = iter(
        rustloader.DataLoader(noisy(400), num_workers=1, multiprocessing_context=rustloader.ray.RayContext())
    )
    next(iterator)
    (worker,) = iterator._workers
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(rustloader.WorkerDiedError) as caught:
        list(iterator)
    (reason,) = [note for note in caught.value.__notes__ if note.startswith("It ran on another machine: ")]
    # The kernel may close the connection before Ray notices the death.
    assert re.search(r"ActorDiedError|was closed|Connection reset by peer|Broken pipe", reason), reason
    wait_until(lambda: "ActorDiedError" in worker.end)


def test_an_actor_without_a_place_is_an_error_that_names_it(cluster, monkeypatch):
    monkeypatch.setenv("RUSTLOADER_REMOTE_START_SECONDS", "2")
    context = rustloader.ray.RayContext(num_cpus=50, resources={"decoding": 1})
    with pytest.raises(RuntimeError, match=r"requests CPU 50 \(in the cluster 4, free .*decoding 1 \(in the cluster 0"):
        epochs(noisy(), context, 1)


def test_a_context_can_be_copied_and_placed_and_spreads_workers_over_the_nodes(cluster):
    context = rustloader.ray.RayContext(num_cpus=0.5, resources={"far": 0.5})
    for other in (copy.deepcopy(context), pickle.loads(pickle.dumps(context))):
        assert repr(other) == repr(context) and other.get_start_method() == "ray"
    far = {node["NodeID"] for node in ray.nodes() if node["Alive"] and "far" in node["Resources"]}

    def collate(samples):
        return ray.get_runtime_context().get_node_id()

    (nodes,) = epochs(noisy(8), context, 1, collate_fn=collate)
    assert set(nodes) == far
    (nodes,) = epochs(noisy(8), rustloader.ray.RayContext(), 1, collate_fn=collate)
    assert len(far) == 1 and set(nodes) == {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def test_local_workers_are_as_without_ray(cluster):
    assert signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, signal.SIG_IGN)
    assert not group._handles_sigterm()


def test_doctor_asks_the_nodes(cluster):
    command = [sys.executable, "-m", "rustloader", "doctor", "--json"]
    environment = {**os.environ, "RAY_ADDRESS": cluster.address}
    result = subprocess.run(command, capture_output=True, text=True, timeout=250, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    cluster_finding, *nodes = [
        it for it in json.loads(result.stdout)["findings"] if it["subject"] in ("Ray", "Ray node")
    ]
    assert "of 4 CPUs free" in cluster_finding["found"] and len(nodes) == 2
    assert all(f"rustloader {rustloader.__version__}" in it["found"] and it["state"] == "ok" for it in nodes)
