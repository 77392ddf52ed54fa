"""``rustloader.install()``: every DataLoader of the process uses the engine, also those that a framework builds."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from torch.utils.data import dataloader as torch_dataloader

from rustloader import options
from rustloader.install_handle import Installed
from rustloader.iterator.core import _MultiProcessingDataLoaderIter as OurIter
from rustloader.torch_side import IterType, TorchIter

logger = logging.getLogger("rustloader")

_NAME = "_MultiProcessingDataLoaderIter"
_lock = threading.RLock()
# Names that held the engine's class before the installation, with their namespaces. Uninstalling keeps them.
_kept: dict[tuple[int, str], dict[str, Any]] = {}
# Replaced tuples: (replacement, original).
_tuples: list[tuple[tuple[Any, ...], tuple[Any, ...]]] = []
_logged = False
_warned_of: weakref.WeakSet[type] = weakref.WeakSet()


@options.takes(options.Options)
def install(values: dict[str, Any]) -> None:
    """Makes every ``torch.utils.data.DataLoader`` with workers in this process use the Rust engine.

    For programs whose loaders are built by a framework. It replaces torch's iterator class in torch's module and in
    other loaded modules that hold it. Existing loaders use the engine from their next iterator on. A class derived from
    torch's iterator before this call stays on it, and one that overrides methods without a counterpart in the engine
    falls back to it; the logger ``rustloader`` then warns.

    The arguments are options that frameworks drop when they rebuild a loader. Each applies to all loaders that have
    torch's default for it, until ``uninstall()``; further calls add options.

    Raises:
        TypeError: An option has the wrong type.
        ValueError: An option cannot have that value.
        RuntimeError: The program has replaced torch's iterator class.

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
                f"torch.utils.data.dataloader.{_NAME} was replaced by {_full_name(present)}; "
                "call rustloader.install() before that is imported"
            )
        options.add(values)
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
        if IterType.stand_in is None:
            if torch_dataloader._MultiProcessingDataLoaderIter is OurIter:  # the program has restored it
                torch_dataloader._MultiProcessingDataLoaderIter = TorchIter  # type: ignore[misc]
            return
        IterType.stand_in = None
        for _, namespace, key, value in _places(OurIter):
            if (id(namespace), key) not in _kept:
                namespace[key] = _restored(value)
        _kept.clear()
        _tuples.clear()
        present = torch_dataloader._MultiProcessingDataLoaderIter
        if present is not TorchIter:
            text = "torch.utils.data.dataloader.%s was replaced by %s after rustloader.install(), and stays so"
            logger.warning(text, _NAME, _full_name(present))


def is_installed() -> bool:
    """Answers whether torch's loaders use the Rust engine now.

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
        RuntimeError: The program has replaced torch's iterator class; on entering.

    Examples:
        >>> loader = torch.utils.data.DataLoader(range(8), batch_size=4, num_workers=2)
        >>> with rustloader.installed():
        ...     batches = list(loader)
        >>> rustloader.stats(loader).batches
        2
    """
    return Installed(lambda: _installed(values))


@contextlib.contextmanager
def _installed(values: dict[str, Any]) -> Iterator[None]:
    with _lock:
        before = options.current()
        was_installed = is_installed()
        install(**values)
    try:
        yield
    finally:
        with _lock:
            if was_installed:
                options.replace(before)
            else:
                uninstall()


def _put_in() -> None:
    """Replaces torch's class wherever loaded modules hold it."""
    older = list(_derived(TorchIter))
    homes = {cls.__module__ for cls in older} - {torch_dataloader.__name__}
    _kept.update({(id(namespace), key): namespace for _, namespace, key, _ in _places(OurIter)})
    _kept.pop((id(vars(torch_dataloader)), _NAME), None)  # the program has restored it
    rebound = []
    for module, namespace, key, value in _places(TorchIter):
        # Code of derived classes may name torch's class as their base: `super(Name, self)`.
        if module not in homes:
            namespace[key] = _replaced(value)
            rebound.append(f"{module}.{key}")
    IterType.stand_in = OurIter
    _log(rebound, older)


def _places(wanted: type) -> Iterator[tuple[str, dict[str, Any], str, Any]]:
    """The places where loaded modules hold a class or a tuple with it: (module, its namespace, name, value)."""
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] == "rustloader":
            continue
        try:
            # getattr would make lazy modules load.
            namespace = object.__getattribute__(module, "__dict__")
        except AttributeError:
            continue
        for key, value in list(namespace.items()):
            if value is wanted or (type(value) is tuple and any(item is wanted for item in value)):
                yield module_name, namespace, key, value


def _replaced(value: Any) -> Any:
    if value is TorchIter:
        return OurIter
    made = tuple(OurIter if item is TorchIter else item for item in value)
    _tuples.append((made, value))
    return made


def _restored(value: Any) -> Any:
    if value is OurIter:
        return TorchIter
    for made, original in _tuples:
        if made is value:
            return original
    return tuple(TorchIter if item is OurIter else item for item in value)


def _derived(cls: Any) -> Iterator[type]:
    """The classes derived from torch's iterator, without the engine's and its subclasses."""
    for derived in cls.__subclasses__():
        if derived is not OurIter:
            yield derived
            yield from _derived(derived)


def _log(rebound: list[str], older: list[type]) -> None:
    global _logged
    # A spawned process runs the script's top level again, and must not repeat the message.
    process = multiprocessing.current_process()
    quiet = _logged or process.daemon or getattr(process, "_inheriting", False)
    level = logging.DEBUG if quiet else logging.INFO
    _logged = True
    text = "".join(f", {name}={value!r}" for name, value in options.current().items())
    logger.log(level, "DataLoaders with workers use the Rust engine%s; replaced: %s", text, ", ".join(rebound))
    for cls in older:
        if cls not in _warned_of:
            _warned_of.add(cls)
            logger.warning(
                "%s was derived from torch's iterator before rustloader.install(), and stays on it; "
                "call install() before the class is made",
                _full_name(cls),
            )


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
