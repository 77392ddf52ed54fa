"""Limits, intervals and environment variables of the Python side; docs/options.md lists the variables.

``src/config.rs`` has those of the Rust core and shared ones, which ``rustloader._core`` exports. Importing this module
imports neither torch nor the extension.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from rustloader.settings.kinds import NO, YES
from rustloader.settings.options import Options, option_of

# The oldest and newest minor versions of torch that the tests run with.
TORCH_VERSIONS = ((2, 6), (2, 15))

# Seconds from SIGTERM to SIGKILL at shutdown. A worker without its own handler ends at once.
KILL_AFTER = 0.5
# Seconds that workers have to exit at the interpreter's exit, and seconds from SIGTERM to SIGKILL there.
EXIT_GRACE = 0.5
EXIT_KILL_AFTER = 0.2
# Seconds to wait after SIGKILL. Only a process in uninterruptible sleep lives longer.
KILLED_AFTER = 5.0
# Seconds until a Ctrl-C that a destructor caught is raised again: the object must be gone by then.
INTERRUPT_AFTER = 0.02
# Seconds to wait for the fork server to report how a worker ended, or to end itself.
STATUS_AFTER = 1.0
# Seconds after which a spawned worker stops waiting for its turn to import torch. The main module of a program may wait
# for other workers.
GATE_SECONDS = 10.0
# CPU seconds that each worker may spend on snapshots of its dataset in an epoch: this many, so that small states have
# one after each batch from the start, plus this share of the time since the epoch began, so that large states cost no
# more than this share of the batch rate.
SNAPSHOT_ALLOWANCE = 0.02
SNAPSHOT_SHARE = 0.005
# Batches of a worker after which the state of an iterable dataset that has not changed is reported.
FROZEN_AFTER = 64
# Seconds until a worker that died again without a batch in between is started again, the first time; each further death
# doubles them, up to the maximum.
BACK_OFF = 0.1
BACK_OFF_MOST = 5.0
# Deaths of workers at one sample, or in one batch, after which it is not tried again.
POISON_AFTER = 3
# Maximum number of deaths that an error lists.
DEATHS_SHOWN = 20
# Maximum characters of an index batch in errors and warnings.
INDEX_SHOWN = 200


class Seconds(NamedTuple):
    """An environment variable whose value is a number of seconds."""

    name: str
    default: float

    def get(self) -> float:
        """Returns the current value. Raises ValueError if it is not a nonnegative number."""
        text = os.environ.get(self.name, "")
        try:
            value = float(text) if text else self.default
        except ValueError:
            value = -1.0
        if not value >= 0:
            raise ValueError(
                f"{self.name} must be a number of seconds, 0 or more, got {text!r}; set it to one, or unset it"
            )
        return value


class Switch(NamedTuple):
    """An environment variable that turns something off, or on."""

    name: str
    default: bool

    def get(self) -> bool:
        """Returns the current value. Raises ValueError if it is neither 1 nor 0."""
        text = os.environ.get(self.name, "").strip().lower()
        if text and text not in YES + NO:
            raise ValueError(f"{self.name} must be 1 or 0, got {text!r}; set it to one of them, or unset it")
        return text in YES if text else self.default


# Seconds without a first batch until a stall warning; 0: no warning.
STALL_START = Seconds("RUSTLOADER_STALL_START_SECONDS", 30.0)
# Seconds of work on one batch until a stall warning; 0: no warning.
STALL_ITEM = Seconds("RUSTLOADER_STALL_ITEM_SECONDS", 120.0)
# Seconds to wait for the stack of the stalled worker; 0: no stack.
STALL_STACK = Seconds("RUSTLOADER_STALL_STACK_SECONDS", 1.0)
# If the program handles SIGTERM: seconds until a worker that alone received one dies of it.
SIGTERM = Seconds("RUSTLOADER_SIGTERM_SECONDS", 0.5)
# True if the fork server of the program imports what workers need.
FORKSERVER_PRELOAD = Switch("RUSTLOADER_FORKSERVER_PRELOAD", True)
# True if large arrays that NumPy makes in workers lie in shared memory.
NUMPY_ARENA = Switch("RUSTLOADER_NUMPY_ARENA", True)
# Seconds that the start of workers on other machines may take: of their processes, the import of torch, and the
# transfer of the dataset.
REMOTE_START = Seconds("RUSTLOADER_REMOTE_START_SECONDS", 120.0)
SECONDS = (STALL_START, STALL_ITEM, STALL_STACK, SIGTERM, REMOTE_START)
# Seconds between two looks at workers that start or end on other machines.
REMOTE_CHECK = 0.05
# Seconds that workers on other machines have to exit: those at a sample end at once then. And seconds until their
# connections are closed and their actors killed.
REMOTE_GRACE = 0.8
REMOTE_KILL_AFTER = 0.2
# Seconds that a worker on another machine has to send its last results.
REMOTE_FINISH = 5.0


class StallLimits(NamedTuple):
    """The values of `STALL_START`, `STALL_ITEM` and `STALL_STACK`. The engine reads the fields by name."""

    start_seconds: float
    item_seconds: float
    stack_seconds: float


def stall_limits() -> StallLimits:
    """Returns the limits from the environment. Raises ValueError as `Seconds.get` does."""
    return StallLimits(STALL_START.get(), STALL_ITEM.get(), STALL_STACK.get())


# Makes `import rustloader` install the engine, see parse_install().
INSTALL = "RUSTLOADER_INSTALL"


def parse_install(setting: str) -> dict[str, Any] | None:
    """Returns the options by name that a value of ``RUSTLOADER_INSTALL`` sets, or None if it does not install.

    Raises:
        ValueError: The value is neither 1 nor 0 nor a list of options.
    """
    text = setting.strip()
    if text.lower() in ("", *NO):
        return None
    values = {}
    for part in () if text.lower() in YES else text.split(","):
        name, _, value = (piece.strip() for piece in part.partition("="))
        name = name.lower()
        try:
            values[name] = option_of(name).kind.parse(value)
        except (KeyError, ValueError):
            known = ", ".join(f"{name} ({option_of(name).kind.expected})" for name in Options.__dataclass_fields__)
            raise ValueError(
                f"{INSTALL} must be 1, 0, or options of rustloader.install(), separated by commas, for example "
                f"prefetch_factor=4,in_order=0; got {setting!r}. The options: {known}"
            ) from None
    return values
