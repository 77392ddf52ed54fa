"""Names the DataLoader argument that cannot be pickled for a worker, or that a worker cannot unpickle.

The pickle has a mark before each argument. Both ends process the pickle in order, so the last mark before an error
names the argument that caused it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import threading
import traceback
from collections.abc import Iterator
from multiprocessing import reduction
from typing import Any

# Maximum number of characters of a traceback in a report.
_MAX_TRACEBACK = 1 << 16
_UNPICKLABLE = (
    "The DataLoader's argument {} cannot be pickled. Workers started by spawn or forkserver, or on another machine, "
    "receive a pickle of it: define its classes and functions at the top level of a module and open files in the "
    "workers, or use multiprocessing_context='fork'."
)
_UNLOADABLE = (
    "Workers started by spawn or forkserver import the classes and functions of their arguments. They cannot import "
    "definitions from the body of `if __name__ == '__main__':`, or from the prompt of `python -i`: move these into a "
    "module, or use multiprocessing_context='fork'."
)
_UNKNOWN = (
    "The worker ended before it could load its arguments; its own error is on stderr. Workers started by spawn or "
    "forkserver import the main script again: a script that starts such workers must guard its top-level code with "
    "`if __name__ == '__main__':`."
)
_current = threading.local()


def set_current(name: str | None) -> None:
    """Records the name of the argument that this thread pickles or unpickles next, or None if what follows is not an
    argument of the loader."""
    _current.name = name


class Mark:
    """A mark before an argument in a pickle. When it is pickled or unpickled, it calls ``set_current`` with the
    argument's name."""

    def __init__(self, name: str | None) -> None:
        self._name = name

    def __reduce__(self) -> Any:
        set_current(self._name)
        return set_current, (self._name,)


def marked(dataset: Any, job: Any, last: Any) -> tuple[Any, ...]:
    """Returns the arguments of a worker, with marks: the dataset first and ``last`` at the end. Both may share objects
    with the arguments in between."""
    values = {"collate_fn": job.collate_fn, "worker_init_fn": job.init_fn, "on_error": job.config.on_error}
    marks: list[Any] = [Mark("dataset"), dataset]
    for name, value in values.items():
        marks += [Mark(name), value]
    return (*marks, Mark(None), last)


def unmarked(contents: tuple[Any, ...]) -> tuple[Any, Any]:
    """Returns the dataset and ``last`` from the unpickled result of ``marked``."""
    return contents[1], contents[-1]


def current() -> str | None:
    """Returns the name of the argument that this thread pickles or unpickles, or None."""
    return getattr(_current, "name", None)


def add_first_note(error: BaseException, note: str) -> None:
    """Adds a note before the notes that an error has. From Python 3.14 on, pickle adds one per level of an object."""
    error.add_note(note)
    error.__notes__.insert(0, error.__notes__.pop())


@contextlib.contextmanager
def naming_argument() -> Iterator[None]:
    """If the body raises an error, adds a note that names the argument whose pickling failed."""
    set_current(None)
    try:
        yield
    except Exception as error:
        if (name := current()) is not None:
            add_first_note(error, _UNPICKLABLE.format(name))
        raise
    finally:
        set_current(None)


class Reports:
    """A file that all workers of a group share. A worker that cannot load its arguments writes the reason to it and
    exits."""

    # `__del__` may run while the interpreter exits, when the globals of this module are already None.
    _close, _fstat = staticmethod(os.close), staticmethod(os.fstat)
    # -1 if there is no file: after `close`, or if `memfd_create` failed in the constructor.
    _fd = -1
    _file: tuple[int, int] | None = None

    def __init__(self) -> None:
        self._fd = os.memfd_create("rustloader-reports", os.MFD_CLOEXEC)
        # Workers may write at the same time; with O_APPEND, their reports do not overwrite each other.
        fcntl.fcntl(self._fd, fcntl.F_SETFL, os.O_APPEND)
        self._file = self._identity()

    def _identity(self) -> tuple[int, int] | None:
        """Returns the device and inode of the descriptor's file, or None if it is closed. The program may close the
        descriptor, and its number may then belong to another file."""
        try:
            status = self._fstat(self._fd)
        except OSError:
            return None
        return status.st_dev, status.st_ino

    def for_child(self) -> Any:
        """Returns the descriptor in a form that can be pickled for a child process."""
        return reduction.DupFd(self._fd)

    def of(self, pid: int) -> str | None:
        """Returns the report of a process that could not load an argument, or None if it has not written one."""
        if self._fd < 0 or self._identity() != self._file:
            return None
        data = os.pread(self._fd, os.fstat(self._fd).st_size, 0)
        for line in data.splitlines():
            with contextlib.suppress(ValueError):
                report = json.loads(line)
                if report["pid"] == pid:
                    return str(report["text"])
        return None

    def close(self) -> None:
        """Closes the file."""
        fd = self._fd
        if fd >= 0 and self._identity() == self._file:
            self._close(fd)
        self._fd = -1

    __del__ = close


@contextlib.contextmanager
def reporting(duplicate: Any, worker_id: int) -> Iterator[None]:
    """Reports an error that the body raises in a worker, and ends the worker. ``duplicate`` is the result of
    ``Reports.for_child``, or None: then the error is raised."""
    fd = None if duplicate is None else duplicate.detach()
    try:
        yield
    except Exception as error:
        if fd is not None:
            subject = current() or "settings and the state that it starts from"
            text = f"It could not load its {subject}. Caught {type(error).__name__} in DataLoader worker process "
            text += f"{worker_id}.\nOriginal {''.join(traceback.format_exception(error))[-_MAX_TRACEBACK:]}"
            line = json.dumps({"pid": os.getpid(), "text": text})
            # If this write fails, its error must not replace the original error.
            with contextlib.suppress(OSError):
                os.write(fd, f"{line}\n".encode())
                # The main process raises it; Python would print it once more.
                raise SystemExit(1) from None
        raise
    finally:
        if fd is not None:
            os.close(fd)


def remedy(report: str | None) -> str:
    """Returns a note with the remedy for a worker that failed to start. ``report`` is the worker's report, or None."""
    return _UNKNOWN if report is None else _UNLOADABLE
