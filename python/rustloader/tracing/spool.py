"""The folder of a trace in progress. It contains the records, which the extension writes, and a list of the loaders.

The folder is next to the trace's file, and remains there if the program is killed. `rustloader trace merge` reads it.
A thread of the extension writes the records four times per second, and with them the activities that are in progress.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from rustloader._core import TraceSink
from rustloader.system import local_ranks, procfs

# The folder of `run.json` is `run.json.spool`, unless there is one already.
SUFFIX = ".spool"
ABOUT, _LOADERS, _UNFINISHED = "about.json", "loaders.jsonl", "unfinished"
# Version of the format of the folder.
VERSION = 1
# A record. From the highest bits down, the first word holds the iterator's number in the trace (32 bits), the worker,
# main process or pin thread (24 bits), and the kind (8 bits). The start time and the duration, in nanoseconds, and two
# numbers that depend on the kind follow.
_RECORD = struct.Struct("<5Q")
_READ_BYTES = _RECORD.size << 14
# The start of the file of unfinished activities: the time of the list in nanoseconds, and the number of records.
_UNFINISHED_HEAD = struct.Struct("<2Q")
# A record, unpacked.
Record = tuple[int, int, int, int, int]
# Length of a period in nanoseconds. As in torch.profiler's files, timestamps are in microseconds since the start of a
# period, which keeps them small enough for a float to represent them precisely.
_PERIOD = 7_889_238 * 10**9


def _clocks() -> tuple[int, int]:
    """Returns the times of the monotonic clock and of the wall clock at the same moment, in nanoseconds."""
    reads = [(time.monotonic_ns(), time.time_ns(), time.monotonic_ns()) for _ in range(10)]
    before, wall, after = min(reads, key=lambda read: read[2] - read[0])
    return (before + after) // 2, wall


class Spool:
    """The folder, and the sink that writes the records.

    Args:
        path: The file of the trace.
        level: 1 for batches, 2 for batches and samples.
        seconds: Number of seconds to keep at the end of the trace; None to keep everything.
    """

    def __init__(self, path: str, level: int, seconds: float | None) -> None:
        self._pid = os.getpid()
        self.folder = _new_folder(path, self._pid)
        monotonic, wall = _clocks()
        self._about: dict[str, Any] = {
            "version": VERSION,
            "pid": self._pid,
            "host": socket.gethostname(),
            "rank": local_ranks.global_rank(),
            "level": level,
            "seconds": seconds,
            "monotonicNanoseconds": monotonic,
            "wallNanoseconds": wall,
            "baseTimeNanoseconds": wall // _PERIOD * _PERIOD,
        }
        self._loaders = 0
        self._files = ["0"] if seconds is None else ["0", "1"]
        self._write()
        # The process that has the folder with the usual name, and whether it is running; None if this one has it.
        self.owner: tuple[int, bool] | None = None
        try:
            # The folder gets this name only now, so that another process that finds it can read whose it is.
            os.rename(self.folder, path + SUFFIX)
            self.folder = path + SUFFIX
        except OSError:
            self.owner = _owner_of(path + SUFFIX)
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
        names = [*self._files, _UNFINISHED]
        *opened, unfinished = (os.open(os.path.join(self.folder, name), flags, 0o666) for name in names)
        self.sink = TraceSink(opened, unfinished, seconds or 0.0)

    @property
    def is_ours(self) -> bool:
        """True if this process created the folder."""
        return self._pid == os.getpid()

    def add(self, group: int, name: str, workers: int) -> int:
        """Adds an iterator of a loader, and returns the iterator's number."""
        with open(os.path.join(self.folder, _LOADERS), "a") as file:
            file.write(json.dumps({"group": group, "name": name, "workers": workers}) + "\n")
        self._loaders += 1
        return self._loaders - 1

    def end(self) -> int:
        """Completes the files. Returns the number of lost events."""
        lost, files = self.sink.end()
        self._about["lost"] = lost
        self._about["files"] = [(self._files[number], length) for number, length in files]
        self._write()
        return lost

    def remove(self) -> None:
        """Removes the folder. Frees the space of its files even if forked workers have them open."""
        for name in self._files:
            with contextlib.suppress(OSError):
                os.truncate(os.path.join(self.folder, name), 0)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _write(self) -> None:
        # Each write reads the script's name, because `rustloader trace` begins the trace before it runs the script.
        main = getattr(sys.modules.get("__main__"), "__file__", None) or sys.argv[0]
        self._about["script"] = os.path.basename(main)
        name = os.path.join(self.folder, ABOUT)
        with open(name + ".new", "w") as file:
            json.dump(self._about, file)
        os.replace(name + ".new", name)


