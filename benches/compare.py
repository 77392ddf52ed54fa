"""Compare rustloader's DataLoader with torch's: time and CPU time per batch, interleaved in one process.

Each row is one kind of batch (rows.py). A sample costs next to nothing, so the rows measure the transport.
In each round torch's loader and rustloader's run one epoch each, in alternating order. The
figures are medians of the rounds, divided by the batches of an epoch. `wall` is the time from iter() to the end of
the epoch, `CPU` the processor time of this process and of all workers in it. `floor` is torch with num_workers=0:
no transport at all.

Before a row is timed, its first batches through both loaders are compared: types, dtypes, shapes and values.
Each timed epoch must deliver all its batches, the last ones equal on both sides, and all of rustloader's must
have come from the Rust engine. Otherwise the exit status is 1.
"""

import argparse
import itertools
import json
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import floors
import report
import torch
import torch.utils.data
from epochs import Failure, Side, difference, run_epoch
from rows import ROWS, Row, Samples

import rustloader
from rustloader.tools.probe.leaves import nbytes
from rustloader.tools.probe.machine import machine

EXAMPLES = """\
examples:
  python benches/compare.py                            all rows, workers started each epoch
  python benches/compare.py --persistent               all rows, persistent workers
  python benches/compare.py --both --docs              both, into docs/performance-log.md and its chart
  python benches/compare.py --rows scalar,tokens --rounds 7
  python benches/compare.py --rows scalar --beside     torch in other settings, and the floors, in a line below
  python benches/compare.py --off RUSTLOADER_NUMPY_ARENA    rustloader without that, in the same rounds, in a line below
                                                             (--rounds: a multiple of 4)
  python benches/compare.py --save before.json         ... change something ...
  python benches/compare.py --against before.json      the rows that became slower (exit status 3 if any did)
"""

CHECKED = 4  # batches compared before a row is timed
ROOT = Path(__file__).parent.parent


def check_first_batches(torch_side: Side, ours: Side) -> None:
    pairs = zip(ours.loader, torch_side.loader, strict=True)
    for number, (b, a) in enumerate(itertools.islice(pairs, CHECKED)):
        found = difference(a, b)
        if found:
            raise Failure(f"batch {number} differs between torch and rustloader: {found}")


def in_turn(sides: list[Side], number: int) -> list[Side]:
    """The order of a round. In four rounds, each of rustloader's sides is behind torch's once: behind the other one or
    itself it may find warm pages."""
    last = sides[-1:] if len(sides) > 2 else []
    theirs, ours = sides[:2]
    return [[theirs, ours, *last], [*last, ours, theirs], [theirs, *last, ours], [ours, *last, theirs]][number % 4]


# --- a row ----------------------------------------------------------------------------------------


