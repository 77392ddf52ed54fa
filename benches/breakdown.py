"""Where the time of a batch goes, by rustloader's own statistics: `make compare-breakdown`.

Persistent workers; an epoch to warm up, then some that are measured together. Times are microseconds a batch. Those
of the workers, which work side by side, are of all of them together; those of main are of its thread. `sum` is what
the parts of the workers come to, of the wall time that they had: what is missing is not accounted for.
"""

import argparse
import sys
import time
import warnings
from typing import Any

import torch
from epochs import cpu_seconds
from rows import ROWS, Row, Samples

import rustloader

PARTS = ("fetch", "collate", "pack", "idle")


def totals(loader: Any) -> dict[str, float]:
    """Seconds so far."""
    stats = rustloader.stats(loader)
    found = {part: sum(getattr(worker, f"{part}_seconds") for worker in stats.workers) for part in PARTS}
    return found | {
        "waited": stats.waited_seconds + stats.first_seconds,
        "own": stats.own_seconds,
        "cpu": cpu_seconds(loader),
        "main": time.thread_time(),
        "wall": time.perf_counter(),
    }


def measure(row: Row, epochs: int) -> dict[str, float]:
    """Microseconds a batch."""
    dataset = Samples(row.samples(), row.batches * (row.batch_size or 1), row.fresh)
    arguments: dict[str, Any] = {
        "batch_size": row.batch_size,
        "collate_fn": row.collate,
        "num_workers": row.workers or 2,
    }
    loader = rustloader.DataLoader(dataset, persistent_workers=True, **arguments)
    batches = sum(1 for _ in loader)
    before = totals(loader)
    for _ in range(epochs):
        for _ in loader:
            pass
    after = totals(loader)
    us = {name: (after[name] - before[name]) / (epochs * batches) * 1e6 for name in after}
    us["sum"] = 100 * sum(us[part] for part in PARTS) / (us["wall"] * arguments["num_workers"])
    return us


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--rows", metavar="NAME,...", help="only these rows")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    wanted = options.rows.split(",") if options.rows else [row.name for row in ROWS if not row.to_first]
    print("| row | wall | workers: fetch | collate | pack | idle | sum | main: thread | in next | waits | CPU of all |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for row in ROWS:
        if row.name in wanted:
            us = measure(row, options.epochs)
            names = ("wall", *PARTS)
            cells = [f"{us[name]:,.1f}" for name in names] + [f"{us['sum']:.0f} %"]
            cells += [f"{us[name]:,.1f}" for name in ("main", "own", "waited", "cpu")]
            print(f"| {row.name} | {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
