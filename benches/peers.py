"""Compare with loaders of other projects: torchdata.nodes and SPDL (`make compare KIND=peers`).

The rows are those of the comparison with torch (rows.py), with shorter epochs; 2 workers each, in all forms that a
peer offers: processes, threads, and SPDL's one process with threads in it. Each is built as its own documentation
advises for a map-style dataset, and keeps the order.

A row begins with short epochs, all batches of which must equal those of torch without workers. Then all loaders
run an epoch each, in rotating order. The figures are medians of the rounds, divided by
the batches of an epoch. Each timed epoch must deliver all its batches, and its last one must be right. Otherwise
the cell says so and the exit status is 1.

`wall` is the time from iter() to the end of the epoch, `CPU` the processor time of all processes in it. Worker
processes start and end with the epoch, except SPDL's one process, which is persistent by design.
"""

import argparse
import importlib
import importlib.metadata
import json
import multiprocessing
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import report
import torch
import torch.utils.data
from compare import progress
from epochs import Failure, Side, difference, run_epoch
from rows import ROWS, Row, Samples
from torch.utils.data import BatchSampler, SequentialSampler, default_collate

import rustloader
from rustloader.tools.probe.leaves import nbytes
from rustloader.tools.probe.machine import machine

WORKERS = 2
AHEAD = 2 * WORKERS  # batches in flight, as with torch's prefetch_factor
CHECKED = 8

# The rows, and how many batches make an epoch here.
BATCHES = {
    "scalar": 1000,
    "floats8": 500,
    "tokens": 250,
    "images_u8": 80,
    "images_f32": 30,
    "texts": 300,
    "jpeg": 12,
}


# --- the loaders ------------------------------------------------------------------------------------


class Fetch:
    """Makes a batch from its indices, as a worker of a peer does."""

    def __init__(self, dataset: Samples):
        self.dataset = dataset

    def __call__(self, indices: list[int]) -> Any:
        return default_collate([self.dataset[index] for index in indices])


def index_batches(dataset: Samples, batch_size: int) -> BatchSampler:
    return BatchSampler(SequentialSampler(dataset), batch_size, drop_last=False)


def torch_loader(dataset: Samples, batch_size: int) -> Iterable[Any]:
    return torch.utils.data.DataLoader(dataset, batch_size, num_workers=WORKERS, multiprocessing_context="fork")


def our_loader(dataset: Samples, batch_size: int) -> Iterable[Any]:
    return rustloader.DataLoader(dataset, batch_size, num_workers=WORKERS, multiprocessing_context="fork")


def nodes(dataset: Samples, batch_size: int, method: str) -> Iterable[Any]:
    """A loader of torchdata's nodes, built as its guide builds a DataLoader."""
    from torchdata.nodes import Batcher, Loader, ParallelMapper, Prefetcher, SamplerWrapper

    indices = Batcher(SamplerWrapper(SequentialSampler(dataset)), batch_size, drop_last=False)
    batches = ParallelMapper(
        indices,
        Fetch(dataset),
        num_workers=WORKERS,
        in_order=True,
        method=method,
        multiprocessing_context="fork" if method == "process" else None,
    )
    return Loader(Prefetcher(batches, prefetch_factor=AHEAD))


def nodes_processes(dataset: Samples, batch_size: int) -> Iterable[Any]:
    return nodes(dataset, batch_size, "process")


def nodes_threads(dataset: Samples, batch_size: int) -> Iterable[Any]:
    return nodes(dataset, batch_size, "thread")


def spdl_processes(dataset: Samples, batch_size: int) -> Iterable[Any]:
    from spdl.dataloader import get_pytorch_dataloader

    return get_pytorch_dataloader(
        dataset, batch_size, num_workers=WORKERS, multiprocessing_context="fork", in_order=True
    )


def spdl_threads(dataset: Samples, batch_size: int) -> Iterable[Any]:
    from spdl.dataloader import DataLoader

    return DataLoader(
        index_batches(dataset, batch_size),
        preprocessor=Fetch(dataset),
        buffer_size=AHEAD,
        num_threads=WORKERS,
        output_order="input",
    )


def spdl_one_process(dataset: Samples, batch_size: int) -> Iterable[Any]:
    """The threads in one process of their own; its batches come through a pool of shared memory, uncopied."""
    from spdl.pipeline import PipelineBuilder, SharedMemorySegmentPool, run_pipeline_in_subprocess

    pipeline = PipelineBuilder().add_source(index_batches(dataset, batch_size))
    pipeline.pipe(Fetch(dataset), concurrency=WORKERS, output_order="input").add_sink(AHEAD)
    # Those in the queue, one being written, one in use and its successor.
    segments = AHEAD + 3
    size = nbytes(Fetch(dataset)(list(range(batch_size))))
    # With Python before 3.13 the resource tracker warns at exit about memory that both processes have released.
    return run_pipeline_in_subprocess(
        pipeline.get_config(),
        num_threads=WORKERS,
        buffer_size=AHEAD,
        mp_context="fork",
        arena=SharedMemorySegmentPool(size + (64 << 10), segments),
    )


Maker = Callable[[Samples, int], Iterable[Any]]
OWN: dict[str, Maker] = {"torch": torch_loader, "rustloader": our_loader}
# The module to import, its name for pip, and its loaders.
PEERS: list[tuple[str, str, dict[str, Maker]]] = [
    ("torchdata.nodes", "torchdata", {"torchdata processes": nodes_processes, "torchdata threads": nodes_threads}),
    (
        "spdl.pipeline",
        "spdl-core",
        {"spdl processes": spdl_processes, "spdl one process": spdl_one_process, "spdl threads": spdl_threads},
    ),
]


