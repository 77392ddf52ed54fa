"""Shows where the time per batch goes, from rustloader's own statistics: `make compare KIND=breakdown`.

Workers are persistent. After one epoch to warm up, --rounds epochs are measured together. Times are in microseconds per
batch. The workers' times are sums over all workers, and the main process's times are those of its main thread. `sum` is
the share of the workers' wall time that the parts account for. `in next` is the time inside next() except waits; the
main process holds the GIL during this time.

With --calls, `perf stat` counts system calls per batch, in loops without a step and with a step of 1 ms. Counting slows
the loops down, so no times are shown.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from epochs import cpu_seconds, loop
from harness.program import Program
from harness.report import us
from rows import BY_NAME, ROWS

import rustloader
from rustloader.tools.harness.rounds import Failure

PARTS = ("fetch", "collate", "pack", "idle")
HEAD = ("row", "wall", "workers: fetch", *PARTS[1:], "sum", "main: thread", "in next", "waits", "CPU of all")
CALLS = ("row", "main", "workers", "with a step of 1 ms: main", "workers")

program = Program(__doc__, [row.name for row in ROWS if not row.to_first])


def totals(loader: Any) -> dict[str, float]:
    """Returns the seconds spent so far on each part of the workers' and the main process's work, and clock readings."""
    stats = rustloader.stats(loader)
    sums = {part: sum(getattr(worker, f"{part}_seconds") for worker in stats.workers) for part in PARTS}
    return sums | {
        "waited": stats.waited_seconds + stats.first_seconds,
        "own": stats.own_seconds,
        "cpu": cpu_seconds(loader),
        "main": time.thread_time(),
        "wall": time.perf_counter(),
    }


def measure(name: str) -> None:
    prepared = loop(BY_NAME[name], "rustloader", persistent_workers=True)
    loader, batches = prepared.loader, prepared.batches * program.options.rounds
    prepared()
    if program.options.calls:
        counts = [count / batches for step in (0.0, 1e-3) for count in calls(loader, step)]
        program.line(name, name, *(f"{count:.2f}" for count in counts), calls=counts)
        return
    before = totals(loader)
    for _ in range(program.options.rounds):
        for _ in loader:
            pass
    each = {key: (after - before[key]) / batches * 1e6 for key, after in totals(loader).items()}
    share = sum(each[part] for part in PARTS) / (each["wall"] * loader.num_workers)
    cells = [*(us(each[key]) for key in ("wall", *PARTS)), f"{share:.0%}"]
    program.line(name, name, *cells, *(us(each[key]) for key in ("main", "own", "waited", "cpu")), us=each)


@contextlib.contextmanager
def counted(pids: list[int]) -> Iterator[list[int]]:
    """Counts the system calls that processes make in the block. Yields a list that is filled when the block ends."""
    counts: list[int] = []
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(tempfile.NamedTemporaryFile("r")) for _ in pids]
        arguments = ["perf", "stat", "-x,", "-e", "raw_syscalls:sys_enter"]
        perfs = [
            subprocess.Popen([*arguments, "-o", file.name, "-p", str(pid)])
            for file, pid in zip(files, pids, strict=True)
        ]
        time.sleep(0.5)
        yield counts
        for perf, file in zip(perfs, files, strict=True):
            perf.send_signal(signal.SIGINT)
            perf.wait()
            lines = [line for line in file if "raw_syscalls" in line]
            if len(lines) != 1:
                raise Failure("perf stat counted nothing: it needs root and tracefs")
            counts.append(int(lines[0].split(",")[0]))


def calls(loader: Any, step: float) -> tuple[int, int]:
    """Returns the number of system calls of the main process, and of all workers together."""
    with counted([os.getpid(), *(worker.pid for worker in rustloader.stats(loader).workers)]) as counts:
        for _ in range(program.options.rounds):
            for _ in loader:
                # The step makes no system calls.
                end = time.perf_counter() + step
                while time.perf_counter() < end:
                    pass
    return counts[0], sum(counts[1:])


if __name__ == "__main__":
    program.option("--calls", action="store_true", help="count system calls instead (perf, as root)")
    sys.exit(program.run(measure, CALLS if program.parse().calls else HEAD))
