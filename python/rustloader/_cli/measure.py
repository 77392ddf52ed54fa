"""The process of ``bench`` that has one loader on one engine, and measures what it is asked for.

Each side has a process of its own, so that neither finds the memory, the imports or the threads that the other has
left.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import random
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

from rustloader._cli.factory import Unusable, find, make
from rustloader._cli.log import warnings as logged_warnings
from rustloader._cli.machine import machine
from rustloader._cli.passes import run_pass
from rustloader._cli.timeline import Recorder, watch

__all__ = ["Order", "serve"]

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Order:
    """What a process has to measure.

    Attributes:
        target: the factory.
        engine: a name of ``ENGINES``.
        workers: its num_workers; None: as the factory sets it.
        parent: process id of who orders.
        records: a folder for what the workers do when; None: they are left as they are.
    """

    target: str
    engine: str
    workers: int | None
    parent: int
    records: str | None = None


def serve(descriptor: int) -> None:
    """Answers requests, each ("name", arguments...), with ("name", value), until the other end is closed, or SIGINT
    comes."""
    os.set_inheritable(descriptor, False)
    signal.signal(signal.SIGINT, _interrupt)
    try:
        _serve(Connection(descriptor))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _interrupt(*_: object) -> None:
    """Once: a second time would disturb the end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def _serve(connection: Connection) -> None:
    engine = "?"
    try:
        order: Order = connection.recv()
        engine = order.engine
        _end_with(order.parent)
        with _Side(order) as side:
            connection.send(("ready", side.about()))
            while True:
                name, *arguments = connection.recv()
                connection.send((name, getattr(side, name)(*arguments)))
    except (EOFError, BrokenPipeError):
        pass
    except Unusable as error:
        _tell(connection, str(error))
    except Exception as error:
        _tell(connection, f"{_told(error)}\n{engine}'s iterator failed")


def _tell(connection: Connection, text: str) -> None:
    with contextlib.suppress(OSError):
        connection.send(("unusable", text))


def _told(error: Exception) -> str:
    """What a loader raised. An error in a worker brings the worker's traceback; else it begins where we end."""
    text = "".join(traceback.format_exception_only(error))
    if "Original Traceback" in text:
        return text
    trace = error.__traceback__
    while trace is not None and os.path.dirname(trace.tb_frame.f_code.co_filename) == os.path.dirname(__file__):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))


def _end_with(parent: int) -> None:
    """Has the system interrupt this process when its parent has ended."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGINT))
    if os.getppid() != parent:
        raise KeyboardInterrupt


class _Side:
    """A loader on an engine. Its methods are what may be asked for."""

    def __init__(self, order: Order) -> None:
        factory = find(order.target)  # before torch is imported: a wrong name is told at once
        import rustloader
        from rustloader._cli.engines import ENGINES

        rustloader.uninstall()  # RUSTLOADER_INSTALL may have been set
        if order.workers is not None:  # more workers than cores is a fair question
            warnings.filterwarnings("ignore", "This DataLoader will create")
        self._order = order
        self._loader = make(factory, order.target, order.workers)
        self._recorder: Recorder | None = None
        if order.records is not None:
            self._recorder = Recorder(order.records, self._loader.worker_init_fn)
            self._loader.worker_init_fn = self._recorder
        self._engine = ENGINES[order.engine]
        self._cut_short = False

    def __enter__(self) -> _Side:
        return self

    def __exit__(self, *error: object) -> None:
        iterator: Any = getattr(self._loader, "_iterator", None)  # of persistent workers
        if hasattr(iterator, "_shutdown_workers"):
            iterator._shutdown_workers()

    def about(self) -> dict[str, Any]:
        """What is said of machine and loader beside the figures."""
        loader = self._loader
        context = loader.multiprocessing_context or multiprocessing
        return {
            "machine": machine(),
            "num_workers": loader.num_workers,
            "prefetch_factor": loader.prefetch_factor,
            "batch_size": loader.batch_size,
            "persistent_workers": bool(loader.persistent_workers),
            "pin_memory": bool(loader.pin_memory),
            "start_method": context.get_start_method(),
        }

    def run(self, number: int, limits: Any, weigh: bool) -> dict[str, Any]:
        """A pass; those of one number see the same random numbers on both sides."""
        _seed(number)
        with self._on_engine():
            try:
                result = run_pass(self._loader, limits, weigh)
            except StopIteration:
                raise Unusable(f"the loader of {self._order.target} gave no batch") from None
        self._cut_short |= not result.complete
        return asdict(result)

    def verdict(self) -> dict[str, Any]:
        """What the statistics of all passes say."""
        import rustloader

        stats = rustloader.stats(self._loader)
        # Passes that were cut short start workers more often than epochs do.
        judged = replace(stats, epochs=1) if self._cut_short else stats
        return {**asdict(judged.verdict()), "stats": stats.as_dict()}

    def watch(self, limits: Any) -> dict[str, Any]:
        """What main and the workers do when."""
        _seed(0)
        assert self._recorder is not None
        with self._on_engine():
            asked, got = watch(self._loader, limits)
        return {"asked": asked, "got": got, "spans": self._recorder.spans()}

    @contextlib.contextmanager
    def _on_engine(self) -> Iterator[None]:
        import rustloader

        before = rustloader.engine_batches()
        with self._engine(), logged_warnings() as lines:
            yield
        served = rustloader.engine_batches() > before
        if self._order.engine == "rustloader" and not served and self._loader.num_workers > 0:
            raise Unusable(f"nothing to compare: {lines[0] if lines else 'the Rust engine delivered nothing'}")


def _seed(number: int) -> None:
    import numpy as np
    import torch

    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)
