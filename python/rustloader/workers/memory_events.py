"""Detects that the kernel has killed processes because a memory cgroup was out of memory.

Each cgroup counts how many of its processes the OOM killer has killed. In cgroup version 2 the counts are in
memory.events, which includes the cgroups below, and in memory.events.local, which does not. In version 1 they are in
memory.oom_control.
"""

from __future__ import annotations

import os
from pathlib import PurePosixPath

# Appended to the error message for a death that an OOM kill explains.
OUT_OF_MEMORY = " Its memory cgroup was out of memory."


class OomKills:
    """Counters of the OOM kills in this process's memory cgroups. They are first read when the object is made.

    Workers start in the cgroups of the main process. The cgroups above these are also read, but only for kills of
    processes directly in them: cgroups further down may belong to other containers.

    Args:
        proc: The root of procfs; tests replace it.
        cgroup: The folder in which the cgroup file systems are mounted.
    """

    def __init__(self, proc: str = "/proc", cgroup: str = "/sys/fs/cgroup") -> None:
        self._proc = proc
        self._cgroup = cgroup
        self._counts = self._read()

    def grew(self) -> bool:
        """Returns True if a counter has grown since the last call, or since the object was made. A counter that is new,
        or that restarted at zero because its cgroup was recreated, has not grown."""
        before, self._counts = self._counts, self._read()
        return any(count > before.get(file, count) for file, count in self._counts.items())

    def _read(self) -> dict[str, int]:
        """Returns the counters that can be read, keyed by file."""
        counts: dict[str, int] = {}
        for line in _text(f"{self._proc}/self/cgroup").splitlines():
            _, _, membership = line.partition(":")
            controllers, _, path = membership.partition(":")
            if not controllers:
                counts |= self._version_2(path)
            elif "memory" in controllers.split(","):
                counts |= _read_counters(f"{self._cgroup}/memory", path, "memory.oom_control")
        return counts

    def _version_2(self, path: str) -> dict[str, int]:
        unified = os.path.exists(f"{self._cgroup}/cgroup.controllers")
        base = self._cgroup if unified else f"{self._cgroup}/unified"
        counts = _read_counters(base, path, "memory.events.local")
        # Finds the lowest level that this process can see. In a container the path may name levels that are not
        # mounted.
        for folder in reversed(_levels(base, path)):
            count = _count(f"{folder}/memory.events")
            if count is not None:
                counts[f"{folder}/memory.events"] = count
                break
        return counts


def _levels(base: str, path: str) -> list[str]:
    """Returns the folders of a cgroup and of the cgroups above it, from the root down."""
    # A path such as "/../x" leads above the root of the mount, which is then the container's own level.
    names = [name for name in PurePosixPath(path).parts if name not in ("/", "..")]
    return ["/".join([base, *names[:depth]]) for depth in range(len(names) + 1)]


def _read_counters(base: str, path: str, name: str) -> dict[str, int]:
    """Returns the counters in the files called ``name`` at all levels, keyed by file."""
    files = [f"{folder}/{name}" for folder in _levels(base, path)]
    counts = {file: _count(file) for file in files}
    return {file: count for file, count in counts.items() if count is not None}


def _count(file: str) -> int | None:
    """Returns the value of "oom_kill" in a file, or None if the file has none."""
    for line in _text(file).splitlines():
        name, _, value = line.partition(" ")
        if name == "oom_kill" and value.isdecimal():
            return int(value)
    return None


def _text(file: str) -> str:
    """Returns the contents of a file, or an empty string if it cannot be read."""
    try:
        with open(file, encoding="utf-8", errors="replace") as opened:
            return opened.read()
    except OSError:
        return ""
