"""Reads figures of processes from /proc. The end of a process is not an error, but has its own result."""

import contextlib
import os
from collections.abc import Iterable, Iterator

# Index of the start time among the fields that `stat` returns.
STARTED = 19


def read(path: str) -> str | None:
    """Returns the content of a file in /proc or /sys, or None if it is not readable."""
    with contextlib.suppress(OSError), open(path, errors="replace") as file:
        return file.read()
    return None


def stat(pid: int) -> list[str]:
    """Returns the fields of /proc/PID/stat, starting with the state; empty if the process is gone."""
    return (read(f"/proc/{pid}/stat") or "").rpartition(")")[2].split()


def state(pid: int) -> str:
    """Returns the letter for a process's state; "X" if the process is gone."""
    return (stat(pid) or ["X"])[0]


def parent(pid: int) -> int:
    """Returns the pid of a process's parent; 0 if it has none, or if the process is gone."""
    return int((stat(pid)[1:2] or ["0"])[0])


def has_ended(pid: int) -> bool:
    """Returns True if a process is gone or a zombie."""
    return state(pid) in "ZX"


def is_stopped(pid: int) -> bool:
    """Returns True if a signal (SIGSTOP or Ctrl-Z) or a debugger has stopped a process."""
    return state(pid) in "Tt"


def exit_code(pid: int) -> int | None:
    """Returns the exit code of a zombie as in multiprocessing; None for other processes."""
    fields = stat(pid)
    return os.waitstatus_to_exitcode(int(fields[-1])) if fields[:1] == ["Z"] else None


def pids() -> list[int]:
    """Returns all process ids in /proc."""
    return sorted(int(name) for name in os.listdir("/proc") if name.isdecimal())


def members(group: int) -> Iterator[int]:
    """Yields the process ids of a process group, except those of ended processes."""
    for pid in pids():
        fields = stat(pid)
        if fields[2:3] == [str(group)] and fields[0] not in "ZX":
            yield pid


def resident(pid: int) -> int | None:
    """Returns the resident bytes of a process, including shared pages (RSS); None if the process has ended."""
    fields = (read(f"/proc/{pid}/statm") or "").split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") or None if len(fields) > 1 else None


def amounts(text: str | None) -> dict[str, int]:
    """Returns numbers of bytes by name, from the lines of a file in /proc that are in kB."""
    lines = [line.split() for line in (text or "").splitlines()]
    return {words[0].rstrip(":"): int(words[1]) << 10 for words in lines if len(words) == 3 and words[2] == "kB"}


def rollup(pid: int) -> dict[str, int]:
    """Returns the totals of /proc/PID/smaps_rollup in bytes, by the kernel's names; empty if not readable."""
    return amounts(read(f"/proc/{pid}/smaps_rollup"))


def private(pid: int) -> int | None:
    """Returns the resident bytes of a process that no other process maps (USS); None if not readable."""
    sums = rollup(pid)
    return sums["Private_Clean"] + sums["Private_Dirty"] if sums else None


def proportional(pid: int) -> int | None:
    """Returns the resident bytes of a process, where each page is divided by the number of processes that map it (PSS);
    None if not readable.
    """
    return rollup(pid).get("Pss")


def core_ranges(cores: Iterable[int]) -> str:
    """Formats core numbers as the kernel does, as in "0-3,8"."""
    ranges: list[list[int]] = []
    for core in sorted(cores):
        if ranges and core == ranges[-1][1] + 1:
            ranges[-1][1] = core
        else:
            ranges.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
