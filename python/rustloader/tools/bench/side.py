"""The part of ``bench`` that runs in the process with the user's loader, and measures the loader on request."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from rustloader.remote.context import is_remote
from rustloader.settings import loader_state
from rustloader.tools.bench.passes import Limits, run_pass
from rustloader.tools.bench.settings import Setting
from rustloader.tools.harness.machine import machine
from rustloader.tools.probe.factory import Unusable, check_target
from rustloader.tools.probe.side import Side, end_workers

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

# Maximum seconds to wait after a pass for workers to finish their outstanding batches.
_MAX_SETTLING = 5.0
# Leaves the factory's num_workers and options unchanged.
_FROM_FACTORY = Setting(None)


class BenchSide(Side):
    """A loader to measure. Each public method except ``close`` answers the request of the same name.

    Args:
        target: the factory.
        engine: name of the engine.
        setting: replaces the factory's num_workers and options.
        quiet: whether to hide Python's warnings.
        is_named: whether messages name the factory, because there are several.
    """

    def __init__(
        self,
        target: str,
        engine: str,
        setting: Setting = _FROM_FACTORY,
        quiet: bool = False,
        is_named: bool = False,
    ) -> None:
        super().__init__(target, engine, quiet)
        if is_named:
            self.title += f" ({target})"
        self._setting = setting
        self._cut_short = self._has_step = False
        # Hits and misses of the dataset's cache at the end of the warm-up.
        self._warm = 0, 0

    def close(self) -> None:
        """Shuts down the workers that are still running."""
        loader = getattr(self, "loader", None)
        end_workers(getattr(loader, "_iterator", None))  # persistent workers

    def about(self) -> dict[str, Any]:
        """Creates the loader. Returns descriptions of the machine and the loader."""
        self.load()  # before the import of torch, so that a wrong name fails immediately
        if self._setting.workers is not None:  # a sweep may use more workers than cores
            warnings.filterwarnings("ignore", "This DataLoader will create")
        self.make(self._setting.workers, ", or pass --workers 2")
        loader = self.loader
        _prepare_remote(loader, self.engine, self.target)
        loader_state.forget_auto(loader)  # the number of workers must not change during a measurement
        loader_state.give(loader, dict(self._setting.options))  # torch's iterator ignores these options
        context = loader.multiprocessing_context or multiprocessing
        method = getattr(context, "get_start_method", None)
        return {
            "machine": machine(),
            "num_workers": int(loader.num_workers),
            "prefetch_factor": None if loader.prefetch_factor is None else int(loader.prefetch_factor),
            "batch_size": loader.batch_size,
            "persistent_workers": bool(loader.persistent_workers),
            "pin_memory": bool(loader.pin_memory),
            "start_method": method() if method else type(context).__name__,
            "remote": is_remote(loader.multiprocessing_context),
        }

    def run(self, number: int, limits: Limits, count_bytes: bool) -> dict[str, Any]:
        """Runs a pass. Passes with the same number use the same random seeds on both engines."""
        from rustloader.tools.probe.leaves import nbytes

        with self._pass(number):
            result = run_pass(self.loader, limits, nbytes if count_bytes else None, self)
        self._cut_short |= not result.complete
        if not result.complete and self.loader.persistent_workers:
            # Waits while the workers finish their outstanding batches, so that they do not take cores from the engine
            # that is measured next.
            outstanding = self.loader.num_workers * (self.loader.prefetch_factor or 0)
            time.sleep(min(limits.seconds, _MAX_SETTLING, outstanding / result.batches_per_second))
        self._has_step |= limits.step > 0
        if count_bytes:
            self._warm = _cache_counts(self.loader.dataset)
        return asdict(result)

    def verdict(self) -> dict[str, Any]:
        """Returns the verdict on all passes, with the statistics on which it is based, and the share of the samples
        that came from a cache after the warm-up (None without a cache)."""
        import rustloader

        stats = rustloader.stats(self.loader)
        # Passes that are cut short start workers more often than full epochs would.
        changes: dict[str, Any] = {"epochs": 1} if self._cut_short else {}
        if not self._has_step:  # the time between two batches is only the overhead of the measurement
            changes["step_seconds"] = 0.0
        judged = replace(stats, **changes, halves=tuple(replace(half, **changes) for half in stats.halves))
        hits, misses = (now - warm for now, warm in zip(_cache_counts(self.loader.dataset), self._warm, strict=True))
        cached = hits / (hits + misses) if hits + misses else None
        return {**asdict(judged.verdict()), "cached_share": cached, "stats": stats.as_dict(), "judged": judged}

    @contextlib.contextmanager
    def _pass(self, number: int) -> Iterator[None]:
        """Seeds the random generators, and makes iterators use the engine while a pass runs.

        Raises ``Unusable`` if the loader is empty, or if batches did not come from the engine that is measured.
        """
        self.seed(number)
        with self.on_engine():
            try:
                yield
            except StopIteration:
                raise Unusable(f"the loader of {self.target} yields no batches") from None
        served, line = self.served()
        if self.engine == "torch":
            self.refuse_engine()
        elif not served and self.loader.num_workers > 0:
            raise Unusable(f"nothing to compare: {line or 'the Rust engine delivered no batches'}")


def _cache_counts(dataset: Any) -> tuple[int, int]:
    """Returns the hits and misses of a dataset's cache so far; zeros without a cache."""
    from rustloader.metrics import caches

    usage = caches.usage(dataset)
    return (0, 0) if usage is None else (usage.hits, usage.misses)


def _prepare_remote(loader: DataLoader[Any], engine: str, target: str) -> None:
    """Prepares a loader whose workers run on other machines.

    torch's iterator gets local workers instead. For the engine, cloudpickle gets the definitions in the factory's file
    by value, because the other machines cannot import that file.
    """
    if not is_remote(loader.multiprocessing_context):
        return
    place, _, is_file = check_target(target)
    if engine == "torch":
        loader.multiprocessing_context = None
    elif is_file:
        from ray import cloudpickle

        cloudpickle.register_pickle_by_value(sys.modules[os.path.splitext(os.path.basename(place))[0]])
