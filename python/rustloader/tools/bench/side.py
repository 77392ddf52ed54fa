"""The process of ``bench`` with a loader on one engine, which answers requests to measure it."""

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
from rustloader.tools.bench.cached import CACHED, Fit, Wrapped
from rustloader.tools.bench.elsewhere import RAY, carry, give_workers, measure
from rustloader.tools.bench.images import Noted, Size, advice, kept_size
from rustloader.tools.bench.passes import Limits, run_pass
from rustloader.tools.bench.settings import Setting
from rustloader.tools.bench.timeline import TimelineRecorder, watch
from rustloader.tools.harness.machine import machine
from rustloader.tools.probe.factory import Unusable
from rustloader.tools.probe.side import Side, end_workers

# Maximum seconds to wait for workers that still make batches which no pass takes.
_SETTLING = 5.0
# The factory's own settings.
_FROM_FACTORY = Setting(None)


class BenchSide(Side):
    """A loader to measure. Its methods from ``about`` on are the requests. ``setting`` replaces the factory's
    num_workers and options; ``records`` is a folder for the timelines of the workers; ``cache`` is the limit of a cache
    in bytes, for the engine "cached"."""

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
        self._wrapped: Wrapped | None = None
        # Sizes of the images that workers decode, and of those that samples keep.
        self._noted: Noted | None = None
        self._kept: Size | None = None
        self._cut_short = self._has_step = False

    def close(self) -> None:
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
            carry(self.target)
        loader_state.forget_auto(loader)  # a measurement has one number of workers
        loader_state.give(loader, dict(self._setting.options))  # torch's iterator does not read them
        if self.engine == CACHED:
            self._wrapped = Wrapped(loader, self._cache)
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
            **({"cluster": measure()} if self.engine == RAY else {}),
        }

    def run(self, number: int, limits: Limits, weigh: bool) -> dict[str, Any]:
        """Runs a pass. Passes with the same number use the same random seeds on both engines."""
        with self._pass(number), self._noting() if weigh else contextlib.nullcontext():
            result = run_pass(self.loader, limits, self._weigh if weigh else None, self)
        self._cut_short |= not result.complete
        if not result.complete and self.loader.persistent_workers:
            # The workers finish the batches under way, and must not take cores from the other engine.
            under_way = self.loader.num_workers * (self.loader.prefetch_factor or 0)
            time.sleep(min(limits.seconds, _SETTLING, under_way / result.batches_per_second))
        self._has_step |= limits.step > 0
        return asdict(result)

    def run_cached(self, number: int, limits: Limits) -> tuple[dict[str, Any], dict[str, Any], Fit]:
        """Runs a pass that fills a new cache, and a second one over the same samples."""
        assert self._wrapped is not None
        self._end_persistent()
        self._wrapped.renew()
        first = self.run(number, limits, False)
        self._end_persistent()  # a first epoch of persistent workers draws another order than a later one
        usage = self._wrapped.usage()
        second = self.run(number, limits._replace(batches=first["batches"]), False)
        return first, second, self._wrapped.fit(usage)

    def _end_persistent(self) -> None:
        """Ends persistent workers, so that the next pass starts others."""
        self.close()
        self.loader._iterator = None

    def verdict(self) -> dict[str, Any]:
        """Returns the verdict of the statistics of all passes, and its basis."""
        import rustloader

        stats = rustloader.stats(self.loader)
        # Passes that end early start workers more often than whole epochs do.
        judged = replace(stats, epochs=1) if self._cut_short else stats
        if not self._has_step:  # what lies between two batches is the measurement's own
            judged = replace(judged, step_seconds=0.0)
        verdict = asdict(judged.verdict())
        if verdict["kind"] in ("dataset", "workers", "cores") and self._noted is not None:
            verdict["images"] = advice(self._noted.sizes, self._kept)
        return {**verdict, "stats": stats.as_dict(), "judged": judged}

    def watch(self, limits: Limits) -> dict[str, Any]:
        """Records the timeline of the main process and the workers."""
        assert self._recorder is not None
        with self._pass(0):
            asked, got = watch(self.loader, limits, self)
        return {"asked": asked, "got": got, "spans": self._recorder.spans(self.loader)}

    def _weigh(self, batch: Any) -> int:
        from rustloader.tools.probe.leaves import nbytes

        self._kept = self._kept or kept_size(batch)
        return nbytes(batch)

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        """Lets workers that start in the first pass note the sizes of images."""
        init_fn = self.loader.worker_init_fn
        if self._noted is not None or self.engine != "rustloader" or self._recorder is not None:
            yield
            return
        with tempfile.TemporaryDirectory(prefix="rustloader-bench-") as folder:
            self._noted = self.loader.worker_init_fn = Noted(f"{folder}/sizes", init_fn)
            try:
                yield
            finally:
                self.loader.worker_init_fn = init_fn
                self._noted.read()

    @contextlib.contextmanager
    def _pass(self, number: int) -> Iterator[None]:
        self.seed(number)
        with self.on_engine():
            try:
                yield
            except StopIteration:
                raise Unusable(f"the loader of {self.target} yields no batches") from None
        served, line = self.served()
        if self.engine != "torch" and not served and self.loader.num_workers > 0:
            raise Unusable(f"nothing to compare: {line or 'the Rust engine delivered nothing'}")
