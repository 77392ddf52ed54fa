"""Loaders on a Ray cluster as programs use them: installed, several at a time, pinned, on a device, in ranks."""

import os
import re
import signal
import subprocess
import sys
from unittest import mock

import ray
import torch
from pinning_support import pinning
from ray_cluster import actors
from ray_support import Stream, Threads, epochs, is_gone, noisy, same, wait_until
from standin import StandIn

import rustloader
import rustloader.ray


def test_pinned_batches_reach_a_device(cluster):
    (expected,) = epochs(Stream(), "fork", 1, num_workers=1)
    device, values = StandIn(), []
    with pinning() as host, mock.patch("rustloader.device.prefetch.loader.streams_of", lambda asked: device):
        torch.manual_seed(5)
        loader = rustloader.DataLoader(
            Stream(),
            batch_size=4,
            num_workers=1,
            pin_memory=True,
            persistent_workers=True,
            multiprocessing_context=rustloader.ray.RayContext(),
        )
        batches = list(loader)
        assert same(batches, expected) and all(host.owns(tensor) for batch in batches for tensor in batch)
        for batch in rustloader.prefetch_to_device(loader):
            device.read(batch[0], values.extend)
        device.run_all()
    assert values == list(range(31)) and device.faults == []


def test_installed_loaders_work_at_the_same_time_and_one_after_the_other(cluster):
    rustloader.install(multiprocessing_context=rustloader.ray.RayContext(num_cpus=0.5), worker_threads=3)
    try:
        loaders = [torch.utils.data.DataLoader(Threads(), batch_size=8, num_workers=1) for _ in range(2)]
        iterators = list(map(iter, loaders))
        assert {it._workers[0].pid for it in iterators} == set(actors()) and len(actors()) == 2
        pairs = list(zip(*iterators, strict=True))
        # The context does not apply to a loader without workers.
        assert [len(one) for one in torch.utils.data.DataLoader(list(range(9)), batch_size=3)] == [3, 3, 3]
    finally:
        rustloader.uninstall()
    for number in range(2):
        batches = [pair[number] for pair in pairs]
        assert torch.equal(torch.cat([indices for indices, _ in batches]), torch.arange(24))
        assert len({int(thread) for _, threads in batches for thread in threads}) > 1
    # There is room for another loader.
    assert same(epochs(Threads(), rustloader.ray.RayContext(), 1, num_workers=1)[0][0][0], torch.arange(4))


# A rank: a process with a loader of its own on the same cluster. It prints its workers' pids, and waits for a line.
RANK = """
import sys
import ray, torch, rustloader, rustloader.ray

ray.init(address=sys.argv[1], log_to_driver=False)
rank, data = int(sys.argv[2]), list(range(200))
sampler = torch.utils.data.DistributedSampler(data, num_replicas=2, rank=rank, shuffle=True, seed=3)
context = rustloader.ray.RayContext()
loader = rustloader.DataLoader(data, sampler=sampler, batch_size=4, num_workers=2, multiprocessing_context=context)
iterator = iter(loader)
batches = [next(iterator)]
print("workers", *[worker.pid for worker in iterator._workers], flush=True)
sys.stdin.readline()
batches += iterator
print("indices", *torch.cat(batches).tolist(), flush=True)
"""


def test_each_rank_has_its_workers_and_outlives_the_other(cluster):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    ranks = [subprocess.Popen([sys.executable, "-c", RANK, cluster.address, str(rank)], **pipes) for rank in range(2)]
    try:
        pids = []
        for rank in ranks:
            match = re.fullmatch(r"workers (\d+) (\d+)\n", rank.stdout.readline())
            pids.append([int(pid) for pid in match.groups()])
        assert len({*pids[0], *pids[1]}) == 4 and not any(map(is_gone, [*pids[0], *pids[1]]))
        # Workers of a killed process learn of its death only from their connections and Ray.
        ranks[0].kill()
        wait_until(lambda: all(map(is_gone, pids[0])))
        assert not any(map(is_gone, pids[1]))
        out, _ = ranks[1].communicate("go on\n", timeout=200)
        data = list(range(200))
        sampler = torch.utils.data.DistributedSampler(data, num_replicas=2, rank=1, shuffle=True, seed=3)
        assert out == " ".join(map(str, ["indices", *sampler])) + "\n"
        assert ranks[0].wait() == -signal.SIGKILL and ranks[1].wait(200) == 0
        wait_until(lambda: all(map(is_gone, pids[1])))
    finally:
        for rank in ranks:
            rank.kill(), rank.communicate()


def test_workers_are_gone_when_their_loader_is(cluster):
    context = rustloader.ray.RayContext()
    iterator = iter(rustloader.DataLoader(noisy(1000), num_workers=2, multiprocessing_context=context))
    pids = [worker.pid for worker in iterator._workers]
    next(iterator)
    # A stopped worker cannot notice it.
    os.kill(pids[0], signal.SIGSTOP)
    del iterator
    wait_until(lambda: all(map(is_gone, pids)))


def test_the_loss_of_a_node_is_a_death_that_is_made_good(cluster):
    (expected,) = epochs(noisy(), "fork", 1, seed_by="sample", shuffle=True)
    torch.manual_seed(5)
    context = rustloader.ray.RayContext()
    loader = rustloader.DataLoader(
        noisy(),
        batch_size=4,
        shuffle=True,
        num_workers=2,
        multiprocessing_context=context,
        max_restarts=3,
        seed_by="sample",
    )
    iterator = iter(loader)
    batches = [next(iterator) for _ in range(3)]
    pids = [worker.pid for worker in iterator._workers]
    lost = cluster.second.node_id
    cluster.lose()
    batches += list(iterator)
    assert same([batch[:4] for batch in batches], [batch[:4] for batch in expected])
    wait_until(lambda: any(map(is_gone, pids)))
    wait_until(lambda: lost not in [node["NodeID"] for node in ray.nodes() if node["Alive"]])
