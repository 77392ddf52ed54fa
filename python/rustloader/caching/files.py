"""Opens and creates the files of caches.

A file is created without a name, and gets its name when it is a whole cache. An existing file is used only if it is a
cache, and only if no other user can have written to it: samples may be pickles, which run code when they are read.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import secrets
import stat
from collections.abc import Iterator
from typing import Any, NamedTuple

from rustloader._core import CACHE_VERSION, CacheTable, rename_to_new
from rustloader.caching import limits

logger = logging.getLogger("rustloader")

# Maximum length of the version and of the dataset's class in a file's header, in characters. In JSON, a character takes
# up to 4 bytes, or 6 if it is a control character; the header has room for 3,840.
_MAX_VERSION, _MAX_CLASS = 400, 300
# Maximum number of symbolic links that are followed, as in the kernel.
_MAX_LINKS = 40
# Bits of a mode: the group or others may write.
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
# Errors of file systems that have no files without names, and of those that have no hard links.
_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT)
_NO_LINKS = (errno.EOPNOTSUPP, errno.EPERM, errno.EINVAL, errno.ENOSYS)


class _Table(NamedTuple):
    """The table that a program wants to open.

    Attributes:
        path: The path of its file.
        rows: The number of samples.
        memory: The requested limit in bytes; None for half of the available space, or the limit of an existing file.
        meta: What an existing file must contain in its header.
        token: The number of the opening.
    """

    path: str
    rows: int
    memory: int | None
    meta: dict[str, str]
    token: int


def new_token() -> int:
    """Returns a number for a new opening of a file."""
    return secrets.randbits(64)


def open_table(path: str, dataset: Any, rows: int, memory: int | None, version: str, token: int) -> CacheTable:
    """Opens the file of a cache, or creates it. Programs that open it at the same time wait for one another briefly.
    Processes that pass the same ``token`` share what they find out about the file's samples.

    Raises:
        OSError: The file cannot be opened, enlarged or mapped, or other users may have written to it.
        ValueError: The file is not a cache, belongs to another dataset or version, or would exceed the available space.
    """
    if len(version) > _MAX_VERSION:
        raise ValueError(f"version must have at most {_MAX_VERSION} characters, got {len(version)}")
    meta = {"dataset": type(dataset).__qualname__[:_MAX_CLASS], "version": version}
    wanted = _Table(path, rows, memory, meta, token)
    try:
        with _folder_of(path) as (folder, name):
            while True:
                # If another program creates the file in between, this program opens that file.
                table = _existing(folder, name, wanted) or _new(folder, name, wanted)
                if table is not None:
                    return table
    except OSError as error:
        # Errors from calls with a descriptor lack the file's name, and others name it relative to its folder.
        error.filename, error.filename2 = path, None
        raise


# Names and trust


@contextlib.contextmanager
def _folder_of(path: str) -> Iterator[tuple[int, str]]:
    """Opens the folder of a file. Yields its descriptor, and the file's name in it. Follows symbolic links to the file,
    except in a folder in which other users may replace them."""
    for _ in range(_MAX_LINKS):
        parent, name = os.path.split(path)
        if not name:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        folder = os.open(parent or ".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            target = _target_of(folder, name)
            if target is None:
                yield folder, name
                return
            path = os.path.join(parent, target)
        finally:
            os.close(folder)
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))


def _target_of(folder: int, name: str) -> str | None:
    """Returns the target of a symbolic link; None if the name is not one."""
    try:
        target = os.readlink(name, dir_fd=folder)
    except OSError:
        return None
    status = os.fstat(folder)
    if status.st_uid not in (0, os.geteuid()) or status.st_mode & _OTHERS_WRITE:
        raise PermissionError(
            errno.EPERM,
            f"this symbolic link is in a folder to which other users may write: give the path of its target, {target}",
        )
    return target


def _check_owner(descriptor: int, path: str) -> None:
    """Checks that no other user may have written to a file."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path} is not a regular file: give another path")
    if status.st_uid not in (0, os.geteuid()):
        raise PermissionError(
            errno.EPERM,
            f"this file belongs to user {status.st_uid}, and reading the samples in a cache can run code of its owner: "
            "give another path",
        )
    if status.st_mode & _OTHERS_WRITE:
        raise PermissionError(
            errno.EPERM,
            f"other users may write to this file (mode {stat.S_IMODE(status.st_mode):o}), and reading the samples in a "
            "cache can run their code: give another path, or run `chmod go-w` if only you have written to the file",
        )


# Files that exist


def _existing(folder: int, name: str, wanted: _Table) -> CacheTable | None:
    """Opens a file. Returns None if there is none."""
    try:
        # With O_NONBLOCK, opening a device does not wait.
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(name, flags, dir_fd=folder)
    except FileNotFoundError:
        return None
    try:
        _check_owner(fd, wanted.path)
        _lock(fd, wanted.path)
        return _table(fd, wanted)
    finally:
        # Unlocks explicitly, because closing is not enough: the mapping has a duplicate of the descriptor, which shares
        # the lock.
        fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


