"""Compares rustloader's DataLoader with torch's: time and CPU time per batch, interleaved in one process.

Each row is one kind of batch (rows.py). In most rows a sample costs next to nothing, so the rows measure the transport.
In each round torch's loader and rustloader's run the row's epochs, usually one each, in turn. The figures are medians
of the rounds, divided by the number of batches in a round. A ratio is the median of the rounds' ratios, with its
confidence interval. `torch us` and `rustloader us` are wall times from iter() to the end of the epoch; in the `start_`
rows, to the first batch, and not divided. `CPU` is the CPU time of this process and of all workers in the epoch.
`floor` is torch with num_workers=0, which has no transport.

Before a row is timed, its first batches through both loaders are compared: types, dtypes, shapes and values.
Each timed epoch must deliver all its batches, and the last batch must be equal on both sides. All of rustloader's
batches must come from the Rust engine. Otherwise the exit status is 1.

examples:
  python benches/compare.py                            all rows, workers started each epoch
  python benches/compare.py --persistent               all rows, persistent workers
  python benches/compare.py --both --docs              both, into RESULTS.md, and docs/compare.svg
  python benches/compare.py --rows scalar,tokens --rounds 7
  python benches/compare.py --rows scalar --beside     torch in other settings, bare forks and memcpy
  python benches/compare.py --off RUSTLOADER_NUMPY_ARENA    also rustloader without that feature, in the same rounds
                                                             (--rounds: a multiple of 6, for all orders of three sides)
  python benches/compare.py --save before.json         ... then change something ...
  python benches/compare.py --against before.json      the rows that became slower (exit status 3 if any did)
"""

import json
import sys
from pathlib import Path
from typing import Any

import floors
import torch
from drawing import bars
from epochs import loop, same_first, same_last
from harness import report
from harness.program import Program
from harness.report import us
from rows import BY_NAME, Row

from rustloader.tools.harness.layout import times
from rustloader.tools.harness.rounds import spread
from rustloader.tools.probe.leaves import nbytes

MARK = "<!-- compare -->"
HERE = Path(__file__).parent
TOLERANCE = 10  # percent, for --against
HEAD = (
    "row",
    "workers",
    "torch us",
    "rustloader us",
    "ratio",
    "CPU torch us",
    "CPU rustloader us",
    "ratio",
    "floor us",
)
# The bars of a row, and their colors.
SETTINGS = {"workers started in each epoch": "#7fa8d9", "persistent workers": "#1f5fa8"}

program = Program(__doc__, list(BY_NAME), rounds=3)


def measure(name: str) -> None:
    options, row = program.options, BY_NAME[name]
    for persistent in (False, True) if options.both else (options.persistent,):
        if not (persistent and row.to_first):
            program.attempt(name, lambda persistent=persistent: in_setting(row, persistent))


def in_setting(row: Row, persistent: bool) -> None:
    """Measures a row with persistent workers, or with workers that are started in each epoch."""
    options, common = program.options, {"persistent_workers": persistent}
    shared: dict[str, Any] = {"dataset": row.dataset(program.options.quick), "quick": program.options.quick}
    both = {kind: loop(row, kind, **shared, **common) for kind in ("torch", "rustloader")}
    sides = both | ({"off": loop(row, "rustloader", **shared, **common, off=options.off)} if options.off else {})
    references = {"floor": loop(row, "torch", **shared, num_workers=0)}
    if options.beside:
        references["file_system"] = loop(row, "torch", **shared, **common, sharing="file_system")
        if not persistent and not row.to_first:
            references["persistent"] = loop(row, "torch", **shared, persistent_workers=True)
    same_first(both)
    for it in (*sides.values(), *references.values()):
        if it.loader.persistent_workers:
            it()
    size = 0

    def check() -> None:
        nonlocal size
        size = nbytes(both["torch"].last)
        same_last(sides)

    rounds = program.interleave(sides, row.name, references=references, after=check)
    result: dict[str, Any] = {"persistent": persistent, "what": row.what, "bytes": size}
    for side, key in (("torch", "torch"), ("rustloader", "ours"), ("off", "off")):
        if side in rounds:
            result |= {f"{key}_us": rounds.median(side, "wall"), f"{key}_cpu_us": rounds.median(side, "cpu")}
            result[f"{key}_main_us"] = rounds.median(side, "main")
    ratios = {
        key: rounds.ratios("torch", "rustloader", what) for key, what in (("ratio", "wall"), ("cpu_ratio", "cpu"))
    }
    result |= {
        "ratio": rounds.ratio("torch", "rustloader", "wall"),
        "cpu_ratio": rounds.ratio("torch", "rustloader", "cpu"),
    }
    result |= {f"{side}_us": rounds.median(side, "wall") for side in references}
    if options.beside:
        workers = both["torch"].loader.num_workers
        if not persistent:
            result["bare_us"] = floors.bare_processes(workers) * 1e6 / (1 if row.to_first else both["torch"].batches)
        result |= {"copy_us": floors.copy_of(size) * 1e6, "copies_us": floors.copies_at_once(size, workers) * 1e6}
    cells = [row.name, "persistent" if persistent else "started each epoch"]
    cells += [us(result["torch_us"]), us(result["ours_us"]), spread(ratios["ratio"], times)]
    cells += [us(result["torch_cpu_us"]), us(result["ours_cpu_us"]), spread(ratios["cpu_ratio"], times)]
    cells += [us(result.get(key)) for key in ("floor_us", *(BESIDE if options.beside else ()))]
    if options.off:
        cells += [spread(rounds.ratios("off", "rustloader", what), times) for what in ("wall", "cpu")]
    program.line(row.name, *cells, **result, rounds=rounds)


