"""The process of ``check`` that has the user's loader on one engine, and takes its batches when it is asked to.

Each side has a process of its own: both start from the same state of the user's modules, and one that hangs can be
ended from outside.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import random
import signal
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from rustloader._cli import stacks
from rustloader._cli.factory import Unusable, find, make
from rustloader._cli.failure import failure
from rustloader._cli.log import warnings as logged_warnings
from rustloader._cli.measure import _end_with, _interrupt
from rustloader._cli.workers import death

__all__ = ["Event", "SideOrder", "serve"]


@dataclass(frozen=True)
class SideOrder:
    """What a process has to do.

    Attributes:
        target: the factory.
        engine: a name of ``ENGINES``.
        seed: for torch, numpy and random.
        quiet: whether Python's warnings were shown before, by another process.
        parent: process id of the command.
    """

    target: str
    engine: str
    seed: int
    quiet: bool
    parent: int


class Event(NamedTuple):
    """The outcome of one call of ``next``.

    ``key`` is what both sides have to agree in. ``text`` is the error in a short form, ``details`` its traceback.
    """

    kind: str  # "batch", "error", "end" or "death"
    key: Any = None
    text: str = ""
    details: str = ""


def serve(descriptor: int) -> None:
    """Answers requests, each (name,), with (name, value), until the other end is closed or SIGINT arrives."""
    os.set_inheritable(descriptor, False)
    signal.signal(signal.SIGINT, _interrupt)
    connection = Connection(descriptor)
    try:
        _serve(connection)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except (EOFError, BrokenPipeError):
        pass
    except Unusable as error:
        _tell(connection, error)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _serve(connection: Connection) -> None:
    order: SideOrder = connection.recv()
    _end_with(order.parent)
    side = Side(order)
    connection.send(("ready", stacks.install()))
    try:
        while True:
            name, *arguments = connection.recv()
            connection.send((name, getattr(side, name)(*arguments)))
    except (EOFError, BrokenPipeError, Unusable):
        raise
    except Exception as error:
        # torch's handler for SIGCHLD raises the death of a worker wherever this process is.
        event = side.raised(error)
        if event.kind != "death":
            raise Unusable(f"{order.engine}: {event.text}", event.details) from None
        connection.send(("death", event))


def _tell(connection: Connection, error: Unusable) -> None:
    with contextlib.suppress(OSError):
        connection.send(("unusable", error))


class Side:
    """One loader on one engine. The methods are the requests, in this order."""

    def __init__(self, order: SideOrder) -> None:
        self._order = order
        self._factory: Callable[[], Any] = _no_factory
        self._loader: Any = None
        self._iterator: Any = None
        self._batch: Any = None
        self._open = contextlib.ExitStack()
        self._logged: list[str] = []
        self._engine_batches = 0

    def load(self) -> None:
        """Imports the user's code."""
        if self._order.quiet:
            warnings.simplefilter("ignore")
        self._factory = find(self._order.target)

    def make(self) -> dict[str, Any]:
        """Calls the factory. Returns what there is to say about the loader."""
        from torch.utils.data import IterableDataset

        import rustloader

        rustloader.uninstall()  # by RUSTLOADER_INSTALL, or by the user's module
        self._seed()
        self._loader = make(self._factory, self._order.target)
        rustloader.uninstall()  # by the factory
        endless = isinstance(self._loader.dataset, IterableDataset)
        return {
            "num_workers": self._loader.num_workers,
            "in_order": getattr(self._loader, "in_order", True),
            "may_be_endless": endless,
        }

    def start(self) -> Event | dict[int, int]:
        """Starts the workers. Returns their process ids, by number."""
        import rustloader
        from rustloader._cli.engines import ENGINES

        self._open.enter_context(ENGINES[self._order.engine]())
        self._logged = self._open.enter_context(logged_warnings())
        self._engine_batches = rustloader.engine_batches()
        try:
            self._iterator = iter(self._loader)
        except (Exception, SystemExit) as error:
            return self.raised(error)
        return {k: worker.pid for k, worker in enumerate(self._workers()) if getattr(worker, "pid", None)}

    def next(self) -> Event:
        """Takes a batch."""
        from rustloader._cli.leaves import summary

        self._batch = None
        try:
            self._batch = next(self._iterator)
        except StopIteration:
            return Event("end")
        except (Exception, SystemExit) as error:
            return self.raised(error)
        try:
            return Event("batch", _digest(repr(summary(self._batch)).encode(errors="surrogatepass")))
        except Exception as error:
            event = self.raised(error)
            if event.kind == "death":
                return event
            raise Unusable(f"a batch cannot be compared: {event.text}", event.details) from None

    def served(self) -> tuple[int, str]:
        """How many batches the engine has delivered, and the first line that the loader has logged."""
        import rustloader

        return rustloader.engine_batches() - self._engine_batches, "".join(self._logged[:1])

    def finish(self) -> bytes:
        """Ends the workers. Returns a digest of the random state."""
        import numpy as np
        import torch

        for end in ("_shutdown_workers", "close"):
            if hasattr(self._iterator, end):
                getattr(self._iterator, end)()
                break
        self._open.close()
        state = (torch.get_rng_state().tolist(), np.random.get_state(), random.getstate())
        return _digest(pickle.dumps(state))

    def packed(self) -> bytes | None:
        """The last batch, pickled; None if that cannot be done."""
        try:
            return pickle.dumps(self._batch)
        except Exception:
            return None

    def difference(self, packed: bytes | None) -> str:
        """Where the last batch, which is torch's, differs from the engine's."""
        from rustloader._cli.leaves import difference, summary

        try:
            other = pickle.loads(packed or b"")
            if summary(other) == summary(self._batch):
                return "the batches differ in what a copy does not keep"
            return difference(self._batch, other)
        except Exception as error:
            return f"the batches differ; where cannot be said: {failure(error).text}"

    def _seed(self) -> None:
        import numpy as np
        import torch

        torch.manual_seed(self._order.seed)
        np.random.seed(self._order.seed % 2**32)
        random.seed(self._order.seed)

    def _workers(self) -> list[Any]:
        return list(getattr(self._iterator, "_workers", []))

    def raised(self, error: BaseException) -> Event:
        """What an exception means: an error, or the death of a worker."""
        found = failure(error)
        if died := death(self._workers(), error):
            return Event("death", None, died)
        return Event("error", found.text, str(found), found.details)


def _no_factory() -> None:
    raise AssertionError("load() comes first")


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()
