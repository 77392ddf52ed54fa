"""Iterators that are dropped at random moments and in many ways: `make stress KIND=drops ARGS='--count 1000 --seed S'`.

Required: the workers and the pin thread end with the iterator; batches taken before are right and stay unchanged;
Python reports no unraisable exception; nothing is left behind, which is checked after every 50 iterators and at the
end.
"""

import contextlib
import errno
import gc
import multiprocessing.process
import os
import signal
import sys
import threading
import time
from typing import NamedTuple

from .trials import ONLY, Numbered, arguments, drawn, number, quiet, run_all, status_of

# Weighted: fork servers and spawned interpreters are slow to start.
METHODS = ["fork"] * 60 + ["forkserver"] * 3 + ["spawn"]
WAYS = ["del", "cycle", "traceback", "thread", "child", "twice", "replaced", "failed", "vacant"]
# Seconds within which a thread or a child must end.
LIMIT = 60


class Trial(NamedTuple):
    """A loader, how many batches are taken from it, and how its iterator is dropped."""

    way: str
    method: str
    workers: int
    persistent: bool
    in_order: bool
    pinned: bool
    pickled: bool
    size: int
    taken: int
    kept: bool

    @classmethod
    def random(cls, rng):
        return cls(
            way=rng.choice(WAYS),
            method=rng.choice(METHODS),
            workers=rng.randint(1, 3),
            persistent=rng.random() < 0.3,
            in_order=rng.random() < 0.7,
            pinned=rng.random() < 0.3,
            pickled=rng.random() < 0.3,
            size=rng.choice([1, 100, 6000, 50_000]),
            taken=rng.choice([0, 1, 2, 7, 30]),
            kept=rng.random() < 0.3,
        )


class Holder:
    """Part of a reference cycle."""


class Expected(Exception):
    pass


class Drop:
    def __init__(self, trial):
        from support import DataLoader

        self.trial = trial
        self.loader = DataLoader(
            Numbered(30, trial.size, trial.pickled),
            batch_size=None,
            num_workers=trial.workers,
            multiprocessing_context=trial.method,
            persistent_workers=trial.persistent,
            in_order=trial.in_order,
            pin_memory=trial.pinned,
            max_restarts=3 if trial.way == "vacant" else None,
        )
        self.pids, self.kept = [], []

    def start_iterator(self):
        """Returns an iterator after some batches."""
        iterator = iter(self.loader)
        self.pids += [worker.pid for worker in iterator._workers]
        numbers = []
        for _ in range(self.trial.taken):
            batch = next(iterator)
            numbers.append(number(batch))
            if self.trial.kept:
                self.kept.append((numbers[-1], batch))
        assert len(set(numbers)) == len(numbers)
        assert not self.trial.in_order or numbers == list(range(self.trial.taken))
        # A persistent loader holds the iterator as well.
        if self.trial.way not in ("twice", "replaced"):
            self.loader._iterator = None
        return iterator

    def run(self):
        from support import gone, wait_until

        getattr(self, "by_" + self.trial.way)()
        self.loader._iterator = None
        assert wait_until(lambda: all(map(gone, self.pids)), 10), "a worker has survived"
        assert all(number(batch) == i for i, batch in self.kept), "a kept batch has changed"

    def by_del(self):
        iterator = self.start_iterator()
        del iterator

    def by_cycle(self):
        holder = Holder()
        holder.iterator, holder.me = self.start_iterator(), holder
        del holder
        gc.collect()

    def by_traceback(self):
        def body():
            iterator = self.start_iterator()
            raise Expected(iterator)

        try:
            body()
        except Expected as error:
            kept = error
        del kept
        gc.collect()

    def by_thread(self):
        """The last reference is a local variable of a thread that ends."""

        def body():
            iterator = self.start_iterator()
            done.append(iterator is not None)

        done = []
        thread = threading.Thread(target=body)
        thread.start()
        thread.join(LIMIT)
        assert not thread.is_alive() and done == [True], "the thread does not end"

    def by_child(self):
        """A forked child drops the iterator that it inherits, and the parent continues its own."""
        iterator = self.start_iterator()
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                faults = []
                sys.unraisablehook = faults.append
                self.kept.clear()
                del iterator
                gc.collect()
                status = 2 if faults else 0
            finally:
                os._exit(status)
        status = status_of(pid, LIMIT)
        assert status == 0, f"the child: {status}"
        for batch in iterator:
            number(batch)
            del batch

    def by_twice(self):
        iterator = self.start_iterator()
        iterator._shutdown_workers()
        iterator._shutdown_workers()
        del iterator

    def by_replaced(self):
        """A new epoch begins while the previous epoch's iterator is still referenced; it may be the same iterator."""
        first = self.start_iterator()
        second = self.start_iterator()
        assert (first is second) == self.trial.persistent
        del first, second

    def by_failed(self):
        """The last worker fails to start: no iterator is created, and the other workers end."""
        real, starts = multiprocessing.process.BaseProcess.start, []

        def start(process):
            starts.append(process)
            if len(starts) == self.trial.workers:
                raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
            real(process)
            self.pids.append(process.pid)

        multiprocessing.process.BaseProcess.start = start
        try:
            self.start_iterator()
            raise AssertionError("the iterator starts without its last worker")
        except OSError as error:
            assert error.errno == errno.EAGAIN, error
        finally:
            multiprocessing.process.BaseProcess.start = real

    def by_vacant(self):
        """A worker has died. A call of `next` may have restarted it before the iterator is dropped."""
        iterator = self.start_iterator()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pids[0], signal.SIGKILL)
        if self.trial.kept:
            number(next(iterator, self.loader.dataset[0]))
            self.pids += [worker.pid for worker in iterator._workers]
        del iterator


def main():
    args = arguments("drops", __doc__, count=(1000, "how many iterators"), only=ONLY)
    from pinning_support import pinning
    from rules import left_after, state
    from support import wait_until

    import rustloader  # noqa: F401

    quiet()
    gc.freeze()
    unraisable = []
    sys.unraisablehook = lambda it: unraisable.append(f"{it.exc_type.__name__}: {it.exc_value} in {it.object!r}")
    start, before = time.monotonic(), state()
    count = args.count if args.only is None else 1

    def play(trial, done):
        wrong = []
        with contextlib.ExitStack() as stack:
            host = stack.enter_context(pinning()) if trial.pinned else None
            try:
                Drop(trial).run()
            except Exception as error:
                wrong.append(f"{type(error).__name__}: {error}")
                del error
            if host is not None and not wait_until(lambda: gc.collect() is not None and not host.live):
                wrong.append("pinned memory is not released")
        wrong += unraisable
        unraisable.clear()
        if (done % 50 == 0 or done == count or wrong) and (leftovers := left_after(before, 5)):
            wrong.append(f"left behind: {leftovers}")
        return wrong

    _, failed = run_all(drawn(Trial, args.count, args), play)
    print(f"{count} iterators, {failed} wrong, {time.monotonic() - start:.0f} s")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
