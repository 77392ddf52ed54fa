"""Starts multiprocessing's fork server with the workers' modules preloaded.

Without preloading, each worker imports torch, which takes seconds of CPU time. A program that has called
``set_forkserver_preload``, or whose server is already running, keeps its list of modules.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import multiprocessing
import os
import pickle
import select
import sys
from collections.abc import Iterator
from multiprocessing import forkserver
from types import FrameType
from typing import Any

from rustloader.settings.limits import FORKSERVER_PRELOAD, STATUS_AFTER
from rustloader.system.patches import Patch
from rustloader.workers import definitions

_server: Any = forkserver._forkserver

# Python's default list of modules to preload.
_DEFAULT_MODULES = ["__main__"]
_PRELOADED = "rustloader.workers.preloaded"
# The exit code of a server whose import of the main script reaches a loader that starts workers.
_UNGUARDED_CODE = 76
_UNGUARDED = (
    "Put the top-level code of the main script under `if __name__ == '__main__':`, or use "
    "multiprocessing_context='fork': workers started by forkserver, Python's default from 3.14 on, import the script, "
    "and it starts a DataLoader's workers again."
)


class UnguardedScript(RuntimeError):
    """Raised if the import of the main script, which workers repeat, starts workers."""


class _Exit:
    """An object that ends the process that unpickles it."""

    def __reduce__(self) -> Any:
        return os._exit, (0,)


def ensure_running() -> None:
    """Starts the server if it is not running, and waits until it has imported its modules.

    A signal handler can interrupt this wait by raising an error. Without this function, the start of the first worker
    would wait for the server, with signals deferred.

    Raises:
        UnguardedScript: The server ended because its import of the main script starts workers.
        SystemExit: This process is that server.
    """
    if _is_importing_main():
        raise SystemExit(_UNGUARDED_CODE)
    pid = getattr(_server, "_forkserver_pid", None)
    with _preload():
        forkserver.ensure_running()
    started = getattr(_server, "_forkserver_pid", None)
    if started is not None and started != pid:
        try:
            _await_server()
        except (OSError, EOFError):
            if _exit_code(started) == _UNGUARDED_CODE:
                raise UnguardedScript(_UNGUARDED) from None
            # The server died during its imports. Python now starts another one, with the program's own list of modules.
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


def _exit_code(pid: int) -> int | None:
    """Waits up to ``STATUS_AFTER`` seconds for the exit of a server that has closed its connections, and returns its
    exit code or the number of its signal. Returns None if it is unknown. ``multiprocessing`` still reaps the server."""
    with contextlib.suppress(OSError):
        fd = os.pidfd_open(pid)
        try:
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            poll.poll(STATUS_AFTER * 1000)
        finally:
            os.close(fd)
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        return None if ended is None else ended.si_status
    return None


def _is_importing_main() -> bool:
    """Returns True in a fork server that is importing the main script."""
    if getattr(_server, "_forkserver_address", None) is not None:
        return False
    if not getattr(multiprocessing.current_process(), "_inheriting", False):
        return False
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not forkserver.main.__code__:
        frame = frame.f_back
    return frame is not None
