"""The ranks of a distributed program on this machine, from the environment variables of its launcher (torchrun, Slurm,
MPI).

If several environment variables have the same meaning, the first valid one is used. A variable is valid if its value
consists of one to nine ASCII digits.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping

import rustloader.system.procfs as procfs

# The variables, one per launcher, for the number of ranks on this machine, and for this process's local rank.
_SIZES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
# The variables, one per launcher, for this process's global rank.
_GLOBAL = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
# The variables, one per launcher, for the number of ranks on all machines.
_GLOBAL_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")
# Slurm's variable with the number of tasks on each node, as in "2(x3),1".
_SLURM_SIZES = "SLURM_STEP_TASKS_PER_NODE"


def number(name: str, environment: Mapping[str, str] = os.environ) -> int | None:
    """Returns the value of an environment variable; None if it is not set or not a number of at most nine digits."""
    text = environment.get(name, "")
    return int(text) if re.fullmatch(r"[0-9]{1,9}", text) else None


def size() -> int | None:
    """Returns the number of ranks on this machine, 1 or more; None if unknown."""
    return next((value for name in _SIZES if (value := number(name))), None) or _slurm_size()


def rank() -> int | None:
    """Returns this process's local rank (its rank on this machine), from 0; None if unknown."""
    variable = _rank_variable_in(os.environ)
    return None if variable is None else variable[1]


def global_rank() -> int | None:
    """Returns this process's global rank (its rank across all machines), from 0; None if unknown."""
    return next((value for name in _GLOBAL if (value := number(name)) is not None), None)


def is_one_of_several() -> bool:
    """Returns True if a launcher has set this process's global rank, and not set the number of ranks to 1."""
    size = next((value for name in _GLOBAL_SIZES if (value := number(name)) is not None), None)
    return global_rank() is not None and size != 1


def _slurm_size() -> int | None:
    sizes: list[int] = []
    for part in os.environ.get(_SLURM_SIZES, "").split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,5})\))?", part)
        if not match:
            return None
        sizes += [int(match[1])] * int(match[2] or 1)
    node = number("SLURM_NODEID")
    return (sizes[node] or None) if node is not None and node < len(sizes) else None


def are_bound(cores: Iterable[int]) -> bool:
    """Returns True if the ranks seem to be bound to different cores, that is, if this rank's cores differ from those of
    the launcher. Works only on Linux.

    Args:
        cores: The core numbers in this rank's affinity.
    """
    try:
        return os.sched_getaffinity(_launcher()) != set(cores)
    except OSError:
        # The launcher has ended.
        return False


def _launcher() -> int:
    """Returns the pid of the launcher: the nearest ancestor whose environment does not have this process's local rank.

    Processes between the launcher and this process are wrappers of this rank (a shell, ``uv run``, ``conda run``),
    which have the same affinity as the rank.
    """
    pid, own = os.getppid(), _rank_variable_in(os.environ)
    while own is not None and rank_variable_of(pid) == own and (parent := procfs.parent(pid)):
        pid = parent
    return pid


def rank_variable_of(pid: int) -> tuple[str, int] | None:
    """Returns the name and value of the variable for the local rank in a process's initial environment. Returns None if
    it has no such variable or cannot be read."""
    lines = (procfs.read(f"/proc/{pid}/environ") or "").split("\0")
    return _rank_variable_in(dict(line.split("=", 1) for line in lines if "=" in line))


def _rank_variable_in(environment: Mapping[str, str]) -> tuple[str, int] | None:
    return next(((name, value) for name in _RANKS if (value := number(name, environment)) is not None), None)
