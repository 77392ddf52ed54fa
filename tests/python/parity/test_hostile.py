"""Datasets and samplers that do unexpected things to their process: no harm, or a clear error; never a hang, and never
a write into a file that is not rustloader's."""

import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from sample_data import Numbers, Unpicklable
from support import (
    DataLoader,
    finish,
    gone,
    outcome,
    outcomes,
    run_script,
    start_script,
    wait_until,
    within,
    worker_pids,
)
from torch.utils.data import Sampler

pytestmark = pytest.mark.ours

N, AT = 60, 7


LIMITS = {
    "limit_files": resource.RLIMIT_NOFILE,
    "limit_file_sizes": resource.RLIMIT_FSIZE,
    "limit_processes": resource.RLIMIT_NPROC,
    "limit_locked_memory": resource.RLIMIT_MEMLOCK,
}


class Hostile(Numbers):
    """Sample i is a tensor of i in a block of its own. At sample AT or the next, a worker calls `act`, once."""

    done = False

    def __init__(self, act, folder=None):
        super().__init__(N)
        self.act, self.folder = act, folder

    def __getitem__(self, i):
        if i in (AT, AT + 1) and not self.done:
            self.done = True
            if self.act in LIMITS:
                resource.setrlimit(LIMITS[self.act], (0, 0))
            else:
                getattr(self, self.act)()
        return torch.full((5000,), float(i))

    def close_all_and_open_files(self):
        os.closerange(0, 1000)
        self.mine = []
        for number in range(60):
            self.mine.append(os.open(f"{self.folder}/{os.getpid()}-{number}", os.O_CREAT | os.O_RDWR))
            os.write(self.mine[-1], b"mine")

    def close_all_and_open_eventfds(self):
        os.closerange(3, 1000)
        self.mine = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(60)]

    def setsid(self):
        os.setsid()

    def chdir(self):
        folder = f"{self.folder}/{os.getpid()}"
        os.mkdir(folder)
        os.chdir(folder)
        os.rmdir(folder)

    def limit_memory(self):
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20),) * 2)
        resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, 1 << 30))

    def limit_core_and_stack(self):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_STACK, (1 << 20, 1 << 20))

    def replace_handlers(self):
        for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, lambda *_: None)

    def ignore_signals(self):
        for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_IGN)

    def block_signals(self):
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())

    def be_interrupted(self):
        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)

    def run_subprocess(self):
        assert subprocess.run([sys.executable, "-c", "print(42)"], capture_output=True, text=True).stdout == "42\n"

    def start_busy_threads(self):
        def work():
            while True:
                torch.ones(100).sum()

        for _ in range(2):
            threading.Thread(target=work, daemon=True).start()

    def become_another(self):
        """Changes the priority, the umask, the environment, the recursion limit and the standard streams."""
        os.nice(5)
        os.umask(0o777)
        os.environ.clear()
        sys.setrecursionlimit(150)
        sys.stdout = sys.stderr = sys.stdin = None

    def leave_a_grandchild(self):
        """It stays in the worker's session, holds its descriptors, and ignores SIGTERM."""
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            with open(f"{self.folder}/grandchild-{os.getpid()}", "w"):
                pass
            time.sleep(60)
            os._exit(0)


HARMLESS = [name for name in {**vars(Hostile), **LIMITS} if not name.startswith("_") and name != "done"]


def right_epoch(batches):
    """True if these are all the batches, in order."""
    at = -1
    for at, batch in enumerate(batches):
        assert bool((batch == at).all()), f"batch {at} is wrong"
    return at == N - 1


@pytest.mark.parametrize("persistent", [False, True], ids=["once", "persistent"])
@pytest.mark.parametrize("act", HARMLESS)
def test_what_a_dataset_does_to_its_worker_does_no_harm(act, persistent, tmp_path):
    loader = DataLoader(Hostile(act, str(tmp_path)), num_workers=2, batch_size=None, persistent_workers=persistent)
    pids = set()
    try:
        for _ in range(3 if persistent else 2):
            iterator = iter(loader)
            pids.update(worker_pids(iterator))
            with within(60):
                assert right_epoch(iterator)
        if persistent:
            with within(20):
                iterator._shutdown_workers()
        assert wait_until(lambda: all(map(gone, pids)))
        for file in tmp_path.iterdir():
            assert "grandchild" in file.name or file.read_bytes() == b"mine", "a user's file has been written to"
    finally:
        for file in tmp_path.glob("grandchild-*"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(file.name.partition("-")[2]), signal.SIGKILL)


