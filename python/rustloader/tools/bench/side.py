"""The process of ``bench`` with a loader on one engine, which answers requests to measure it."""

from __future__ import annotations

import contextlib
import multiprocessing
import warnings
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

from rustloader.settings import loader_state
from rustloader.tools.bench.elsewhere import RAY, carry, give_workers, measure
from rustloader.tools.bench.passes import Limits, run_pass
from rustloader.tools.bench.settings import Setting
from rustloader.tools.bench.timeline import Recorder, watch
from rustloader.tools.harness.machine import machine
from rustloader.tools.probe.factory import Unusable
from rustloader.tools.probe.side import Side, end_workers

# The factory's own settings.
_FACTORYS = Setting(None)


class BenchSide(Side):
    """A loader to measure. Its methods from ``about`` on are the requests. ``setting`` replaces the factory's
    num_workers and options; ``records`` is a folder for the timelines of the workers."""

    def __init__(
        self, target: str, engine: str, setting: Setting = _FACTORYS, records: str | None = None, quiet: bool = False
    ) -> None:
        super().__init__(target, engine, quiet)
        self._setting, self._records = setting, records
        self._recorder: Recorder | None = None
        self._cut_short = False

    def close(self) -> None:
        end_workers(getattr(self.loader, "_iterator", None))  # persistent workers

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
        if self._records is not None:
            self._recorder = loader.worker_init_fn = Recorder(self._records, loader.worker_init_fn)
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
        with self._pass(number):
            result = run_pass(self.loader, limits, weigh, self)
        self._cut_short |= not result.complete
        return asdict(result)

    def verdict(self) -> dict[str, Any]:
        """The verdict of the statistics of all passes."""
        import rustloader

        stats = rustloader.stats(self.loader)
        # Passes that end early start workers more often than whole epochs do.
        judged = replace(stats, epochs=1) if self._cut_short else stats
        return {**asdict(judged.verdict()), "stats": stats.as_dict()}

    def watch(self, limits: Limits) -> dict[str, Any]:
        """Records the timeline of the main process and the workers."""
        assert self._recorder is not None
        with self._pass(0):
            asked, got = watch(self.loader, limits, self)
        return {"asked": asked, "got": got, "spans": self._recorder.spans(self.loader)}

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
