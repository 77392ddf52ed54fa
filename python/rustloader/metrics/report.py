"""``rustloader.report()``: periodic statistics."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from rustloader._core import set_reporting
from rustloader.metrics.loader_stats import stats
from rustloader.metrics.stats import Stats, check_interval
from rustloader.system import hooks
from rustloader.system.cleanup import clean_up_after
from rustloader.system.forks import at_fork


def _forget_all() -> None:
    """Ends all reports in a forked child, so that workers do not report."""
    hooks.before_next.clear()
    set_reporting(False)


@contextlib.contextmanager
def report(source: Any, callback: Callable[[Stats], object], every: float = 10.0) -> Iterator[None]:
    """Calls a function periodically with a loader's statistics, while the body of a ``with`` statement runs.

    No thread is used: the callback runs in the training loop, when ``next`` of a rustloader iterator is called and
    ``every`` seconds have passed. It runs once more at the end of the body. If the callback fails, that ``next`` raises
    its error, and no batch is lost. The callback's time counts as part of the training step. With ``num_workers=0``
    the callback runs only at the end.

    Args:
        source: A loader or an iterator, as for ``rustloader.stats()``.
        callback: A function of one argument, a ``rustloader.Stats``. ``stats.scalars()`` returns floats by name for
            TensorBoard and Weights & Biases.
        every: Minimum seconds between two calls, greater than 0 (default: 10).

    Returns:
        A context manager, which also works as a decorator of the training function.

    Raises:
        ValueError: ``every`` is not greater than 0; raised on entering.
        TypeError: ``source`` is neither a loader nor an iterator; raised when the callback is due.

    Examples:
        >>> loader = rustloader.DataLoader(range(8), batch_size=4, num_workers=2)
        >>> with rustloader.report(loader, lambda stats: print(stats.batches, "batches"), every=30):
        ...     for batch in loader:
        ...         pass
        2 batches
    """
    check_interval(every)
    due = time.monotonic() + every

    def call() -> None:
        nonlocal due
        # Set first, so that a callback that iterates over a loader does not recurse.
        due = time.monotonic() + every
        callback(stats(source))

    def call_if_due() -> None:
        if time.monotonic() >= due:
            call()

    # As in `installed`: at interpreter shutdown, the body may end after the globals of this module are set to None.
    is_finalizing = sys.is_finalizing
    hooks.before_next.append(call_if_due)
    set_reporting(True)
    try:
        yield
    except BaseException as error:
        if is_finalizing():
            raise
        _stop(call_if_due)
        clean_up_after(error, call)
        raise
    _stop(call_if_due)
    call()


def _stop(hook: Callable[[], object]) -> None:
    hooks.before_next.remove(hook)
    set_reporting(bool(hooks.before_next))


at_fork("reports", after_in_child=_forget_all)
