"""The end of a probe with the loader: a process that answers requests until the command closes the connection.

Each engine has a process of its own: neither finds memory, imports or threads that the other has left, and one that
hangs can be ended from outside.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing.queues
import os
import random
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from rustloader.probe import stacks
from rustloader.probe.deaths import death
from rustloader.probe.factory import Unusable, find, make
from rustloader.probe.failure import failure
from rustloader.probe.log import warnings as logged_warnings

__all__ = ["Side", "end_workers", "serve"]

_PR_SET_PDEATHSIG = 1
# Seconds that a process has to end after an interrupt. The shutdown of workers takes up to 5.5.
_SWALLOWED = 15


class Side:
    """The user's loader on one engine. Subclasses add the requests: methods, by their names.

    The command makes it and sends it to the process, where it does its work.

    Args:
        target: the factory.
        engine: a name of ``ENGINES``.
        quiet: whether Python's warnings are hidden, because another process has shown them.
    """

    def __init__(self, target: str, engine: str, quiet: bool = False) -> None:
        self.target, self.engine, self.quiet = target, engine, quiet
        self.loader: Any = None
        # Sends the command a note (name, value) before the answer.
        self.note: Callable[[str, Any], None] = _no_command
        # The worker that has died, in words.
        self.dead: str | None = None
        self._factory: Callable[[], Any] | None = None
        self._workers: list[Any] = []
        self._logged: list[str] = []
        self._served_before = 0

    def load(self) -> None:
        """Imports the user's code."""
        self._factory = find(self.target)

    def make(self, workers: int | None = None, remedy: str = "") -> None:
        """Calls the factory; see ``factory.make``."""
        import rustloader

        assert self._factory is not None, "load() comes first"
        rustloader.uninstall()  # by RUSTLOADER_INSTALL, or by the user's module
        self.loader = make(self._factory, self.target, workers, remedy)
        rustloader.uninstall()  # by the factory

    def seed(self, number: int) -> None:
        """Seeds torch, numpy and random."""
        import numpy as np
        import torch

        torch.manual_seed(number)
        np.random.seed(number % 2**32)
        random.seed(number)

    @contextlib.contextmanager
    def on_engine(self) -> Iterator[None]:
        """Iterators that are made meanwhile are the engine's."""
        import rustloader
        from rustloader.probe.engines import ENGINES

        with ENGINES[self.engine](), logged_warnings() as self._logged:
            self._served_before = rustloader.engine_batches()
            yield

    def served(self) -> tuple[int, str]:
        """The batches that the Rust engine has delivered since ``on_engine``, and the first line of the log."""
        import rustloader

        return rustloader.engine_batches() - self._served_before, "".join(self._logged[:1])

    def began(self, iterator: Any) -> None:
        """Tells the command the workers of an iterator, so that it can name one that dies or hangs."""
        self._workers = list(getattr(iterator, "_workers", ()))
        pids = {k: worker.pid for k, worker in enumerate(self._workers) if getattr(worker, "pid", None)}
        self.note("workers", pids)

    def beat(self) -> None:
        """Tells the command that there is progress."""
        self.note("progress", None)

    def failed(self, error: BaseException) -> None:
        """Looks for a worker whose death is the reason of an error, before the iterator's end ends all of them."""
        self.dead = self.dead or death(self._workers, error)

    def close(self) -> None:
        """Ends what is left of the loader."""


def end_workers(iterator: Any) -> None:
    """Ends the workers of an iterator. A loader's class may wrap torch's in one of its own."""
    for end in ("_shutdown_workers", "close"):
        if hasattr(iterator, end):
            getattr(iterator, end)()
            return


def _no_command(name: str, value: Any) -> None:
    raise AssertionError("this is the command's process")


def serve(descriptor: int, parent: int) -> None:
    """Answers requests, each (name, arguments...), with (name, value), until the other end is closed or SIGINT arrives.

    Args:
        descriptor: the connection. A ``Side`` comes first.
        parent: process id of the command.
    """
    os.set_inheritable(descriptor, False)
    signal.signal(signal.SIGINT, _interrupt)
    connection = Connection(descriptor)
    try:
        _end_with(parent)
        connection.send(("ready", stacks.install()))
        _answer(connection, connection.recv())
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except (EOFError, BrokenPipeError):  # the command ended at once
        pass
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _answer(connection: Connection, side: Side) -> None:
    if side.quiet:
        warnings.simplefilter("ignore")
    side.note = lambda name, value: connection.send((name, value))
    # torch's workers only print that a batch cannot be pickled, and their main process waits for ever.
    multiprocessing.queues.Queue._on_queue_feeder_error = staticmethod(  # type: ignore[attr-defined]
        lambda error, batch: _send_unsent(side, error)
    )
    try:
        while True:
            name, *arguments = connection.recv()
            connection.send((name, getattr(side, name)(*arguments)))
    except (Exception, SystemExit) as error:
        # Also while a request is awaited: torch's handler for SIGCHLD raises the death of a worker.
        side.failed(error)
        with contextlib.suppress(OSError):  # the other end is closed
            side.note(*_end(side, error))
    finally:
        side.close()


def _send_unsent(side: Side, error: BaseException) -> None:
    with contextlib.suppress(OSError):  # another worker was first, and the command has ended
        side.note("unsent", failure(error).text)


def _end(side: Side, error: BaseException) -> tuple[str, Any]:
    """What the command is told of an error."""
    if isinstance(error, Unusable):
        return "unusable", error
    found = failure(error)
    if side.dead is not None:
        return "died", (side.dead, found.details)
    return "unusable", Unusable(f"with {side.engine}'s iterator: {found}", found.details)


def _interrupt(*_: object) -> None:
    """Once: a second time would disturb the end. Where user code swallows the interrupt, an alarm kills the group."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, lambda *_: os.killpg(0, signal.SIGKILL))
    signal.alarm(_SWALLOWED)
    raise KeyboardInterrupt


def _end_with(parent: int) -> None:
    """Asks the system to interrupt this process when its parent ends."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGINT))
    if os.getppid() != parent:
        raise KeyboardInterrupt