@pytest.mark.parametrize(
    "act", ["setsid", "block_signals", "ignore_signals", "close_all_and_open_files", "limit_files"]
)
def test_a_hostile_worker_still_ends_with_main(act, tmp_path):
    process = start_script(f"""
        from test_hostile import Hostile
        from support import worker_pids
        iterator = iter(DataLoader(Hostile({act!r}, {str(tmp_path)!r}), num_workers=2, batch_size=None))
        for _ in range(20):
            next(iterator)
        print(*worker_pids(iterator), flush=True)
        time.sleep(60)
    """)
    pids = list(map(int, process.stdout.readline().split()))
    os.kill(process.pid, signal.SIGKILL)
    assert len(pids) == 2 and wait_until(lambda: all(map(gone, pids)))
    finish(process)


def keep_a_thread(_):
    threading.Thread(target=time.sleep, args=(60,)).start()


def test_a_thread_that_a_worker_would_wait_for_does_not_hold_up_the_shutdown(monkeypatch):
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.3)
    loader = DataLoader(Numbers(8), num_workers=2, batch_size=None, worker_init_fn=keep_a_thread)
    with within(20):
        assert [x.item() for x in loader] == list(range(8))


@pytest.mark.forks
def test_descriptors_that_are_closed_in_main_are_an_error_or_no_harm():
    """And files that get their numbers are not written to."""
    status, out, err = run_script("""
        from test_hostile import Numbers, outcome
        def files():
            return [os.open(f"/proc/self/fd/{os.memfd_create('mine')}", os.O_RDWR) for _ in range(60)]
        for persistent in (False, True):
            iterator = iter(DataLoader(Numbers(40), num_workers=2, batch_size=None, persistent_workers=persistent))
            got = [outcome(next, iterator)]
            os.closerange(3, 200)
            mine = files()
            got += [outcome(next, iterator) for _ in range(41)]
            values = [o[1] for o in got if o[0] == "value"]
            assert values == list(range(len(values))), values
            assert len(values) == 40 or any(o[0] == "error" for o in got), got
            iterator._shutdown_workers()
            assert all(os.fstat(fd).st_size == 0 for fd in mine), "a user's file has been written to"
            del iterator
            os.closerange(3, 200)
        print("through")
    """)
    assert (status, out) == (0, "through\n"), err


@pytest.mark.parametrize("pinned", [False, True], ids=["plain", "pinned"])
@pytest.mark.parametrize("kind", ["a file", "a pipe", "an empty pipe", "the pipe's other end"])
@pytest.mark.forks
def test_what_gets_the_numbers_of_mains_descriptors_stays_as_it_is(kind, pinned):
    """Nothing writes to such a file, reads from it or waits for it."""
    status, out, err = run_script(f"""
        import contextlib, fcntl, struct, termios
        from pinning_support import pinning
        import rustloader
        from support import sleeps, threads_named, wait_until
        from test_hostile import Numbers, outcome
        kind, pinned = {kind!r}, {pinned}
        if kind == "a file":
            mine = os.open(f"/proc/self/fd/{{os.memfd_create('mine')}}", os.O_RDWR)
            os.pwrite(mine, b"mine" * 16, 0)
            def look():
                return os.lseek(mine, 0, os.SEEK_CUR), os.pread(mine, 100, 0)
        else:
            reader, writer = os.pipe()
            if kind == "a pipe":
                os.write(writer, b"mine" * 16)
            mine = writer if kind == "the pipe's other end" else reader
            def look():
                return fcntl.ioctl(reader, termios.FIONREAD, bytes(4))
        def pinned_all(iterator):
            return rustloader.stats(iterator).pinning.batches >= 5 and sleeps("rl_pin")
        ours = set(os.listdir("/proc/self/fd"))
        with pinning() if pinned else contextlib.nullcontext():
            iterator = iter(DataLoader(Numbers(12), num_workers=2, batch_size=None, pin_memory=pinned))
            got = [outcome(next, iterator)]
            # The set below must not include a file that a thread has open only for a moment.
            done = lambda: sum(worker.tasks for worker in rustloader.stats(iterator).workers) >= 5
            assert wait_until(done) and (not pinned or wait_until(lambda: pinned_all(iterator)))
            before = look()
            for number in set(os.listdir("/proc/self/fd")) - ours:
                with contextlib.suppress(OSError):
                    os.fstat(int(number))
                    os.dup2(mine, int(number))
            got += [outcome(next, iterator) for _ in range(12)]
            iterator._shutdown_workers()
            assert look() == before, (before, look())
            assert got == [("value", i) for i in range(12)] + [("end",)], got
            assert wait_until(lambda: threads_named("rl_pin") == 0, 5), "the pin thread waits for a user's file"
        print("through")
    """)
    assert (status, out) == (0, "through\n"), err


