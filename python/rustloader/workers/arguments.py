"""Names the argument of a loader that a worker's pickle cannot hold or a worker cannot load.

The pickle has a mark before each argument. Both ends take what they meet in order, so the last mark names the argument.
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

# Characters of a traceback in a report, at most.
_MAX_TRACEBACK = 1 << 16
_UNPICKLABLE = (
    "The DataLoader's argument {} cannot be pickled. Workers by spawn, by forkserver or on another machine get a "
    "pickle of it: define its classes and functions at the top of a module and open files in the workers, or use "
    "multiprocessing_context='fork'."
)
_UNLOADABLE = (
    "Workers by spawn and forkserver import the classes and functions of their arguments. What the body of "
    "`if __name__ == '__main__':` defines, or a prompt after a script, is not there: put it into a module, or use "
    "multiprocessing_context='fork'."
)
_UNKNOWN = (
    "The worker ended before it could load its arguments; stderr has its own error. Workers by spawn and forkserver "
    "import the main script again: a script that makes them needs `if __name__ == '__main__':` around what it runs."
)
_reached = threading.local()


def reach(name: str | None) -> None:
    """Notes that this thread has come to an argument in pickling or unpickling. None: to none any more."""
    _reached.name = name


class Mark:
    """Notes that pickling, or unpickling, has come to an argument. None: to none any more."""

    def __init__(self, name: str | None) -> None:
        self._name = name

    def __reduce__(self) -> Any:
        reach(self._name)
        return reach, (self._name,)


def marked(dataset: Any, job: Any, last: Any) -> tuple[Any, ...]:
    """Returns the arguments of a worker, with marks: the dataset first, ``last`` at the end. They may share objects
    with the arguments in between."""
    values = {"collate_fn": job.collate_fn, "worker_init_fn": job.init_fn, "on_error": job.config.on_error}
    marks: list[Any] = [Mark("dataset"), dataset]
    for name, value in values.items():
        marks += [Mark(name), value]
    return (*marks, Mark(None), last)


def unmarked(contents: tuple[Any, ...]) -> tuple[Any, Any]:
    """Returns the dataset and ``last``, as they arrived."""
    return contents[1], contents[-1]


def present() -> str | None:
    """Returns the argument that pickling or unpickling has come to in this thread."""
    return getattr(_reached, "name", None)


@contextlib.contextmanager
def naming() -> Iterator[None]:
    """Names the argument in a note of an error that its pickling raises."""
    reach(None)
    try:
        yield
    except Exception as error:
        if (name := present()) is not None:
            error.add_note(_UNPICKLABLE.format(name))
        raise
    finally:
        reach(None)


class Reports:
    """A file that all workers of a group share. A worker that cannot load its arguments writes the reason to it, and
    ends."""

    # `__del__` may come when the names of this module are None.
    _close, _fstat = staticmethod(os.close), staticmethod(os.fstat)
    # Without a file, if there are too many open ones.
    _fd = -1
    _file: tuple[int, int] | None = None

    def __init__(self) -> None:
        self._fd = os.memfd_create("rustloader-reports", os.MFD_CLOEXEC)
        # Workers may write at the same time.
        fcntl.fcntl(self._fd, fcntl.F_SETFL, os.O_APPEND)
        self._file = self._identity()

    def _identity(self) -> tuple[int, int] | None:
        """Returns the identity of the descriptor's file. The program may have closed it, and have another one by its
        number."""
        try:
            status = self._fstat(self._fd)
        except OSError:
            return None
        return status.st_dev, status.st_ino

    def for_child(self) -> Any:
        """Returns the descriptor, in a form that the pickle of a process takes."""
        return reduction.DupFd(self._fd)

    def of(self, pid: int) -> str | None:
        """Returns the report of a process that could not load an argument, with the reason; None without one."""
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
    """Reports an error of the body, in a worker. ``duplicate`` is the result of ``Reports.for_child``, or None."""
    fd = None if duplicate is None else duplicate.detach()
    try:
        yield
    except Exception as error:
        if fd is not None:
            what = present() or "settings and the state that it begins with"
            text = f"It could not load its {what}. Caught {type(error).__name__} in DataLoader worker process "
            text += f"{worker_id}.\nOriginal {''.join(traceback.format_exception(error))[-_MAX_TRACEBACK:]}"
            line = json.dumps({"pid": os.getpid(), "text": text})
            # The error itself is the one to be raised.
            with contextlib.suppress(OSError):
                os.write(fd, f"{line}\n".encode())
        raise
    finally:
        if fd is not None:
            os.close(fd)


def way_out(report: str | None) -> str:
    """Returns the note of the error of a worker that could not begin, with or without a report."""
    return _UNKNOWN if report is None else _UNLOADABLE
