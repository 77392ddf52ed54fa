"""The view of ``top``: formats lines for a terminal of any size, or as plain text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from rustloader.caching.usage import CacheUsage
from rustloader.metrics.tables import cache_line
from rustloader.system.formatting import count_of, size
from rustloader.tools.top.model import Loader, WorkerView

# The parts of a line, each with its text and its style in rich.
Line = list[tuple[str, str]]

_COLORS = {
    "fetching": "green",
    "collating": "cyan",
    "packing": "blue",
    "sending": "blue",
    "starting": "yellow",
    "ended": "bold red",
    "stopped": "bold red",
    "idle": "dim",
    "left": "dim",
}
_WARNING_STYLE = "bold red"
# The columns of the table: heading, alignment and width. The index column takes the remaining width.
_COLUMNS = {"worker": ">6", "pid": ">7", "state": "<9", "batch": ">6", "for": ">6"}
_COLUMNS |= {"fetch": ">5", "cpu": ">5", "coll": ">5", "pack": ">5", "idle": ">5", "memory": ">7"}
# Columns that are omitted if the terminal is narrower than this many characters.
_WIDE, _WIDE_FROM = {"pid", "cpu"}, 96
# Indentation of the text in the lines above a table.
_INDENT = 14


def plain(lines: Sequence[Line]) -> str:
    """Returns the lines as plain text."""
    return "\n".join("".join(text for text, _ in line).rstrip() for line in lines)


def frame(
    pid: int,
    command: str,
    loaders: Sequence[Loader],
    width: int,
    height: int | None = None,
    caches: Sequence[CacheUsage] = (),
) -> list[Line]:
    """Returns the lines for a process, its caches and each of its loaders.

    ``width`` is the maximum length of a line. ``height`` is the maximum number of lines; None for no maximum.
    """
    head = f"process {pid}: "
    lines: list[Line] = [[(head, "bold"), (_cut(command, width - len(head)), "")]]
    lines += [_line("cache", f"{cache_line(usage)}, {size(usage.bytes_left)} left", width) for usage in caches]
    if not loaders:
        return [*lines, [], [("No loader is running now; the process may be between two epochs.", "dim")]]
    above = _summaries(loaders, width, compact=False)
    below = None if height is None else height - len(lines)
    if below is not None and _lines_for_rows(above, below) < sum(len(loader.workers) for loader in loaders):
        above = _summaries(loaders, width, compact=True)
    room = None if below is None else _lines_for_rows(above, below)
    for place, (part, loader) in enumerate(zip(above, loaders, strict=True)):
        share = None if room is None else max(1, room // (len(loaders) - place))
        table = list(_table(loader, width, share))
        lines += [[], *part, *table]
        room = None if room is None else room - len(table) + 1
    return lines if height is None else lines[:height]


def _summaries(loaders: Sequence[Loader], width: int, compact: bool) -> list[list[Line]]:
    return [list(_summary(number, loader, width, compact)) for number, loader in enumerate(loaders, 1)]


def _lines_for_rows(summaries: list[list[Line]], height: int) -> int:
    """Returns the number of lines available for the rows of the tables.

    The summaries take up the other lines, with an empty line and a heading per loader.
    """
    return height - sum(len(part) + 2 for part in summaries)


def _summary(number: int, loader: Loader, width: int, compact: bool) -> Iterator[Line]:
    """Yields the lines above a loader's table; fewer lines if ``compact``, for a short terminal."""
    figures, total = loader.figures, loader.total
    settings = [count_of(len(loader.workers), "worker"), f"prefetch_factor={figures.prefetch_factor}"]
    settings += [] if figures.in_order else ["in_order=False"]
    settings += ["persistent_workers"] if figures.persistent else []
    settings += ["pinned"] if figures.pinning else []
    named = f"{figures.name}: " if figures.name else ""
    title = f"{named}{', '.join(settings)}; created {_time(loader.age_seconds)} ago"
    yield [(f"{f'loader {number}':<{_INDENT}}", "bold"), (_cut(title, width - _INDENT), "")]
    yield _line("main", _main(loader), width, "bold yellow" if _main_waits(loader) else "")
    shares = loader.main_shares
    names = [name for name in _SHARES if name != "between" or shares[name] >= 0.01]
    parts = ", ".join(f"{_percent(shares[name])} {_SHARES[name]}" for name in names)
    yield _line(f"last {_time(loader.seconds)}", parts, width)
    epoch = f"epoch {total.epochs}, " if figures.persistent else ""
    rates = f"{_rate(loader.batches_per_second)} ({size(loader.recent.bytes / loader.seconds)}/s), since the start "
    rates += f"{_rate(total.batches / loader.age_seconds)}; {epoch}{count_of(figures.epoch_batches, 'batch')}"
    yield _line("batches", rates, width)
    if not compact:
        yield _line("memory", _memory(loader), width)
    yield from _paragraph("verdict", _verdict(loader), width, compact)
    for worker in loader.marked_workers:
        yield from _paragraph("!", _warning(worker), width, compact, _WARNING_STYLE)


# Descriptions of the states of the main process, by their names in `Loader.main_shares`.
_SHARES = {
    "waiting": "waiting",
    "step": "in the training step",
    "next": "working in next()",
    "between": "between epochs or starting one",
}


def _memory(loader: Loader) -> str:
    arena, rss = loader.total.arena, _shows_rss(loader)
    workers = [used for worker in loader.workers if (used := _memory_of(worker, rss)) is not None]
    shared = f"shared {size(arena.warm_bytes)}, {size(arena.leased_bytes)} of it in main's tensors; workers "
    return shared + (size(sum(workers)) + (" RSS" if rss else "") if workers else "n/a")