class Yields(Sampler):
    """Yields the given objects, and the results of the given functions."""

    def __init__(self, *things):
        self.things = things

    def __iter__(self):
        for thing in self.things:
            yield thing() if isinstance(thing, type(keep_a_thread)) else thing


class RaisesInTheWorker:
    def __reduce__(self):
        return int, ("no number",)


GARBAGE = {
    "none": None,
    "a text": "seven",
    "a negative": -1,
    "too large": 10**30,
    "not a number": float("nan"),
    "a tensor of two": torch.tensor([1, 2]),
    "a class": int,
    "an object": object(),
    "a dict of itself": (lambda d: d.update(d=d) or d)({}),
    "deep": (lambda n: [n := [n] for _ in range(5000)][-1])(0),
    "what cannot be pickled": (i for i in ()),
    "what cannot be reduced": Unpicklable(),
    "what cannot be loaded": RaisesInTheWorker(),
    "16 MB": b"x" * (16 << 20),
}


class Asked(Numbers):
    def __getitem__(self, i):
        if not isinstance(i, int) or not 0 <= i < self.n:
            raise IndexError(f"asked for a {type(i).__name__}")
        return torch.tensor(i)


@pytest.mark.parametrize("batched", [False, True], ids=["index", "batch"])
@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_of_a_sampler_is_an_error_and_the_others_come(garbage, batched):
    """Beyond the primed indices, one that cannot be sent is an error of the call that draws it. Any other garbage is an
    error of its batch."""
    thing = GARBAGE[garbage]
    if batched:
        batches = Yields(*([i] for i in range(6)), thing, [7], [8, thing], [9])
        loader = DataLoader(Asked(10), num_workers=2, batch_sampler=batches)
    else:
        loader = DataLoader(Asked(10), num_workers=2, batch_size=None, sampler=Yields(*range(6), thing, 7, 8, 9))
    iterator = iter(loader)
    pids = worker_pids(iterator)
    with within(30):
        results = outcomes(iterator, 14)
    values = [o[1][0] if batched else o[1] for o in results if o[0] == "value"]
    assert values == [i for i in range(10) if i != 6 and not (batched and i == 8)], results
    assert len([o for o in results if o[0] == "error"]) == (2 if batched else 1), results
    assert results[-1] == ("end",) and worker_pids(iterator) == pids
    assert not any("DataLoader worker (pid" in o[2] for o in results if o[0] == "error"), "a worker has died of it"


def test_a_sampler_that_blocks_keeps_nobody_else_from_shutting_down():
    release, blocked = threading.Event(), threading.Event()

    def block():
        blocked.set()
        release.wait(60)
        return 5

    def blocked_index():
        return block()

    iterator = iter(DataLoader(Numbers(6), num_workers=1, batch_size=None, sampler=Yields(0, 1, blocked_index, 3)))
    pids, seen = worker_pids(iterator), []
    thread = threading.Thread(target=lambda: seen.append(outcome(next, iterator)))
    thread.start()
    assert blocked.wait(60)
    with within(10):
        iterator._shutdown_workers()
    assert all(map(gone, pids))
    release.set()
    thread.join(10)
    assert not thread.is_alive() and seen[0][0] in ("error", "end", "value")
    assert outcome(next, iterator)[0] != "value"
