"""Starts multiprocessing's fork server with the workers' modules preloaded.

Without preloading, each worker imports torch, which takes seconds of CPU time. A program that has called
``set_forkserver_preload``, or whose server is already running, keeps its list of modules.
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

# Python's default list of modules to preload.
_DEFAULT_MODULES = ["__main__"]
_PRELOADED = "rustloader.workers.preloaded"


class _Exit:
    """An object that ends the process that unpickles it."""

    def __reduce__(self) -> Any:
        return os._exit, (0,)


def ensure_running() -> None:
    """Starts the server if it is not running, and waits until it has imported its modules.

    A signal handler can interrupt this wait by raising an error. Without this function, the start of the first worker
    would wait for the server, with signals deferred.
    """
    pid = getattr(_server, "_forkserver_pid", None)
    with _preload():
        forkserver.ensure_running()
    started = getattr(_server, "_forkserver_pid", None)
    if started is not None and started != pid:
        try:
            _await_server()
        except (OSError, EOFError):
            # The server died during its imports. Python now starts another one, with the program's own list of modules.
            _await_end(started)
            forkserver.ensure_running()


@contextlib.contextmanager
def _preload() -> Iterator[None]:
    """Adds this package's module to the server's list of modules while the body starts the server."""
    modules = getattr(_server, "_preload_modules", None)
    if modules != _DEFAULT_MODULES or not FORKSERVER_PRELOAD.get() or _is_shadowed():
        yield
        return
    patch = Patch("multiprocessing.forkserver._forkserver._preload_modules", _server)
    try:
        # In some versions of Python the server runs the program's main file, and dies if that file does not exist.
        patch.put_in([_PRELOADED] if definitions.main_is_missing() else [*modules, _PRELOADED])
        yield
    finally:
        # `take_out` does not overwrite a list that another thread of the program has set in the meantime.
        patch.take_out()


def _is_shadowed() -> bool:
    """Returns True if the server may import another package of the same name from the working directory, which comes
    first on its path."""
    if sys.flags.safe_path:
        return False
    try:
        cwd = os.getcwd()
    except OSError:
        return False  # the directory has been deleted
    spec = importlib.machinery.PathFinder.find_spec("rustloader", [cwd])
    return spec is not None and spec.origin not in (None, sys.modules["rustloader"].__file__)


def _await_server() -> None:
    """Waits until the server has finished its imports, by having it start a process that exits at once.

    The fork also makes the server single-threaded: OpenBLAS starts threads when NumPy is imported, ends them before a
    fork, and starts them again only when it needs them.
    """
    status, data = forkserver.connect_to_new_process([])
    try:
        os.write(data, pickle.dumps(_Exit()))
        forkserver.read_signed(status)
        # After the pid, the server writes the exit code.
        forkserver.read_signed(status)
    finally:
        os.close(data)
        os.close(status)


def _await_end(pid: int) -> None:
    """Waits up to ``STATUS_AFTER`` seconds for the exit of a server that has closed its connections."""
    with contextlib.suppress(OSError):
        fd = os.pidfd_open(pid)
        try:
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            poll.poll(STATUS_AFTER * 1000)
        finally:
            os.close(fd)
