"""Records timelines of the main process and the workers, in seconds of the monotonic clock, which they share."""

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
        workers: number of workers.
        skipped: number of batches that the plot omits: twice those that are outstanding at the start.
        called: the time at which the main process called ``next``, for each batch.
        returned: the time at which ``next`` returned, for each batch.
        spans: the spans of each worker's work, by worker ID. A span is a tuple of its kind ("fetch", "collate" or
            "send"), its start and its end.
    """

    workers: int
    skipped: int
    called: list[float]
    returned: list[float]
    spans: dict[int, list[tuple[str, float, float]]]

    def window(self, first: int, count: int) -> tuple[float, float]:
        """Returns the start and end of the period in which batches ``first`` to ``count - 1`` are delivered."""
        return self.returned[first - 1] if first else self.called[0], self.returned[count - 1]


class TimelineRecorder:
    """A ``worker_init_fn`` that records the timeline of a worker on either engine.

    Calls ``init_fn``, the loader's own ``worker_init_fn``, first. Then times each fetch and each collation, and writes
    them to the worker's file in ``folder``, one per line.
    """

    def __init__(self, folder: str, init_fn: Callable[[int], object] | None) -> None:
        self._folder, self._init_fn = folder, init_fn

    def __call__(self, worker: int) -> None:
        if self._init_fn is not None:
            self._init_fn(worker)
        self._file = os.open(f"{self._folder}/{worker}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._time_fetches()

    def spans(self, loader: DataLoader[Any]) -> dict[int, list[tuple[str, float, float]]]:
        """Returns the spans of each worker.

        A worker of rustloader sends a batch right after fetching it. Each "send" span has the mean duration from the
        loader's statistics. A worker of torch sends batches in a thread, so it has no "send" spans.
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
                    return torch_fetch(index)

            fetcher = torch_create_fetcher(kind, dataset, auto_collation, collate, drop_last)
            torch_fetch, fetcher.fetch = fetcher.fetch, fetch
            return fetcher

        patch = Patch("torch.utils.data._DatasetKind.create_fetcher", _DatasetKind)
        patch.put_in(staticmethod(create_fetcher))


def _seconds_per_send(loader: DataLoader[Any]) -> dict[int, float]:
    """Returns the mean seconds that each worker takes to send a batch; empty on torch's iterator."""
    import rustloader

    return {
        worker.id: worker.pack_seconds / worker.tasks for worker in rustloader.stats(loader).workers if worker.tasks
    }


def watch(loader: DataLoader[Any], limits: Limits, watcher: Watcher | None = None) -> tuple[list[float], list[float]]:
    """Runs a pass over a DataLoader. Returns the times at which ``next`` was called, and at which it returned.

    Raises StopIteration if the loader is empty.
    """
    called: list[float] = []
    returned: list[float] = []
    deadline: float | None = None
    with iterating(loader, watcher) as iterator:
        while len(returned) != limits.batches and (deadline is None or time.monotonic() < deadline):
            called.append(time.monotonic())
            try:
                next(iterator)
            except StopIteration:
                called.pop()
                break
            returned.append(time.monotonic())
            if watcher is not None:
                watcher.on_progress()
            deadline = deadline or returned[0] + limits.seconds
            if limits.step:
                time.sleep(limits.step)
    if not returned:
        raise StopIteration
    return called, returned
