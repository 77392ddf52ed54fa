"""Compares rustloader with loaders of other projects: torchdata.nodes and SPDL (`make compare KIND=peers`).

The rows are those of the comparison with torch (rows.py), with shorter epochs. Each loader has 2 workers, in each form
that a peer offers: processes, threads, and SPDL's single process with threads in it. Each is built as its own
documentation advises for a map-style dataset, and keeps the order.

A row starts with short epochs, whose batches must all equal those of torch without workers. Then each loader runs an
epoch, in rotating order. The figures are medians of the rounds, divided by the number of batches in an epoch. Each
timed epoch must deliver all its batches, and its last batch must be right. Otherwise the cell says FAILED and the exit
status is 1.

`wall` is the time from iter() to the end of the epoch. `CPU` is the CPU time of all processes in that time.
Worker processes start and end with the epoch, except SPDL's single process, which is persistent by design.
"""

import importlib
import importlib.metadata
import itertools
import multiprocessing
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from epochs import KINDS, Loop, difference
from harness.program import Program, main
from harness.report import us
from rows import BY_NAME, Samples
from torch.utils.data import BatchSampler, SequentialSampler, default_collate

from rustloader.tools.harness.rounds import Failure, Rounds
from rustloader.tools.probe.leaves import nbytes

WORKERS = 2
AHEAD = 2 * WORKERS  # batches in flight, as with torch's prefetch_factor
CHECKED = 8

# The rows, and the number of batches in an epoch in this program.
BATCHES = {
    "scalar": 1000,
    "floats8": 500,
    "tokens": 250,
    "images_u8": 80,
    "images_f32": 30,
    "texts": 300,
    "jpeg": 12,
}


class Fetch:
    """A callable that makes a batch from its indices; the workers of peers call it."""

    def __init__(self, dataset: Samples):
        self.dataset = dataset

    def __call__(self, indices: list[int]) -> Any:
        return default_collate([self.dataset[index] for index in indices])


def index_batches(dataset: Samples, batch_size: int) -> BatchSampler:
    return BatchSampler(SequentialSampler(dataset), batch_size, drop_last=False)


def in_workers(dataset: Samples, batch_size: int, kind: str) -> Iterable[Any]:
    return KINDS[kind](dataset, batch_size, num_workers=WORKERS, multiprocessing_context="fork")


def nodes(dataset: Samples, batch_size: int, method: str) -> Iterable[Any]:
    """Returns a loader that consists of torchdata's nodes, built as torchdata's guide builds a DataLoader."""
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
    """Returns SPDL's loader with its threads in another process. Batches arrive in pooled shared memory."""
    from spdl.pipeline import PipelineBuilder, SharedMemorySegmentPool, run_pipeline_in_subprocess

    pipeline = PipelineBuilder().add_source(index_batches(dataset, batch_size))
    pipeline.pipe(Fetch(dataset), concurrency=WORKERS, output_order="input").add_sink(AHEAD)
    # A segment for each batch in the queue, the one being written, the one in use and its successor.
    segments = AHEAD + 3
    size = nbytes(Fetch(dataset)(list(range(batch_size))))
    # Before Python 3.13, the resource tracker warns at exit about memory that both processes have already released.
    return run_pipeline_in_subprocess(
        pipeline.get_config(),
        num_threads=WORKERS,
        buffer_size=AHEAD,
        mp_context="fork",
        arena=SharedMemorySegmentPool(size + (64 << 10), segments),
    )


Maker = Callable[[Samples, int], Iterable[Any]]
OWN: dict[str, Maker] = {kind: partial(in_workers, kind=kind) for kind in KINDS}
TORCHDATA: dict[str, Maker] = {
    "torchdata processes": partial(nodes, method="process"),
    "torchdata threads": partial(nodes, method="thread"),
}
SPDL: dict[str, Maker] = {
    "spdl processes": spdl_processes,
    "spdl one process": spdl_one_process,
    "spdl threads": spdl_threads,
}
# For each peer: the module to import, the package to install with pip, and the loaders.
PEERS = [("torchdata.nodes", "torchdata", TORCHDATA), ("spdl.pipeline", "spdl-core", SPDL)]
program = Program(__doc__, list(BATCHES), rounds=3)
results: dict[str, dict[str, list[str]]] = {"wall": {}, "cpu": {}}


