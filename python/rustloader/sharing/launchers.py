"""What a launcher (torchrun, Slurm, MPI) tells its processes about the run: its name, and the ranks of this machine."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

import torch.distributed

# What names a run, as its launcher sets it for every rank. Those that are missing count as empty.
_RUN = ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "SLURM_JOB_ID", "PMIX_NAMESPACE")
# What tells apart runs of the same name.
_PART = ("TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "SLURM_STEP_ID")
# The number of ranks on this machine, and the number of this rank among them, by launcher.
_SIZES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
# For each node, as in "2(x3),1".
_SLURM_SIZES = "SLURM_STEP_TASKS_PER_NODE"
_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")


class Ranks(NamedTuple):
    """The ranks of a run on this machine."""

    # Their number; None if it is unknown.
    size: int | None
    # What tells this one from the others.
    own: str


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and re.fullmatch(r"[0-9]{1,9}", text) else None


def _slurm_size() -> int | None:
    sizes: list[int] = []
    for part in os.environ.get(_SLURM_SIZES, "").split(","):
        found = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,5})\))?", part)
        if not found:
            return None
        sizes += [int(found[1])] * int(found[2] or 1)
    node = _number(os.environ.get("SLURM_NODEID"))
    return sizes[node] if node is not None and node < len(sizes) else None


def _has_others() -> bool:
    """Whether the run has several processes, on this machine or others."""
    if (_number(os.environ.get("WORLD_SIZE")) or 1) > 1:
        return True
    available = torch.distributed.is_available() and torch.distributed.is_initialized()
    return available and torch.distributed.get_world_size() > 1


def local_ranks() -> Ranks | None:
    """The ranks of this machine; None if this process is alone, or nothing tells."""
    sizes = (_number(os.environ.get(name)) for name in _SIZES)
    size = next((size for size in sizes if size), None) or _slurm_size()
    if size == 1 or (size is None and not _has_others()):
        return None
    return Ranks(size, next((os.environ[name] for name in _RANKS if os.environ.get(name)), f"pid {os.getpid()}"))


def run_name() -> tuple[str, ...] | None:
    """What names the run, the same in all its ranks; None if nothing does."""
    named = [os.environ.get(name, "") for name in _RUN]
    return (*named, *(os.environ.get(name, "") for name in _PART)) if any(named) else None
