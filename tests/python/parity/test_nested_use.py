"""Forks during iteration: grandchildren, children with loaders of their own, threads (T14)."""

import os
import signal
import time

import pytest
import torch
from sample_data import Images, Numbers
from support import DataLoader, arena_bytes, gone, wait_until, within, worker_pids
from torch.utils.data import default_collate


def leave_behind(body):
    """Runs `body` in a grandchild, which outlives the calling process, and returns its pid."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        grandchild = os.fork()
        if grandchild:
            os.write(writer, str(grandchild).encode())
            os._exit(0)
        signal.alarm(280)  # in case the test does not end it
        try:
            body()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    pid = int(os.read(reader, 20))
    os.close(reader), os.close(writer)
    return pid


class Haunted:
    """A collate_fn that, at some of its worker's batches, forks a process that holds the batch and outlives the worker.

    The process checks that the batch does not change, until there is a file "go". If `writes` is set, it then writes
    to the batch and checks that its writes stay, until there is a file "stop". A file of its own reports the outcome.
    """

    def __init__(self, folder, at, writes=False):
        self.folder, self.at, self.writes, self.count = folder, at, writes, 0

    def __call__(self, samples):
        batch = default_collate(samples)
        self.count += 1
        if self.count in self.at and not self.exists("go"):
            leave_behind(lambda: self.haunt(batch[0]))
        return batch

    def exists(self, name):
        return (self.folder / name).exists()

    def haunt(self, images):
        good, expected = True, images.clone()
        (self.folder / str(os.getpid())).touch()
        for step in range(100_000):
            if self.exists("stop") or (not self.writes and self.exists("go")):
                break
            if self.writes and self.exists("go"):
                images.fill_(step % 256)
                expected.fill_(step % 256)
            time.sleep(0.005)
            good &= torch.equal(images, expected)
        (self.folder / f"{'good' if good else 'wrong'} {os.getpid()}").touch()

    def pids(self):
        return [int(file.name) for file in self.folder.iterdir() if file.name.isdigit()]

    def reports(self):
        return sorted(name for name, _, pid in (file.name.partition(" ") for file in self.folder.iterdir()) if pid)


def right(images, dataset, k):
    """True if these are the images of batch k."""
    return all(torch.equal(x, dataset.image(4 * k + i)) for i, x in enumerate(images))


@pytest.mark.ours  # torch's batch changes with the grandchild's; its join waits for a pipe that the grandchild holds
@pytest.mark.parametrize("persistent", [False, True])
def test_a_grandchild_that_outlives_its_worker_reads_and_writes_what_is_its_own(persistent, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 250)
    dataset, haunted = Images(48, (3, 80, 80)), Haunted(tmp_path, {3, 5}, writes=True)
    loader = DataLoader(dataset, batch_size=4, num_workers=2, collate_fn=haunted, persistent_workers=persistent)
    with within(200):  # the wait for a worker that does not exit by itself is 250 s
        iterator = iter(loader)
        pids = worker_pids(iterator)
        kept = [images for images, _ in iterator]
        assert all(right(images, dataset, k) for k, images in enumerate(kept))
        assert wait_until(lambda: len(haunted.pids()) == 4)
        (tmp_path / "go").touch()
        for _ in range(3):
            for k, (images, _) in enumerate(loader):
                time.sleep(0.005)
                assert right(images, dataset, k)
        iterator._shutdown_workers()
    assert all(map(gone, pids)) and not any(map(gone, haunted.pids()))
    for images, _ in DataLoader(dataset, batch_size=4, num_workers=2):
        images.fill_(7)
    assert all(right(images, dataset, k) for k, images in enumerate(kept))
    (tmp_path / "stop").touch()
    assert wait_until(lambda: all(map(gone, haunted.pids())))
    assert haunted.reports() == ["good"] * 4


@pytest.mark.ours
def test_what_grandchildren_held_comes_back_when_they_have_ended(tmp_path):
    dataset, haunted = Images(64, (3, 256, 256)), Haunted(tmp_path, range(1, 17))
    loader = DataLoader(dataset, batch_size=4, num_workers=1, collate_fn=haunted, persistent_workers=True)
    for _ in loader:
        pass
    held = arena_bytes()
    assert held > 14 * 4 * dataset.image(0).numel(), "not every grandchild holds a batch"
    (tmp_path / "go").touch()
    assert wait_until(lambda: len(haunted.reports()) == 16)
    assert wait_until(lambda: all(map(gone, haunted.pids())))
    for _ in range(10):
        for k, (images, _) in enumerate(loader):
            assert torch.equal(images[0], dataset.image(4 * k))
    del images
    assert haunted.reports() == ["good"] * 16
    assert arena_bytes() < held / 2


@pytest.mark.ours  # torch's iterator serves both, and each gets a part of the batches
def test_a_sampler_that_forks_does_not_give_the_iterator_to_the_child():
    child = None

    class Forks(torch.utils.data.Sampler):
        def __iter__(self):
            nonlocal child
            for i in range(12):
                if i == 7:
                    child = os.fork()
                yield i

    samples = []
    try:
        for x in DataLoader(Numbers(12), sampler=Forks(), batch_size=None, num_workers=2):
            samples.append(x.item())
    except RuntimeError as error:
        if child == 0:
            os._exit(7 if "forked from" in str(error) else 8)
        raise
    finally:
        if child == 0:
            os._exit(9)
    assert samples == list(range(12))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
