"""Shared memory is freed without a call to the library: with its loader, or 10 s after its last use."""

import gc
import time

import pytest
import torch
from sample_data import Images
from support import DataLoader, arena_bytes, run_script, same, threads_named, trim_pool, wait_until

pytestmark = [pytest.mark.ours, pytest.mark.timeout(180)]

MB = 1 << 20
CARETAKER = "rl_caretaker"
IDLE = 10  # seconds
# What an arena in use retains: rings and tables, and the pages of small blocks.
CONTROL = 4 * MB


def loader_of(persistent=False, **kw):
    """A loader whose epoch leaves more than 8 MiB of warm pages."""
    return DataLoader(Images(32, (3, 300, 300)), batch_size=8, num_workers=2, persistent_workers=persistent, **kw)


def run(loader):
    for x, _ in loader:
        assert x.shape[0] == 8
    del x
    gc.collect()


@pytest.mark.parametrize("persistent", [False, True])
def test_the_pages_go_with_the_loader(persistent):
    loader = loader_of(persistent)
    run(loader)
    run(loader)
    assert arena_bytes() > 2 * MB, "no warm pages are left for the next epoch"
    del loader
    gc.collect()
    assert arena_bytes() == 0
    assert wait_until(lambda: threads_named(CARETAKER) == 0), "the caretaker runs on with nothing to do"


def test_an_iterator_that_outlives_its_loader_leaves_no_pages():
    iterator = iter(loader_of())
    batches = list(iterator)
    assert len(batches) == 4
    del batches
    gc.collect()
    assert iterator._workers_status == [False] * 2
    del iterator
    gc.collect()
    assert arena_bytes() == 0


@pytest.mark.parametrize("persistent", [False, True])
def test_pages_go_without_a_call_and_only_when_they_were_idle_for_long(persistent):
    trim_pool()
    loader = loader_of(persistent)
    begin = time.monotonic()
    run(loader)
    assert arena_bytes() > 2 * MB
    # The workers of a persistent loader release their pages, and keep the arena.
    assert wait_until(lambda: arena_bytes() <= (CONTROL if persistent else 0), 5 * IDLE)
    assert time.monotonic() - begin > IDLE - 1, "the pages were freed too early"
    assert wait_until(lambda: threads_named(CARETAKER) == 0)
    expected = [torch.stack([Images(32, (3, 300, 300))[i][0] for i in range(k, k + 8)]) for k in range(0, 32, 8)]
    assert same([x for x, _ in loader], expected)


def test_workers_that_are_ahead_of_the_loop_keep_no_idle_pages():
    """Each worker has two batches ready, and the loop holds one: an idle block is of no use yet."""
    images = Images(32, (3, 300, 300))
    expected = torch.stack([images[i][0] for i in range(32)])
    batch = expected.nbytes
    assert batch > 2 * CONTROL
    for number, (x, _) in enumerate(DataLoader(images, batch_size=32, sampler=[*range(32)] * 8, num_workers=2)):
        assert same(x, expected), number
        if 2 <= number < 4:
            assert wait_until(lambda: arena_bytes() < 5 * batch + CONTROL), number
            assert same(x, expected), number


def test_a_loader_that_has_not_begun_inherits_the_pages():
    """A program that builds a loader for each epoch binds each new one to the name of the old one."""
    loader = loader_of()
    run(loader)
    warm = arena_bytes()
    loader = loader_of()
    gc.collect()
    assert arena_bytes() == warm > 2 * MB
    other = DataLoader(Images(8), num_workers=3)
    loader = other
    gc.collect()
    assert arena_bytes() == 0, "a loader with another number of workers inherited pages that it cannot use"
    del loader, other
    begun, old = loader_of(), loader_of()
    run(begun)
    trim_pool()
    run(old)
    del old
    gc.collect()
    assert arena_bytes() == 0, "a loader that has begun inherited pages"
    heir, old = loader_of(), loader_of()
    run(old)
    del old
    gc.collect()
    assert arena_bytes() > 2 * MB
    del heir
    gc.collect()
    assert arena_bytes() == 0


FORKS = """
import os, sys
found = []
def note():
    # The kernel may list a joined thread for a moment. The caretaker itself would stay for 10 s.
    found.append(not wait_until(lambda: threads_named("rl_caretaker") == 0, 5))
# Registered before rustloader's hook, so that it sees the threads as they were at the fork.
os.register_at_fork(after_in_parent=note)
from sample_data import Images
from support import arena_bytes, threads_named, wait_until
import rustloader
loader = rustloader.DataLoader(Images(32, (3, 300, 300)), batch_size=8, num_workers=2)
other = rustloader.DataLoader(Images(8), batch_size=8, num_workers=1)
for _ in range(3):
    # Pages stay for 10 s after an epoch, so each fork comes just after one.
    for batch in loader:
        pass
    del batch
    warm = arena_bytes()
    assert warm > 2 << 20 and wait_until(lambda: threads_named("rl_caretaker") == 1)
    pid = os.fork()
    if pid == 0:
        # The child has neither the thread nor its lock.
        for batch in rustloader.DataLoader(Images(8), batch_size=8, num_workers=1):
            pass
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert arena_bytes() == warm
    if sys.version_info[:2] != (3, 13):
        assert wait_until(lambda: threads_named("rl_caretaker") == 1)
for batch in other:
    pass
assert wait_until(lambda: threads_named("rl_caretaker") == 1)
assert len(found) == 3 * (2 + 1) + 1 and not any(found), found
del loader, other, batch
assert wait_until(lambda: threads_named("rl_caretaker") == 0) and arena_bytes() == 0
print("ok")
"""


@pytest.mark.forks
def test_no_fork_finds_the_thread():
    """Python 3.12 warns about a fork in a process with threads, and a child would inherit the thread's locks."""
    status, out, err = run_script(FORKS, head="")
    assert (status, out, err) == (0, "ok\n", "")