def _new_folder(path: str, pid: int) -> str:
    """Creates a folder next to the trace."""
    folder = f"{path}.{pid}{SUFFIX}"
    try:
        os.mkdir(folder)
    except FileExistsError:  # an earlier process with this pid
        return tempfile.mkdtemp(SUFFIX, os.path.basename(path) + ".", os.path.dirname(path))
    return folder


def merge_command(folder: str, path: str) -> str:
    """Returns the command that makes the trace ``path`` from a folder whose program was killed."""
    return shlex.join(["python", "-m", "rustloader", "trace", "merge", folder, "-o", path])


def _owner_of(folder: str) -> tuple[int, bool] | None:
    """Returns the pid of the process that made a folder, and whether this is another process that is still running.
    Returns None if the folder is not a spool, or its process is on another machine."""
    with contextlib.suppress(OSError, ValueError):
        about = read_about(folder)
        if about["host"] == socket.gethostname():
            return about["pid"], about["pid"] != os.getpid() and not procfs.has_ended(about["pid"])
    return None


def read_about(folder: str) -> dict[str, Any]:
    """Reads the description of a spool's records: the process, its clocks and its loaders.

    Raises:
        ValueError: The folder is not a spool of this version.
        OSError: The folder cannot be read.
    """
    with open(os.path.join(folder, ABOUT)) as file:
        about: dict[str, Any] = json.load(file)
    if about.get("version") != VERSION:
        raise ValueError(f"{folder} has records of version {about.get('version')}, but this rustloader reads {VERSION}")
    about["loaders"] = []
    with contextlib.suppress(FileNotFoundError), open(os.path.join(folder, _LOADERS)) as file:
        about["loaders"] = [json.loads(line) for line in file if line.endswith("\n")]
    return about


def read_records(folder: str, about: dict[str, Any]) -> Iterator[Record]:
    """Yields the records in the order of the files. If the program was killed, the lengths of the files are unknown,
    and the files are read to their ends."""
    files = [name for name in ("0", "1") if os.path.exists(os.path.join(folder, name))]
    files.sort(key=lambda name: os.stat(os.path.join(folder, name)).st_mtime_ns)
    for name, length in about.get("files", [(name, sys.maxsize) for name in files]):
        with open(os.path.join(folder, name), "rb") as file:
            while length > 0 and (data := file.read(min(_READ_BYTES, length))):
                length -= len(data)
                yield from _RECORD.iter_unpack(data[: len(data) // _RECORD.size * _RECORD.size])


def read_unfinished(folder: str, about: dict[str, Any]) -> list[Record]:
    """Returns records of the activities that were in progress when a program was killed; they end when the program
    last wrote to the folder. Some may also be among the records of `read_records`. Returns an empty list if the trace
    is complete."""
    content = b""
    if "files" not in about:
        with contextlib.suppress(FileNotFoundError), open(os.path.join(folder, _UNFINISHED), "rb") as file:
            content = file.read()
    if len(content) < _UNFINISHED_HEAD.size:
        return []
    _, count = _UNFINISHED_HEAD.unpack_from(content)
    records = content[_UNFINISHED_HEAD.size :][: count * _RECORD.size]
    return list(_RECORD.iter_unpack(records[: len(records) // _RECORD.size * _RECORD.size]))
