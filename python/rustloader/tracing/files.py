"""Reads, writes and merges trace files."""

from __future__ import annotations

import contextlib
import errno
import gzip
import itertools
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from typing import IO, Any

from rustloader._core import TRACE_KINDS
from rustloader.system import local_ranks
from rustloader.tracing import slices, spool

_EPOCH = TRACE_KINDS.index("epoch")
# Added to the pids of a file once for each earlier file with the same pids.
_PID_STEP = 100_000_000
# Phases whose events belong together if they have the same `id`.
_BOUND_BY_ID = frozenset("stfbneSTpFNOD")


class NotATrace(ValueError):
    """Raised if a file is not a trace that can be merged."""


def of_rank(path: str) -> str:
    """Returns the name of this rank's trace. It contains the rank if there are several."""
    rank = local_ranks.global_rank()
    if "{rank}" in path:
        return path.replace("{rank}", str(rank or 0))
    is_special = os.path.exists(path) and not os.path.isfile(path)
    return with_label(path, f"rank{rank}") if local_ranks.is_one_of_several() and not is_special else path


def with_label(path: str, label: str) -> str:
    """Adds a label to the name of a trace, before its suffix: `run-label.json.gz`."""
    stem, compressed = (path[:-3], ".gz") if path.endswith(".gz") else (path, "")
    stem, suffix = os.path.splitext(stem)
    return f"{stem}-{label}{suffix}{compressed}"


def convert(folder: str, path: str) -> int:
    """Converts a spool to a trace file. Returns the number of slices."""
    count = 0

    def counted() -> Iterator[str]:
        nonlocal count
        for line in _lines(folder, spool.read_about(folder)):
            count += slices.is_slice(line)
            yield line

    _write(path, counted())
    return count


def _lines(folder: str, about: dict[str, Any]) -> Iterator[str]:
    """Returns the events of a spool, each as JSON. If the trace keeps only its last seconds, earlier events are
    omitted."""
    since, unfinished = 0, spool.read_unfinished(folder, about)
    if about["seconds"] is not None:
        records = itertools.chain(spool.read_records(folder, about), unfinished)
        last = max((begin + length for _, begin, length, *_ in records), default=0)
        since = last - int(about["seconds"] * 1e9)
    kept = spool.read_records(folder, about)
    # Earlier starts of epochs are kept, because they give later batches their numbers.
    kept = (it for it in kept if it[1] + it[2] >= since or it[0] & 0xFF == _EPOCH)
    return slices.lines(about, kept, unfinished)


def _write(path: str, lines: Iterable[str]) -> None:
    """Writes the events as an array, one per line. After an error, an existing file is unchanged."""
    with _replacement(path) as new, _open(new, "wt") as file:
        file.write("[")
        separator = "\n"
        for line in lines:
            file.write(separator + line)
            separator = ",\n"
        file.write("\n]\n")


