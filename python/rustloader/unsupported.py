"""macOS, Windows and whatever else is not Linux: the public names without the engine, on torch's own iterator.

Nothing here needs the extension, which is built for Linux alone.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from rustloader import options
from rustloader.install_handle import Installed
from rustloader.metrics.figures import Stats, check_interval, no_loader
from rustloader.metrics.wrappers import loader_in

logger = logging.getLogger("rustloader")

_WHY = f"the engine of rustloader needs Linux, and this is {sys.platform}"
_told = False


def __getattr__(name: str) -> Any:
    """``__version__``, which the extension has where there is one."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return metadata.version("rustloader")


def tell() -> None:
    """Says in the log, once, that loaders run on torch's iterator."""
    global _told
    # A worker that is spawned runs the script's top level once more; it is not the one to speak.
    process = multiprocessing.current_process()
    if not (_told or process.daemon or getattr(process, "_inheriting", False)):
        _told = True
        logger.warning("DataLoaders run on torch's own iterator: %s", _WHY)


def engine_batches() -> int:
    """Batches that the engine has delivered in this process: none."""
    return 0


@options.takes(options.Options)
def install(values: dict[str, Any]) -> None:
    """Does nothing but say so in the log: loaders stay on torch's iterator, with the options that they have."""
    tell()


def uninstall() -> None:
    """Does nothing: nothing is installed."""


def is_installed() -> bool:
    """False: there is no engine here."""
    return False


@options.takes(options.Options)
def installed(values: dict[str, Any]) -> Installed:
    """``install()`` for the body of a ``with`` statement."""
    return Installed(_installed)


@contextlib.contextmanager
def _installed() -> Iterator[None]:
    tell()
    yield


def stats(source: Any) -> Stats:
    """The statistics of a loader or an iterator: none, and why.

    Raises:
        TypeError: It is neither.
    """
    source = loader_in(source, lambda _: False)
    if not isinstance(source, (DataLoader, _BaseDataLoaderIter)):
        raise no_loader(source)
    workers: int = getattr(source, "num_workers", 0) or getattr(source, "_num_workers", 0)
    return Stats(num_workers=workers, cores=os.cpu_count() or 1, note=_WHY)


@contextlib.contextmanager
def report(source: Any, callback: Callable[[Stats], object], every: float = 10.0) -> Iterator[None]:
    """Calls ``callback`` with ``stats(source)`` once, at the end of the body of a ``with`` statement.

    Raises:
        ValueError: ``every`` is not greater than 0.
    """
    check_interval(every)
    try:
        yield
    finally:
        callback(stats(source))
