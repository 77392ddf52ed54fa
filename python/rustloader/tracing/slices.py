"""Converts the records of a trace to events of Chrome's trace format.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU describes the format. Each event is one
line. A slice precedes the slices within it. Starts and ends are rounded down to microseconds, so that slices that touch
or contain each other still do so after rounding.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rustloader._core import TRACE_KINDS, TRACE_MAIN, TRACE_PINNER

# Names of the event that describes a file's clock, and of the last event, which gives the number of lost events.
CLOCK, END = "rustloader_trace", "rustloader_trace_end"

# The ID of the first row, which the file gives as a thread ID. No thread has an ID this high.
_FIRST_ROW = 10_000_000
# Minimum length in nanoseconds at which the work between collate_fn and sending is shown as a slice.
_MIN_REST = 20_000
# Maximum gap in nanoseconds between two waits that are shown as one.
_MAX_GAP = 200_000
_FETCH, _COLLATE, _PACK, _PUBLISH, _SAMPLE = map(TRACE_KINDS.index, ("fetch", "collate", "pack", "publish", "sample"))
_NEXT, _WAITING, _EPOCH, _STARTED = map(TRACE_KINDS.index, ("next", "waiting", "epoch", "started"))
_DIED, _STALLED, _SAVED, _PIN = map(TRACE_KINDS.index, ("died", "stalled", "saved", "pin"))
_BATCH_KINDS = {_FETCH, _COLLATE, _PACK, _PUBLISH, _SAMPLE}
_INSTANT_KINDS = {_EPOCH, _STARTED, _DIED, _STALLED, _SAVED}
_INNER_KINDS = {_SAMPLE, _WAITING, *_INSTANT_KINDS}
# The start of a slice.
_SLICE = '{"ph":"X"'
_NO_INDEX = (1 << 64) - 1

# The kind, begin, length, and two numbers. In `lines`, the first field is the packed word: source, origin and kind.
_Record = tuple[int, int, int, int, int]


def lines(about: dict[str, Any], records: Iterable[_Record], unfinished: Sequence[_Record] = ()) -> Iterator[str]:
    """Yields the events of a trace as JSON. ``unfinished`` are the activities that were in progress when the program
    was killed; those whose end is among ``records`` are omitted."""
    yield metadata(CLOCK, about["pid"], {key: value for key, value in about.items() if key not in ("files", "lost")})
    name = about["script"] if about["rank"] is None else f"{about['script']} rank {about['rank']}"
    yield metadata("process_name", about["pid"], {"name": name})
    sources: list[_Source] = []
    groups = {loader["group"]: loader["name"] for loader in about["loaders"]}
    for loader in about["loaders"]:
        previous = next((source for source in reversed(sources) if source.group == loader["group"]), None)
        first = sources[-1].end if sources else _FIRST_ROW
        # Rows begin with the activity, because Perfetto cuts long names and appends the row's number.
        is_unique = [*groups.values()].count(loader["name"]) == 1
        label = loader["name"] if is_unique else f"{loader['name']}, {loader['group']}"
        sources.append(_Source(about, len(sources), loader | {"label": label}, previous, first))
        yield from sources[-1].names()
    ends: dict[int, int] = {}
    for word, begin, length, number, extra in records:
        if unfinished:
            ends[_lane(word)] = max(ends.get(_lane(word), 0), begin + length)
        yield from sources[word >> 32].add(word >> 8 & 0xFFFFFF, (word & 0xFF, begin, length, number, extra))
    # The program may have written records after the list.
    end = max([*ends.values(), *(begin + length for _, begin, length, *_ in unfinished)], default=0)
    for word, begin, _, number, extra in unfinished:
        if begin >= ends.get(_lane(word), 0):
            record = (word & 0xFF, begin, end - begin, number, extra)
            yield from sources[word >> 32].cut_off(word >> 8 & 0xFFFFFF, record)
    for source in sources:
        yield from source.close()
    yield metadata(END, about["pid"], {"lost": about.get("lost", 0), "complete": "files" in about})


def is_slice(line: str) -> bool:
    """Returns True for an event of `lines` that is a slice."""
    return line.startswith(_SLICE)


def _lane(word: int) -> int:
    """Returns a number for the activities that follow each other: those with the same source and origin, except events
    that occur during another activity, whose number includes their kind."""
    return word if word & 0xFF in _INNER_KINDS else word | 0xFF


def metadata(name: str, pid: int, args: dict[str, Any], tid: int = 0) -> str:
    """Returns a metadata event as JSON."""
    return json.dumps({"ph": "M", "pid": pid, "tid": tid, "ts": 0, "name": name, "args": args}, separators=(",", ":"))


class _Source:
    """The rows of one iterator. Successive iterators of a loader share their rows if they have the same number of
    workers."""

    def __init__(
        self, about: dict[str, Any], number: int, loader: dict[str, Any], previous: _Source | None, first: int
    ) -> None:
        self.group, self._label, self._workers = loader["group"], loader["label"], loader["workers"]
        self._pid, self._number, self._previous = about["pid"], number, previous
        self._offset = about["wallNanoseconds"] - about["monotonicNanoseconds"] - about["baseTimeNanoseconds"]
        self._is_new = previous is None or previous._workers != self._workers
        self._first: int = first if self._is_new or previous is None else previous._first
        # Rows that have been named at their first event. Iterators that share rows share this set.
        self._named: set[int] = set() if self._is_new or previous is None else previous._named
        # The row after the last one in use.
        self.end = max(first, self._first + self._workers + 2)
        # The result of `epochs_before`; None if it is not known yet.
        self._epochs_before: int | None = None
        # The first task and the number of each epoch.
        self._tasks: list[int] = []
        self._epochs: list[int] = []
        # By row, the records of the current batch, or the waits of the current `next`.
        self._pending: dict[int, list[_Record]] = {}

    def names(self) -> Iterator[str]:
        """Yields the events that name the rows, unless an earlier iterator has named them."""
        if self._is_new:
            yield from self._row_name(0, "main")
            for worker in range(self._workers):
                yield from self._row_name(worker + 2, f"worker {worker}")

    def _row_name(self, row: int, name: str) -> Iterator[str]:
        tid = self._first + row
        yield metadata("thread_name", self._pid, {"name": f"{name} ({self._label})"}, tid)
        yield metadata("thread_sort_index", self._pid, {"sort_index": tid}, tid)

    @staticmethod
    def _row(origin: int) -> int:
        return {TRACE_MAIN: 0, TRACE_PINNER: 1}.get(origin, origin + 2)

    @property
    def epochs_before(self) -> int:
        """The number of epochs that the loader's earlier iterators had."""
        chain = [self]
        while chain[-1]._epochs_before is None and chain[-1]._previous is not None:
            chain.append(chain[-1]._previous)
        epochs = 0
        for source, previous in zip(reversed(chain), [None, *reversed(chain)], strict=False):
            if source._epochs_before is None:
                # An iterator without workers has one epoch, which is not recorded.
                own = (
                    0 if previous is None else previous._epochs[-1] if previous._epochs else int(not previous._workers)
                )
                source._epochs_before = epochs + own
            epochs = source._epochs_before
        return epochs

    def add(self, origin: int, record: _Record) -> Iterator[str]:
        """Yields the events that a record completes. ``origin`` is a worker ID, ``TRACE_MAIN`` or ``TRACE_PINNER``."""
        kind, begin, length, number, extra = record
        args = self._args(number) if kind in (_FETCH, _PIN) else ""
        row = self._row(origin)
        if row == 1 and row not in self._named:
            self._named.add(row)
            yield from self._row_name(row, "pin thread")
        pending = self._pending.setdefault(row, [])
        if kind in _INSTANT_KINDS:
            if kind == _EPOCH and not self._begin_epoch(number, extra):
                return
            if kind == _DIED:
                yield from self._batch(row, is_whole=True)
            yield self._instant(row, record)
        elif row == 0 and kind == _NEXT:
            yield self._slice(row, "next", begin, length, self._args(number - 1) if number else "")
            for _, since, time, *_ in pending:
                yield self._slice(row, TRACE_KINDS[_WAITING], since, time)
            pending.clear()
            if number:
                # The arrow must end within the slice, and after the batch was sent.
                yield self._flow(row, "f", begin + max(0, length - 1000), number - 1)
        elif kind == _WAITING:
            # The engine wakes up several times during a long wait, which splits the wait into several records.
            continues = bool(pending) and begin - pending[-1][1] - pending[-1][2] < _MAX_GAP
            since = pending.pop()[1] if continues else begin
            pending.append((kind, since, begin + length - since, 0, 0))
        elif row > 1 and kind in _BATCH_KINDS:
            if pending and pending[0][3] != number:
                yield from self._batch(row)
            pending.append(record)
            if kind == _PUBLISH:
                yield from self._batch(row, is_whole=True)
        else:
            yield from self._batch(row)
            yield self._slice(row, TRACE_KINDS[kind], begin, length, args)

    def cut_off(self, origin: int, record: _Record) -> Iterator[str]:
        """Yields the events of an activity that was in progress when the program was killed, and of its batch."""
        yield from self.add(origin, record)
        if record[0] in _BATCH_KINDS:
            yield from self._batch(self._row(origin), is_whole=True)

    def _begin_epoch(self, task: int, count: int) -> bool:
        """Notes the start of an epoch. Returns False if the epoch is already known, or has not begun.

        Each file of records begins with the current epoch, which may already be known from an earlier file.
        """
        if not self._tasks or task > self._tasks[-1]:
            self._tasks.append(task)
            self._epochs.append(count)
        elif count > self._epochs[-1]:
            self._epochs[-1] = count
        else:
            return False
        return count > 0

    def close(self) -> Iterator[str]:
        """Yields the events of all batches that are not complete."""
        for row in list(self._pending):
            yield from self._batch(row)

    def _batch(self, row: int, is_whole: bool = False) -> Iterator[str]:
        """Yields the events of a row's current batch and its parts.

        ``is_whole`` is True if the records are known to belong to a batch: it was sent, or its worker died while making
        it.
        """
        records = self._pending.get(row)
        if not records:
            return
        records.sort(key=lambda record: (record[1], -record[2]))
        sent: list[_Record] = []
        if is_whole:
            begin, end = records[0][1], max(record[1] + record[2] for record in records)
            yield self._slice(row, "batch", begin, end - begin, self._args(records[0][3]))
        has_fetch = False
        for record in records:
            kind, begin, length, _, index = record
            if kind in (_PACK, _PUBLISH):
                sent.append(record)
            elif kind == _SAMPLE:
                yield self._slice(row, "sample", begin, length, "" if index == _NO_INDEX else f'"index":{index}')
            elif not is_whole:
                yield self._slice(row, "no batch", begin, length)
            elif kind == _FETCH and has_fetch:
                if length >= _MIN_REST:
                    yield self._slice(row, "rest", begin, length)
            else:
                yield self._slice(row, TRACE_KINDS[kind], begin, length)
                has_fetch |= kind == _FETCH
        if sent:
            begin = sent[0][1]
            yield self._slice(row, "send", begin, sent[-1][1] + sent[-1][2] - begin)
        if is_whole:
            yield self._flow(row, "s", records[-1][1], records[-1][3])
        records.clear()

    def _time(self, nanoseconds: int) -> int:
        return (nanoseconds + self._offset) // 1000

    def _slice(self, row: int, name: str, begin: int, length: int, args: str = "") -> str:
        since = self._time(begin)
        args = f',"args":{{{args}}}' if args else ""
        return (
            f'{_SLICE},"pid":{self._pid},"tid":{self._first + row},"ts":{since},'
            f'"dur":{self._time(begin + length) - since},"name":"{name}"{args}}}'
        )

    def _flow(self, row: int, phase: str, at: int, task: int) -> str:
        """Returns the start or the end of the arrow from a batch to its delivery."""
        binding = ',"bp":"e"' if phase == "f" else ""
        return (
            f'{{"ph":"{phase}","pid":{self._pid},"tid":{self._first + row},"ts":{self._time(at)},'
            f'"id":{self._number << 32 | task},"cat":"batch","name":"batch"{binding}}}'
        )

    def _instant(self, row: int, record: _Record) -> str:
        kind, at, _, number, extra = record
        args, name = "", TRACE_KINDS[kind]
        if kind == _STARTED:
            name, args = ("restarted" if extra else "started"), f'"pid":{number}'
        elif kind == _EPOCH:
            args = f'"epoch":{self._epoch_of(number)[0]}'
        elif kind == _SAVED:
            name, args = "state saved", f'"batches":{number}'
        elif number:
            args = self._args(number)
        return (
            f'{{"ph":"i","s":"t","pid":{self._pid},"tid":{self._first + row},"ts":{self._time(at)},"name":"{name}",'
            f'"args":{{{args}}}}}'
        )

    def _args(self, task: int) -> str:
        epoch, first = self._epoch_of(task)
        return f'"batch":{task - first},"epoch":{epoch}'

    def _epoch_of(self, task: int) -> tuple[int, int]:
        """Returns the epoch of a task, counted from 0, and the first task of that epoch."""
        at = bisect.bisect_right(self._tasks, task) - 1
        return (
            (self.epochs_before, 0) if at < 0 else (self.epochs_before + max(self._epochs[at] - 1, 0), self._tasks[at])
        )
