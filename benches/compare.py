"""Compare rustloader's DataLoader with torch's: time and CPU time a batch, interleaved in one process.

Each row is one kind of batch; making a sample costs next to nothing, so that what is left is the transport.
In each round torch's loader and rustloader's run one epoch each, in turn, the first one changing from round
to round; the figures are medians of the rounds, divided by the batches of an epoch. `wall` is the time from
iter() to the end of the epoch, `CPU` the processor time of this process and of all workers in it. `floor` is
torch with num_workers=0: no transport at all.

Before a row is timed, its first batches through both loaders are compared: types, dtypes, shapes and values.
Each timed epoch must deliver all its batches, the last ones equal on both sides, and all of rustloader's must
have come from the Rust engine. If one of these does not hold, the exit status is 1.
"""

import argparse
import ctypes
import gc
import itertools
import json
import os
import platform
import resource
import shutil
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.utils.data

import rustloader

EXAMPLES = """\
examples:
  python benches/compare.py                            all rows, workers started each epoch
  python benches/compare.py --persistent               all rows, persistent workers
  python benches/compare.py --rows scalar,tokens --rounds 7
  python benches/compare.py --save before.json         ... change something ...
  python benches/compare.py --against before.json      what became slower (exit status 3 if anything did)
"""

IMAGE = (3, 224, 224)
CHECKED = 4  # batches compared before a row is timed
MB = 1 << 20


# --- rows -----------------------------------------------------------------------------------------


class Samples(torch.utils.data.Dataset):
    """`length` samples, by turns from a few that were made beforehand; `fresh` copies one when asked for."""

    def __init__(self, samples: list[Any], length: int, fresh: Callable[[Any], Any] | None = None):
        self.samples = samples
        self.length = length
        self.fresh = fresh

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        sample = self.samples[index % len(self.samples)]
        return sample if self.fresh is None else self.fresh(sample)


def identity(batch: Any) -> Any:
    return batch


