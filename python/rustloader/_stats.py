"""``rustloader.stats()``: what is known of a loader's work."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter, _SingleProcessDataLoaderIter

from rustloader import _ledger
from rustloader._figures import Arena, Copies, Handover, Pinning, SlowTask, Stats, Worker, no_loader
from rustloader._iter import _MultiProcessingDataLoaderIter as OurIter
from rustloader._wrappers import loader_in

__all__ = ["stats"]

_NO_WORKERS = "num_workers=0: batches are made in the main process, by torch's own iterator"
_TORCHS = "it is torch's own iterator: rustloader.install() was not in force when it was made"
_NOTHING_YET = "it has had no iterator of rustloader's so far"
_ALL_TORCHS = "its iterators were torch's own: "


def stats(source: Any) -> Stats:
    """What a loader or an iterator has done so far.

    May be called at any time, from any thread. A loader that was pickled or copied begins at zero.

    Args:
        source: a ``rustloader.DataLoader``, a ``torch.utils.data.DataLoader``, an iterator of one, or what a library
            has wrapped around a loader: an iterable with one loader among its attributes. Of a loader the figures are
            those of all its iterators, also of those that have ended, but for those that were torch's own.

    Raises:
        TypeError: it is none of these.
    """
    source = loader_in(source, _has_figures)
    ledger: _ledger.Ledger | None
    if OurIter in type(source).__mro__:
        ledger, note = _ledger.find(source), _TORCHS
    elif isinstance(source, _BaseDataLoaderIter):
        ledger, note = None, _NO_WORKERS if isinstance(source, _SingleProcessDataLoaderIter) else _TORCHS
    else:
        ledger = _ledger.find(source)
        if ledger is None and not isinstance(source, DataLoader):
            raise no_loader(source)
        note = _NO_WORKERS if getattr(source, "num_workers", None) == 0 else _NOTHING_YET
    workers: int = getattr(source, "num_workers", 0) or getattr(source, "_num_workers", 0)
    handovers: tuple[Handover, ...] = ()
    if ledger is not None:
        handovers = tuple(Handover(reason, count) for reason, count in ledger.handovers.items())
        if ledger.iterators:
            return _of_ledger(ledger, workers, handovers)
    if handovers:
        note = _ALL_TORCHS + "; ".join(handover.reason for handover in handovers)
    batches = getattr(source, "_num_yielded", 0)
    return Stats(num_workers=workers, cores=_cores(), batches=batches, handovers=handovers, note=note)


def _has_figures(source: Any) -> bool:
    ledger = _ledger.find(source)
    return ledger is not None and bool(ledger.iterators or ledger.handovers)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _of_ledger(ledger: _ledger.Ledger, num_workers: int, handovers: tuple[Handover, ...]) -> Stats:
    figures = ledger.figures()

    def seconds(name: str) -> float:
        return float(figures[name]) / 1e9

    return Stats(
        num_workers=num_workers,
        cores=_cores(),
        iterators=ledger.iterators,
        epochs=figures["epochs"],
        batches=figures["batches"],
        bytes=figures["bytes"],
        next_seconds=seconds("next"),
        first_seconds=seconds("first"),
        waited_seconds=seconds("waited"),
        blocked_seconds=seconds("blocked"),
        sampler_seconds=seconds("sampler"),
        step_seconds=seconds("step"),
        workers=tuple(_worker(number, worker) for number, worker in enumerate(figures["workers"])),
        slowest=tuple(
            SlowTask(task["index"], task["worker"], task["fetch"], task["collate"], task["pack"])
            for task in figures["slowest"]
        ),
        arena=Arena(figures["leased"], figures["warm"], figures["high_water"], figures["blocks"]),
        copies=Copies(figures["copies"], figures["copied_bytes"], figures["pickled"]),
        pinning=Pinning(figures["pin_threads"] > 0, figures["pinned"], seconds("pinning")),
        handovers=handovers,
    )


def _worker(number: int, figures: dict[str, Any]) -> Worker:
    return Worker(
        id=number,
        pid=figures["pid"],
        alive=figures["alive"],
        rss_bytes=_rss(figures["pid"]) if figures["alive"] else 0,
        tasks=figures["tasks"],
        starting_seconds=figures["starting"],
        idle_seconds=figures["idle"],
        fetch_seconds=figures["fetch"],
        collate_seconds=figures["collate"],
        pack_seconds=figures["pack"] + figures["publish"],
    )


def _rss(pid: int) -> int:
    """Resident bytes of a process; 0 where it has just ended, or there is no /proc."""
    with contextlib.suppress(OSError, IndexError, ValueError), open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0
