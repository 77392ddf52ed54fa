"""Peak memory of two epochs through torch's loader and through rustloader's: `make compare KIND=memory`.

Each measurement is a new process in its own memory cgroup, so everything counts: private memory of all processes, and
shared memory, mapped or not. What the process had before the first iter() is subtracted. Needs the right to create a
cgroup. Without --step the loop takes each batch at once, and a loader that is slower than the loop never holds all
the batches that it may prefetch. Last comes what two epochs leave behind after 12 s, and two more when their loader
is gone; with --left that alone, and with --peaks without it. With --off, a second line of each case is rustloader
with that variable at 0.
"""

import argparse
import contextlib
import gc
import json
import os
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.utils.data
from rows import IMAGE, MB, Samples, images_f32, images_numpy, images_u8, large_arrays

import rustloader

# Seconds after which pages that wait for the next epoch should be gone.
LEFT_AFTER = 12


# --- a private cgroup ----------------------------------------------------------------------------------------


class Cgroup:
    """A memory cgroup, of version 1 or 2."""

    def __init__(self) -> None:
        v1 = Path("/sys/fs/cgroup/memory")
        self.is_v1 = v1.is_dir()
        self.path = (v1 if self.is_v1 else Path("/sys/fs/cgroup")) / f"rustloader-bench-{os.getpid()}"
        self.path.mkdir()

    def enter(self) -> None:
        """Moves the calling process into it; memory that it touches from then on counts."""
        (self.path / "cgroup.procs").write_text(str(os.getpid()))

    def used(self) -> int:
        """Current bytes."""
        return int((self.path / ("memory.usage_in_bytes" if self.is_v1 else "memory.current")).read_text())

    def peak(self) -> int:
        """Peak bytes."""
        return int((self.path / ("memory.max_usage_in_bytes" if self.is_v1 else "memory.peak")).read_text())

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            self.path.rmdir()


@contextlib.contextmanager
def cgroup() -> Iterator[Cgroup]:
    group = Cgroup()
    try:
        yield group
    finally:
        group.remove()


# --- what is measured ---------------------------------------------------------------------------------------------


class Ragged(torch.utils.data.IterableDataset):
    """Batches of 1 to 64 images, by a fixed sequence."""

    def __init__(self, batches: int):
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        worker = torch.utils.data.get_worker_info()
        sizes = torch.randint(1, 65, (self.batches,), generator=torch.Generator().manual_seed(1)).tolist()
        for size in sizes[worker.id :: worker.num_workers]:
            yield torch.ones(size, *IMAGE), torch.arange(size)


@dataclass(frozen=True)
class Case:
    """A loader and its use."""

    name: str
    dataset: Callable[[], Any]
    batch_size: int | None
    workers: int
    keeps_labels: bool = False


@dataclass(frozen=True)
class Side:
    """A loader that a case is measured with."""

    name: str
    loader: type[torch.utils.data.DataLoader]
    # A variable that is 0 in its process.
    off: str | None = None


def sides_of(off: str | None) -> list[Side]:
    both = [Side("torch", torch.utils.data.DataLoader), Side("rustloader", rustloader.DataLoader)]
    return [*both, Side(f"{off}=0", rustloader.DataLoader, off)] if off else both


def of(samples: Callable[[], list[Any]], batches: int) -> Callable[[], Any]:
    return lambda: Samples(samples(), batches * 64)


def copied(sample: tuple[Any, int]) -> tuple[Any, int]:
    return sample[0].copy(), sample[1]


def arrays() -> list[Any]:
    return [(array, i) for i, array in enumerate(large_arrays())]


CASES = [
    Case("u8 images, 2 workers", of(images_u8, 100), 64, 2),
    Case("u8 images, 8 workers", of(images_u8, 100), 64, 8),
    Case("f32 images, 2 workers", of(images_f32, 60), 64, 2),
    Case("f32 images, 8 workers", of(images_f32, 60), 64, 8),
    Case("ragged f32 images, 2 workers", lambda: Ragged(100), None, 2),
    Case("ragged f32 images, 8 workers", lambda: Ragged(100), None, 8),
    Case("f32 images, labels kept, 2 workers", of(images_f32, 60), 64, 2, keeps_labels=True),
    Case("fresh NumPy u8 images, 2 workers", lambda: Samples(images_numpy(), 100 * 64, copied), 64, 2),
    Case("fresh NumPy arrays of 16 MB, 2 workers", lambda: Samples(arrays(), 150, copied), None, 2),
    Case("fresh NumPy arrays of 16 MB, 8 workers", lambda: Samples(arrays(), 150, copied), None, 8),
]


