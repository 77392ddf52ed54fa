"""The process with the user's loader. It answers requests until the command closes the connection.

Each engine has a separate process, so that the memory, imports and threads of one engine cannot affect the other, and
the command can kill a process that hangs.
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
from rustloader.tools.probe.deaths import describe_death, write_stacks_on_signal
from rustloader.tools.probe.factory import Unusable, find, make
from rustloader.tools.probe.failure import failure
from rustloader.tools.probe.log import warnings as logged_warnings

if TYPE_CHECKING:
    from torch.utils.data import DataLoader as AnyLoader

_PR_SET_PDEATHSIG = 1
# Maximum seconds for a process to exit after an interrupt. The shutdown of workers takes up to 5.5 s.
_INTERRUPT_SECONDS = 15


@contextlib.contextmanager
def on_torch() -> Iterator[None]:
    """Makes every loader use torch's iterator, including ``rustloader.DataLoader``."""
    from rustloader.dataloader import DataLoader

    get_iterator = DataLoader._get_iterator
    del DataLoader._get_iterator
    try:
        yield
    finally:
        DataLoader._get_iterator = get_iterator  # type: ignore[method-assign]


# Reasons why the engine delivered batches on torch's side.
_STATEFUL = "a rustloader.StatefulDataLoader has no torch iterator to compare with; let the factory return a DataLoader"
_ENGINE_ON_TORCH = (
    "torch's side used the Rust engine; the factory must not iterate its loader, nor call rustloader.install()"
)
# Context managers that make loaders use an engine, by the engine's name.
ENGINES: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "torch": on_torch,
    "rustloader": lambda: rustloader.installed(),  # not evaluated here, because the attribute imports torch
}
# How messages name what a loader runs on.
ENGINE_TEXTS = {"torch": "torch's iterator", "rustloader": "rustloader's iterator"}


class Side:
    """The user's loader on one engine. The command creates this object and sends it to the process.

    A request names a method of the object. ``quiet`` hides Python's warnings, for use when another process has already
    shown them.
    """

    # Set by `make`.
    loader: AnyLoader[Any]

    def __init__(self, target: str, engine: str, quiet: bool = False) -> None:
        self.target, self.engine, self.quiet = target, engine, quiet
        # What messages call the side.
        self.title = ENGINE_TEXTS[engine]
        # Sends a note (name, value) to the command before the answer. Set in `_answer`.
        self.send_note: Callable[[str, Any], None] = _no_command
        # Description of a worker's death that caused an error; None if there was none.
        self.death: str | None = None
        self._factory: Callable[[], Any] | None = None
        self._workers: list[Any] = []
        self._logged: list[str] = []
        self._served_before = 0

    def load(self) -> None:
        """Imports the user's code."""
        self._factory = find(self.target)

    def make(self, workers: int | None = None, remedy: str = "") -> None:
        """Calls the factory, and sets ``loader``. ``factory.make`` describes the arguments."""
        assert self._factory is not None, "load() comes first"
        rustloader.uninstall()  # RUSTLOADER_INSTALL or the user's module may have called install()
        self.loader = make(self._factory, self.target, workers, remedy)
        rustloader.uninstall()  # the factory may have called install(), too

    def seed(self, number: int) -> None:
        """Seeds torch, NumPy and random."""
        import numpy as np
        import torch

        torch.manual_seed(number)
        np.random.seed(number % 2**32)
        random.seed(number)

    @contextlib.contextmanager
    def on_engine(self) -> Iterator[None]:
        """Makes iterators that are created in the body of the ``with`` statement use the engine."""
        with ENGINES[self.engine](), logged_warnings() as self._logged:
            self._served_before = rustloader.engine_batches()
            yield

    def served(self) -> tuple[int, str]:
        """Returns the number of batches from the Rust engine since ``on_engine``, and the first warning since then.

        The warning is "" if there was none.
        """
        return rustloader.engine_batches() - self._served_before, "".join(self._logged[:1])

    def refuse_engine(self) -> None:
        """Raises ``Unusable`` if batches came from the Rust engine since ``on_engine``. For torch's side."""
        if self.served()[0]:
            is_stateful = isinstance(self.loader, rustloader.StatefulDataLoader)
            raise Unusable(f"nothing to compare: {_STATEFUL if is_stateful else _ENGINE_ON_TORCH}")

    def on_start(self, iterator: Iterator[Any]) -> None:
        """Sends the process IDs of the workers to the command, so that the command can name one that dies or hangs.

        Does nothing for remote workers: the command cannot check processes on other machines.
        """
        if is_remote(self.loader.multiprocessing_context):
            return
        self._workers = list(getattr(iterator, "_workers", ()))
        pids = {k: worker.pid for k, worker in enumerate(self._workers) if getattr(worker, "pid", None)}
        self.send_note("workers", pids)

    def on_progress(self) -> None:
        """Reports progress to the command."""
        self.send_note("progress", None)

    def on_error(self, error: BaseException) -> None:
        """Sets ``death`` if a worker's death caused the error. Must be called before the iterator shuts down."""
        self.death = self.death or describe_death(self._workers, error)

    def close(self) -> None:
        """Shuts down the workers that are still running. Does nothing by default."""


