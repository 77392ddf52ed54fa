"""Measures the fetches of iterators without workers, for the current trace and for metrics."""

from __future__ import annotations

import time
import weakref
from typing import Any

from rustloader._core import TRACE_MAIN
from rustloader.metrics import ledger
from rustloader.settings import loader_state, names
from rustloader.settings.config import LoaderConfig
from rustloader.system.protocols import LoaderLike, SingleIterator
from rustloader.tracing import core as tracing


def observe(iterator: SingleIterator, loader: LoaderLike, config: LoaderConfig) -> None:
    """Adds the fetches of a new iterator to the current trace, and to the metrics if they are served. Does nothing if
    there is no trace and no server."""
    sink, source = tracing.sink_and_source(loader_state.of(loader), names.of(loader))
    meter = None
    if ledger.new_ledger_hooks:  # metrics are served
        meter = ledger.of(loader).count_fetches(iterator, ledger.settings(loader, iterator, config))
    if sink is None and meter is None:
        return
    fetcher = iterator._dataset_fetcher
    # The reference is weak because a fetcher that refers to itself would outlive its iterator.
    fetch_of_class, weak = type(fetcher).fetch, weakref.ref(fetcher)
    number, last_end = 0, 0

    def fetch(index: Any) -> Any:
        nonlocal number, last_end
        begin, has_batch = time.monotonic_ns(), False
        if sink is not None:
            if last_end:
                sink.put(source, tracing.STEP, TRACE_MAIN, last_end, begin - last_end, 0)
            sink.begin(source, tracing.FETCH, TRACE_MAIN, begin, number)
        try:
            data = fetch_of_class(weak(), index)
            has_batch = True
            return data
        finally:
            end = time.monotonic_ns()
            if sink is not None:
                sink.put(source, tracing.FETCH, TRACE_MAIN, begin, end - begin, number)
            if meter is not None:
                meter.note_fetch(begin - last_end if last_end else None, end - begin, has_batch)
            number, last_end = number + 1, end

    fetcher.fetch = fetch