def clone(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone()


def clone_all(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in tensors]


def scalars() -> list[Any]:
    return [torch.tensor(float(i)) for i in range(256)]


def floats8() -> list[Any]:
    return list(torch.rand(256, 8).unbind())


def tokens() -> list[Any]:
    names = ("input_ids", "attention_mask", "labels")
    return [{name: torch.randint(50_000, (512,)) for name in names} for _ in range(128)]


def fields64() -> list[Any]:
    return [{f"field_{k:02d}": float(i * 64 + k) for k in range(64)} for i in range(128)]


def leaves50() -> list[Any]:
    return [[torch.rand(4096) for _ in range(50)] for _ in range(4)]


def images_u8() -> list[Any]:
    return [(torch.randint(256, IMAGE, dtype=torch.uint8), i % 10) for i in range(64)]


def images_f32() -> list[Any]:
    return [(torch.rand(IMAGE), i % 10) for i in range(64)]


def images_numpy() -> list[Any]:
    random = np.random.default_rng(0)
    return [(random.integers(256, size=IMAGE, dtype=np.uint8), i % 10) for i in range(64)]


def large_tensors() -> list[Any]:
    return [torch.rand(64, *IMAGE) for _ in range(2)]


def large_arrays() -> list[Any]:
    return [np.random.default_rng(i).random(2 * MB) for i in range(2)]


def texts() -> list[Any]:
    return [bytes([i]) * 100 if i % 2 else f"sample number {i}" for i in range(128)]


@dataclass(frozen=True)
class Row:
    """One kind of batch."""

    name: str
    what: str
    batches: int  # an epoch
    batch_size: int | None
    samples: Callable[[], list[Any]]
    fresh: Callable[[Any], Any] | None = None
    collate: Callable[[Any], Any] | None = None


ROWS = [
    Row("scalar", "one 0-d float tensor, batch 1", 8000, 1, scalars),
    Row("floats8", "8 floats, batch 64", 1500, 64, floats8),
    Row("tokens", "dict of 3 int64 fields of 512, batch 32", 1000, 32, tokens),
    Row("fields64", "dict of 64 Python floats, batch 32", 200, 32, fields64),
    Row("leaves50", "50 tensors of 16 KiB, batch_size=None", 300, None, leaves50, fresh=clone_all),
    Row("images_u8", "u8 images and labels, batch 64, 9.6 MB", 400, 64, images_u8),
    Row("images_f32", "f32 images and labels, batch 64, 38.5 MB", 150, 64, images_f32),
    Row("images_f32_256", "f32 images and labels, batch 256, 154 MB", 40, 256, images_f32),
    Row("images_numpy", "NumPy u8 images and labels, batch 64", 400, 64, images_numpy),
    Row("ready_tensor", "one ready 38.5 MB tensor, fresh each time", 100, None, large_tensors, fresh=clone),
    Row(
        "ready_numpy",
        "one ready 16 MB NumPy array, collate = identity",
        150,
        None,
        large_arrays,
        collate=identity,
    ),
    Row("texts", "list of bytes and str, batch 64", 500, 64, texts),
    Row("same_tensor", "the same 38.5 MB tensor again and again", 100, None, large_tensors),
]


# --- one epoch ------------------------------------------------------------------------------------


class Failure(Exception):
    """A loader has not done what its row asks for."""


@dataclass
class Timing:
    """An epoch, by its batches; in microseconds."""

    wall: float
    cpu: float


@dataclass
class Side:
    """One of the two loaders of a row, and what was measured with it."""

    name: str
    loader: torch.utils.data.DataLoader
    timings: list[Timing] = field(default_factory=list)

    def median(self, what: str) -> float:
        return statistics.median(getattr(timing, what) for timing in self.timings)


_libc = ctypes.CDLL(None, use_errno=True)


def process_cpu_seconds(pid: int) -> float:
    """Processor time of all threads, living and ended, of a process that lives."""
    clock = ctypes.c_int()
    error = _libc.clock_getcpuclockid(ctypes.c_int(pid), ctypes.byref(clock))
    if error:
        raise OSError(error, f"clock_getcpuclockid: {os.strerror(error)}", str(pid))
    return time.clock_gettime(clock.value)


def cpu_seconds(loader: torch.utils.data.DataLoader) -> float:
    """Processor time of this process, of the children it has waited for, and of the loader's workers."""
    total = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        total += usage.ru_utime + usage.ru_stime
    if loader.persistent_workers and loader._iterator is not None:
        total += sum(process_cpu_seconds(worker.pid) for worker in loader._iterator._workers)
    return total


def run_epoch(side: Side, batches: int) -> tuple[Timing, Any]:
    """Time one epoch; also the last batch."""
    gc.collect()
    from_engine = rustloader.engine_batches()
    cpu = cpu_seconds(side.loader)
    start = time.perf_counter()
    seen = 0
    for batch in side.loader:  # noqa: B007 (the last one is returned)
        seen += 1
    wall = time.perf_counter() - start
    cpu = cpu_seconds(side.loader) - cpu
    from_engine = rustloader.engine_batches() - from_engine
    if seen != batches:
        raise Failure(f"{side.name} delivered {seen} batches in place of {batches}")
    wanted = batches if side.name == "rustloader" else 0
    if from_engine != wanted:
        raise Failure(f"{side.name}: {from_engine} batches came from the Rust engine, not {wanted}")
    return Timing(wall / batches * 1e6, cpu / batches * 1e6), batch


# --- equality -------------------------------------------------------------------------------------


def difference(a: Any, b: Any, path: str = "batch") -> str | None:
    """Where and how two batches differ; None if they are equal."""
    if type(a) is not type(b):
        return f"{path}: {type(a).__name__} and {type(b).__name__}"
    if isinstance(a, torch.Tensor):
        for name in ("dtype", "shape", "layout", "device"):
            if getattr(a, name) != getattr(b, name):
                return f"{path}.{name}: {getattr(a, name)} and {getattr(b, name)}"
        return None if torch.equal(a, b) else f"{path}: other values"
    if isinstance(a, np.ndarray):
        if a.dtype != b.dtype or a.shape != b.shape:
            return f"{path}: {a.dtype}{a.shape} and {b.dtype}{b.shape}"
        return None if np.array_equal(a, b) else f"{path}: other values"
    if isinstance(a, dict):
        if list(a) != list(b):
            return f"{path}: keys {list(a)} and {list(b)}"
        return next(filter(None, (difference(a[key], b[key], f"{path}[{key!r}]") for key in a)), None)
    if isinstance(a, list | tuple):
        if len(a) != len(b):
            return f"{path}: {len(a)} and {len(b)} elements"
        pairs = zip(a, b, strict=True)
        return next(filter(None, (difference(x, y, f"{path}[{i}]") for i, (x, y) in enumerate(pairs))), None)
    return None if a == b else f"{path}: {a!r} and {b!r}"


def check_first_batches(torch_side: Side, ours: Side) -> None:
    pairs = zip(ours.loader, torch_side.loader, strict=True)
    for number, (b, a) in enumerate(itertools.islice(pairs, CHECKED)):
        found = difference(a, b)
        if found:
            raise Failure(f"batch {number} differs between torch and rustloader: {found}")


# --- a row ----------------------------------------------------------------------------------------


def measure(row: Row, options: argparse.Namespace) -> dict[str, Any]:
    """All rounds of one row."""
    batches = max(8, row.batches // 10) if options.quick else row.batches
    torch.manual_seed(0)
    dataset = Samples(row.samples(), batches * (row.batch_size or 1), row.fresh)
    common = {"batch_size": row.batch_size, "collate_fn": row.collate}
    parallel = {
        "num_workers": options.workers,
        "persistent_workers": options.persistent,
        "multiprocessing_context": options.start_method,
    }
    theirs = Side("torch", torch.utils.data.DataLoader(dataset, **common, **parallel))
    ours = Side("rustloader", rustloader.DataLoader(dataset, **common, **parallel))
    floor = Side("floor", torch.utils.data.DataLoader(dataset, **common))

    check_first_batches(theirs, ours)
    if options.persistent:  # workers live by now; one whole epoch each, as warm as all that follow
        for side in (theirs, ours):
            run_epoch(side, batches)
    for number in range(options.rounds):
        progress(f"{row.name}: round {number + 1} of {options.rounds}")
        last = {}
        for side in (theirs, ours) if number % 2 == 0 else (ours, theirs):
            timing, last[side.name] = run_epoch(side, batches)
            side.timings.append(timing)
        found = difference(last["torch"], last["rustloader"])
        if found:
            raise Failure(f"the last batch differs between torch and rustloader: {found}")
        del last
        floor.timings.append(run_epoch(floor, batches)[0])
    return {
        "row": row.name,
        "what": row.what,
        "batches": batches,
        "persistent": options.persistent,
        "torch_us": theirs.median("wall"),
        "ours_us": ours.median("wall"),
        "ratio": theirs.median("wall") / ours.median("wall"),
        "torch_cpu_us": theirs.median("cpu"),
        "ours_cpu_us": ours.median("cpu"),
        "cpu_ratio": theirs.median("cpu") / ours.median("cpu"),
        "floor_us": floor.median("wall"),
        "rounds": {side.name: [vars(timing) for timing in side.timings] for side in (theirs, ours, floor)},
    }


# --- output ---------------------------------------------------------------------------------------


def progress(text: str) -> None:
    """One line on stderr, in place where that is a terminal."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
    elif text:
        print(text, file=sys.stderr, flush=True)


HEAD = f"{'':<16}{'torch':>12}{'rustloader':>12}{'':>8} |{'torch':>12}{'rustloader':>12}{'':>8} |{'floor':>12}\n"
HEAD += f"{'row':<16}{'wall us':>12}{'wall us':>12}{'ratio':>8} |{'CPU us':>12}{'CPU us':>12}{'ratio':>8} |"
HEAD += f"{'wall us':>12}"


def line(result: dict[str, Any]) -> str:
    def us(name: str) -> str:
        value = result[name]
        return f"{value:>12,.1f}" if value < 1000 else f"{value:>12,.0f}"

    return (
        f"{result['row']:<16}{us('torch_us')}{us('ours_us')}{result['ratio']:>7.1f}x |"
        f"{us('torch_cpu_us')}{us('ours_cpu_us')}{result['cpu_ratio']:>7.1f}x |{us('floor_us')}"
    )


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    model = platform.processor() or platform.machine()
    with open("/proc/cpuinfo") as file:
        model = next((entry.split(":", 1)[1].strip() for entry in file if entry.startswith("model name")), model)
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "rustloader": getattr(rustloader, "__version__", "unknown"),
    }


def slower_than(before: dict[str, Any], results: list[dict[str, Any]], percent: float) -> list[str]:
    """What became slower by more than `percent`.

    Ratios to torch are compared, not times: torch's time in the same run stands for the machine's speed.
    """
    known = {(old["row"], old["persistent"]): old for old in before["results"]}
    found = []
    for new in results:
        old = known.get((new["row"], new["persistent"]))
        if old is None:
            continue
        for title, ratio, absolute in (("wall", "ratio", "ours_us"), ("CPU", "cpu_ratio", "ours_cpu_us")):
            loss = (old[ratio] / new[ratio] - 1) * 100
            if loss > percent:
                found.append(
                    f"{new['row']}: {title} slower by {loss:.0f} %: ratio to torch {old[ratio]:.1f} -> "
                    f"{new[ratio]:.1f}, {old[absolute]:,.1f} -> {new[absolute]:,.1f} us a batch"
                )
    return found


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--rows", metavar="NAME,...", help="only these rows (default: all)")
    add("--list", action="store_true", help="list the rows and stop")
    add("--rounds", type=int, default=3, help="rounds a row (default: %(default)s)")
    add("--workers", type=int, default=2, help="worker processes a loader (default: %(default)s)")
    add("--persistent", action="store_true", help="persistent workers (default: started each epoch)")
    add("--start-method", choices=("fork", "spawn"), default="fork", help="default: %(default)s")
    add("--quick", action="store_true", help="a tenth of the batches: a first look, no figures to quote")
    add("--save", "--json", dest="save", type=Path, metavar="FILE", help="write the results as JSON")
    add("--against", type=Path, metavar="FILE", help="compare with results that --save has written")
    add("--tolerance", type=float, default=10, metavar="PERCENT", help="for --against (default: %(default)s)")
    options = parser.parse_args()
    if options.rounds < 1 or options.workers < 1:
        parser.error("--rounds and --workers must be at least 1")
    names = [row.name for row in ROWS] if options.rows is None else options.rows.split(",")
    unknown = set(names) - {row.name for row in ROWS}
    if unknown:
        parser.error(f"no such row: {', '.join(sorted(unknown))} (see --list)")
    options.rows = [row for row in ROWS if row.name in names]
    return options


def main() -> int:
    options = parse_arguments()
    if options.list:
        for row in ROWS:
            print(f"{row.name:<16}{row.batches:>6} batches  {row.what}")
        return 0
    before = json.loads(options.against.read_text()) if options.against else None
    if shutil.disk_usage("/dev/shm").total < 2 << 30:
        progress("warning: /dev/shm is smaller than 2 GiB; torch's loader may die of SIGBUS on the large rows")
    # More workers than cores is a fair question here.
    warnings.filterwarnings("ignore", "This DataLoader will create")
    torch.set_num_threads(1)  # as in a worker, so that the floor compares

    about = machine()
    print(
        "{cpu}, {cores} cores, {memory_gib} GiB; Linux {kernel}, Python {python}, torch {torch}, "
        "rustloader {rustloader}".format(**about)
    )
    print(
        f"{options.workers} workers, {'persistent' if options.persistent else 'started each epoch'} "
        f"({options.start_method}); a batch, medians of {options.rounds} rounds{', quick' * options.quick}\n"
    )
    print(HEAD, flush=True)
    results, failures = [], []
    for row in options.rows:
        try:
            results.append(measure(row, options))
        except Failure as failure:
            failures.append(f"{row.name}: {failure}")
            progress("")
            print(f"{row.name:<16}FAILED: {failure}", flush=True)
        else:
            progress("")
            print(line(results[-1]), flush=True)

    if options.save:
        options.save.write_text(json.dumps({"machine": about, "results": results}, indent=1) + "\n")
    slower = slower_than(before, results, options.tolerance) if before else []
    if before:
        print(f"\nagainst {options.against}:", *(slower or ["nothing became slower"]), sep="\n  ")
    if failures:
        return 1
    return 3 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