# Columns that --beside adds, by their key in a result.
BESIDE = {
    "file_system_us": "file_system us",
    "persistent_us": "torch persistent us",
    "bare_us": "bare fork us",
    "copy_us": "memcpy us",
    "copies_us": "memcpy in all workers us",
    "torch_main_us": "main CPU torch us",
    "ours_main_us": "main CPU rustloader us",
}


def by_row(results: list[dict[str, Any]]) -> dict[str, dict[bool, dict[str, Any]]]:
    """Groups results by the row's description, then by whether the workers are persistent."""
    rows: dict[str, dict[bool, dict[str, Any]]] = {}
    for result in results:
        rows.setdefault(result["what"], {})[result["persistent"]] = result
    return rows


def table(results: list[dict[str, Any]]) -> str:
    """Formats the table for the documentation, with a line per row."""
    sides = ("torch", "rustloader", "ratio", "CPU ratio")
    lines = [report.head(["batch", *sides, *(f"{it}, persistent" for it in sides[:2]), *sides[2:]])]
    for what, settings in by_row(results).items():
        cells = [what]
        for it in (settings.get(False), settings.get(True)):
            times = [f"{us(it['torch_us'])} us", f"{us(it['ours_us'])} us"] if it else ["", ""]
            cells += [*times, *(f"{it[key]:.1f}x" if it else "" for key in ("ratio", "cpu_ratio"))]
        lines.append(report.line(cells))
    return "\n".join(lines)


def picture(results: list[dict[str, Any]]) -> str:
    """Draws each row's speedup over torch on a logarithmic scale."""
    groups = {
        what: {name: ratios[k]["ratio"] for k, name in zip((False, True), SETTINGS, strict=True) if k in ratios}
        for what, ratios in by_row(results).items()
    }
    return bars("Batches per second, torch's DataLoader = 1", SETTINGS, groups, decades=True)


def slower_than(before: list[dict[str, Any]]) -> list[str]:
    """Describes the rows that became slower than ``before`` by more than the tolerance.

    Compares ratios to torch, not times: torch's time in the same run represents the machine's speed.
    """
    known = {(old["row"], old["persistent"]): old for old in before}
    slower = []
    for new in program.results:
        old = known.get((new["row"], new["persistent"]), new)
        for title, ratio, absolute in (("wall", "ratio", "ours_us"), ("CPU", "cpu_ratio", "ours_cpu_us")):
            if (loss := (old[ratio] / new[ratio] - 1) * 100) > TOLERANCE:
                slower.append(
                    f"{new['row']}: {title} slower by {loss:.0f} %: ratio to torch {old[ratio]:.1f} -> "
                    f"{new[ratio]:.1f}, {old[absolute]:,.1f} -> {new[absolute]:,.1f} us per batch"
                )
    return slower


def main() -> int:
    add = program.option
    add("--persistent", action="store_true", help="use persistent workers (default: started each epoch)")
    add("--both", action="store_true", help="measure workers started each epoch, and persistent ones")
    add("--quick", action="store_true", help="measure a tenth of the batches; do not quote the results")
    add(
        "--beside",
        action="store_true",
        help="also measure torch with file_system sharing and persistent workers, and floors",
    )
    add("--off", metavar="VARIABLE", help="also measure rustloader with this variable at 0, and show the ratios")
    add("--docs", action="store_true", help="write the table into RESULTS.md, and the chart docs/compare.svg")
    add("--against", type=Path, metavar="FILE", help="compare with results that --save has written")
    options = program.parse()
    before = json.loads(options.against.read_text())["results"] if options.against else None
    torch.multiprocessing.set_forkserver_preload(["torch", "rustloader", "rows"])
    off = [f"time with {options.off}=0 / without", "CPU time, likewise"] if options.off else []
    status = program.run(measure, [*HEAD, *(BESIDE.values() if options.beside else ()), *off])
    if options.docs:
        report.write(HERE / "RESULTS.md", table(program.results), MARK)
        (HERE.parent / "docs" / "compare.svg").write_text(picture(program.results))
    if before is None:
        return status
    slower = slower_than(before)
    print(f"against {options.against}:", *(slower or ["nothing became slower"]), sep="\n  ")
    return status or 3 * bool(slower)


if __name__ == "__main__":
    sys.exit(main())
