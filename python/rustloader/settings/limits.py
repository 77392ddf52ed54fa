"""Limits, intervals and environment variables of the Python code. docs/options.md describes the variables.

The limits of the Rust core, and those that both sides use, are in ``src/config.rs``; ``rustloader._core`` exports the
latter. Importing this module imports neither torch nor the extension.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from rustloader.settings.option_values import NO, YES

# The oldest and the newest minor version of torch that the tests cover.
TORCH_VERSIONS = ((2, 6), (2, 15))

# At shutdown: seconds from SIGTERM to SIGKILL. A worker that has not installed a handler for SIGTERM ends at once.
KILL_AFTER = 0.5
# At the interpreter's exit: seconds that workers get to exit before SIGTERM, and seconds from SIGTERM to SIGKILL. The
# first is also the longest wait for a pin thread that has failed.
EXIT_GRACE = 0.5
EXIT_KILL_AFTER = 0.2
# Seconds to wait for a process after SIGKILL. Only a process in uninterruptible sleep lives longer.
KILLED_AFTER = 5.0
# Seconds until a Ctrl-C that a destructor has caught is raised again. By then, the object must have been destroyed.
INTERRUPT_AFTER = 0.1
# Seconds to wait for a report of how a worker ended (from the fork server, or from the cluster of a worker on another
# machine), or for the end of the fork server.
STATUS_AFTER = 1.0
# Seconds after which a spawned worker stops waiting for its turn to import torch. Without this limit, workers could
# deadlock: the program's main module may wait for other workers when it is imported during a worker's turn.
GATE_SECONDS = 10.0
# CPU time that each worker may spend per epoch on snapshots of its dataset's state, and the main process on copies of
# the sampler's state: a fixed number of seconds, plus a share of the time since the epoch started. The former allows a
# snapshot of a small state after every batch from the start. The latter is the maximum share by which a large state
# lowers the batch rate.
SNAPSHOT_ALLOWANCE = 0.02
SNAPSHOT_SHARE = 0.005
# Number of a worker's batches after which a warning reports that the state of its iterable dataset has not changed.
FROZEN_AFTER = 64
# Seconds until the restart of a worker that has died twice without making a batch in between. Each further death in a
# row doubles the time, up to the maximum.
BACK_OFF = 0.1
MAX_BACK_OFF = 5.0
# Number of deaths at one sample, or in one batch, after which that sample or batch is not tried again.
POISON_AFTER = 3
# Maximum number of deaths that an error lists.
DEATHS_SHOWN = 20
# Maximum number of characters of an index batch that errors and warnings show.
INDEX_SHOWN = 200


class Seconds(NamedTuple):
    """An environment variable whose value is a number of seconds."""

    name: str
    default: float

    def get(self) -> float:
        """Returns the variable's current value. Raises ValueError if it is not a nonnegative number."""
        text = os.environ.get(self.name, "")
        try:
            value = float(text) if text else self.default
        except ValueError:
            value = -1.0
        if not value >= 0:
            raise ValueError(
                f"{self.name} must be a number of seconds, 0 or more, got {text!r}; correct it, or unset it"
            )
        return value


class Switch(NamedTuple):
    """An environment variable that turns a feature on or off."""

    name: str
    default: bool

    def get(self) -> bool:
        """Returns the variable's current value. Raises ValueError if it is neither 1 nor 0 nor a synonym of these."""
        text = os.environ.get(self.name, "").strip().lower()
        if text and text not in YES + NO:
            raise ValueError(f"{self.name} must be 1 or 0, got {text!r}; correct it, or unset it")
        return text in YES if text else self.default


# Seconds after which a worker that has not made its first batch causes a stall warning; 0 for no warning.
STALL_START = Seconds("RUSTLOADER_STALL_START_SECONDS", 30.0)
# Seconds of work on one batch after which a worker causes a stall warning; 0 for no warning.
STALL_ITEM = Seconds("RUSTLOADER_STALL_ITEM_SECONDS", 120.0)
# Seconds to wait for the stack of a stalled worker; 0 to omit the stack.
STALL_STACK = Seconds("RUSTLOADER_STALL_STACK_SECONDS", 1.0)
# If the program handles SIGTERM: seconds after which a worker dies of a SIGTERM that no other worker has received.
SIGTERM = Seconds("RUSTLOADER_SIGTERM_SECONDS", 0.5)
# Whether the program's fork server imports the modules that workers need.
FORKSERVER_PRELOAD = Switch("RUSTLOADER_FORKSERVER_PRELOAD", True)
# Whether NumPy allocates the workers' large arrays in shared memory.
NUMPY_ARENA = Switch("RUSTLOADER_NUMPY_ARENA", True)
# Seconds that the start of workers on other machines may take, including the import of torch and the transfer of the
# dataset.
REMOTE_START = Seconds("RUSTLOADER_REMOTE_START_SECONDS", 120.0)
SECONDS = (STALL_START, STALL_ITEM, STALL_STACK, SIGTERM, REMOTE_START)
# Seconds between two checks of workers that are starting or ending on other machines.
REMOTE_CHECK = 0.05
# Seconds that workers on other machines get to exit. After that, a worker ends at once, even in the middle of a
# sample. REMOTE_KILL_AFTER seconds later, the connections are closed and the actors are killed.
REMOTE_GRACE = 0.8
REMOTE_KILL_AFTER = 0.2
# Seconds that a worker on another machine gets to send its last results.
REMOTE_FINISH = 5.0


class StallLimits(NamedTuple):
    """The values of `STALL_START`, `STALL_ITEM` and `STALL_STACK`. The engine reads the fields by name."""

    start_seconds: float
    item_seconds: float
    stack_seconds: float


def stall_limits() -> StallLimits:
    """Returns the limits that the environment sets, or their defaults. Raises ValueError if a value is invalid."""
    return StallLimits(STALL_START.get(), STALL_ITEM.get(), STALL_STACK.get())