def loaders() -> dict[str, Maker]:
    """Returns all loaders that are installed. Prints a line for each peer: its version, or that it is left out."""
    installed = dict(OWN)
    for module, package, makers in PEERS:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            print(f"left out: {', '.join(makers)} ({error}): pip install {package}")
            continue
        print(f"{package} {importlib.metadata.version(package)}")
        installed |= makers
    return installed


def check(loader: Iterable[Any], expected: list[Any]) -> None:
    """Raises Failure unless two short epochs deliver the expected batches in order.

    Compares each batch immediately, because SPDL's pool is too small to keep all batches.
    """
    for epoch in range(2):
        seen = -1
        for seen, (batch, right) in enumerate(itertools.zip_longest(loader, expected)):
            if problem := difference(batch, right):
                raise Failure(f"epoch {epoch}, batch {seen} differs from torch's without workers: {problem}")


def timed(loop: Loop, last: Any) -> dict[str, float]:
    """Times an epoch. Raises Failure if its last batch is not ``last``."""
    others = multiprocessing.active_children()
    figures = loop()
    # torchdata's workers exit shortly after their epoch. If they were reaped in the next epoch, their CPU time
    # would count there.
    for child in set(multiprocessing.active_children()).difference(others):
        child.join()
    wrong, loop.last = difference(loop.last, last), None
    if wrong:
        raise Failure(f"the last batch differs from torch's without workers: {wrong}")
    return figures


def measure(name: str) -> None:
    row, batches = BY_NAME[name], max(CHECKED, BATCHES[name] // (10 if program.options.quick else 1))
    samples, size = row.samples(), row.batch_size
    short, dataset = (Samples(samples, length * size, row.fresh) for length in (CHECKED, batches))
    expected = list(KINDS["torch"](short, size))
    last = Fetch(dataset)(list(range(len(dataset) - size, len(dataset))))
    sides: dict[str, Callable[[], dict[str, float]]] = {}
    failed: dict[str, str] = {}

    def guarded(side: str, work: Callable[[], Any]) -> Any:
        try:
            return work() if side not in failed else {}
        except Exception as error:
            failed[side] = repr(error)
            print(f"{name}: {side} FAILED: {error!r}")
            return {}

    for side, make in makers.items():
        guarded(side, lambda make=make: check(make(short, size), expected))
        loop = Loop(make(dataset, size), batches, from_engine=side == "rustloader")
        sides[side] = lambda side=side, loop=loop: guarded(side, lambda: timed(loop, last))
    rounds = program.interleave(sides, name)
    program.failed |= bool(failed)
    for what in results:
        results[what][row.what] = cells(rounds, failed, what)
    program.line(name, row.what, *results["wall"][row.what], batches=batches, failed=failed, rounds=rounds)


def cells(rounds: Rounds, failed: dict[str, str], what: str) -> list[str]:
    """Returns the cells of a line, in microseconds per batch, with the lowest value in bold."""
    medians = {side: rounds.median(side, what) for side in rounds if side not in failed}
    if not medians:
        return ["FAILED"] * len(rounds)
    lowest = min(medians, key=lambda side: medians[side])
    words = {side: us(value) for side, value in medians.items()} | {lowest: f"**{us(medians[lowest])}**"}
    return [words.get(side, "FAILED") for side in rounds]


def measure_then_show_cpu(name: str) -> None:
    """Measures a row. After the last row, prints the table of CPU times."""
    measure(name)
    if name == program.options.rows[-1]:
        program.head("cpu per batch, us", *makers)
        for what, words in results["cpu"].items():
            program.line("cpu", what, *words)


if __name__ == "__main__":
    program.option("--quick", action="store_true", help="run a tenth of the batches; do not quote the results")
    program.parse()
    makers = loaders()
    main(program, measure_then_show_cpu, "wall per batch, us", *makers)
