"""Forks while other loaders run: `make stress KIND=forks ARGS='--forks 500 --seed S'`.

Two threads iterate, one of them over a persistent loader; a third loader has started and is idle. The main thread
forks at random moments. Required: all data are right in parent and child; an inherited iterator does nothing in the
child; batches that the child drops stay intact in the parent; the child can run a loader of its own; no thread waits
for a lock that is never released. Half of the forks happen with plain loaders, half with loaders that pin: their pin
threads are often in the allocator, which holds a lock.
"""

import contextlib
import faulthandler
import gc
import os
import random
import signal
import sys
import threading
import time
import traceback

import torch
from torch.utils.data import Dataset

from .trials import arguments, number, quiet, seed_of

# Seconds after which a child counts as hung.
LIMIT = 60


class Items(Dataset):
    """Sample i is filled with i. It fits in a message, or needs a block of its own."""

    def __init__(self, n=40):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return torch.full((10 if i % 3 == 0 else 8000,), float(i))


class Busy:
    """A thread that iterates, epoch after epoch."""

    def __init__(self, loader):
        self.loader, self.stopped, self.epochs, self.error = loader, threading.Event(), 0, None
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self):
        try:
            while not self.stopped.is_set():
                assert [number(batch) for batch in self.loader] == list(range(self.loader.dataset.n))
                self.epochs += 1
        except BaseException:
            self.error = traceback.format_exc()

    def end(self):
        self.stopped.set()
        self.thread.join()


class Forks:
    def __init__(self, pinned):
        self.pinned = pinned

    def loader(self, **kw):
        from support import DataLoader

        # A child that is forked while a thread draws a loader's base seed from the default generator could not draw.
        usual = {"batch_size": None, "num_workers": 2, "pin_memory": self.pinned, "generator": torch.Generator()}
        return DataLoader(Items(), **(usual | kw))

    def run(self, count, rng):
        """Forks `count` times. Returns the problems found."""
        from support import wait_until, worker_pids

        wrong = []
        waiting = iter(self.loader(prefetch_factor=3))
        held = [next(waiting) for _ in range(5)]
        # torch initializes an operation at its first use. A child that is forked while a thread does that hangs when it
        # uses the operation.
        assert list(map(number, held)) == list(range(5))
        busy = [Busy(self.loader(persistent_workers=True)), Busy(self.loader(num_workers=1))]
        try:
            for at in range(count):
                time.sleep(rng.random() * rng.choice([0, 0.002, 0.02]))
                text = self.fork(waiting, held, loads=at % 10 == 0, drops=rng.random() < 0.5)
                if text:
                    wrong.append(f"child {at}: {text}")
                if list(map(number, held)) != list(range(5)):
                    wrong.append(f"child {at}: batches that the parent holds have changed")
            wait_until(lambda: all(thread.epochs or thread.error for thread in busy), LIMIT)
        finally:
            for thread in busy:
                thread.end()
        wrong += [thread.error for thread in busy if thread.error]
        if not all(thread.epochs for thread in busy):
            wrong.append("one of the other loaders finished no epoch")
        if [number(batch) for batch in waiting] != list(range(5, 40)):
            wrong.append("the parent's own iterator has lost batches")
        for thread in busy:
            if thread.loader.persistent_workers and thread.loader._iterator is not None:
                pids = worker_pids(thread.loader._iterator)
                if any(not os.path.exists(f"/proc/{pid}") for pid in pids):
                    wrong.append("a worker of the persistent loader has ended")
                thread.loader._iterator._shutdown_workers()
        return wrong

    def fork(self, waiting, held, loads, drops):
        """Forks one child. Returns what is wrong in it, or a false value."""
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            faulthandler.register(signal.SIGALRM, file=writer, all_threads=True, chain=True)
            signal.alarm(LIMIT)
            status = 1
            try:
                os.close(reader)
                self.child([waiting], held, loads, drops)
                status = 0
            except BaseException:
                os.write(writer, traceback.format_exc().encode())
            finally:
                os._exit(status)
        os.close(writer)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        # Not until end of file: a worker that a thread has started meanwhile may hold the other end open.
        os.set_blocking(reader, False)
        try:
            text = os.read(reader, 1 << 16).decode(errors="replace")
        except BlockingIOError:
            text = ""
        os.close(reader)
        if status == -signal.SIGALRM:
            return f"it hangs\n{text}"
        return text or (status and f"it ends with status {status}")

    def child(self, iterators, held, loads, drops):
        from pinning_support import pinning
        from support import engine_batches

        assert list(map(number, held)) == list(range(5)), "held batches have changed"
        before = engine_batches()
        try:
            next(iterators[0])
            raise AssertionError("an inherited iterator returns a batch")
        except RuntimeError as error:
            assert "belongs to the process" in str(error), error
        iterators[0]._shutdown_workers()
        if drops:
            iterators.clear()
            if not self.pinned:  # to free pinned memory takes the allocator's lock
                held.clear()
            gc.collect()
        assert engine_batches() == before, "the engine has run in the child"
        assert len(os.listdir("/proc/self/task")) == 1, "the child has a thread"
        if loads:
            if self.pinned:
                # The lock of the parent's allocator may be held by a thread that does not exist here.
                context = pinning()
                context.__enter__()
            assert [number(batch) for batch in self.loader(num_workers=1)] == list(range(40)), "the child's own loader"
            assert held == [] or list(map(number, held)) == list(range(5)), "held batches have changed"


def main():
    args = arguments("forks", __doc__, forks=(500, "the number of forks in each half"))
    from pinning_support import pinning
    from rules import left_after, state

    quiet()
    seed = seed_of(args)
    failed = 0
    for pinned in (False, True):
        start, rng = time.monotonic(), random.Random(f"{seed}-{pinned}")
        with contextlib.ExitStack() as stack:
            if pinned:
                stack.enter_context(pinning(delay=0.0005, locked=True))
            before = state()
            wrong = Forks(pinned).run(args.forks, rng)
            if leftovers := left_after(before, 10):
                wrong.append(f"left behind: {leftovers}")
        name = "with pin threads" if pinned else "without pinning"
        print("\n".join(wrong), end="\n" * bool(wrong))
        print(f"{args.forks} forks {name}, {len(wrong)} wrong, {time.monotonic() - start:.0f} s", flush=True)
        failed += len(wrong)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
