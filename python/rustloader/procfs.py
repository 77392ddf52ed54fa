"""What /proc shows of processes. One that has ended meanwhile is an answer, not an error."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


def read(path: str) -> str | None:
    """The content of a file of the kernel; None where it cannot be read."""
    with contextlib.suppress(OSError), open(path, errors="replace") as file:
        return file.read()
    return None


def stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat behind the name of the program, from the state on; none if the process is gone."""
    return (read(f"/proc/{pid}/stat") or "").rpartition(")")[2].split()


def state(pid: int) -> str:
    """The letter for a process's state; "X" if it is gone."""
    return (stat(pid) or ["X"])[0]


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or only its exit status is left."""
    return state(pid) in "ZX"


def is_stopped(pid: int) -> bool:
    """Whether a signal (SIGSTOP, or Ctrl-Z) or a debugger has stopped a process."""
    return state(pid) in "Tt"


def exit_code(pid: int) -> int | None:
    """How a process has ended that no other has waited for, as multiprocessing counts; None for all others."""
    fields = stat(pid)
    return os.waitstatus_to_exitcode(int(fields[-1])) if fields[:1] == ["Z"] else None


def pids() -> list[int]:
    """Process ids of this machine, as far as /proc shows them."""
    return sorted(int(name) for name in os.listdir("/proc") if name.isdecimal())


def members(group: int) -> Iterator[int]:
    """Process ids of a group, without those that have ended."""
    for pid in pids():
        fields = stat(pid)
        if fields[2:3] == [str(group)] and fields[0] not in "ZX":
            yield pid


def resident(pid: int) -> int | None:
    """Resident bytes of a process, with pages that it shares (RSS); None when it has ended."""
    fields = (read(f"/proc/{pid}/statm") or "").split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") or None if len(fields) > 1 else None


def proportional(pid: int) -> int | None:
    """Resident bytes of a process (PSS): a page that n processes map counts as 1/n. None if not readable."""
    lines = (read(f"/proc/{pid}/smaps_rollup") or "").splitlines()
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:")), None)