def measure(row: Row, persistent: bool, options: argparse.Namespace) -> dict[str, Any]:
    """All rounds of one row."""
    batches = max(8, row.batches // 10) if options.quick else row.batches
    epochs = 1 if options.quick else row.epochs
    torch.manual_seed(0)
    dataset = Samples(row.samples(), batches * (row.batch_size or 1), row.fresh)
    common = {"batch_size": row.batch_size, "collate_fn": row.collate}
    workers = row.workers or options.workers
    method = row.start_method or options.start_method
    parallel = {"num_workers": workers, "persistent_workers": persistent, "multiprocessing_context": method}
    theirs = Side("torch", torch.utils.data.DataLoader(dataset, **common, **parallel))
    ours = Side("rustloader", rustloader.DataLoader(dataset, **common, **parallel))
    others = {"floor": Side("floor", torch.utils.data.DataLoader(dataset, **common))}
    compared = [theirs, ours]
    if options.off:
        compared.append(Side("off", rustloader.DataLoader(dataset, **common, **parallel), off=options.off))
    if options.beside:
        loader = torch.utils.data.DataLoader(dataset, **common, **parallel)
        others["file_system"] = Side("torch, file_system", loader, sharing="file_system")
        if not persistent and not row.to_first:
            loader = torch.utils.data.DataLoader(dataset, **common, **{**parallel, "persistent_workers": True})
            others["persistent"] = Side("torch, persistent", loader)

    def timed(side: Side) -> Any:
        timing, last = run_epoch(side, batches, epochs, row.to_first)
        side.timings.append(timing)
        return last

    check_first_batches(theirs, ours)
    for side in (*compared, *others.values()):
        if side.loader.persistent_workers:  # one whole epoch to warm up
            run_epoch(side, batches)
    for number in range(options.rounds):
        progress(f"{row.name}: round {number + 1} of {options.rounds}")
        last = {side.name: timed(side) for side in in_turn(compared, number)}
        found = difference(last["torch"], last["rustloader"])
        if found:
            raise Failure(f"the last batch differs between torch and rustloader: {found}")
        size = nbytes(last.popitem()[1])
        last.clear()
        for side in others.values():
            timed(side)
    result = {
        "row": row.name,
        "what": row.what,
        "batches": batches,
        "persistent": persistent,
        "bytes": size,
        "ratio": theirs.median("wall") / ours.median("wall"),
        "cpu_ratio": theirs.median("cpu") / ours.median("cpu"),
        "floor_us": others["floor"].median("wall"),
    }
    for name, side in (("torch", theirs), ("ours", ours)):
        result |= {f"{name}_us": side.median("wall"), f"{name}_cpu_us": side.median("cpu")}
        result[f"{name}_main_us"] = side.median("main")
    if options.off:
        off = compared[-1]
        result |= {"off": options.off, "off_us": off.median("wall"), "off_cpu_us": off.median("cpu")}
    if options.beside:
        for name in ("file_system", "persistent"):
            if name in others:
                result[f"{name}_us"] = others[name].median("wall")
        if not persistent:
            started = floors.bare_processes(workers) * 1e6
            result["bare_us"] = started if row.to_first else started / batches
        result["copy_us"] = floors.copy_of(size) * 1e6
        result["copies_us"] = floors.copies_at_once(size, workers) * 1e6
    sides = (*compared, *others.values())
    result["rounds"] = {side.name: [vars(timing) for timing in side.timings] for side in sides}
    return result


# --- output ---------------------------------------------------------------------------------------


def progress(text: str) -> None:
    """One line on stderr, overwritten if stderr is a terminal."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
    elif text:
        print(text, file=sys.stderr, flush=True)


def slower_than(before: dict[str, Any], results: list[dict[str, Any]], percent: float) -> list[str]:
    """The rows that became slower by more than `percent`.

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
                    f"{new[ratio]:.1f}, {old[absolute]:,.1f} -> {new[absolute]:,.1f} us per batch"
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
    add("--both", action="store_true", help="workers started each epoch, and persistent ones")
    add("--start-method", choices=("fork", "spawn"), default="fork", help="default: %(default)s")
    add("--quick", action="store_true", help="a tenth of the batches: a first look, no figures to quote")
    add("--beside", action="store_true", help="torch with file_system sharing and with persistent workers; floors")
    add(
        "--off",
        metavar="VARIABLE",
        help="rustloader with this variable at 0 as well, and the difference",
    )
    add("--docs", action="store_true", help="write the table into docs/performance-log.md, and its chart beside it")
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
    options.settings = [False, True] if options.both else [options.persistent]
    return options


def run(options: argparse.Namespace) -> tuple[list[dict[str, Any]], bool]:
    """All rows in all settings: the results, and whether each row passed its checks."""
    results, held = [], True
    for persistent in options.settings:
        print(
            f"{options.workers} workers, {'persistent' if persistent else 'started each epoch'} "
            f"({options.start_method}); per batch, medians of {options.rounds} rounds{', quick' * options.quick}\n"
        )
        print(report.HEAD, flush=True)
        for row in options.rows:
            if persistent and row.to_first:
                continue
            try:
                results.append(measure(row, persistent, options))
            except Failure as failure:
                held = False
                progress("")
                print(f"{row.name:<17}FAILED: {failure}", flush=True)
                continue
            progress("")
            print(report.line(results[-1]), flush=True)
            if options.off:
                print(report.off_line(results[-1]), flush=True)
            if options.beside:
                print(report.beside_line(results[-1]), flush=True)
        print()
    return results, held


def main() -> int:
    options = parse_arguments()
    if options.list:
        for row in ROWS:
            print(f"{row.name:<17}{row.batches:>6} batches  {row.what}")
        return 0
    before = json.loads(options.against.read_text()) if options.against else None
    if shutil.disk_usage("/dev/shm").total < 2 << 30:
        progress("warning: /dev/shm is smaller than 2 GiB; torch's loader may die of SIGBUS on the large rows")
    # More workers than cores are intended here.
    warnings.filterwarnings("ignore", "This DataLoader will create")
    torch.set_num_threads(1)  # as in a worker, for comparability
    torch.multiprocessing.set_forkserver_preload(["torch", "rustloader", "rows"])

    about = machine()
    print(
        "{cpu}, {cores} cores, {memory_gib} GiB; Linux {kernel}, Python {python}, torch {torch}, "
        "rustloader {rustloader}".format(**about)
    )
    results, held = run(options)
    if options.save:
        options.save.write_text(json.dumps({"machine": about, "results": results}, indent=1) + "\n")
    if options.docs:
        report.write(ROOT / "docs" / "performance-log.md", report.table(results))
        (ROOT / "docs" / "compare.svg").write_text(report.picture(results))
    slower = slower_than(before, results, options.tolerance) if before else []
    if before:
        print(f"against {options.against}:", *(slower or ["nothing became slower"]), sep="\n  ")
    if not held:
        return 1
    return 3 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
