"""The steps of this package around ``os.fork``, in one order.

The module of a step says what it does (:func:`at_fork`); this list says when. So the order does not depend on imports.
Hooks of the C library run between these and the fork itself: ``src/sys/fork.rs`` lists them.

CPython calls the parts of the steps one by one. What one raises, also from a signal's handler, is written by
``sys.unraisablehook`` and stops no other step.
"""

from __future__ import annotations

import os
from collections.abc import Callable

# After a fork the steps run in this order, before it in the reverse one.
STEPS = (
    # A child makes the lock of the ledgers again. First: later steps may run the collector, and the objects that it
    # destroys may take the lock, which a thread of the parent held for good.
    "ledgers",
    # The lock of the sockets by which ranks meet is held over the fork, and a child closes its copies. Before all that
    # is not a lock: the other threads of the parent wait for it.
    "ranks",
    # A child has no reports. It shares nothing with other steps.
    "reports",
    # A child serves no metrics: it closes its copy of the port. It shares nothing with other steps.
    "metrics",
    # multiprocessing in a child forgets the workers of the parent. It shares nothing with other steps.
    "workers",
    # The parent starts the thread again that returns idle pages. Last in the parent: a thread comes when the locks are
    # free again.
    "pages",
    # A child of multiprocessing's fork server has a NumPy generator of its own. It shares nothing with other steps.
    "numpy",
)
_PARTS = ("before", "after_in_parent", "after_in_child")


class _Part:
    """One part of a step, which does nothing until a module registers a function."""

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
    """Registers the function of a step, in place of the one that was registered before.

    Args:
        name: One of ``STEPS``.
        before: Called in the parent before the fork.
        after_in_parent: Called in the parent after it.
        after_in_child: Called in the child.

    Raises:
        ValueError: No step has that name.
    """
    if name not in _parts:
        raise ValueError(f"no step at a fork is called {name!r}: add it to rustloader.system.forks.STEPS, in its place")
    for part, function in zip(_PARTS, (before, after_in_parent, after_in_child), strict=True):
        _parts[name][part].function = function


def registered(name: str) -> tuple[str, ...]:
    """Returns the parts of a step that do something in this process."""
    return tuple(part for part in _PARTS if _parts[name][part].function is not None)
