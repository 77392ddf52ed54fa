"""How fast faults are detected and how long shutdowns take: medians and maxima of many trials, for docs/reliability.md.

Deaths and shutdowns are those of real processes. Figures that depend on the number of workers are compared with a lower
bound from the same run: the same number of children of a bare fork, which wait in a read and then `_exit`.
"""

import argparse
import atexit
import ctypes
import functools
import logging
import os
import platform
import signal
import statistics
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.utils.data

import rustloader

FIGURES = "<!-- figures -->"
RESTARTS = "<!-- restarts -->"
WORKERS = (1, 2, 4, 8, 16)
NEVER = 60.0  # maximum wait, in seconds


# --- datasets -----------------------------------------------------------------------------------------------------


class Numbers(torch.utils.data.Dataset):
    """Numbers; from `slow` on each runs `body`."""

    def __init__(self, length: int = 1000, slow: int | None = None, body: Callable[[], Any] | None = None):
        self.length, self.slow, self.body = length, slow, body

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.slow is not None and self.body is not None and index >= self.slow:
            self.body()
        return torch.tensor(index)


class OnceSlow(Numbers):
    """Numbers; `slow` runs `body` the first time alone, and notes when that began. For forked workers."""

    def __init__(self, slow: int, body: Callable[[], Any]):
        super().__init__(slow=slow, body=body)
        self.begun = torch.zeros(1, dtype=torch.float64).share_memory_()

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.slow and not self.begun and self.body is not None:
            self.begun[0] = time.monotonic()
            self.body()
        return torch.tensor(index)


def sleep_in_python(seconds: float) -> None:
    """An item that lets signal handlers run."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.01)


def sleep_in_c(seconds: float) -> None:
    """An item that keeps the GIL."""
    ctypes.PyDLL(None).usleep(ctypes.c_uint(int(seconds * 1e6)))


def stuck_in_c() -> None:
    """An item that never ends and keeps the GIL. A signal, such as that for its stack, does not end it."""
    reader, _ = os.pipe()
    ctypes.PyDLL(None).read(reader, ctypes.create_string_buffer(1), ctypes.c_size_t(1))


def loader_of(dataset: Numbers, workers: int, **kw: Any) -> rustloader.DataLoader:
    return rustloader.DataLoader(dataset, num_workers=workers, **kw)


def started(dataset: Numbers, workers: int, taken: int = 1, **kw: Any) -> tuple[Any, list[int]]:
    """An iterator after some batches, its workers idle or at work, and their pids."""
    iterator = iter(loader_of(dataset, workers, **kw))
    for _ in range(taken):
        next(iterator)
    return iterator, [worker.pid for worker in iterator._workers]


# --- processes ----------------------------------------------------------------------------------------------------


def running(pid: int) -> bool:
    """Whether a process is alive and not a zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def seconds_until(condition: Callable[[], bool], start: float) -> float:
    while not condition():
        if time.monotonic() - start > NEVER:
            raise TimeoutError(f"not within {NEVER:.0f} s")
        time.sleep(0.0002)
    return time.monotonic() - start


def none_of(pids: list[int]) -> bool:
    return not any(map(running, pids))


def say(pipe: int, text: str) -> None:
    os.write(pipe, text.encode() + b"\n")


def in_child(body: Callable[[int], None]) -> tuple[int, Iterator[str]]:
    """Runs the body in a fork that then exits as a script does. Yields its pid and its lines of output."""
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
        # The hooks of a script's exit; what Python does after them is the same for all.
        atexit._run_exitfuncs()
        os._exit(status)
    os.close(writer)
    return pid, iter(os.fdopen(reader))


class Bare:
    """Children of a bare fork, which wait until they are released."""

    def __init__(self, count: int):
        self.reader, self.writer = os.pipe()
        self.pids = []
        for _ in range(count):
            pid = os.fork()
            if pid == 0:
                os.close(self.writer)
                os.read(self.reader, 1)
                os._exit(0)
            self.pids.append(pid)
        time.sleep(0.02)

    def end(self) -> None:
        os.close(self.writer)
        os.close(self.reader)
        for pid in self.pids:
            os.waitpid(pid, 0)


# --- what is measured, each in seconds ------------------------------------------------------------------------------


