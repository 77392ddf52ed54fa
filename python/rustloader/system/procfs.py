"""Reads the states and memory use of processes from /proc. If a process is gone, the functions return a special value
and do not raise.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator

# Index of the start time among the fields that `stat` returns.
STARTED = 19


def read(path: str) -> str | None:
    """Returns the content of a file in /proc or /sys; None if the file cannot be read."""
    with contextlib.suppress(OSError), open(path, errors="replace") as file:
        return file.read()
    return None


def stat(pid: int) -> list[str]:
    """Returns the fields of /proc/PID/stat, starting with the state; an empty list if the process is gone."""
    return (read(f"/proc/{pid}/stat") or "").rpartition(")")[2].split()


def state(pid: int) -> str:
    """Returns the letter that denotes a process's state; "X" if the process is gone."""
    return (stat(pid) or ["X"])[0]


def parent(pid: int) -> int:
    """Returns the pid of a process's parent; 0 if it has none, or if the process is gone."""
    return int((stat(pid)[1:2] or ["0"])[0])


def has_ended(pid: int) -> bool:
    """Returns True if a process is gone or is a zombie."""
    return state(pid) in "ZX"


def is_stopped(pid: int) -> bool:
    """Returns True if a process is currently stopped by a signal (SIGSTOP or Ctrl-Z) or by a debugger."""
    return state(pid) in "Tt"


def exit_code(pid: int) -> int | None:
    """Returns the exit code of a zombie, as multiprocessing defines it: negative for a signal. Returns None for any
    other process."""
    fields = stat(pid)
    return os.waitstatus_to_exitcode(int(fields[-1])) if fields[:1] == ["Z"] else None


def pids() -> list[int]:
    """Returns the ids of all processes in /proc, in ascending order."""
    return sorted(int(name) for name in os.listdir("/proc") if name.isdecimal())


def members(group: int) -> Iterator[int]:
    """Yields the ids of the processes in a process group, except processes that have ended."""
    for pid in pids():
        fields = stat(pid)
        if fields[2:3] == [str(group)] and fields[0] not in "ZX":
            yield pid


def resident(pid: int) -> int | None:
    """Returns the resident memory of a process in bytes, including shared pages (RSS); None if the process is gone."""
    fields = (read(f"/proc/{pid}/statm") or "").split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") or None if len(fields) > 1 else None


def amounts(text: str | None) -> dict[str, int]:
    """Returns the amounts of memory in the text of a /proc file, in bytes, by name. Skips lines that are not in kB."""
    lines = [line.split() for line in (text or "").splitlines()]
    return {words[0].rstrip(":"): int(words[1]) << 10 for words in lines if len(words) == 3 and words[2] == "kB"}


def rollup(pid: int) -> dict[str, int]:
    """Returns the amounts in /proc/PID/smaps_rollup in bytes, by the kernel's names; an empty dict if unreadable."""
    return amounts(read(f"/proc/{pid}/smaps_rollup"))


def proportional(pid: int) -> int | None:
    """Returns the resident memory of a process in bytes, counting each page as its size divided by the number of
    processes that map it (PSS); None if unreadable.
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
