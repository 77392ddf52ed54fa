"""Measures how fast faults are detected and how long shutdowns take: `make compare KIND=reliability`.

The tables are those of RESULTS.md. Deaths and shutdowns are those of real processes, in --rounds trials, or in
at most 10 trials if a trial takes seconds. The figures are medians, with confidence intervals, and maxima. Those of
`ends` are compared with a lower bound from the same rounds: the same number of bare forked children, which wait in a
read and then call `_exit`.

restarts   from a fault to the first batch of the new worker
faults     from a fault to its error, or to the end of the last process
ends       the end of an epoch, of an iterator and of a program, by the number of workers
"""

import atexit
import contextlib
import ctypes
import functools
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.utils.data
from harness import report
from harness.program import Program

import rustloader
from rustloader.system.procfs import has_ended
from rustloader.tools.harness.machine import sentence
from rustloader.tools.harness.rounds import interleave, spread

WORKERS = (1, 2, 4, 8, 16)
MAX_WAIT = 60.0  # seconds


# --- datasets -----------------------------------------------------------------------------------------------------


class Numbers(torch.utils.data.Dataset):
    """A dataset of numbers; each sample with an index of at least `slow` calls `body`."""

    def __init__(self, length: int = 1000, slow: int | None = None, body: Callable[[], Any] | None = None):
        self.length, self.slow, self.body = length, slow, body

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.slow is not None and self.body is not None and index >= self.slow:
            self.body()
        return torch.tensor(index)


class SlowOnce(Numbers):
    """A dataset of numbers for forked workers. The first fetch of sample `slow` sets `begun` to the time and calls
    `body`."""

    def __init__(self, slow: int, body: Callable[[], Any]):
        super().__init__(slow=slow, body=body)
        self.begun = torch.zeros(1, dtype=torch.float64).share_memory_()

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.slow and not self.begun and self.body is not None:
            self.begun[0] = time.monotonic()
            self.body()
        return torch.tensor(index)


def sleep_in_python(seconds: float) -> None:
    """Sleeps in Python code, so that signal handlers can run."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.01)


def sleep_in_c(seconds: float) -> None:
    """Sleeps in C code that holds the GIL."""
    ctypes.PyDLL(None).usleep(ctypes.c_uint(int(seconds * 1e6)))


def stuck_in_c() -> None:
    """Hangs in C code that holds the GIL. A signal, such as the one that requests a stack, does not end the hang."""
    reader, _ = os.pipe()
    ctypes.PyDLL(None).read(reader, ctypes.create_string_buffer(1), ctypes.c_size_t(1))


def started(dataset: Numbers, workers: int, batches: int = 1, **kw: Any) -> tuple[Any, list[int]]:
    """Returns an iterator that has delivered some batches, and the workers' pids. The workers may be idle or busy."""
    iterator = iter(rustloader.DataLoader(dataset, num_workers=workers, **kw))
    for _ in range(batches):
        next(iterator)
    return iterator, [worker.pid for worker in iterator._workers]


# --- processes ----------------------------------------------------------------------------------------------------


def seconds_until(condition: Callable[[], bool], start: float) -> float:
    while not condition():
        if time.monotonic() - start > MAX_WAIT:
            raise TimeoutError(f"not within {MAX_WAIT:.0f} s")
        time.sleep(0.0002)
    return time.monotonic() - start


def all_ended(pids: list[int]) -> bool:
    return all(map(has_ended, pids))


def say(pipe: int, text: str) -> None:
    os.write(pipe, text.encode() + b"\n")


