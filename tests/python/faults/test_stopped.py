"""A worker that is stopped (SIGSTOP) at a random moment: only the batches that it holds are late (P19, S3)."""

import os
import random
import re
import signal
import threading
import time

import pytest
import refusals
import torch
from pinning_support import pinning
from sample_data import Held, WhoAmI
from support import DataLoader, wait_until, worker_pids, workers_report

import rustloader.supervision.stalls

pytestmark = [pytest.mark.ours, pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")]

WORKERS, PREFETCH, N = 3, 2, 300
# The loader's timeout in seconds, and how many timeouts in a row mean that no more batches will come.
TIMEOUT, LATE = 0.3, 3


class Numbered(WhoAmI):
    """Samples are (i, worker, a tensor in a block of its own). They take no time: a worker spends it on publishing
    results and ringing the doorbell."""

    def __getitem__(self, i):
        return *super().__getitem__(i), torch.full((5000,), float(i))


def loader_of(**kw):
    settings = dict(batch_size=None, num_workers=WORKERS, prefetch_factor=PREFETCH, timeout=TIMEOUT)
    return DataLoader(Numbered(N), **settings | kw)


def checked(batch):
    i, worker, tensor = batch
    assert bool((tensor == i).all()), f"batch {i} is wrong"
    return i, worker


def take(iterator, batches, count=N, late=1000):
    """Takes up to `count` batches; stops after `late` timeouts in a row without one. A timeout loses nothing, and can
    occur at any time on a busy machine."""
    end, row = time.monotonic() + 120, 0
    while count and row < late:
        assert time.monotonic() < end, "the epoch does not end"
        try:
            batches.append(checked(next(iterator)))
            count, row = count - 1, 0
        except StopIteration:
            return
        except RuntimeError as error:
            assert str(error) == f"DataLoader timed out after {TIMEOUT} seconds"
            row += 1


def stopped_at_random(rng, iterator):
    """Takes batches and then stops a worker; returns (its ID, the batches)."""
    batches = []
    take(iterator, batches, rng.randrange(40))
    victim = rng.randrange(WORKERS)
    for _ in range(rng.randrange(3000)):  # the worker publishes and rings during this
        pass
    os.kill(worker_pids(iterator)[victim], signal.SIGSTOP)
    return victim, batches


@pytest.mark.parametrize("seed", range(12))
def test_the_others_batches_arrive_and_then_its_own(seed):
    rng = random.Random(seed)
    iterator = iter(loader_of(in_order=False))
    victim, batches = stopped_at_random(rng, iterator)
    take(iterator, batches, N - PREFETCH - len(batches))
    take(iterator, batches, late=LATE)
    missing = set(range(N)) - {i for i, _ in batches}
    assert len({i for i, _ in batches}) == len(batches), "a batch was delivered twice"
    assert 0 < len(missing) <= PREFETCH, f"only tasks of worker {victim} may be missing: {missing}"
    os.kill(worker_pids(iterator)[victim], signal.SIGCONT)
    take(iterator, batches)
    assert sorted(i for i, _ in batches) == list(range(N))


@pytest.mark.parametrize("pinned", [False, True], ids=["plain", "pinned"])
@pytest.mark.parametrize("seed", range(6))
def test_in_order_the_timeout_works_and_loses_nothing(seed, pinned):
    rng = random.Random(100 + seed)
    with pinning() as host:
        iterator = iter(loader_of(pin_memory=pinned))
        victim, batches = stopped_at_random(rng, iterator)
        # On a busy machine, the next batch may be another worker's for a while.
        end = time.monotonic() + 120
        while True:
            take(iterator, batches, late=LATE)
            if len(batches) % WORKERS == victim:
                break
            assert len(batches) < N and time.monotonic() < end, "a batch of another worker does not arrive"
        assert [i for i, _ in batches] == list(range(len(batches)))
        os.kill(worker_pids(iterator)[victim], signal.SIGCONT)
        take(iterator, batches)
        assert [i for i, _ in batches] == list(range(N))
        del iterator
        assert wait_until(lambda: not host.live)


# Calls of a worker from its start to its first sleep. Between populate and eventfd_write it publishes a result: it
# checks that the doorbell is still its own (fstat), and rings it.
PLACES = [
    f"{kind}:{nth}" for kind, calls in [("populate", 4), ("fstat", 4), ("eventfd_write", 2)] for nth in range(1, calls)
]
PLACES += ["memfd_create:1", "sigaction:2", "thread:1", "ppoll:1", "futex_wait:1", "pidfd_open:1"]


@pytest.mark.parametrize("program", ["stopped", "stopped_for_good"])
@pytest.mark.parametrize("place", PLACES)
def test_wherever_a_worker_stops_nothing_is_lost_and_a_shutdown_ends_it(place, program):
    """A failpoint stops it, so that it stops at this very call."""
    report = refusals.report_of(program, f"{place}:stop", "worker")
    assert not report["hangs"] and report["status"] == 0 and report["output"] == "", report
    assert report["processes"] == 0 and not report["left"] and report["bytes"] == 0, report
    assert re.fullmatch(r"[012] stopped", report["value"][0]) and len(report["value"]) == 1, report
    # Whether a worker makes the other calls depends on timing.
    if place in ("populate:1", "memfd_create:1", "thread:1", "sigaction:2"):
        assert report["value"] != ["0 stopped"]


def is_asked_for_its_stack(pid):
    """True if the signal that requests the stack is pending."""
    with open(f"/proc/{pid}/status") as file:
        pending = [int(line.split()[1], 16) for line in file if line.startswith(("SigPnd", "ShdPnd"))]
    return any(mask >> (signal.SIGRTMIN + 13 - 1) & 1 for mask in pending)


@pytest.mark.warns
def test_a_worker_that_was_named_while_a_batch_waited_for_it_is_named_again_where_it_hangs(monkeypatch, tmp_path):
    warnings = []

    def warning(text, *args):
        warnings.append(text % args)
        if "state: fetch" in warnings[-1]:
            (tmp_path / "warned").touch()

    monkeypatch.setattr(rustloader.supervision.stalls.logger, "warning", warning)
    monkeypatch.setenv("RUSTLOADER_STALL_START_SECONDS", "0")
    monkeypatch.setenv("RUSTLOADER_STALL_ITEM_SECONDS", "1")
    iterator = iter(DataLoader(Held(3, 1, tmp_path / "warned"), batch_size=None, num_workers=1, prefetch_factor=1))
    [pid] = worker_pids(iterator)
    # It is also idle for a moment before it takes the first task.
    assert workers_report(iterator, tasks_done=1, state="idle")
    os.kill(pid, signal.SIGSTOP)

    def resume():
        assert wait_until(lambda: is_asked_for_its_stack(pid))
        os.kill(pid, signal.SIGCONT)

    resumer = threading.Thread(target=resume)
    resumer.start()
    assert [x.item() for x in iterator] == [0, 1, 2]
    resumer.join()
    idle, fetch = (text for text in warnings if "the batch has index 1." in text)
    assert "state: idle" in idle and "state: fetch" in fetch
    assert re.search(r"sample_data\.py\", line \d+ in wait\n", fetch), fetch
