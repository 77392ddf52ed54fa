"""Timelines of the main process and the workers, in seconds of the monotonic clock, which all processes share."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rustloader.system.patches import Patch
from rustloader.tools.bench.passes import Limits, Watcher, iterating

if TYPE_CHECKING:
    from torch.utils.data import DataLoader


@dataclass(frozen=True)
class Timeline:
    """The timeline of one engine.

    Attributes:
        workers: the number of workers.
        skipped: batches at the start that a picture leaves out, because they were in flight before the first arrived.
        asked, got: begin and end of ``next`` in the main process, for each batch.
        spans: ("fetch", "collate" or "send", begin, end) of each part of a worker's work, by worker.
    """

    workers: int
    skipped: int
    asked: list[float]
    got: list[float]
    spans: dict[int, list[tuple[str, float, float]]]

    def window(self, first: int, count: int) -> tuple[float, float]:
        """Returns the start and the end of the delivery of the batches from ``first`` up to, but not including,
        ``count``.
        """
        return self.got[first - 1] if first else self.asked[0], self.got[count - 1]


class TimelineRecorder:
    """Replaces a loader's ``worker_init_fn``. In the worker, on either engine, it times each fetch and each collation,
    and writes them as lines to the worker's file."""

    def __init__(self, folder: str, init_fn: Callable[[int], object] | None) -> None:
        self._folder, self._init_fn = folder, init_fn

    def __call__(self, worker: int) -> None:
        if self._init_fn is not None:
            self._init_fn(worker)
        self._file = os.open(f"{self._folder}/{worker}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._time_fetches()

    def spans(self, loader: DataLoader[Any]) -> dict[int, list[tuple[str, float, float]]]:
        """Returns the spans of each worker. rustloader sends a batch right after its fetch; these spans have the mean
        duration from the loader's statistics. A thread sends torch's batches, so there are no such spans.
        """
        spans_of = {}
        sending = _seconds_per_send(loader)
        for path in Path(self._folder).iterdir():
            lines = (line.split() for line in path.read_text().splitlines())
            spans = [(what, float(begin), float(end)) for what, begin, end in lines]
            if seconds := sending.get(int(path.name)):
                fetches = [(begin, end) for what, begin, end in spans if what == "fetch"]
                following = [*(begin for begin, _ in fetches[1:]), math.inf]
                spans += [
                    ("send", end, min(end + seconds, next_)) for (_, end), next_ in zip(fetches, following, strict=True)
                ]
            spans_of[int(path.name)] = spans
        return spans_of

    @contextlib.contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        begin = time.monotonic()
        try:
            yield
        finally:
            os.write(self._file, f"{what} {begin!r} {time.monotonic()!r}\n".encode())

    def _time_fetches(self) -> None:
        from torch.utils.data import _DatasetKind

        torch_create_fetcher = _DatasetKind.create_fetcher

        def create_fetcher(kind: Any, dataset: Any, auto_collation: Any, collate_fn: Any, drop_last: Any) -> Any:
            def collate(batch: Any) -> Any:
                with self._timed("collate"):
                    return collate_fn(batch)

            def fetch(index: Any) -> Any:
                with self._timed("fetch"):
                    return whole(index)

            fetcher = torch_create_fetcher(kind, dataset, auto_collation, collate, drop_last)
            whole, fetcher.fetch = fetcher.fetch, fetch
            return fetcher

        patch = Patch("torch.utils.data._DatasetKind.create_fetcher", _DatasetKind)
        patch.put_in(staticmethod(create_fetcher))


def _seconds_per_send(loader: DataLoader[Any]) -> dict[int, float]:
    """Returns the mean time to send a batch, by worker; empty on torch's iterator."""
    import rustloader

    return {one.id: one.pack_seconds / one.tasks for one in rustloader.stats(loader).workers if one.tasks}


def watch(loader: DataLoader[Any], limits: Limits, watcher: Watcher | None = None) -> tuple[list[float], list[float]]:
    """Runs a pass over a DataLoader. Returns begin and end of ``next`` for each batch."""
    asked: list[float] = []
    got: list[float] = []
    deadline: float | None = None
    with iterating(loader, watcher) as iterator:
        while len(got) != limits.batches and (deadline is None or time.monotonic() < deadline):
            asked.append(time.monotonic())
            try:
                next(iterator)
            except StopIteration:
                asked.pop()
                break
            got.append(time.monotonic())
            if watcher is not None:
                watcher.beat()
            deadline = deadline or got[0] + limits.seconds
            if limits.step:
                time.sleep(limits.step)
    if not got:
        raise StopIteration
    return asked, got
