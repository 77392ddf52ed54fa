"""The public names on systems other than Linux, where there is no extension and torch's own iterator runs."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import socket
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

from torch.utils.data import DataLoader, Sampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from rustloader.caching.usage import CacheUsage
from rustloader.caching.wrapper import Wrapper, check
from rustloader.metrics.ranks import RankReport, RankStats
from rustloader.metrics.stats import Stats, check_interval, no_loader
from rustloader.metrics.wrappers import loader_in
from rustloader.settings import options
from rustloader.system.install_handle import Installed

logger = logging.getLogger("rustloader")

_WHY = f"rustloader's engine needs Linux, and this is {sys.platform}"
_warned = False


def __getattr__(name: str) -> Any:
    """Returns ``__version__``, which comes from the extension on Linux."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return metadata.version("rustloader")


def warn() -> None:
    """Logs once per process that loaders run on torch's iterator."""
    global _warned
    # A spawned worker runs the script's top-level code again, and must not repeat the warning.
    process = multiprocessing.current_process()
    if not (_warned or process.daemon or getattr(process, "_inheriting", False)):
        _warned = True
        logger.warning("DataLoaders run on torch's own iterator: %s", _WHY)


def engine_batches() -> int:
    """Returns 0: there is no engine."""
    return 0


def sample_seed() -> int:
    """Raises RuntimeError: without the engine, loaders use torch's seeds."""
    raise RuntimeError(f"sample_seed() is not available: {_WHY}")


def share(x: Any, *, threshold: int = 1 << 20, key: str | None = None, timeout: float = 1800.0) -> Any:
    """Returns ``x`` itself or, if it is a function, its result: there is no shared memory."""
    return x() if callable(x) and not any(hasattr(x, name) for name in ("__getitem__", "__iter__")) else x


class CachedDataset(Wrapper[Any]):
    """A dataset without a cache, which passes each sample to ``then``."""

    def __getitem__(self, index: Any) -> Any:
        sample = self.dataset[index]
        return sample if self.then is None else self.then(sample)

    def __reduce__(self) -> Any:
        return _cached_of, (self.dataset, self.then)

    def usage(self) -> CacheUsage:
        """Returns counters that are all 0."""
        return CacheUsage()


def cache(
    dataset: Any,
    memory: int | str | None = None,
    *,
    then: Callable[[Any], Any] | None = None,
    key: str | None = None,
    path: str | os.PathLike[str] | None = None,
    version: str = "",
) -> CachedDataset:
    """Returns a dataset that fetches a sample again each time it is read: there is no shared memory for a cache."""
    check(dataset, then, key, path, version)
    return _cached_of(dataset, then)


def _cached_of(dataset: Any, then: Callable[[Any], Any] | None) -> CachedDataset:
    return CachedDataset.class_for(dataset)(dataset=dataset, then=then)


class StatefulDataLoader(DataLoader[Any]):
    """A class that cannot be used: its constructor raises NotImplementedError, because states need the engine."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"StatefulDataLoader: {_WHY}")


class TokenBudgetBatchSampler(Sampler[list[int]]):
    """A class that cannot be used: its constructor raises NotImplementedError, because plans need the engine."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"{type(self).__name__}: {_WHY}")


class PackingBatchSampler(TokenBudgetBatchSampler):
    """A class that cannot be used, as ``TokenBudgetBatchSampler``."""


def pack(samples: Any, *, max_length: int | None = None) -> dict[str, Any]:
    """Raises NotImplementedError: packing needs the engine."""
    raise NotImplementedError(f"pack: {_WHY}")


@options.takes(options.Options)
def install(values: dict[str, Any]) -> None:
    """Only logs a warning: loaders keep torch's iterator, and the options have no effect."""
    warn()


def uninstall() -> None:
    """Does nothing: nothing is installed."""


def is_installed() -> bool:
    """Returns False: there is no engine."""
    return False


@options.takes(options.Options)
def installed(values: dict[str, Any]) -> Installed:
    """Returns a context manager that, like ``install()``, only logs a warning."""
    return Installed(_installed)


@contextlib.contextmanager
def _installed() -> Iterator[None]:
    warn()
    yield


def stats(source: Any) -> Stats:
    """Returns empty statistics, with a note that explains why. Raises TypeError if ``source`` is neither a loader nor
    an iterator of one."""
    source = loader_in(source, lambda _: False)
    if not isinstance(source, (DataLoader, _BaseDataLoaderIter)):
        raise no_loader(source)
    workers: int = getattr(source, "num_workers", 0) or getattr(source, "_num_workers", 0)
    return Stats(num_workers=workers, cores=os.cpu_count() or 1, note=_WHY)


def report_ranks(source: Any = None, group: Any = None) -> RankReport:
    """Returns a report that covers only this process and has no measurements."""
    return RankReport((RankStats(0, socket.gethostname()),))


class MetricsServer:
    """A stand-in for the metrics server. It serves nothing."""

    port, address = 0, ""

    def close(self) -> None:
        """Does nothing."""

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(self, *error: object) -> None:
        pass


def serve_metrics(port: int, address: str = "127.0.0.1") -> MetricsServer:
    """Only logs a warning: there are no metrics to serve."""
    warn()
    return MetricsServer()


@contextlib.contextmanager
def trace(path: str | os.PathLike[str], *, level: str = "batch", seconds: float | None = None) -> Iterator[None]:
    """Only logs a warning: there is no engine to trace."""
    warn()
    yield


@contextlib.contextmanager
def report(source: Any, callback: Callable[[Stats], object], every: float = 10.0) -> Iterator[None]:
    """Calls ``callback`` with ``stats(source)`` when the body of the ``with`` statement ends. Raises ValueError for an
    invalid interval, as on Linux."""
    check_interval(every)
    try:
        yield
    finally:
        callback(stats(source))