def loaders() -> dict[str, Maker]:
    """All that are installed; prints a line for each that is not."""
    found = dict(OWN)
    for module, package, makers in PEERS:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            print(f"left out: {', '.join(makers)} ({error}): pip install {package}")
            continue
        print(f"{package} {importlib.metadata.version(package)}")
        found |= makers
    return found


# --- a row ------------------------------------------------------------------------------------------


def check(loader: Iterable[Any], wanted: list[Any]) -> None:
    """Two short epochs: each must deliver these batches in this order. SPDL's pool is too small to keep them all."""
    for epoch in range(2):
        seen = 0
        for seen, batch in enumerate(loader, 1):
            found = difference(batch, wanted[seen - 1]) if seen <= len(wanted) else "one too many"
            if found:
                raise Failure(f"epoch {epoch}, batch {seen - 1} differs from torch's without workers: {found}")
        if seen < len(wanted):
            raise Failure(f"epoch {epoch} ended after {seen} batches in place of {len(wanted)}")


def timed(side: Side, batches: int, last: Any) -> None:
    """Times an epoch, and checks its last batch."""
    others = multiprocessing.active_children()
    timing, batch = run_epoch(side, batches)
    # torchdata's workers end a moment after their epoch. Reaped in the next epoch, they would count there.
    for child in set(multiprocessing.active_children()).difference(others):
        child.join()
    found = difference(batch, last)
    if found:
        raise Failure(f"the last batch differs from torch's without workers: {found}")
    side.timings.append(timing)


def measure(row: Row, makers: dict[str, Maker], batches: int, rounds: int) -> tuple[dict[str, Side], dict[str, str]]:
    """The loaders that passed, with their timings, and the errors of the others."""
    torch.manual_seed(0)
    samples, size = row.samples(), row.batch_size
    short, dataset = (Samples(samples, length * size, row.fresh) for length in (CHECKED, batches))
    wanted = list(torch.utils.data.DataLoader(short, size))
    last = Fetch(dataset)(list(range(len(dataset) - size, len(dataset))))
    sides, failures = {}, {}
    for name, make in makers.items():
        progress(f"{row.name}: checking {name}")
        try:
            check(make(short, size), wanted)
            sides[name] = Side(name, make(dataset, size))
        except Exception as error:
            failures[name] = repr(error)
    for number in range(rounds):
        names = list(sides)
        turn = number % max(1, len(names))
        for name in names[turn:] + names[:turn]:
            progress(f"{row.name}: round {number + 1} of {rounds}, {name}")
            try:
                timed(sides[name], batches, last)
            except Exception as error:
                failures[name] = repr(error)
                del sides[name]
    progress("")
    return sides, failures


# --- output -----------------------------------------------------------------------------------------


def head(names: list[str], what: str) -> str:
    """The first lines of a table in Markdown."""
    return f"\n| {what} per batch, us | {' | '.join(names)} |\n{'|---' * (len(names) + 1)}|"


def line(result: dict[str, Any], names: list[str], what: str) -> str:
    """Microseconds per batch; the least in bold."""
    found = result[what]
    cells = [report.us(found[name]) if name in found else "FAILED" for name in names]
    least = min(range(len(names)), key=lambda k: found.get(names[k], float("inf")))
    cells[least] = f"**{cells[least]}**"
    return f"| {result['what']} | {' | '.join(cells)} |"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", metavar="NAME,...", help=f"only some of {', '.join(BATCHES)}")
    parser.add_argument("--rounds", type=int, default=3, help="of each row (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a tenth of the batches: no figures to quote")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the results as JSON")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    names = list(BATCHES) if options.rows is None else options.rows.split(",")
    unknown = set(names) - set(BATCHES)
    if unknown:
        parser.error(f"no such row: {', '.join(sorted(unknown))}")
    options.rows = [row for row in ROWS if row.name in names]
    return options


def main() -> int:
    options = parse_arguments()
    # Threads and forks in one process: here it is the peers' business.
    warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)
    torch.set_num_threads(1)  # as in a worker, so that threads and processes are comparable
    about = machine()
    print(
        "{cpu}, {cores} cores, {memory_gib} GiB; Linux {kernel}, Python {python}, torch {torch}, "
        "rustloader {rustloader}".format(**about)
    )
    makers = loaders()
    results, held = [], True
    print(head(list(makers), "wall"), flush=True)
    for row in options.rows:
        batches = max(CHECKED, BATCHES[row.name] // (10 if options.quick else 1))
        sides, failures = measure(row, makers, batches, options.rounds)
        for name, failure in failures.items():
            held = False
            progress(f"{row.name}: {name} FAILED: {failure}\n")
        result = {"row": row.name, "what": row.what, "batches": batches}
        for what in ("wall", "cpu"):
            result[what] = {name: side.median(what) for name, side in sides.items()}
        result["rounds"] = {name: [vars(timing) for timing in side.timings] for name, side in sides.items()}
        results.append(result)
        print(line(result, list(makers), "wall"), flush=True)
    print(head(list(makers), "cpu"))
    for result in results:
        print(line(result, list(makers), "cpu"))
    if options.save:
        options.save.write_text(json.dumps({"machine": about, "results": results}, indent=1) + "\n")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