def end_workers(iterator: Iterator[Any] | None) -> None:
    """Shuts down the workers of an iterator, or of the one that it wraps. Does nothing for None."""
    for end in ("_shutdown_workers", "close"):
        if hasattr(iterator, end):
            getattr(iterator, end)()
            return


def _no_command(name: str, value: Any) -> None:
    raise AssertionError("only the process of `serve` can send notes")


def serve(descriptor: int, parent: int) -> None:
    """Answers requests (name, arguments...) with (name, value), until the connection closes or SIGINT arrives.

    The first message is a ``Side``. ``descriptor`` is the connection's file descriptor, and ``parent`` is the process
    ID of the command.
    """
    os.set_inheritable(descriptor, False)
    signal.signal(signal.SIGINT, _interrupt)
    connection = Connection(descriptor)
    try:
        _interrupt_with(parent)
        connection.send(("ready", write_stacks_on_signal()))
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
    side.send_note = lambda name, value: connection.send((name, value))
    # If a batch cannot be pickled, torch's workers only print the error, and the main process waits forever.
    patch = Patch("multiprocessing.queues.Queue._on_queue_feeder_error", multiprocessing.queues.Queue)
    patch.put_in(staticmethod(lambda error, batch: _report_unsent(side, error)))
    try:
        while True:
            name, *arguments = connection.recv()
            connection.send((name, getattr(side, name)(*arguments)))
    except (Exception, SystemExit) as error:
        # The error may also occur between two requests: torch's SIGCHLD handler raises when a worker dies.
        side.on_error(error)
        with contextlib.suppress(OSError):  # the command may have closed the connection
            side.send_note(*_note_of(side, error))
    finally:
        side.close()


def _report_unsent(side: Side, error: BaseException) -> None:
    with contextlib.suppress(OSError):  # the command may have ended after an error of another worker
        side.send_note("unsent", failure(error).text)


def _note_of(side: Side, error: BaseException) -> tuple[str, Any]:
    """Returns the note that reports an error."""
    if isinstance(error, Unusable):
        return "unusable", error
    described = failure(error)
    if side.death is not None:
        return "died", (side.death, described.details)
    return "unusable", Unusable(f"with {side.title}: {described}", described.details)


def _interrupt(*_: object) -> None:
    """Raises KeyboardInterrupt, and ignores later interrupts. If the process does not exit in time, an alarm kills its
    process group."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, lambda *_: os.killpg(0, signal.SIGKILL))
    signal.alarm(_INTERRUPT_SECONDS)
    raise KeyboardInterrupt


def _interrupt_with(parent: int) -> None:
    """Makes the system interrupt this process when its parent exits. Raises KeyboardInterrupt if the parent has already
    exited."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGINT))
    if os.getppid() != parent:
        raise KeyboardInterrupt
