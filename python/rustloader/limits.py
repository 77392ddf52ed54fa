"""What this process may use: cores and memory, with the limits of its cgroups."""

from __future__ import annotations

import contextlib
import functools
import os
import resource
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["Cores", "Memory", "cores", "effective_cores", "kilobytes", "memory"]

_PROC = "/proc"
_CGROUPS = "/sys/fs/cgroup"
# Bytes; version 1 of cgroups writes a larger number where there is no limit.
_NO_LIMIT = 1 << 60


class Cores(NamedTuple):
    """Cores: of the machine, by this process's affinity, and by the CPU quota of its cgroups (None without one)."""

    machine: int
    affinity: int
    quota: float | None

    @property
    def effective(self) -> float:
        """Those that this process may use."""
        return self.affinity if self.quota is None else min(self.affinity, self.quota)


class Memory(NamedTuple):
    """Bytes: available on the machine, the limit of the cgroup that leaves least and what it leaves, what RLIMIT_AS
    leaves. None without such a limit."""

    available: int
    cgroup_limit: int | None
    cgroup_left: int | None
    address_space_left: int | None

    @property
    def left(self) -> int:
        """What this process and its workers may still use."""
        return min(part for part in (self.available, self.cgroup_left, self.address_space_left) if part is not None)


def cores() -> Cores:
    """The cores, now."""
    return Cores(os.cpu_count() or 1, len(os.sched_getaffinity(0)), _smallest_quota())


def effective_cores() -> float:
    """Cores that this process may use. Cheap: the quota is read once, the affinity each time."""
    affinity, quota = len(os.sched_getaffinity(0)), _known_quota()
    return affinity if quota is None else min(affinity, quota)


def _smallest_quota() -> float | None:
    quotas = [quota for version, folder in _levels("cpu") if (quota := _quota(version, folder)) is not None]
    return min(quotas, default=None)


_known_quota = functools.cache(_smallest_quota)


def memory() -> Memory:
    """The memory, now."""
    available = kilobytes(f"{_PROC}/meminfo", "MemAvailable:")
    groups = [found for version, folder in _levels("memory") if (found := _group_memory(version, folder)) is not None]
    left, limit = min(groups, default=(None, None))
    space = resource.getrlimit(resource.RLIMIT_AS)[0]
    if space == resource.RLIM_INFINITY:
        return Memory(available, limit, left, None)
    return Memory(available, limit, left, max(0, space - kilobytes(f"{_PROC}/self/status", "VmSize:")))


def kilobytes(path: str, name: str) -> int:
    """A figure that a file of the kernel has in kB, in bytes."""
    with open(path) as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(name))


def _levels(controller: str) -> Iterator[tuple[int, str]]:
    """The folders of this process's cgroup and of those around it, each with the version of cgroups."""
    for line in (_text(f"{_PROC}/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        version = 1 if controllers else 2
        # Where both versions are mounted, the second one is below the first.
        below = controller if controllers else "unified" if os.path.isdir(f"{_CGROUPS}/unified") else ""
        # In a container the path may be the host's; its own level is then the root.
        names = [name for name in path.split("/") if name not in ("", "..")]
        for depth in range(len(names) + 1):
            yield version, os.path.join(_CGROUPS, below, *names[:depth])


def _quota(version: int, folder: str) -> float | None:
    if version == 2:
        fields = (_text(f"{folder}/cpu.max") or "").split()
    else:
        fields = [_text(f"{folder}/cpu.cfs_{name}_us") or "" for name in ("quota", "period")]
    try:
        quota, period = (int(field) for field in fields)
    except ValueError:  # "max", or no such file
        return None
    return quota / period if quota > 0 and period > 0 else None


def _group_memory(version: int, folder: str) -> tuple[int, int] | None:
    """What a cgroup leaves, and its limit. Page cache that was not used lately counts as left."""
    limit, usage, cache = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        2: ("memory.max", "memory.current", "inactive_file"),
    }[version]
    try:
        most, used = (int(_text(f"{folder}/{name}") or "") for name in (limit, usage))
    except ValueError:
        return None
    if most >= _NO_LIMIT:
        return None
    for line in (_text(f"{folder}/memory.stat") or "").splitlines():
        name, _, value = line.partition(" ")
        if name == cache:
            used -= min(used, int(value))
    return max(0, most - used), most


def _text(path: str) -> str | None:
    with contextlib.suppress(OSError), open(path) as file:
        return file.read().strip()
    return None
