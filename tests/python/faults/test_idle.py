"""Waiting uses no CPU time, whatever else has been forked: no descriptor stays ready, and nothing spins."""

import os
import time

import pytest
import torch
from sample_data import Numbers
from support import DataLoader, gone, wait_until, worker_pids

# `alone`: these tests measure CPU time.
pytestmark = [pytest.mark.ours, pytest.mark.alone, pytest.mark.timeout(180)]

WAIT = 1.5  # seconds
# A wait wakes up four times a second. A busy loop that gets only a third of a core still uses 0.5 s.
MAX_CPU = 0.4


class Gated(Numbers):
    """Sample i is tensor(i). Samples from `at` on wait until the file exists."""

    def __init__(self, n, at, file):
        super().__init__(n)
        self.at, self.file = at, str(file)

    def __getitem__(self, i):
        while i >= self.at and not os.path.exists(self.file):
            time.sleep(0.05)
        return super().__getitem__(i)


def cpu_of(pid):
    """Seconds of CPU time that the process has used."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# The epoll of many workers, and the ppoll of few.
@pytest.mark.parametrize(("workers", "others", "times"), [(2, 1, 100), (36, 1, 10), (1, 36, 2)])
def test_a_persistent_loader_waits_idly_while_another_keeps_forking_workers(workers, others, times, tmp_path):
    gate = tmp_path / "gate"
    train = DataLoader(
        Gated(3 * workers, workers, gate), num_workers=workers, batch_size=None, persistent_workers=True, timeout=WAIT
    )
    validation = DataLoader(Numbers(others), num_workers=others, batch_size=None)
    iterator = iter(train)
    for i in range(workers):
        # The first batches may take long on a busy machine.
        assert take(iterator) == i
    pids = worker_pids(iterator)
    for _ in range(times):
        assert [x.item() for x in validation] == list(range(others))
    start, used = time.monotonic(), time.thread_time()
    with pytest.raises(RuntimeError, match="timed out"):
        next(iterator)
    used, took = time.thread_time() - used, time.monotonic() - start
    assert took > 0.9 * WAIT, "it waited"
    assert used < MAX_CPU, f"{used:.2f} s of CPU time in a wait of {took:.2f} s"
    gate.touch()
    assert [take(iterator) for _ in range(2 * workers)] == list(range(workers, 3 * workers))
    assert worker_pids(iterator) == pids
    iterator._shutdown_workers()
    assert wait_until(lambda: all(map(gone, pids)))


def take(iterator):
    """The next number, however long it takes."""
    end = time.monotonic() + 60
    while True:
        try:
            return next(iterator).item()
        except RuntimeError as error:
            assert "timed out" in str(error) and time.monotonic() < end, error


@pytest.mark.parametrize("persistent", [False, True], ids=["in an epoch", "between epochs"])
def test_a_worker_that_has_nothing_to_do_uses_no_cpu_time(persistent):
    loader = DataLoader(Numbers(40), num_workers=2, batch_size=None, persistent_workers=persistent)
    iterator = iter(loader)
    for i in range(40 if persistent else 4):
        assert torch.equal(next(iterator), torch.tensor(i))
    pids = worker_pids(iterator)
    time.sleep(0.3)  # work in flight ends
    before = [cpu_of(pid) for pid in pids]
    time.sleep(WAIT)
    used = [cpu_of(pid) - earlier for pid, earlier in zip(pids, before, strict=True)]
    assert max(used) < MAX_CPU, f"{used} s of CPU time in {WAIT} s"
    iterator._shutdown_workers()
