"""The process of ``bench`` that has one loader on one engine, and answers requests to measure it.

Each engine has a process of its own, so that neither finds memory, imports or threads that the other has left.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import random
import signal
import sys
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

from rustloader._cli import stacks
from rustloader._cli.factory import Unusable, find, make
from rustloader._cli.failure import failure
from rustloader._cli.log import warnings as logged_warnings
from rustloader._cli.machine import machine
from rustloader._cli.passes import run_pass
from rustloader._cli.timeline import Recorder, watch
from rustloader._cli.workers import advice, death

__all__ = ["Order", "serve"]

_PR_SET_PDEATHSIG = 1
# Seconds that a process has to end after an interrupt. The shutdown of workers takes up to 5.5.
_SWALLOWED = 15


@dataclass(frozen=True)
class Order:
    """What a process has to measure.

    Attributes:
        target: the factory.
        engine: a name of ``ENGINES``.
        workers: num_workers of the loader; None: as the factory sets it.
        parent: process id of the command.
        records: a folder for the timelines of the workers; None: the loader is left as it is.
        quiet: whether Python's warnings are hidden, because another process has shown them.
    """

    target: str
    engine: str
    workers: int | None
    parent: int
    records: str | None = None
    quiet: bool = False


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
    """Once: a second time would disturb the end. Where user code swallows the interrupt, an alarm kills the group."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, lambda *_: os.killpg(0, signal.SIGKILL))
    signal.alarm(_SWALLOWED)
    raise KeyboardInterrupt


def _serve(connection: Connection) -> None:
    engine = "?"
    try:
        order: Order = connection.recv()
        engine = order.engine
        _end_with(order.parent)
        with _Side(order, connection) as side:
            connection.send(("ready", side.about()))
            while True:
                name, *arguments = connection.recv()
                connection.send((name, getattr(side, name)(*arguments)))
    except (EOFError, BrokenPipeError):
        pass
    except Unusable as error:
        _send(connection, "unusable", error)
    except Exception as error:
        found = failure(error)
        _send(connection, "unusable", Unusable(f"with {engine}'s iterator: {found}", found.details))


def _send(connection: Connection, name: str, value: Any) -> None:
    with contextlib.suppress(OSError):
        connection.send((name, value))


def _end_with(parent: int) -> None:
    """Asks the system to interrupt this process when its parent ends."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGINT))
    if os.getppid() != parent:
        raise KeyboardInterrupt


class _Side:
    """A loader on an engine. The methods from ``about`` on are the requests. It watches its own passes."""

    def __init__(self, order: Order, connection: Connection) -> None:
        connection.send(("stacks", stacks.install()))
        if order.quiet:
            warnings.simplefilter("ignore")
        factory = find(order.target)  # before torch is imported: a wrong name is an error at once
        import rustloader
        from rustloader._cli.engines import ENGINES

        rustloader.uninstall()  # RUSTLOADER_INSTALL may have been set
        if order.workers is not None:  # more workers than cores are allowed in a sweep
            warnings.filterwarnings("ignore", "This DataLoader will create")
        self._order, self._connection = order, connection
        remedy = ", or pass --workers 2"
        self._loader = make(factory, order.target, order.workers, remedy)
        rustloader.uninstall()  # by the user's module or factory
        self._recorder: Recorder | None = None
        if order.records is not None:
            self._recorder = Recorder(order.records, self._loader.worker_init_fn)
            self._loader.worker_init_fn = self._recorder
        self._engine = ENGINES[order.engine]
        self._cut_short = False
        self._workers: list[Any] = []
        self._dead: str | None = None

    # --- watching a pass

    def began(self, iterator: Any) -> None:
        """Tells the command who the workers are, so that it can name one that hangs."""
        self._workers = list(getattr(iterator, "_workers", ()))
        self._connection.send(("workers", {k: worker.pid for k, worker in enumerate(self._workers)}))

    def beat(self) -> None:
        """Tells the command that the pass goes on."""
        self._connection.send(("progress", None))

    def failed(self, error: Exception) -> None:
        """Looks for a worker that has died, before the end of the pass ends all of them."""
        self._dead = death(self._workers, error)

    def __enter__(self) -> _Side:
        return self

    def __exit__(self, *error: object) -> None:
        iterator: Any = getattr(self._loader, "_iterator", None)  # of persistent workers
        if hasattr(iterator, "_shutdown_workers"):
            iterator._shutdown_workers()

    def about(self) -> dict[str, Any]:
        """The machine and the loader."""
        loader = self._loader
        context = loader.multiprocessing_context or multiprocessing
        method = getattr(context, "get_start_method", None)
        return {
            "machine": machine(),
            "num_workers": loader.num_workers,
            "prefetch_factor": loader.prefetch_factor,
            "batch_size": loader.batch_size,
            "persistent_workers": bool(loader.persistent_workers),
            "pin_memory": bool(loader.pin_memory),
            "start_method": method() if method else type(context).__name__,
        }

    def run(self, number: int, limits: Any, weigh: bool) -> dict[str, Any]:
        """A pass. Those with the same number see the same random numbers on both engines."""
        _seed(number)
        with self._on_engine():
            result = run_pass(self._loader, limits, weigh, self)
        self._cut_short |= not result.complete
        return asdict(result)

    def verdict(self) -> dict[str, Any]:
        """The verdict of the statistics of all passes."""
        import rustloader

        stats = rustloader.stats(self._loader)
        # Passes that were cut short start workers more often than whole epochs do.
        judged = replace(stats, epochs=1) if self._cut_short else stats
        return {**asdict(judged.verdict()), "stats": stats.as_dict()}

    def watch(self, limits: Any) -> dict[str, Any]:
        """The timeline of the main process and the workers."""
        _seed(0)
        assert self._recorder is not None
        with self._on_engine():
            asked, got = watch(self._loader, limits, self)
        return {"asked": asked, "got": got, "spans": self._recorder.spans()}

    @contextlib.contextmanager
    def _on_engine(self) -> Iterator[None]:
        import rustloader

        before = rustloader.engine_batches()
        engine = self._order.engine
        with self._engine(), logged_warnings() as lines:
            try:
                yield
            except StopIteration:
                raise Unusable(f"the loader of {self._order.target} yields no batches") from None
            except Exception as error:
                if self._dead is None:
                    raise
                text = f"with {engine}'s iterator, {self._dead}\n  {advice(self._dead)}"
                raise Unusable(text, failure(error).details) from None
        served = rustloader.engine_batches() > before
        if engine == "rustloader" and not served and self._loader.num_workers > 0:
            raise Unusable(f"nothing to compare: {lines[0] if lines else 'the Rust engine delivered nothing'}")


def _seed(number: int) -> None:
    import numpy as np
    import torch

    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)
