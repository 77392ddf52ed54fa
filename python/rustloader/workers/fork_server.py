"""Starts multiprocessing's fork server with the modules of a worker imported.

A worker of a server that has imported nothing imports torch, which takes seconds of processor time. A program that has
called ``set_forkserver_preload``, or whose server runs already, keeps its choice.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import os
import pickle
import select
import sys
from collections.abc import Iterator
from multiprocessing import forkserver
from typing import Any

from rustloader.settings.limits import FORKSERVER_PRELOAD, STATUS_AFTER
from rustloader.system.patches import Patch
from rustloader.workers import definitions

_server: Any = forkserver._forkserver

# Python's own list.
_PYTHONS = ["__main__"]
_OURS = "rustloader.workers.preloaded"


class _Exit:
    """Ends the process that unpickles it."""

    def __reduce__(self) -> Any:
        return os._exit, (0,)


def ensure_running() -> None:
    """Starts the server if it does not run, and waits until it has imported its modules.

    The wait ends with the error of a signal handler. The start of the first worker, which waits as well, defers
    signals.
    """
    pid = getattr(_server, "_forkserver_pid", None)
    with _preload():
        forkserver.ensure_running()
    started = getattr(_server, "_forkserver_pid", None)
    if started is not None and started != pid:
        try:
            _await_server()
        except (OSError, EOFError):
            # It has ended while it imported. Python starts another one, by the program's own list.
            _await_end(started)
            forkserver.ensure_running()


@contextlib.contextmanager
def _preload() -> Iterator[None]:
    """Adds this package's module to the list of the program's server, while that starts."""
    before = getattr(_server, "_preload_modules", None)
    if before != _PYTHONS or not FORKSERVER_PRELOAD.get() or _is_shadowed():
        yield
        return
    patch = Patch("multiprocessing.forkserver._forkserver._preload_modules", _server)
    try:
        # Some Pythons have the server run the file of `__main__`, and end with it where that is no file.
        patch.put_in([_OURS] if definitions.main_is_missing() else [*before, _OURS])
        yield
    finally:
        # Not if another thread of the program has set its own list.
        patch.take_out()


def _is_shadowed() -> bool:
    """Returns True if the server may find another package of the same name in the working directory, where it looks
    first."""
    if sys.flags.safe_path:
        return False
    try:
        cwd = os.getcwd()
    except OSError:
        return False  # the directory has been deleted
    spec = importlib.machinery.PathFinder.find_spec("rustloader", [cwd])
    return spec is not None and spec.origin not in (None, sys.modules["rustloader"].__file__)


def _await_server() -> None:
    """Lets the server start a process that exits at once.

    That also makes the server single-threaded: OpenBLAS has started threads when NumPy was imported. It ends them
    before a fork, and starts them again where they are used.
    """
    status, data = forkserver.connect_to_new_process([])
    try:
        os.write(data, pickle.dumps(_Exit()))
        forkserver.read_signed(status)
        # The server writes the exit code as well.
        forkserver.read_signed(status)
    finally:
        os.close(data)
        os.close(status)


def _await_end(pid: int) -> None:
    """Waits until a server that has closed its connections can be reaped."""
    with contextlib.suppress(OSError):
        fd = os.pidfd_open(pid)
        try:
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            poll.poll(STATUS_AFTER * 1000)
        finally:
            os.close(fd)