def in_child(body: Callable[[int], None]) -> tuple[int, Iterator[str]]:
    """Runs the body in a forked child that exits as a script does. Returns the child's pid and its lines of output."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        status = 0
        try:
            body(writer)
        except BaseException:
            traceback.print_exc()
            status = 1
        # Runs the exit hooks, as a script does. The rest of Python's exit takes the same time on all sides.
        atexit._run_exitfuncs()
        os._exit(status)
    os.close(writer)
    return pid, iter(os.fdopen(reader))


def bare_children(count: int) -> Callable[[], None]:
    """Forks bare children, which wait in a read. Returns a function that makes them exit and reaps them."""
    reader, writer = os.pipe()
    pids = []
    for _ in range(count):
        if (pid := os.fork()) == 0:
            os.close(writer)
            os.read(reader, 1)
            os._exit(0)
        pids.append(pid)
    time.sleep(0.02)

    def end() -> None:
        os.close(writer)
        os.close(reader)
        for pid in pids:
            os.waitpid(pid, 0)

    return end


def seconds_of(work: Callable[[], object]) -> float:
    start = time.monotonic()
    work()
    return time.monotonic() - start


@contextlib.contextmanager
def killed_soon(pid: int, begun: Callable[[], bool] = lambda: True) -> Iterator[list[float]]:
    """Kills a process from a thread, soon after ``begun`` returns True. Yields a list that receives the kill time."""
    at: list[float] = []

    def kill() -> None:
        while not begun():
            time.sleep(0.0005)
        time.sleep(0.02)
        at.append(time.monotonic())
        os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    yield at
    thread.join()


# --- measurements, each in seconds ----------------------------------------------------------------------------------


def death_seen() -> float:
    """Measures the time from the SIGKILL of a worker to the error that a waiting next() raises."""
    iterator, pids = started(Numbers(slow=2, body=functools.partial(sleep_in_python, 30)), 1, batches=2)
    with killed_soon(pids[0]) as killed:
        try:
            next(iterator)
        except RuntimeError as error:
            seen = time.monotonic()
            assert "killed by signal: Killed" in str(error), error
        else:
            raise AssertionError("next() did not raise")
    iterator._shutdown_workers()
    return seen - killed[0]


def replaced_after_a_kill() -> float:
    """Measures the time from the SIGKILL of one of two workers to the first batch of its replacement."""
    dataset = SlowOnce(2, functools.partial(sleep_in_python, 30.0))
    iterator, pids = started(dataset, 2, batches=2, max_restarts=1)
    with killed_soon(pids[0], lambda: bool(dataset.begun)) as killed:
        batch = next(iterator)
        took = time.monotonic() - killed[0]
    assert batch.tolist() == [2] and iterator._workers[0].pid != pids[0]
    iterator._shutdown_workers()
    return took


def replaced_after_a_stall() -> float:
    """Measures the time from the start of a hang in C, with the GIL held, to the first batch of the new worker."""
    dataset = SlowOnce(2, stuck_in_c)
    iterator, pids = started(dataset, 2, batches=2, max_restarts=1, stall_timeout=1)
    batch = next(iterator)
    took = time.monotonic() - float(dataset.begun)
    assert batch.tolist() == [2] and iterator._workers[0].pid != pids[0]
    iterator._shutdown_workers()
    return took


def workers_gone_after_main(body: Callable[[float], None]) -> float:
    """Measures the time from the SIGKILL of the main process to the exit of its last worker.

    Each of the two workers is fetching a sample that takes 30 s.
    """

    def main(pipe: int) -> None:
        iterator, pids = started(Numbers(slow=2, body=functools.partial(body, 30.0)), 2, batches=2)
        time.sleep(0.05)
        say(pipe, " ".join(map(str, pids)))
        next(iterator)

    pid, lines = in_child(main)
    pids = [int(word) for word in next(lines).split()]
    start = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return seconds_until(lambda: all_ended(pids), start)


def ended(
    end: Callable[[list[Any]], object], dataset: Numbers, workers: int, batches: int, pause: float = 0.02
) -> float:
    """Measures the time that `end` takes to end an iterator after some batches.

    Passes `end` a list with the only reference to the iterator. All workers must have exited when `end` returns.
    """
    held: list[Any] = []
    iterator, pids = started(dataset, workers, batches)
    held.append(iterator)
    del iterator
    time.sleep(pause)
    took = seconds_of(lambda: end(held))
    assert all_ended(pids)
    return took


def drop(workers: int) -> float:
    """Measures the time of `del` for an iterator whose workers are idle, as after a break."""
    return ended(list.clear, Numbers(), workers, 1)


def last_next(workers: int) -> float:
    """Measures the time of the last next() of an epoch, which joins the workers."""
    return ended(lambda held: next(held[0], None), Numbers(2 * workers), workers, 2 * workers)


def shutdown_in_items(body: Callable[[float], None], workers: int) -> float:
    """Measures the time of `del` for an iterator whose workers are all fetching samples that take 10 s."""
    dataset = Numbers(slow=workers, body=functools.partial(body, 10.0))
    return ended(list.clear, dataset, workers, workers, 0.1)


def exit_with(workers: int) -> float:
    """Measures the time from the start of the main process's exit, with a live iterator, to the last process's exit."""

    def main(pipe: int) -> None:
        global kept
        kept, pids = started(Numbers(), workers)
        time.sleep(0.02)
        say(pipe, " ".join(map(str, pids)))
        say(pipe, str(time.monotonic()))

    pid, lines = in_child(main)
    pids, start = [int(word) for word in next(lines).split()], float(next(lines))
    os.waitpid(pid, 0)
    return seconds_until(lambda: all_ended(pids), start)


def bare(workers: int) -> float:
    return seconds_of(bare_children(workers))


def bare_exit(workers: int) -> float:
    def main(pipe: int) -> None:
        end = bare_children(workers)
        say(pipe, str(time.monotonic()))
        end()

    pid, lines = in_child(main)
    start = float(next(lines))
    os.waitpid(pid, 0)
    return time.monotonic() - start


# --- output -------------------------------------------------------------------------------------------------------


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}"


HEAD = ("fault", "trials", "median ms (interval)", "worst ms", "goal")


def fault(name: str, goal: str, body: Callable[[], float], slow: bool = False) -> None:
    trials = min(program.options.rounds, 10) if slow else program.options.rounds
    times = interleave({"rustloader": body}, trials, name)["rustloader"]
    program.line(name, name, trials, spread(times, ms), ms(max(times)), goal, seconds=times)


def restarts() -> None:
    program.head(*HEAD)
    fault("a forked worker, one of two, is killed: the first batch of the new one", "60", replaced_after_a_kill)
    name = "a sample hangs in C code that holds the GIL, `stall_timeout=1`: the first batch of the new worker"
    fault(name, "1,300", replaced_after_a_stall, slow=True)


def faults() -> None:
    program.head(*HEAD)
    fault("a worker is killed while `next()` waits: the error", "10", death_seen)
    sleeps = {"Python": sleep_in_python, "C, holding the GIL": sleep_in_c}
    for kind, sleep in sleeps.items():
        gone = functools.partial(workers_gone_after_main, sleep)
        fault(f"the main process is killed, two workers sleep 30 s in {kind}: both exit", "500", gone)
    for kind, sleep in sleeps.items():
        for workers in (1, 4):
            body = functools.partial(shutdown_in_items, sleep, workers)
            name = f"`del` while {workers} worker{' sleeps' if workers == 1 else 's sleep'} 10 s in {kind}"
            fault(name, "one for all workers", body, slow=True)


def ends() -> None:
    program.head(
        "end, workers idle", "workers", "median ms (interval)", "worst ms", "bare children, median ms", "ratio"
    )
    endings = {
        "`break` and `del`": (drop, bare),
        "the last `next()`": (last_next, bare),
        "exit": (exit_with, bare_exit),
    }
    for name, (body, floor) in endings.items():
        for workers in WORKERS:
            sides = {"rustloader": functools.partial(body, workers), "bare": functools.partial(floor, workers)}
            rounds = program.interleave(sides, f"{name}, {workers} workers")
            cells = [spread(rounds["rustloader"], ms), ms(max(rounds["rustloader"])), ms(rounds.median("bare"))]
            ratio = spread(rounds.ratios("rustloader", "bare"), "{:.2f}".format)
            program.line(name, name, workers, *cells, ratio, rounds=rounds)


ROWS = {it.__name__: it for it in (restarts, faults, ends)}
# The rows between each pair of marks in RESULTS.md.
MARKS = {"<!-- restarts -->": ("restarts",), "<!-- figures -->": ("faults", "ends")}
DOCS = Path(__file__).parent / "RESULTS.md"
program = Program(__doc__, list(ROWS), rounds=100)
program.option("--docs", action="store_true", help="write the tables into RESULTS.md")
tables: dict[str, str] = {}


def measure(row: str) -> None:
    begin = len(program.table)
    ROWS[row]()
    tables[row] = "\n".join(program.table[begin:])


if __name__ == "__main__":
    logging.getLogger("rustloader").setLevel(logging.ERROR)  # hides the line that each restart logs
    status = program.run(measure)
    for mark, names in MARKS.items():
        if program.options.docs and all(name in tables for name in names):
            about = f"`make compare KIND=reliability`, on {sentence()}."
            report.write(DOCS, "\n\n".join([about, *(tables[name].strip() for name in names)]), mark)
    sys.exit(status)
