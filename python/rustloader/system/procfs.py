"""Reads processes from /proc. A process that has ended is a result, not an error."""

import contextlib
import os
from collections.abc import Iterable, Iterator

# Index of the start time among the fields that `stat` returns.
STARTED = 19


def read(path: str) -> str | None:
    """Returns the content of a kernel file, or None if it is not readable."""
    with contextlib.suppress(OSError), open(path, errors="replace") as file:
        return file.read()
    return None


def stat(pid: int) -> list[str]:
    """Returns the fields of /proc/PID/stat from the state on; empty if the process is gone."""
    return (read(f"/proc/{pid}/stat") or "").rpartition(")")[2].split()


def state(pid: int) -> str:
    """Returns the letter of a process's state; "X" if it is gone."""
    return (stat(pid) or ["X"])[0]


def parent(pid: int) -> int:
    """Returns the pid of a process's parent; 0 for none, or if the process is gone."""
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
    """Returns the process ids of a process group, without ended processes."""
    for pid in pids():
        fields = stat(pid)
        if fields[2:3] == [str(group)] and fields[0] not in "ZX":
            yield pid


def resident(pid: int) -> int | None:
    """Returns the resident bytes of a process, shared pages included (RSS); None if it has ended."""
    fields = (read(f"/proc/{pid}/statm") or "").split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") or None if len(fields) > 1 else None


def amounts(text: str | None) -> dict[str, int]:
    """Returns bytes by name, from the lines of a kernel file that are in kB."""
    lines = [line.split() for line in (text or "").splitlines()]
    return {words[0].rstrip(":"): int(words[1]) << 10 for words in lines if len(words) == 3 and words[2] == "kB"}


def rollup(pid: int) -> dict[str, int]:
    """Returns the sums of a process's memory in bytes, by the kernel's names; empty if not readable."""
    return amounts(read(f"/proc/{pid}/smaps_rollup"))


def private(pid: int) -> int | None:
    """Returns the resident bytes of a process that no other one maps (USS); None if not readable."""
    sums = rollup(pid)
    return sums["Private_Clean"] + sums["Private_Dirty"] if sums else None


def proportional(pid: int) -> int | None:
    """Returns the resident bytes of a process with each page divided by the processes that map it (PSS); None if not
    readable.
    """
    return rollup(pid).get("Pss")


def core_ranges(cores: Iterable[int]) -> str:
    """Formats the numbers of cores as the kernel writes them: "0-3,8"."""
    ranges: list[list[int]] = []
    for core in sorted(cores):
        if ranges and core == ranges[-1][1] + 1:
            ranges[-1][1] = core
        else:
            ranges.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