def death_seen() -> float:
    """From the SIGKILL of a worker to the error that a waiting next() raises: a thread kills and notes the time."""
    iterator, pids = started(Numbers(slow=2, body=functools.partial(sleep_in_python, 30)), 1, taken=2)
    killed = 0.0

    def kill() -> None:
        nonlocal killed
        time.sleep(0.02)
        killed = time.monotonic()
        os.kill(pids[0], signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        next(iterator)
    except RuntimeError as error:
        seen = time.monotonic()
        assert "killed by signal: Killed" in str(error), error
    else:
        raise AssertionError("next() went on")
    thread.join()
    iterator._shutdown_workers()
    return seen - killed


def replaced_after_a_kill() -> float:
    """From the SIGKILL of one of two workers to the batch that its replacement makes."""
    dataset = OnceSlow(2, functools.partial(sleep_in_python, 30.0))
    iterator, pids = started(dataset, 2, taken=2, max_restarts=1)
    killed = 0.0

    def kill() -> None:
        nonlocal killed
        while not dataset.begun:
            time.sleep(0.0005)
        time.sleep(0.02)
        killed = time.monotonic()
        os.kill(pids[0], signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    batch = next(iterator)
    took = time.monotonic() - killed
    assert batch.tolist() == [2] and iterator._workers[0].pid != pids[0]
    thread.join()
    iterator._shutdown_workers()
    return took


def replaced_after_a_stall() -> float:
    """From the beginning of an item that is stuck in C, with the GIL, to the batch that a new worker makes."""
    dataset = OnceSlow(2, stuck_in_c)
    iterator, pids = started(dataset, 2, taken=2, max_restarts=1, stall_timeout=1)
    batch = next(iterator)
    took = time.monotonic() - float(dataset.begun)
    assert batch.tolist() == [2] and iterator._workers[0].pid != pids[0]
    iterator._shutdown_workers()
    return took


def workers_gone_after_main(body: Callable[[float], None]) -> float:
    """From the SIGKILL of main to the end of its last worker, two workers in an item of 30 s."""

    def main(pipe: int) -> None:
        iterator, pids = started(Numbers(slow=2, body=functools.partial(body, 30.0)), 2, taken=2)
        time.sleep(0.05)
        say(pipe, " ".join(map(str, pids)))
        next(iterator)

    pid, lines = in_child(main)
    pids = [int(word) for word in next(lines).split()]
    start = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return seconds_until(lambda: none_of(pids), start)


def drop(workers: int) -> float:
    """`del` of an iterator whose workers are idle, as after a break."""
    iterator, pids = started(Numbers(), workers)
    time.sleep(0.02)
    start = time.monotonic()
    del iterator
    took = time.monotonic() - start
    assert none_of(pids)
    return took


def last_next(workers: int) -> float:
    """The next() that ends the epoch, which joins the workers."""
    iterator, pids = started(Numbers(2 * workers), workers, taken=2 * workers)
    time.sleep(0.02)
    start = time.monotonic()
    assert next(iterator, None) is None
    took = time.monotonic() - start
    assert none_of(pids)
    return took


def exit_with(workers: int) -> float:
    """From the beginning of main's exit to the end of the last process, with a live iterator."""

    def main(pipe: int) -> None:
        global kept
        kept, pids = started(Numbers(), workers)
        time.sleep(0.02)
        say(pipe, " ".join(map(str, pids)))
        say(pipe, str(time.monotonic()))

    pid, lines = in_child(main)
    pids, start = [int(word) for word in next(lines).split()], float(next(lines))
    os.waitpid(pid, 0)
    return seconds_until(lambda: none_of(pids), start)


def bare(workers: int) -> float:
    children = Bare(workers)
    start = time.monotonic()
    children.end()
    return time.monotonic() - start


def bare_exit(workers: int) -> float:
    def main(pipe: int) -> None:
        children = Bare(workers)
        say(pipe, str(time.monotonic()))
        children.end()

    pid, lines = in_child(main)
    start = float(next(lines))
    os.waitpid(pid, 0)
    return time.monotonic() - start


def shutdown_in_items(body: Callable[[float], None], workers: int) -> float:
    """`del` of an iterator whose workers are all in items of 10 s."""
    iterator, pids = started(Numbers(slow=workers, body=functools.partial(body, 10.0)), workers, taken=workers)
    time.sleep(0.1)
    start = time.monotonic()
    del iterator
    took = time.monotonic() - start
    assert none_of(pids)
    return took


# --- output -------------------------------------------------------------------------------------------------------


def repeated(name: str, trials: int, *bodies: Callable[[], float]) -> list[list[float]]:
    """Runs trials of each body in turn."""
    taken: list[list[float]] = [[] for _ in bodies]
    for number in range(trials):
        if sys.stderr.isatty():
            print(f"\r\x1b[K{name}: {number + 1} of {trials}", end="", file=sys.stderr, flush=True)
        for body, times in zip(bodies, taken, strict=True):
            times.append(body())
    if not sys.stderr.isatty():
        print(f"{name}: done", file=sys.stderr, flush=True)
    return taken


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}"


HEAD = ["| fault | trials | median ms | worst ms | goal |", "|---|---|---|---|---|"]


def row(name: str, goal: str, trials: int, body: Callable[[], float]) -> str:
    (times,) = repeated(name, trials, body)
    return f"| {name} | {trials} | {ms(statistics.median(times))} | {ms(max(times))} | {goal} |"


def restart_table(options: argparse.Namespace) -> str:
    killed = "a forked worker, one of two, is killed: the first batch of the new one"
    stalled = "an item is stuck in C, with the GIL, `stall_timeout=1`: the first batch of the new worker"
    lines = [*HEAD, row(killed, "60", options.trials, replaced_after_a_kill)]
    return "\n".join([*lines, row(stalled, "1,300", options.long_trials, replaced_after_a_stall)])


def tables(options: argparse.Namespace) -> str:
    lines = [*HEAD]

    def fault(*words: Any) -> None:
        lines.append(row(*words))

    fault("a worker is killed while `next()` waits: the error", "10", options.trials, death_seen)
    for kind, sleep in (("Python", sleep_in_python), ("C, with the GIL", sleep_in_c)):
        gone = functools.partial(workers_gone_after_main, sleep)
        fault(f"main is killed, two workers in 30 s items of {kind}: the last is gone", "500", options.trials, gone)
    for kind, sleep in (("Python", sleep_in_python), ("C, with the GIL", sleep_in_c)):
        for workers in (1, 4):
            body = functools.partial(shutdown_in_items, sleep, workers)
            name = f"`del`, {workers} worker{'s' * (workers > 1)} in 10 s items of {kind}"
            fault(name, "one deadline", options.long_trials, body)
    lines += ["", "| end, workers idle | workers | median ms | worst ms | bare children, median ms | ratio |"]
    lines += ["|---|---|---|---|---|---|"]
    ends = [("`break` and `del`", drop, bare), ("the last `next()`", last_next, bare), ("exit", exit_with, bare_exit)]
    for name, body, floor in ends:
        for workers in WORKERS:
            pair = functools.partial(body, workers), functools.partial(floor, workers)
            ours, bares = repeated(f"{name}, {workers} workers", options.trials, *pair)
            middle, low = statistics.median(ours), statistics.median(bares)
            ratio = f"{middle / low:.2f}"
            lines.append(f"| {name} | {workers} | {ms(middle)} | {ms(max(ours))} | {ms(low)} | {ratio} |")
    return "\n".join(lines)


def machine() -> str:
    return (
        f"{len(os.sched_getaffinity(0))} cores, Linux {platform.release()}, Python {platform.python_version()}, "
        f"torch {torch.__version__}"
    )


def write(path: Path, text: str, mark: str) -> None:
    """Writes figures between the two marks of a document."""
    before, _, after = path.read_text().split(mark)
    path.write_text(f"{before}{mark}\n\n{text}\n\n{mark}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=100, help="of each figure (default: %(default)s)")
    parser.add_argument("--long-trials", type=int, default=10, help="of those of seconds (default: %(default)s)")
    parser.add_argument("--write", type=Path, metavar="FILE", help=f"put the tables between two lines {FIGURES}")
    parser.add_argument("--only", choices=["faults", "restarts"], help="only those of faults that end an epoch, or not")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    logging.getLogger("rustloader").setLevel(logging.ERROR)  # a line for each restart
    for only, mark, make in (("restarts", RESTARTS, restart_table), ("faults", FIGURES, tables)):
        if options.only not in (None, only):
            continue
        text = f"`make compare KIND=reliability`, on {machine()}; {options.trials} trials each.\n\n{make(options)}"
        print(text)
        if options.write:
            write(options.write, text, mark)


if __name__ == "__main__":
    main()