@contextlib.contextmanager
def _replacement(path: str) -> Iterator[str]:
    """Yields the path of a temporary file, which replaces the file at the end and is removed after an error.

    If the path is not that of a regular file, but of a pipe for example, yields the path itself.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        yield path
        return
    if os.path.exists(path) and not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
    target = os.path.realpath(path)  # a link remains one
    # The suffix is the same because it decides whether the file is compressed.
    temporary = os.path.join(os.path.dirname(target), f".{os.getpid()}.{os.path.basename(path)}")
    try:
        yield temporary
        os.replace(temporary, target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.remove(temporary)
        if isinstance(error, OSError) and error.filename in (None, temporary):
            raise OSError(error.errno, error.strerror, path) from None
        raise


def _open(path: str, mode: str) -> IO[str]:
    opened: IO[str] = gzip.open(path, mode, compresslevel=5) if path.endswith(".gz") else open(path, mode)  # type: ignore[assignment]
    return opened


def merge(paths: list[str], path: str) -> int:
    """Merges traces of this module and of torch.profiler into one file. Returns the number of events.

    All clocks are aligned. If two files from the same source, this module or torch.profiler, have the same pids, the
    pids in the second file are changed. Pids that occur in a file of this module and in one of torch.profiler stay
    unchanged. The result may replace one of the traces.

    Raises:
        NotATrace: A file is not a trace.
        OSError: A file cannot be read or written.
    """
    sources = [_read(source) for source in paths]
    base = next((base for base, *_ in sources if base), 0)
    count = 0

    def merged() -> Iterator[str]:
        nonlocal count
        owners: dict[tuple[bool, Any], list[int]] = {}
        for number, (own_base, is_ours, events) in enumerate(sources):
            shift = (own_base - base) / 1000
            for event in events:
                count += 1
                files = owners.setdefault((is_ours, event.get("pid")), [])
                if number not in files:
                    files.append(number)
                place = files.index(number)
                if place and isinstance(event.get("pid"), int):
                    event["pid"] += place * _PID_STEP
                if shift and event.get("ph") != "M" and "ts" in event:
                    event["ts"] = float(event["ts"]) + shift
                if number and event.get("ph") in _BOUND_BY_ID and "id" in event:
                    event["id"] = f"{number}.{event['id']}"
                yield json.dumps(event, separators=(",", ":"))

    _write(path, merged())
    return count


def _read(path: str) -> tuple[int, bool, Iterable[dict[str, Any]]]:
    """Returns the base of a file's clock in nanoseconds, whether this module made the file, and its events. If the
    file is missing because its program was killed, reads the spool that the program left."""
    if not os.path.lexists(path) and os.path.isdir(path + spool.SUFFIX):
        path += spool.SUFFIX
    if os.path.isdir(path):
        try:
            about = spool.read_about(path)
        except ValueError as error:
            raise NotATrace(f"{path} is not the folder of a trace: {error}") from None
        return about["baseTimeNanoseconds"], True, map(json.loads, _lines(path, about))
    try:
        with _open(path, "rt") as file:
            text = file.read()
    except (EOFError, UnicodeDecodeError, gzip.BadGzipFile, zlib.error) as error:
        raise NotATrace(f"{path} is truncated, or not a trace: {error}") from None
    events = _events(path, text)
    try:
        if isinstance(events, dict):
            return int(events.get("baseTimeNanoseconds", 0)), False, events["traceEvents"]
        clock = next((event["args"] for event in events if event.get("name") == slices.CLOCK), None)
        return (0, False, events) if clock is None else (int(clock["baseTimeNanoseconds"]), True, events)
    except (KeyError, OverflowError, TypeError, ValueError):
        raise NotATrace(f"{path} is not a trace: the base of its clock is not a number") from None


def _events(path: str, text: str) -> Any:
    """Returns the array of events in a file, or the object that contains it. The end of an array may be missing."""
    try:
        content = json.loads(text)
    except ValueError:
        if not text.lstrip().startswith("["):
            raise NotATrace(f"{path} is not JSON: a truncated trace of torch.profiler cannot be read") from None
        lines = [line.strip().rstrip(",") for line in text.lstrip()[1:].splitlines()]
        content = []
        for line in lines:
            if line.startswith("{"):
                with contextlib.suppress(ValueError):  # the last line may be truncated
                    content.append(json.loads(line))
    events = content.get("traceEvents") if isinstance(content, dict) else content
    if not isinstance(events, list):
        raise NotATrace(f"{path} is not a trace: it has no array of events")
    for number, event in enumerate(events):
        if not _is_event(event):
            raise NotATrace(f"{path} is not a trace: element {number} of its array is not an event")
    return content


def _is_event(event: Any) -> bool:
    """Returns whether `merge` can process an element of an array."""
    try:
        float(event.get("ts", 0))
        hash((event.get("pid"), event.get("ph")))
    except (AttributeError, OverflowError, TypeError, ValueError):
        return False
    return True
