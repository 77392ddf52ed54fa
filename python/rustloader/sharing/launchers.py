"""Reads the name and the ranks of the run from the variables that its launcher (torchrun, Slurm, MPI) sets."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch.distributed

import rustloader.system.local_ranks as local

# Variables that name a run. A launcher sets them to the same values in all ranks of the run. Missing variables count
# as empty.
_NAME_VARIABLES = ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "SLURM_JOB_ID", "PMIX_NAMESPACE")
# Variables that distinguish runs with the same name.
_PART_VARIABLES = ("TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "SLURM_STEP_ID")


class Ranks(NamedTuple):
    """The ranks of a run on this machine."""

    # Number of ranks; None if it is unknown.
    size: int | None
    # A string that distinguishes this rank from the others.
    own: str


def _has_others() -> bool:
    """Returns True if the run has several processes, on this machine or others."""
    if (local.number("WORLD_SIZE") or 1) > 1:
        return True
    available = torch.distributed.is_available() and torch.distributed.is_initialized()
    return available and torch.distributed.get_world_size() > 1


def local_ranks() -> Ranks | None:
    """Returns the ranks of this machine. Returns None if this process is the only rank here or, as far as is known, the
    only process of the run."""
    size, rank = local.size(), local.rank()
    if size == 1 or (size is None and not _has_others()):
        return None
    return Ranks(size, f"pid {os.getpid()}" if rank is None else str(rank))


def run_name() -> tuple[str, ...] | None:
    """Returns the name of the run, the same in all its ranks, or None if no variable names it."""
    named = [os.environ.get(name, "") for name in _NAME_VARIABLES]
    return (*named, *(os.environ.get(name, "") for name in _PART_VARIABLES)) if any(named) else None
