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

    This is for programs whose loaders are built by a framework. The call replaces torch's iterator class in torch's
    module and in other loaded modules that hold the class. Existing loaders use the engine from their next iterator on.
    A class derived from torch's iterator before this call keeps torch's iterator, and so does a class that overrides
    methods without a counterpart in the engine; the logger ``rustloader`` then warns.

    The arguments are options that frameworks drop when they rebuild a loader. Until ``uninstall()``, each option
    applies to all loaders that have torch's default for it. Further calls add options.

    Raises:
        TypeError: An option has the wrong type.
        ValueError: An option cannot have that value.
        RuntimeError: The program has replaced torch's iterator class or, with ``stateful=True``, torchdata's loader;
            or torchdata cannot be imported.

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
                "call rustloader.install() before that is imported"
            )
        before = options.current()
        options.add(values)
        try:
            _follow_stateful()
        except RuntimeError:
            options.replace(before)
            raise
        if IterType.stand_in is None:
            _put_in()


def uninstall() -> None:
    """Undoes ``install()``, its options included.

    Running iterators keep using the engine. Does nothing if nothing is installed.

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
            if torch_dataloader._MultiProcessingDataLoaderIter is OurIter:  # the program has restored it
                torch_dataloader._MultiProcessingDataLoaderIter = TorchIter  # type: ignore[misc]
            return
        IterType.stand_in = None
        _iterator_class.take_out()
        present = torch_dataloader._MultiProcessingDataLoaderIter
        if present is not TorchIter:
            text = "torch.utils.data.dataloader.%s was replaced by %s after rustloader.install() and is not restored"
            logger.warning(text, _NAME, full_name(present))


def is_installed() -> bool:
    """Returns True if torch's loaders use the Rust engine now.

    Returns:
        True from ``install()`` to ``uninstall()``, and in the body of ``with rustloader.installed():``.

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
    """Installs the engine for the body of a ``with`` statement, in all threads, and then restores the previous state.

    Returns:
        A context manager, also a decorator. It has no truth value: call ``rustloader.is_installed()`` to ask.

    Raises:
        TypeError: An option has the wrong type; on entering. Or the context manager is used as a truth value.
        ValueError: An option cannot have that value; on entering.
        RuntimeError: As from ``install()``; on entering.

    Examples:
        >>> loader = torch.utils.data.DataLoader(range(8), batch_size=4, num_workers=2)
        >>> with rustloader.installed():
        ...     batches = list(loader)
        >>> rustloader.stats(loader).batches
        2
    """
    return Installed(lambda: _installed(values))


class _Entered:
    """A ``with`` statement that has been entered.

    Attributes:
        before: The options to restore at its end; None if the engine was not installed before.
    """

    def __init__(self) -> None:
        self.before = options.current() if is_installed() else None


# In the order in which they were entered.
_entered: list[_Entered] = []


@contextlib.contextmanager
def _installed(values: dict[str, Any]) -> Iterator[None]:
    # If the interpreter's exit ends a `with` statement, nothing is restored: the names of this module may be None.
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
    """Restores the state before a ``with`` statement, or leaves this to a statement that another thread has entered
    since."""
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
    """Replaces or restores torchdata's class, as the option ``stateful`` requires."""
    if options.current().get("stateful", False):
        stateful_install.put_in()
    else:
        stateful_install.take_out()


def _put_in() -> None:
    """Replaces torch's class wherever loaded modules hold it."""
    IterType.stand_in = OurIter
    text = "".join(f", {name}={value!r}" for name, value in options.current().items())
    _iterator_class.put_in(f"DataLoaders with workers use the Rust engine{text}")
