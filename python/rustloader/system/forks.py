"""The steps that this package takes before and after ``os.fork``, and their order.

Each module registers the functions of its step (:func:`at_fork`). The list in this module fixes the order of the steps,
which therefore does not depend on the order of imports. Hooks of the C library run between these steps and the fork
itself; ``src/sys/fork.rs`` lists them.

CPython calls these functions one by one. If a function raises, for example because a signal handler does,
``sys.unraisablehook`` reports the error, and the remaining functions still run.
"""

from __future__ import annotations

import os
from collections.abc import Callable

# After a fork, the steps run in this order; before a fork, in the reverse order.
STEPS = (
    # The child makes a new lock for the ledgers. This step is first, because later steps may trigger the garbage
    # collector, which may destroy objects that take this lock. In the child, a lock that another thread of the parent
    # held is never released.
    "ledgers",
    # Ranks meet on sockets. During the fork, the parent holds the lock of these sockets; the child closes its copies of
    # them. This step precedes all steps without a lock, so that other threads of the parent wait less for its lock.
    "ranks",
    # The child drops the parent's reports. This step is independent of the others.
    "reports",
    # The child serves no metrics: it closes its copy of the socket. This step is independent of the others.
    "metrics",
    # The child makes multiprocessing forget the parent's workers. This step is independent of the others.
    "workers",
    # The parent restarts the thread that returns idle pages. In the parent, this is the last step that does anything,
    # so that all locks are free again when the thread starts.
    "pages",
    # A child of multiprocessing's fork server reseeds NumPy's generator.
    "numpy",
)
_PARTS = ("before", "after_in_parent", "after_in_child")


class _Part:
    """A part of a step: the part before the fork, the part in the parent after it, or the part in the child after it.
    It does nothing until a module registers a function for it."""

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
    """Registers the functions of a step. They replace all functions that were previously registered for the step.

    Args:
        name: One of ``STEPS``.
        before: Called in the parent before the fork; None to do nothing.
        after_in_parent: Called in the parent after the fork; None to do nothing.
        after_in_child: Called in the child after the fork; None to do nothing.

    Raises:
        ValueError: There is no step with that name.
    """
    if name not in _parts:
        raise ValueError(
            f"no step at a fork is called {name!r}: add it to rustloader.system.forks.STEPS, at the right position"
        )
    for part, function in zip(_PARTS, (before, after_in_parent, after_in_child), strict=True):
        _parts[name][part].function = function


def registered(name: str) -> tuple[str, ...]:
    """Returns the names of a step's parts for which a function is registered in this process."""
    return tuple(part for part in _PARTS if _parts[name][part].function is not None)
