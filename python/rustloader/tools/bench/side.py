"""The part of ``bench`` that runs in the process with the user's loader, and measures the loader on request."""

from __future__ import annotations

import contextlib
import multiprocessing
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

from rustloader.settings import loader_state
from rustloader.tools.bench.cached import CACHED, CachedLoader, Fit
from rustloader.tools.bench.images import Size, SizeRecorder, advice, kept_size
from rustloader.tools.bench.passes import Limits, run_pass
from rustloader.tools.bench.ray_cluster import RAY, give_workers, measure_cluster, send_by_value
from rustloader.tools.bench.settings import Setting
from rustloader.tools.bench.timeline import TimelineRecorder, watch
from rustloader.tools.harness.machine import machine
from rustloader.tools.probe.factory import Unusable
from rustloader.tools.probe.side import Side, end_workers

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
        records: the folder to which workers write their timelines; None to record none.
        quiet: whether to hide Python's warnings.
        cache: maximum size of the cache in bytes, for the engine "cached".
    """

    def __init__(
        self,
        target: str,
        engine: str,
        setting: Setting = _FROM_FACTORY,
        records: str | None = None,
        quiet: bool = False,
        cache: int = 0,
    ) -> None:
        super().__init__(target, engine, quiet)
        self._setting, self._records, self._cache = setting, records, cache
        self._recorder: TimelineRecorder | None = None
        self._cached_loader: CachedLoader | None = None
        # The sizes of images: as decoded by the workers, and in samples.
        self._size_recorder: SizeRecorder | None = None
        self._kept_size: Size | None = None
        self._cut_short = self._has_step = False

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
        give_workers(loader, self.engine)
        if self.engine == RAY:
            send_by_value(self.target)
        loader_state.forget_auto(loader)  # the number of workers must not change during a measurement
        loader_state.give(loader, dict(self._setting.options))  # torch's iterator ignores these options
        if self.engine == CACHED:
            self._cached_loader = CachedLoader(loader, self._cache)
        if self._records is not None:
            self._recorder = loader.worker_init_fn = TimelineRecorder(self._records, loader.worker_init_fn)
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
            **({"cluster": measure_cluster()} if self.engine == RAY else {}),
        }

    def run(self, number: int, limits: Limits, count_bytes: bool) -> dict[str, Any]:
        """Runs a pass. Passes with the same number use the same random seeds on both engines."""
        with self._pass(number), self._recording_sizes() if count_bytes else contextlib.nullcontext():
            result = run_pass(self.loader, limits, self._count_bytes if count_bytes else None, self)
        self._cut_short |= not result.complete
        if not result.complete and self.loader.persistent_workers:
            # Waits while the workers finish their outstanding batches, so that they do not take cores from the engine
            # that is measured next.
            outstanding = self.loader.num_workers * (self.loader.prefetch_factor or 0)
            time.sleep(min(limits.seconds, _MAX_SETTLING, outstanding / result.batches_per_second))
        self._has_step |= limits.step > 0
        return asdict(result)

    def run_cached(self, number: int, limits: Limits) -> tuple[dict[str, Any], dict[str, Any], Fit]:
        """Runs a pass that fills a new cache, and a second pass over the same samples."""
        assert self._cached_loader is not None
        self._end_persistent()
        self._cached_loader.clear()
        first = self.run(number, limits, False)
        self._end_persistent()  # a later epoch of persistent workers would have a different order
        usage = self._cached_loader.usage()
        second = self.run(number, limits._replace(batches=first["batches"]), False)
        return first, second, self._cached_loader.fit(usage)

    def _end_persistent(self) -> None:
        """Shuts down persistent workers, so that the next pass starts new ones."""
        self.close()
        self.loader._iterator = None

    def verdict(self) -> dict[str, Any]:
        """Returns the verdict on all passes, with the statistics on which it is based."""
        import rustloader

        stats = rustloader.stats(self.loader)
        # Passes that are cut short start workers more often than full epochs would.
        changes: dict[str, Any] = {"epochs": 1} if self._cut_short else {}
        if not self._has_step:  # the time between two batches is only the overhead of the measurement
            changes["step_seconds"] = 0.0
        judged = replace(stats, **changes, halves=tuple(replace(half, **changes) for half in stats.halves))
        verdict = asdict(judged.verdict())
        if verdict["kind"] in ("dataset", "workers", "cores") and self._size_recorder is not None:
            verdict["images"] = advice(self._size_recorder.sizes, self._kept_size)
        return {**verdict, "stats": stats.as_dict(), "judged": judged}

    def watch(self, limits: Limits) -> dict[str, Any]:
        """Records the timelines of the main process and the workers."""
        assert self._recorder is not None
        with self._pass(0):
            called, returned = watch(self.loader, limits, self)
        return {"called": called, "returned": returned, "spans": self._recorder.spans(self.loader)}

    def _count_bytes(self, batch: Any) -> int:
        from rustloader.tools.probe.leaves import nbytes

        self._kept_size = self._kept_size or kept_size(batch)
        return nbytes(batch)

    @contextlib.contextmanager
    def _recording_sizes(self) -> Iterator[None]:
        """Makes workers that start in the block record image sizes. Does so once, and only on rustloader's engine."""
        init_fn = self.loader.worker_init_fn
        if self._size_recorder is not None or self.engine != "rustloader" or self._recorder is not None:
            yield
            return
        with tempfile.TemporaryDirectory(prefix="rustloader-bench-") as folder:
            self._size_recorder = self.loader.worker_init_fn = SizeRecorder(f"{folder}/sizes", init_fn)
            try:
                yield
            finally:
                self.loader.worker_init_fn = init_fn
                self._size_recorder.read()

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
