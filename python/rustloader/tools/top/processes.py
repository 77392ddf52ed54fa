"""Finds processes on this machine, and their loaders, through /proc."""

from __future__ import annotations

import contextlib
import os
import pwd
import stat
from collections.abc import Iterator
from typing import NamedTuple

from rustloader._core import Observed, inspect_arena
from rustloader.caching.outside import usage_of
from rustloader.caching.usage import CacheUsage
from rustloader.system.formatting import printable
from rustloader.system.procfs import pids, read

# The target of an arena's link in /proc/PID/fd.
_ARENA = "/memfd:rustloader (deleted)"


class NothingToSee(Exception):
    """Raised if there is nothing to show about a process. The message is the reason, in one line."""


class LoaderArena(NamedTuple):
    """The arena of a running iterator: its device and inode, and the result of ``_core.inspect_arena``."""

    file: tuple[int, int]
    figures: Observed


def loaders(pid: int) -> list[LoaderArena]:
    """Returns the arenas of running iterators that a process has open or has inherited, oldest first.

    Raises ``NothingToSee`` if there is no such process, it belongs to another user, or its arenas cannot be read.
    """
    try:
        arenas = dict(_open_arenas(pid)) or dict(_mapped_arenas(pid))
    except PermissionError:
        raise NothingToSee(_forbidden(pid)) from None
    except OSError:
        raise NothingToSee(f"there is no process {pid}") from None
    running = (LoaderArena(file, figures) for file, figures in arenas.items() if figures is not None)
    return sorted(running, key=lambda it: it.figures.started)


def caches(pid: int) -> list[CacheUsage]:
    """Returns the usage of each cache, in memory or in a file, that a process has open; empty if none can be read."""
    usages: dict[tuple[int, int], CacheUsage] = {}
    with contextlib.suppress(OSError):
        # A process that uses a cache has the cache's file open, and maps the file for writing.
        mapped = {line.split(maxsplit=5)[-1] for line in _maps(pid) if " rw-s " in line}
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                path = f"/proc/{pid}/fd/{name}"
                if os.readlink(path) in mapped and (cache := _cache(path)) is not None:
                    usages.setdefault(*cache)
    return list(usages.values())


def _cache(path: str) -> tuple[tuple[int, int], CacheUsage] | None:
    """Returns the device and inode of a cache's file, and its usage; None if the file is not a cache."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        return None
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        usage = usage_of(descriptor)
    finally:
        os.close(descriptor)
    return None if usage is None else ((status.st_dev, status.st_ino), usage)


def main_processes() -> dict[int, list[LoaderArena]]:
    """Returns the arenas of running iterators by main process, for processes of this user; for root, of all users."""
    processes = {}
    for pid in pids():
        with contextlib.suppress(OSError, NothingToSee):
            if os.geteuid() in (0, os.stat(f"/proc/{pid}").st_uid):
                if own := [it for it in loaders(pid) if it.figures.pid == inner_pid(pid)]:
                    processes[pid] = own
    return processes


def _open_arenas(pid: int) -> Iterator[tuple[tuple[int, int], Observed | None]]:
    folder = f"/proc/{pid}/fd"
    for name in os.listdir(folder):
        # The process may close the file or end at any time.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if os.readlink(f"{folder}/{name}") == _ARENA:
                yield _observe(pid, f"{folder}/{name}")


def _mapped_arenas(pid: int) -> Iterator[tuple[tuple[int, int], Observed | None]]:
    """Yields the arenas that a process maps, even if it has closed their descriptors. Only root can open them."""
    for line in _maps(pid):
        if line.endswith(_ARENA):
            with contextlib.suppress(FileNotFoundError):
                yield _observe(pid, f"/proc/{pid}/map_files/{line.split()[0]}")


def _observe(pid: int, path: str) -> tuple[tuple[int, int], Observed | None]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        return (status.st_dev, status.st_ino), inspect_arena(descriptor)
    except RuntimeError as error:
        raise NothingToSee(f"the loaders of process {pid} cannot be read: {error}") from None
    finally:
        os.close(descriptor)


def _maps(pid: int) -> list[str]:
    with open(f"/proc/{pid}/maps", errors="replace") as file:
        return file.read().splitlines()


def _forbidden(pid: int) -> str:
    name = owner(pid)
    if name is None:
        return f"there is no process {pid}"
    if name == user():
        remedy = "" if os.geteuid() == 0 else "; run this with sudo"
        return f"process {pid} does not let other processes of its user inspect it{remedy}"
    return f"process {pid} belongs to {name}; run as that user or with sudo"


def has_extension(pid: int) -> bool:
    """Returns True if a process has loaded rustloader's extension."""
    with contextlib.suppress(OSError):
        return any("/rustloader/_core." in line for line in _maps(pid))
    return False


def user() -> str:
    """Returns the name of the user of this process."""
    return _user_name(os.geteuid())


def owner(pid: int) -> str | None:
    """Returns the name of the user of a process; None if there is no such process."""
    try:
        return _user_name(os.stat(f"/proc/{pid}").st_uid)
    except OSError:
        return None


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def command(pid: int) -> str:
    """Returns the command line of a process, or its name if the command line is empty."""
    text = " ".join((read(f"/proc/{pid}/cmdline") or "").replace("\0", " ").split())
    if text:
        return printable(text)
    name = read(f"/proc/{pid}/comm")
    return "?" if name is None else f"[{name.strip()}]"


def inner_pid(pid: int) -> int:
    """Returns the ID that a process has in its own PID namespace. In a container this ID differs from ``pid``."""
    lines = (read(f"/proc/{pid}/status") or "").splitlines()
    return next((int(line.split()[-1]) for line in lines if line.startswith("NSpid:")), pid)


def outer_pids(pid: int) -> dict[int, int] | None:
    """Maps process IDs in the PID namespace of a process to those in this one. Returns None if both are the same."""
    namespace = _namespace(pid)
    if namespace is None or namespace == _namespace(os.getpid()):
        return None
    return {inner_pid(other): other for other in pids() if _namespace(other) == namespace}


def _namespace(pid: int) -> str | None:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/pid")
    return None
