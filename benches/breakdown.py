"""Where the time of a batch goes, by rustloader's own statistics: `make compare KIND=breakdown`.

Workers are persistent. One epoch warms up, then some are measured together. Times are microseconds per batch: the
workers' parts are sums over all workers, main's are those of its thread. `sum` is the share of the workers' wall time
that the parts account for. `in next` is the time inside next() without waiting, in which
main holds the GIL.

With --calls `perf stat` counts system calls per batch. It slows them down, so there are no times then.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from epochs import cpu_seconds
from rows import ROWS, Row, Samples

import rustloader

PARTS = ("fetch", "collate", "pack", "idle")


def totals(loader: Any) -> dict[str, float]:
    """Cumulative seconds."""
    stats = rustloader.stats(loader)
    found = {part: sum(getattr(worker, f"{part}_seconds") for worker in stats.workers) for part in PARTS}
    return found | {
        "waited": stats.waited_seconds + stats.first_seconds,
        "own": stats.own_seconds,
        "cpu": cpu_seconds(loader),
        "main": time.thread_time(),
        "wall": time.perf_counter(),
    }


def prepared(row: Row) -> tuple[Any, int]:
    """The loader after an epoch to warm up; batches of an epoch."""
    dataset = Samples(row.samples(), row.batches * (row.batch_size or 1), row.fresh)
    arguments: dict[str, Any] = {
        "batch_size": row.batch_size,
        "collate_fn": row.collate,
        "num_workers": row.workers or 2,
    }
    loader = rustloader.DataLoader(dataset, persistent_workers=True, **arguments)
    return loader, sum(1 for _ in loader)


def measure(row: Row, epochs: int) -> dict[str, float]:
    """Microseconds per batch."""
    loader, batches = prepared(row)
    before = totals(loader)
    for _ in range(epochs):
        for _ in loader:
            pass
    after = totals(loader)
    us = {name: (after[name] - before[name]) / (epochs * batches) * 1e6 for name in after}
    us["sum"] = 100 * sum(us[part] for part in PARTS) / (us["wall"] * loader.num_workers)
    return us


@contextlib.contextmanager
def counted(pids: list[int]) -> Iterator[list[int]]:
    """The system calls of processes, one number each, at the end of the block."""
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
                raise SystemExit("perf stat has counted nothing, which takes root and tracefs")
            counts.append(int(lines[0].split(",")[0]))


def calls(row: Row, epochs: int, step: float) -> list[float]:
    """System calls per batch: of main, and of all workers together."""
    loader, batches = prepared(row)
    with counted([os.getpid(), *(worker.pid for worker in rustloader.stats(loader).workers)]) as counts:
        for _ in range(epochs):
            for _ in loader:
                # A step without a system call.
                end = time.perf_counter() + step
                while time.perf_counter() < end:
                    pass
    return [counts[0] / (epochs * batches), sum(counts[1:]) / (epochs * batches)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--rows", metavar="NAME,...", help="only these rows")
    parser.add_argument("--calls", action="store_true", help="count system calls instead (perf, as root)")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    wanted = options.rows.split(",") if options.rows else [row.name for row in ROWS if not row.to_first]
    rows = [row for row in ROWS if row.name in wanted]
    if options.calls:
        print("| row | main | workers | with a step of 1 ms: main | workers |\n|---|---|---|---|---|")
        for row in rows:
            cells = [f"{count:.2f}" for step in (0.0, 1e-3) for count in calls(row, options.epochs, step)]
            print(f"| {row.name} | {' | '.join(cells)} |", flush=True)
        return 0
    print("| row | wall | workers: fetch | collate | pack | idle | sum | main: thread | in next | waits | CPU of all |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        us = measure(row, options.epochs)
        names = ("wall", *PARTS)
        cells = [f"{us[name]:,.1f}" for name in names] + [f"{us['sum']:.0f} %"]
        cells += [f"{us[name]:,.1f}" for name in ("main", "own", "waited", "cpu")]
        print(f"| {row.name} | {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
