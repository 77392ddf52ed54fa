"""The steps that this package takes around ``os.fork``, and their order.

A module registers what a step does (:func:`at_fork`). The list in this module fixes the order, which therefore does not
depend on the order of imports. Hooks of the C library run between these steps and the fork itself: ``src/sys/fork.rs``
lists them.

CPython calls the parts of the steps one by one. If one raises, possibly from a signal handler, ``sys.unraisablehook``
reports the error, and the other steps still run.
"""

from __future__ import annotations

import os
from collections.abc import Callable

# After a fork the steps run in this order, before the fork in the reverse order.
STEPS = (
    # A child makes a new lock for the ledgers. This step is first, because later steps may run the garbage collector.
    # Objects that it destroys may take the lock, and in the child a lock that a thread of the parent held stays locked.
    "ledgers",
    # The lock of the sockets with which ranks meet is held during the fork, and a child closes its copies of the
    # sockets. This step precedes all steps without a lock, because other threads of the parent wait for its lock.
    "ranks",
    # A child has no reports. This step is independent of the others.
    "reports",
    # A child serves no metrics: it closes its copy of the socket. This step is independent of the others.
    "metrics",
    # A child makes multiprocessing forget the parent's workers. This step is independent of the others.
    "workers",
    # The parent restarts the thread that returns idle pages. In the parent this is the last step that does something,
    # so that the thread starts when the locks are free again.
    "pages",
    # A child of multiprocessing's fork server gets its own NumPy generator. This step is independent of the others.
    "numpy",
)
_PARTS = ("before", "after_in_parent", "after_in_child")


class _Part:
    """A part of a step: what it does before the fork, or after it in one of the processes. It does nothing until a
    module registers a function."""

    def __init__(self, step: str, part: str) -> None:
        self._name = f"{step}, {part}"
        self.function: Callable[[], object] | None = None

    def __call__(self) -> None:
        if self.function is not None:
            self.function()

    def __repr__(self) -> str:
        return f"<rustloader's step at a fork: {self._name}>"


_parts = {step: {part: _Part(step, part) for part in _PARTS} for step in STEPS}
for _step in _parts.values():
    os.register_at_fork(**_step)


def at_fork(
    name: str,
    *,
    before: Callable[[], object] | None = None,
    after_in_parent: Callable[[], object] | None = None,
    after_in_child: Callable[[], object] | None = None,
) -> None:
    """Registers the functions of a step, in place of those that were registered before.

    Args:
        name: One of ``STEPS``.
        before: Called in the parent before the fork.
        after_in_parent: Called in the parent after the fork.
        after_in_child: Called in the child after the fork.

    Raises:
        ValueError: No step has that name.
    """
    if name not in _parts:
        raise ValueError(
            f"no step at a fork is called {name!r}: add it to rustloader.system.forks.STEPS, at the right position"
        )
    for part, function in zip(_PARTS, (before, after_in_parent, after_in_child), strict=True):
        _parts[name][part].function = function


def registered(name: str) -> tuple[str, ...]:
    """Returns the parts of a step for which a function is registered in this process."""
    return tuple(part for part in _PARTS if _parts[name][part].function is not None)