def _lock(fd: int, path: str) -> None:
    """Locks the file while it is being opened. The kernel releases the lock if the process ends."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        logger.info("cache(path=%r): waiting for another program that is opening the file or has locked it", path)
        fcntl.flock(fd, fcntl.LOCK_EX)


def _table(fd: int, wanted: _Table) -> CacheTable:
    """Returns the table of an existing file, which is locked."""
    size = os.fstat(fd).st_size
    head = CacheTable.head(fd)
    if head is None:
        why = "" if size else " (it is empty: a cache is created only where there is no file)"
        raise ValueError(f"{wanted.path} is not a cache of rustloader{why}; give another path, or remove the file")
    layout, rows, stored_limit, meta = head
    _compare(wanted, layout, rows, meta)
    limit = stored_limit
    if wanted.memory is not None and wanted.memory > stored_limit:
        limit = limits.of_file(rows, wanted.memory, _available(fd))
    if size < limit:
        os.ftruncate(fd, limit)
    if size < stored_limit:
        # The file was truncated.
        _allocate_index(fd, rows)
    table = CacheTable.open_file(fd, size, wanted.token)
    table.reopen()
    if limit > stored_limit:
        table.grow(limit)
        table = CacheTable.open_file(fd, limit, wanted.token)
    return table


def _compare(wanted: _Table, layout: int, rows: int, meta: bytes) -> None:
    """Checks that a file has the wanted version of the format, the wanted number of rows, and the wanted meta."""
    path = wanted.path
    if layout != CACHE_VERSION:
        raise ValueError(
            f"{path} has version {layout} of the cache format, but this rustloader reads {CACHE_VERSION}: give "
            "another path, or remove the file"
        )
    try:
        stored = json.loads(meta)
    except ValueError:
        raise ValueError(f"the header of {path} is damaged: give another path, or remove the file") from None
    differences: list[tuple[str, Any, Any]] = [
        (name, stored.get(name), value) for name, value in wanted.meta.items() if stored.get(name) != value
    ]
    if rows != wanted.rows:
        differences.insert(0, ("length", rows, wanted.rows))
    if differences:
        text = ", and ".join(f"{name} {there!r} instead of {here!r}" for name, there, here in differences)
        raise ValueError(
            f"{path} is the cache of another dataset: it has {text}; give another path, or remove the file"
        )


# New files


def _new(folder: int, name: str, wanted: _Table) -> CacheTable | None:
    """Creates a file. Returns None if another program has created it first. If this fails, or the process is killed, no
    file with this name is left behind."""
    fd, temporary = _unnamed_file(folder)
    try:
        _check_owner(fd, wanted.path)
        limit = limits.of_file(wanted.rows, wanted.memory, _available(fd))
        os.ftruncate(fd, limit)
        _allocate_index(fd, wanted.rows)
        meta = json.dumps(wanted.meta, ensure_ascii=False).encode("utf-8", "surrogatepass")
        CacheTable.format(fd, wanted.rows, limit, meta)
        table = CacheTable.open_file(fd, limit, wanted.token)
        # After a crash of the machine, the name must not lead to a file without a header.
        os.fsync(fd)
        return table if _give_name(fd, temporary, folder, name) else None
    finally:
        os.close(fd)
        if temporary is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=folder)


def _unnamed_file(folder: int) -> tuple[int, str | None]:
    """Creates a file without a name or, if the file system has no such files, with a temporary name. Returns the
    descriptor and that name."""
    flags, mode = os.O_RDWR | os.O_CLOEXEC, 0o600
    try:
        return os.open(".", flags | os.O_TMPFILE, mode, dir_fd=folder), None
    except OSError as error:
        if error.errno not in _NO_TMPFILE:
            raise
    temporary = f".rustloader-{secrets.token_hex(8)}"
    return os.open(temporary, flags | os.O_CREAT | os.O_EXCL, mode, dir_fd=folder), temporary


def _give_name(fd: int, temporary: str | None, folder: int, name: str) -> bool:
    """Names a file. Returns False if the name exists."""
    try:
        # A path with a descriptor is absolute, so `src_dir_fd` is ignored.
        os.link(f"/proc/self/fd/{fd}" if temporary is None else temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except FileExistsError:
        return False
    except OSError as error:
        if temporary is None or error.errno not in _NO_LINKS:
            raise
        return rename_to_new(folder, os.fsencode(temporary), os.fsencode(name))
    return True


def _allocate_index(fd: int, rows: int) -> None:
    """Allocates the space before the samples: access to a mapped page for which the disk has no room would raise
    SIGBUS. Samples are written with system calls instead."""
    os.posix_fallocate(fd, 0, CacheTable.overhead(rows))


def _available(fd: int) -> int:
    """Returns the bytes that a file may occupy: those that are free, and those that it occupies."""
    system = os.fstatvfs(fd)
    return system.f_bavail * system.f_frsize + os.fstat(fd).st_blocks * 512