def _shows_rss(loader: Loader) -> bool:
    """Returns True if the workers' memory must be shown as RSS, because the PSS of a worker cannot be read."""
    return any(worker.memory_bytes is not None and worker.pss_bytes is None for worker in loader.workers)


def _memory_of(worker: WorkerView, rss: bool) -> int | None:
    return worker.memory_bytes if rss else worker.pss_bytes


def _verdict(loader: Loader) -> str:
    if loader.marked_workers and _main_waits(loader):
        # The marked workers matter more than earlier measurements.
        who = "worker" if len(loader.marked_workers) == 1 else "workers"
        return f"The loop is waiting for the {who} marked below."
    verdict, seconds = loader.verdict
    return f"{verdict.sentence} ({'since the start' if seconds is None else f'last {_time(seconds)}'})"


def _main_waits(loader: Loader) -> bool:
    return loader.figures.state in ("first", "waiting")


def _main(loader: Loader) -> str:
    figures = loader.figures
    time = _time(figures.seconds_in_state)
    if loader.state == "stopped":
        return "stopped by a signal or a debugger"
    if loader.state == "stopping":
        return "shutting down the workers"
    batch = figures.epoch_batches
    at_step = f" of batch {batch - 1}" if batch else ""
    descriptions = {
        "starting": f"starting workers or an epoch for {time}",
        "next": f"working in next() for {time}",
        "first": f"waiting for the first batch of the epoch for {time}",
        "waiting": f"waiting for batch {batch} for {time}",
        "step": f"in the training step{at_step} for {time}",
        "between": f"between two epochs for {time}",
    }
    return descriptions[figures.state]


def _warning(worker: WorkerView) -> str:
    who = f"worker {worker.id} (pid {worker.pid})" if worker.pid else f"worker {worker.id}"
    indices = f", indices {worker.index}" if worker.index else ""
    at = ("" if worker.batch is None else f" at batch {worker.batch}") + indices
    if worker.state == "ended":
        return f"{who} has ended{at}."
    if worker.state == "stopped":
        return f"{who} is stopped by a signal or a debugger{at}."
    if worker.state == "starting":
        return f"{who} has been starting for {_time(worker.seconds)}."
    usual = f" Its batches take {_time(worker.usual_seconds)} on average." if worker.usual_seconds is not None else ""
    return f"{who} has been {worker.state} batch {worker.batch} for {_time(worker.seconds)}{indices}.{usual}"


def _table(loader: Loader, width: int, room: int | None) -> Iterator[Line]:
    columns = {name: form for name, form in _COLUMNS.items() if name not in _WIDE or width >= _WIDE_FROM}
    rss = _shows_rss(loader)
    heads = {name: name for name in columns} | ({"memory": "RSS"} if rss else {})
    yield [(_row(columns, heads, "indices", width), "dim")]
    shown = list(loader.workers)
    if room is not None and len(shown) > room:
        # If there is no room for all workers, the marked ones have priority.
        marked = {worker.id for worker in loader.marked_workers}
        first = sorted(shown, key=lambda worker: (worker.id not in marked, worker.id))[: max(0, room - 1)]
        shown = sorted(first, key=lambda worker: worker.id)
    for worker in shown:
        row = _row(columns, _cells(worker, rss), worker.index or "", width)
        if worker.is_marked:
            yield [(row, _WARNING_STYLE)]
        else:
            before, state, after = row.partition(worker.state)
            yield [(before, ""), (state, _COLORS.get(worker.state, "")), (after, "")]
    if len(shown) < len(loader.workers):
        more = count_of(len(loader.workers) - len(shown), "more worker")
        yield [(_cut(f"       ... {more}: make the window taller, or use --once", width), "dim")]


def _cells(worker: WorkerView, rss: bool) -> dict[str, str]:
    shares, used = worker.shares, _memory_of(worker, rss)
    return {
        "worker": ("!" if worker.is_marked else "") + str(worker.id),
        "pid": str(worker.pid or "-"),
        "state": worker.state,
        "batch": "-" if worker.batch is None else str(worker.batch),
        "for": _time(worker.seconds),
        "fetch": _percent(shares["fetch"]),
        "cpu": "-" if worker.fetch_cpu_share is None else _percent(worker.fetch_cpu_share),
        "coll": _percent(shares["collate"]),
        "pack": _percent(shares["pack"]),
        "idle": _percent(shares["idle"]),
        "memory": "n/a" if used is None else size(used),
    }


def _row(columns: dict[str, str], cells: dict[str, str], last: str, width: int) -> str:
    row = " ".join(format(cells[name], form) for name, form in columns.items())
    return f"{row}  {_cut(last, width - len(row) - 2)}" if width > len(row) + 2 else row[:width]


def _line(name: str, text: str, width: int, style: str = "") -> Line:
    return [(f"  {name:<11} ", "dim"), (_cut(text, width - _INDENT), style)]


def _paragraph(name: str, text: str, width: int, compact: bool, style: str = "") -> Iterator[Line]:
    """Yields one line if ``compact``, otherwise the wrapped text."""
    first = f"  {name:<11} "
    if compact:
        yield [(_cut(first + text, width), style)]
        return
    for line in textwrap.wrap(text, max(40, width), initial_indent=first, subsequent_indent=" " * _INDENT):
        yield [(line, style)]


def _cut(text: str, room: int) -> str:
    return text if len(text) <= room else text[: max(0, room - 3)] + "..."


def _rate(per_second: float) -> str:
    return f"{per_second:.1f}/s" if per_second < 99.95 else f"{per_second:,.0f}/s"


def _percent(share: float) -> str:
    return f"{share:.0%}"


def _time(seconds: float) -> str:
    if seconds < 0.9995:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 99.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, remaining = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{remaining:02}s"
