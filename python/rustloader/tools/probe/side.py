"""The process with the loader, which answers requests until the command closes the connection.

Each engine has a process of its own: no memory, imports or threads of the other can affect it, and the command can end
it if it hangs.
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
from typing import TYPE_CHECKING, Any

import rustloader
from rustloader.remote.context import is_remote
from rustloader.system.patches import Patch
from rustloader.tools.probe.deaths import death, install
from rustloader.tools.probe.factory import Unusable, find, make
from rustloader.tools.probe.failure import failure
from rustloader.tools.probe.log import warnings as logged_warnings

if TYPE_CHECKING:
    from torch.utils.data import DataLoader as AnyLoader

_PR_SET_PDEATHSIG = 1
# Seconds for a process to end after an interrupt. The shutdown of workers takes up to 5.5.
_INTERRUPT_SECONDS = 15


@contextlib.contextmanager
def on_torch() -> Iterator[None]:
    """Puts every loader on torch's iterator, ``rustloader.DataLoader`` included."""
    from rustloader.dataloader import DataLoader

    get_iterator = DataLoader._get_iterator
    del DataLoader._get_iterator
    try:
        yield
    finally:
        DataLoader._get_iterator = get_iterator  # type: ignore[method-assign]


# By the name that results show.
ENGINES: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "torch": on_torch,
    "rustloader": lambda: rustloader.installed(),  # the attribute imports torch
    "ray": lambda: rustloader.installed(),
    "cached": lambda: rustloader.installed(),
}


class Side:
    """The user's loader on one engine. The command creates it and sends it to the process. Each method of a subclass is
    a request. ``quiet`` hides Python's warnings, which another process has shown."""

    # Set by `make`.
    loader: AnyLoader[Any]

    def __init__(self, target: str, engine: str, quiet: bool = False) -> None:
        self.target, self.engine, self.quiet = target, engine, quiet
        # Sends the command a note (name, value) before the answer. `serve` sets it.
        self.note: Callable[[str, Any], None] = _no_command
        # Describes the worker that has died.
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
        assert self._factory is not None, "load() comes first"
        rustloader.uninstall()  # RUSTLOADER_INSTALL or the user's module may have installed it
        self.loader = make(self._factory, self.target, workers, remedy)
        rustloader.uninstall()  # and so may the factory

    def seed(self, number: int) -> None:
        """Seeds torch, numpy and random."""
        import numpy as np
        import torch

        torch.manual_seed(number)
        np.random.seed(number % 2**32)
        random.seed(number)

    @contextlib.contextmanager
    def on_engine(self) -> Iterator[None]:
        """Makes iterators that are created in the block use the engine."""
        with ENGINES[self.engine](), logged_warnings() as self._logged:
            self._served_before = rustloader.engine_batches()
            yield

    def served(self) -> tuple[int, str]:
        """Returns the batches that the Rust engine has delivered since ``on_engine``, and the first line of the log."""
        return rustloader.engine_batches() - self._served_before, "".join(self._logged[:1])

    def began(self, iterator: Iterator[Any]) -> None:
        """Sends the command the process ids of the workers, so that it can name one that dies or hangs. It cannot look
        after processes of other machines."""
        if is_remote(self.loader.multiprocessing_context):
            return
        self._workers = list(getattr(iterator, "_workers", ()))
        pids = {k: worker.pid for k, worker in enumerate(self._workers) if getattr(worker, "pid", None)}
        self.note("workers", pids)

    def beat(self) -> None:
        """Reports progress to the command."""
        self.note("progress", None)

    def failed(self, error: BaseException) -> None:
        """Notes the worker whose death caused an error, before the iterator's shutdown ends all of them."""
        self.dead = self.dead or death(self._workers, error)

    def close(self) -> None:
        """Ends workers that are left."""


def end_workers(iterator: Iterator[Any] | None) -> None:
    """Ends the workers of an iterator: torch's, or one of a class that wraps it."""
    for end in ("_shutdown_workers", "close"):
        if hasattr(iterator, end):
            getattr(iterator, end)()
            return


def _no_command(name: str, value: Any) -> None:
    raise AssertionError("only the process that serves can send notes")


def serve(descriptor: int, parent: int) -> None:
    """Answers requests (name, arguments...) with (name, value), until the connection closes or SIGINT arrives. The
    first message is a ``Side``. ``parent`` is the process id of the command."""
    os.set_inheritable(descriptor, False)
    signal.signal(signal.SIGINT, _interrupt)
    connection = Connection(descriptor)
    try:
        _end_with(parent)
        connection.send(("ready", install()))
        _answer(connection, connection.recv())
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except (EOFError, BrokenPipeError):  # the command has ended
        pass
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _answer(connection: Connection, side: Side) -> None:
    if side.quiet:
        warnings.simplefilter("ignore")
    side.note = lambda name, value: connection.send((name, value))
    # torch's workers only print that a batch cannot be pickled, and the main process never stops waiting.
    patch = Patch("multiprocessing.queues.Queue._on_queue_feeder_error", multiprocessing.queues.Queue)
    patch.put_in(staticmethod(lambda error, batch: _send_unsent(side, error)))
    try:
        while True:
            name, *arguments = connection.recv()
            connection.send((name, getattr(side, name)(*arguments)))
    except (Exception, SystemExit) as error:
        # Also between two requests: torch's SIGCHLD handler raises when a worker dies.
        side.failed(error)
        with contextlib.suppress(OSError):  # the connection is closed
            side.note(*_end(side, error))
    finally:
        side.close()


def _send_unsent(side: Side, error: BaseException) -> None:
    with contextlib.suppress(OSError):  # another worker has reported it, and the command has ended
        side.note("unsent", failure(error).text)


def _end(side: Side, error: BaseException) -> tuple[str, Any]:
    """Returns the note that reports an error."""
    if isinstance(error, Unusable):
        return "unusable", error
    described = failure(error)
    if side.dead is not None:
        return "died", (side.dead, described.details)
    return "unusable", Unusable(f"with {side.engine}'s iterator: {described}", described.details)


def _interrupt(*_: object) -> None:
    """Raises KeyboardInterrupt once. If user code swallows it, an alarm kills the group."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, lambda *_: os.killpg(0, signal.SIGKILL))
    signal.alarm(_INTERRUPT_SECONDS)
    raise KeyboardInterrupt


def _end_with(parent: int) -> None:
    """Asks the system to interrupt this process when its parent ends."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGINT))
    if os.getppid() != parent:
        raise KeyboardInterrupt