def use(case: Case, loader: Any, step: float) -> None:
    kept = []
    for _ in range(2):
        for batch in loader:
            images, labels = batch
            if case.keeps_labels:
                kept.append(labels)
            if step:
                time.sleep(step)
            del batch, images, labels


def peak_of(case: Case, loaders: list[Any], step: float, group: Cgroup) -> list[int]:
    use(case, loaders[0], step)
    return [group.peak()]


def left_of(case: Case, loaders: list[Any], step: float, group: Cgroup) -> list[int]:
    """Bytes some seconds after an epoch, and at once when the loader of another one is gone."""
    use(case, loaders[0], step)
    time.sleep(LEFT_AFTER)
    late = group.used()
    use(case, loaders[0], step)
    loaders.clear()
    gc.collect()
    return [late, group.used()]


Measure = Callable[[Case, list[Any], float, Cgroup], list[int]]


def measure(case: Case, side: Side, step: float, what: Measure) -> list[int]:
    """Bytes above the level before, in a new process."""
    reader, writer = os.pipe()
    with cgroup() as group:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                group.enter()
                if side.off:
                    os.environ[side.off] = "0"
                dataset = case.dataset()
                loaders = [side.loader(dataset, batch_size=case.batch_size, num_workers=case.workers)]
                before = group.used()
                found = [after - before for after in what(case, loaders, step, group)]
                os.write(writer, json.dumps(found).encode())
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        os.close(writer)
        _, status = os.waitpid(pid, 0)
        with os.fdopen(reader) as file:
            said = file.read()
        if status != 0:
            raise SystemExit(f"{case.name} with {side.name}: the process failed")
        return list(json.loads(said))


def rounds_of(options: argparse.Namespace, case: Case, what: Measure) -> dict[str, list[list[int]]]:
    """What each side took in each round."""
    taken: dict[str, list[list[int]]] = {side.name: [] for side in sides_of(options.off)}
    for _ in range(options.rounds):
        for side in sides_of(options.off):
            taken[side.name].append(measure(case, side, options.step, what))
    return taken


def medians(taken: list[list[int]]) -> list[float]:
    return [statistics.median(it) / MB for it in zip(*taken, strict=True)]


def table(options: argparse.Namespace, cases: list[Case]) -> list[dict[str, Any]]:
    print(f"peak memory in MiB, medians of {options.rounds}\n\n{'':<44}{'torch':>9}{'rustloader':>12}{'ratio':>8}")
    results = []
    for case in cases:
        taken = rounds_of(options, case, peak_of)
        (theirs,), (ours,), *others = map(medians, taken.values())
        print(f"{case.name:<44}{theirs:>9,.0f}{ours:>12,.0f}{ours / theirs:>8.2f}", flush=True)
        for (off,) in others:
            print(f"  {options.off + '=0':<51}{off:>12,.0f}{off / theirs:>8.2f}", flush=True)
        results.append({"case": case.name, "peaks": {name: [it[0] for it in each] for name, each in taken.items()}})
    return results


def table_of_left(options: argparse.Namespace, cases: list[Case]) -> list[dict[str, Any]]:
    after = f"after {LEFT_AFTER} s"
    print(f"memory left behind in MiB, medians of {options.rounds}\n\n{'':<44}{after:>21}{'without the loader':>21}")
    print(f"{'':<44}{'torch':>9}{'rustloader':>12}{'torch':>9}{'rustloader':>12}")
    results = []
    for case in cases:
        taken = rounds_of(options, case, left_of)
        theirs, ours, *others = map(medians, taken.values())
        figures = "".join(f"{it:>9,.1f}{our:>12,.1f}" for it, our in zip(theirs, ours, strict=True))
        print(f"{case.name:<44}{figures}", flush=True)
        for late, gone in others:
            print(f"  {options.off + '=0':<51}{late:>12,.1f}{gone:>21,.1f}", flush=True)
        results.append({"case": case.name, "left": taken})
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="of each case (default: %(default)s)")
    parser.add_argument(
        "--step",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="that the loop keeps each batch (default: %(default)s)",
    )
    parser.add_argument("--left", action="store_true", help="measure only what is left behind")
    parser.add_argument("--only", metavar="TEXT", help="cases whose name has this in it")
    parser.add_argument("--off", metavar="VARIABLE", help="rustloader with this variable at 0 as well")
    parser.add_argument("--peaks", action="store_true", help="measure only the peaks")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the results as JSON")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        Cgroup().remove()
    except OSError as error:
        print(f"no memory cgroup can be made, which this needs: {error}", file=sys.stderr)
        return 2
    cases = [case for case in CASES if options.only is None or options.only in case.name]
    results = [] if options.left else table(options, cases)
    if not options.left and not options.peaks:
        print()
    if not options.peaks:
        results += table_of_left(options, cases)
    if options.save:
        options.save.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
