"""Limits, intervals and environment variables of the Python side; ``src/config.rs`` has those of the Rust core.

What both sides need stands there, and ``rustloader._core`` exports it. Importing this module imports neither torch nor
the extension. docs/options.md lists the variables.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from rustloader.options import NO, YES, Options, option_of

# The oldest and the newest minor version of torch that the tests run with.
TORCH_VERSIONS = ((2, 6), (2, 15))

# Seconds from SIGTERM to SIGKILL at shutdown. A worker without a handler of its own ends at once.
KILL_AFTER = 0.5
# Seconds for workers to leave by themselves at the interpreter's exit, and from SIGTERM to SIGKILL there.
EXIT_GRACE = 0.5
EXIT_KILL_AFTER = 0.2
# Seconds to wait after SIGKILL, which only a process in the kernel's uninterruptible sleep outlives.
KILLED_AFTER = 5.0
# Seconds after which a Ctrl-C that a destructor caught is raised again: the object must be gone by then.
INTERRUPT_AFTER = 0.02
# Seconds to wait for the fork server to report how a worker ended.
STATUS_AFTER = 1.0
# Characters of an index batch in errors and warnings.
INDEX_SHOWN = 200


class Seconds(NamedTuple):
    """An environment variable whose value is a number of seconds."""

    name: str
    default: float

    def get(self) -> float:
        """The value now.

        Raises:
            ValueError: The variable is no such number.
        """
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


# A worker without a first batch is named in the log after this time; 0: never.
STALL_START = Seconds("RUSTLOADER_STALL_START_SECONDS", 30.0)
# A worker that works on a single batch is named in the log after this time; 0: never.
STALL_ITEM = Seconds("RUSTLOADER_STALL_ITEM_SECONDS", 120.0)
# How long the main process waits for that worker's stack; 0: the stack is not requested.
STALL_STACK = Seconds("RUSTLOADER_STALL_STACK_SECONDS", 1.0)
# If the program handles SIGTERM: a worker that alone received one dies of it after this time.
SIGTERM = Seconds("RUSTLOADER_SIGTERM_SECONDS", 0.5)
SECONDS = (STALL_START, STALL_ITEM, STALL_STACK, SIGTERM)


class StallLimits(NamedTuple):
    """When a worker counts as stuck, in seconds; 0: never. The engine reads the fields by name.

    Attributes:
        start_seconds: Without a first batch.
        item_seconds: At a single batch.
        stack_seconds: How long its stack is waited for; 0: it is not requested.
    """

    start_seconds: float
    item_seconds: float
    stack_seconds: float


def stall_limits() -> StallLimits:
    """The limits that the environment sets.

    Raises:
        ValueError: A variable is no number of seconds.
    """
    return StallLimits(STALL_START.get(), STALL_ITEM.get(), STALL_STACK.get())


# `import rustloader` installs the engine, as parse_install() says.
INSTALL = "RUSTLOADER_INSTALL"


def parse_install(setting: str) -> dict[str, Any] | None:
    """The options that ``RUSTLOADER_INSTALL`` sets, by name; None if it does not install.

    Raises:
        ValueError: It is neither 1 nor 0 nor a list of options.
    """
    text = setting.strip().lower()
    if text in ("", *NO):
        return None
    values = {}
    for part in () if text in YES else text.split(","):
        name, _, value = (piece.strip() for piece in part.partition("="))
        try:
            values[name] = option_of(name).parse(value)
        except (KeyError, ValueError):
            known = ", ".join(f"{name} ({option_of(name).expected})" for name in Options.__dataclass_fields__)
            raise ValueError(
                f"{INSTALL} must be 1, 0, or options of rustloader.install(), separated by commas, for example "
                f"prefetch_factor=4,in_order=0; got {setting!r}. The options: {known}"
            ) from None
    return values
