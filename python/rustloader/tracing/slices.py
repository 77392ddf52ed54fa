"""Converts a trace's records into events of Chrome's trace format.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU describes the format. An event is a line
of its own. A slice comes before those within it, and times are whole microseconds of rounded-down ends, so that slices
that touch or contain each other still do.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Iterable, Iterator
from typing import Any

from rustloader._core import TRACE_KINDS, TRACE_MAIN, TRACE_PINNER

# The event with the clock of a file, and the one at the end, with the number of lost events.
CLOCK, END = "rustloader_trace", "rustloader_trace_end"

# Rows of the loaders have numbers of threads that no thread has.
_FIRST_ROW = 10_000_000
# Nanoseconds from which the work between collate_fn and sending is shown.
_SHOWN = 20_000
# Nanoseconds between two waits that are one.
_PAUSE = 200_000
_FETCH, _COLLATE, _PACK, _PUBLISH, _SAMPLE = map(TRACE_KINDS.index, ("fetch", "collate", "pack", "publish", "sample"))
_NEXT, _WAITING, _EPOCH, _STARTED = map(TRACE_KINDS.index, ("next", "waiting", "epoch", "started"))
_DIED, _STALLED, _SAVED, _PIN = map(TRACE_KINDS.index, ("died", "stalled", "saved", "pin"))
_OF_BATCH = {_FETCH, _COLLATE, _PACK, _PUBLISH, _SAMPLE}
_MOMENTS = {_EPOCH, _STARTED, _DIED, _STALLED, _SAVED}
_NO_INDEX = (1 << 64) - 1

# Kind, begin, length, and two numbers.
_Piece = tuple[int, int, int, int, int]


def lines(about: dict[str, Any], records: Iterable[_Piece]) -> Iterator[str]:
    """Yields the events of a trace, each as JSON."""
    yield metadata(CLOCK, about["pid"], {key: value for key, value in about.items() if key not in ("files", "lost")})
    name = about["script"] if about["rank"] is None else f"{about['script']} rank {about['rank']}"
    yield metadata("process_name", about["pid"], {"name": name})
    sources: list[_Source] = []
    for loader in about["loaders"]:
        before = next((source for source in reversed(sources) if source.group == loader["group"]), None)
        first = sources[-1].end if sources else _FIRST_ROW
        sources.append(_Source(about, len(sources), loader, before, first))
        yield from sources[-1].names()
    for word, begin, length, number, extra in records:
        yield from sources[word >> 32].add(word >> 8 & 0xFFFFFF, (word & 0xFF, begin, length, number, extra))
    for source in sources:
        yield from source.close()
    yield metadata(END, about["pid"], {"lost": about.get("lost", 0), "complete": "files" in about})


def metadata(name: str, pid: int, args: dict[str, Any], tid: int = 0) -> str:
    return json.dumps({"ph": "M", "pid": pid, "tid": tid, "ts": 0, "name": name, "args": args}, separators=(",", ":"))


class _Source:
    """The rows of one iterator of a loader. Successive iterators with the same number of workers share them."""

    def __init__(
        self, about: dict[str, Any], number: int, loader: dict[str, Any], before: _Source | None, first: int
    ) -> None:
        self.group, self._name, self._workers = loader["group"], loader["name"], loader["workers"]
        self._pid, self._number, self._before = about["pid"], number, before
        self._offset = about["wallNanoseconds"] - about["monotonicNanoseconds"] - about["baseTimeNanoseconds"]
        self._is_new = before is None or before._workers != self._workers
        self._first: int = first if self._is_new or before is None else before._first
        # Rows that have names. Iterators that share rows share this.
        self._named: set[int] = set() if self._is_new or before is None else before._named
        # The row after the last one in use.
        self.end = max(first, self._first + self._workers + 2)
        # Epochs of the loader's earlier iterators, once this one has begun.
        self._earlier: int | None = None
        # First tasks and numbers of the epochs.
        self._tasks: list[int] = []
        self._epochs: list[int] = []
        # By row: the pieces of the current batch, or the waits of the current `next`.
        self._pieces: dict[int, list[_Piece]] = {}
        # The task that was delivered last.
        self._delivered = -1

    def names(self) -> Iterator[str]:
        """Names the rows, unless they have names."""
        if self._is_new:
            yield self._row_name(0, "main")
            for worker in range(self._workers):
                yield self._row_name(worker + 2, f"worker {worker}")

    def _row_name(self, row: int, name: str) -> str:
        return metadata("thread_name", self._pid, {"name": f"{self.group} {self._name}: {name}"}, self._first + row)

    @property
    def earlier(self) -> int:
        """The number of epochs of the loader's earlier iterators."""
        chain = [self]
        while chain[-1]._earlier is None and chain[-1]._before is not None:
            chain.append(chain[-1]._before)
        found = 0
        for source, before in zip(reversed(chain), [None, *reversed(chain)], strict=False):
            if source._earlier is None:
                # Without workers an iterator is an epoch.
                own = 0 if before is None else before._epochs[-1] if before._epochs else int(not before._workers)
                source._earlier = found + own
            found = source._earlier
        return found

    def add(self, who: int, piece: _Piece) -> Iterator[str]:
        kind, begin, length, number, extra = piece
        args = self._args(number) if kind in (_FETCH, _PIN) else ""
        row = {TRACE_MAIN: 0, TRACE_PINNER: 1}.get(who, who + 2)
        if row == 1 and row not in self._named:
            self._named.add(row)
            yield self._row_name(row, "pin thread")
        kept = self._pieces.setdefault(row, [])
        if kind in _MOMENTS:
            if kind == _EPOCH and not self._begin_epoch(number, extra):
                return
            if kind == _DIED:
                yield from self._batch(row, is_whole=True)
            yield self._moment(row, piece)
        elif row == 0 and kind == _NEXT:
            yield self._slice(row, "next", begin, length, self._args(number - 1) if number else "")
            for _, since, time, *_ in kept:
                yield self._slice(row, "wait", since, time)
            kept.clear()
            if number:
                self._delivered = number - 1
                # Within the slice, and after the batch was sent.
                yield self._flow(row, "f", begin + max(0, length - 1000), number - 1)
        elif kind == _WAITING:
            # The engine looks around now and then in a long wait.
            goes_on = bool(kept) and begin - kept[-1][1] - kept[-1][2] < _PAUSE
            since = kept.pop()[1] if goes_on else begin
            kept.append((kind, since, begin + length - since, 0, 0))
        elif row > 1 and kind in _OF_BATCH:
            if kept and kept[0][3] != number:
                yield from self._batch(row)
            kept.append(piece)
            if kind == _PUBLISH:
                yield from self._batch(row, is_whole=True)
        else:
            yield from self._batch(row)
            yield self._slice(row, TRACE_KINDS[kind], begin, length, args)

    def _begin_epoch(self, task: int, count: int) -> bool:
        """Returns False for an epoch that is known or has not begun: a file of a trace begins with the current one."""
        if not self._tasks or task > self._tasks[-1]:
            self._tasks.append(task)
            self._epochs.append(count)
        elif count > self._epochs[-1]:
            self._epochs[-1] = count
        else:
            return False
        return count > 0

    def close(self) -> Iterator[str]:
        for row in list(self._pieces):
            yield from self._batch(row)

    def _batch(self, row: int, is_whole: bool = False) -> Iterator[str]:
        """Yields the events of a batch and its parts. One that is not whole was left undone, or there was none."""
        pieces = self._pieces.get(row)
        if not pieces:
            return
        pieces.sort(key=lambda piece: (piece[1], -piece[2]))
        # The worker may not have returned from sending it when the trace ended.
        is_whole |= pieces[0][3] == self._delivered
        sent: list[_Piece] = []
        if is_whole:
            begin, end = pieces[0][1], max(piece[1] + piece[2] for piece in pieces)
            yield self._slice(row, "batch", begin, end - begin, self._args(pieces[0][3]))
        has_fetch = False
        for piece in pieces:
            kind, begin, length, _, index = piece
            if kind in (_PACK, _PUBLISH):
                sent.append(piece)
            elif kind == _SAMPLE:
                yield self._slice(row, "sample", begin, length, "" if index == _NO_INDEX else f'"index":{index}')
            elif not is_whole:
                yield self._slice(row, "no batch", begin, length)
            elif kind == _FETCH and has_fetch:
                if length >= _SHOWN:
                    yield self._slice(row, "rest", begin, length)
            else:
                yield self._slice(row, TRACE_KINDS[kind], begin, length)
                has_fetch |= kind == _FETCH
        if sent:
            begin = sent[0][1]
            yield self._slice(row, "send", begin, sent[-1][1] + sent[-1][2] - begin)
        if is_whole:
            yield self._flow(row, "s", pieces[-1][1], pieces[-1][3])
        pieces.clear()

    def _time(self, nanoseconds: int) -> int:
        return (nanoseconds + self._offset) // 1000

    def _slice(self, row: int, name: str, begin: int, length: int, args: str = "") -> str:
        since = self._time(begin)
        args = f',"args":{{{args}}}' if args else ""
        return (
            f'{{"ph":"X","pid":{self._pid},"tid":{self._first + row},"ts":{since},'
            f'"dur":{self._time(begin + length) - since},"name":"{name}"{args}}}'
        )

    def _flow(self, row: int, phase: str, at: int, task: int) -> str:
        """Returns the start or the end of the arrow from a batch to its delivery."""
        binding = ',"bp":"e"' if phase == "f" else ""
        return (
            f'{{"ph":"{phase}","pid":{self._pid},"tid":{self._first + row},"ts":{self._time(at)},'
            f'"id":{self._number << 32 | task},"cat":"batch","name":"batch"{binding}}}'
        )

    def _moment(self, row: int, piece: _Piece) -> str:
        kind, at, _, number, extra = piece
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
        """Returns the epoch of a task, from 0, and the first task of it."""
        at = bisect.bisect_right(self._tasks, task) - 1
        return (self.earlier, 0) if at < 0 else (self.earlier + max(self._epochs[at] - 1, 0), self._tasks[at])
