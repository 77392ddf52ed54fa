"""``rustloader.install()``: all DataLoaders of the process use the engine, including those that a framework builds."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Iterator
from typing import Any

from torch.utils.data import dataloader as torch_dataloader

from rustloader.installation import stateful as stateful_install
from rustloader.installation.replacement import Replacement, full_name
from rustloader.iterator.core import _MultiProcessingDataLoaderIter as OurIter
from rustloader.settings import options
from rustloader.system.install_handle import Installed
from rustloader.system.torch_side import IterType, TorchIter

logger = logging.getLogger("rustloader")

_NAME = "_MultiProcessingDataLoaderIter"
_lock = threading.RLock()
_iterator_class = Replacement(TorchIter, OurIter, "torch's iterator")


@options.takes(options.Options)
def install(values: dict[str, Any]) -> None:
    """Makes every ``torch.utils.data.DataLoader`` with workers in this process use the Rust engine.

    Call this if a framework builds the program's loaders. The call replaces torch's iterator class in torch's module
    and in all other loaded modules that refer to it. Existing loaders use the engine from their next iterator on. A
    class that was derived from torch's iterator before the call keeps using torch's iterator, and so does a class that
    overrides methods without a counterpart in the engine. In both cases, the logger ``rustloader`` warns.

    The arguments are options that a framework would drop when it rebuilds a loader. Until ``uninstall()``, each option
    applies to all loaders that have torch's default for it. Further calls add options.

    Raises:
        TypeError: An option has the wrong type.
        ValueError: An option has an invalid value.
        ImportError: ``stateful=True``, and torchdata is not installed.
        RuntimeError: The program has replaced torch's iterator class. With ``stateful=True``: the program has replaced
            torchdata's loader, or torchdata cannot be imported.

    Examples:
        >>> rustloader.install(prefetch_factor=4)
        >>> loader = torch.utils.data.DataLoader(range(8), batch_size=4, num_workers=2)
        >>> [batch.tolist() for batch in loader]
        [[0, 1, 2, 3], [4, 5, 6, 7]]
        >>> rustloader.stats(loader).batches
        2
        >>> rustloader.uninstall()
    """
    with _lock:
        present = torch_dataloader._MultiProcessingDataLoaderIter
        if present is not OurIter and present is not TorchIter:
            raise RuntimeError(
                f"torch.utils.data.dataloader.{_NAME} was replaced by {full_name(present)}; "
                "call rustloader.install() before the code that replaces it runs"
            )
        before = options.current()
        options.add(values)
        try:
            _follow_stateful()
        except (ImportError, RuntimeError):
            options.replace(before)
            raise
        if IterType.stand_in is None:
            _put_in()


def uninstall() -> None:
    """Undoes ``install()``, including its options.

    Iterators that already exist keep using the engine. Does nothing if the engine is not installed.

    Examples:
        >>> rustloader.install()
        >>> rustloader.uninstall()
        >>> rustloader.is_installed()
        False
    """
    with _lock:
        options.replace({})
        _follow_stateful()
        if IterType.stand_in is None:
            if torch_dataloader._MultiProcessingDataLoaderIter is OurIter:  # the program itself has put it there
                torch_dataloader._MultiProcessingDataLoaderIter = TorchIter  # type: ignore[misc]
            return
        IterType.stand_in = None
        _iterator_class.take_out()
        present = torch_dataloader._MultiProcessingDataLoaderIter
        if present is not TorchIter:
            text = "torch.utils.data.dataloader.%s was replaced by %s after rustloader.install() and is not restored"
            logger.warning(text, _NAME, full_name(present))


def is_installed() -> bool:
    """Returns True if torch's loaders currently use the Rust engine.

    Returns:
        True between ``install()`` and ``uninstall()``, and in the body of ``with rustloader.installed():``.

    Examples:
        >>> rustloader.is_installed()
        False
        >>> with rustloader.installed():
        ...     rustloader.is_installed()
        True
    """
    return IterType.stand_in is not None


@options.takes(options.Options)
def installed(values: dict[str, Any]) -> Installed:
    """Installs the engine, in all threads, for the body of a ``with`` statement; then restores the previous state.

    Returns:
        A context manager that is also a decorator. It has no truth value; call ``rustloader.is_installed()`` to check
        whether the engine is installed.

    Raises:
        TypeError: On entry, if an option has the wrong type. Also if the context manager is used as a truth value.
        ValueError: On entry, if an option has an invalid value.
        ImportError: On entry, in the same case as ``install()``.
        RuntimeError: On entry, in the same cases as ``install()``.

    Examples:
        >>> loader = torch.utils.data.DataLoader(range(8), batch_size=4, num_workers=2)
        >>> with rustloader.installed():
        ...     batches = list(loader)
        >>> rustloader.stats(loader).batches
        2
    """
    return Installed(lambda: _installed(values))


class _Entered:
    """A ``with`` statement that has been entered and not yet exited.

    Attributes:
        before: The options to restore when it is exited; None if the engine was not installed before.
    """

    def __init__(self) -> None:
        self.before = options.current() if is_installed() else None


# All such statements, in the order in which they were entered.
_entered: list[_Entered] = []


@contextlib.contextmanager
def _installed(values: dict[str, Any]) -> Iterator[None]:
    # If the interpreter's exit ends the `with` statement, nothing is restored, because the globals of this module may
    # already be None. For the same reason, `is_finalizing` is looked up now.
    is_finalizing = sys.is_finalizing
    with _lock:
        own = _Entered()
        install(**values)
        _entered.append(own)
    try:
        yield
    finally:
        if not is_finalizing():
            with _lock:
                _leave(own)


def _leave(own: _Entered) -> None:
    """Restores the state from before a ``with`` statement. If another thread has since entered such a statement and not
    exited it, leaves it to that statement to restore the state later."""
    position = _entered.index(own)
    _entered.remove(own)
    if position < len(_entered):
        _entered[position].before = own.before
    elif own.before is None:
        uninstall()
    else:
        options.replace(own.before)
        if not is_installed():
            _put_in()
        _follow_stateful()


def _follow_stateful() -> None:
    """Replaces or restores torchdata's class, depending on the option ``stateful``."""
    if options.current().get("stateful", False):
        stateful_install.put_in()
    else:
        stateful_install.take_out()


def _put_in() -> None:
    """Replaces torch's class wherever loaded modules refer to it."""
    IterType.stand_in = OurIter
    text = "".join(f", {name}={value!r}" for name, value in options.current().items())
    _iterator_class.put_in(f"DataLoaders with workers use the Rust engine{text}")
