"""Starts dead workers again, as ``Restarts`` decides."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

from rustloader._core import Death, Engine
from rustloader.errors import WorkerDiedError
from rustloader.metrics import ledger
from rustloader.remote.context import is_remote
from rustloader.settings import loader_state
from rustloader.system.limited_log import faults as fault_log
from rustloader.workers import deaths, process, remote
from rustloader.workers.bootstrap import Job
from rustloader.workers.group import deferred_signals
from rustloader.workers.restarts import FORK_WARNING, Restarts, hazard_of_fork

logger = logging.getLogger("rustloader")

_NEW_STREAMS = (
    "a DataLoader: a worker that is started again goes on with other random numbers; with seed_by='batch' or 'sample' "
    "it makes the same batches again"
)


def fill(iterator: Any, death: Death, make_job: Callable[[Death], Job]) -> None:
    """Starts a vacant worker again, or postpones this, or makes its death final. After an error the engine asks again.

    Args:
        iterator: The iterator, whose engine answered ``VACANT``.
        death: What it answered.
        make_job: Makes the job of the new process.
    """
    restarts: Restarts = iterator._restarts
    # Before signals are blocked: what the helpers start inherits their mask.
    process.start_helpers(iterator._context)
    # A signal handler that calls `next` comes before or after this. Another thread in `next` gets the same answer.
    with _signals_of(iterator) as unblock, restarts.lock:
        if restarts.is_settled(death):
            return
        engine: Engine = iterator._engine()
        seconds = _decide(iterator, restarts, death)
        if seconds == 0.0:
            try:
                _replace(iterator, restarts, death, make_job(death), unblock)
                return
            except (OSError, remote.StartError) as error:
                if isinstance(error, OSError) and not process.is_refused(error):
                    raise
                seconds = restarts.on_failed_start(death, error)
        if seconds is None:
            engine.give_up(death.worker_id)
            restarts.settle(death)
        else:
            engine.postpone(death.worker_id, seconds)


def _signals_of(iterator: Any) -> contextlib.AbstractContextManager[list[int]]:
    """Defers signals while a process starts. On another machine that takes seconds, and cleans up after a signal."""
    return contextlib.nullcontext([]) if is_remote(iterator._context) else deferred_signals()


def error_of(iterator: Any, death: Death) -> Callable[[], WorkerDiedError]:
    """Returns a function that makes the error of a final death."""
    restarts: Restarts | None = iterator._restarts
    worker = _process_of(iterator, death)
    report, start_notes = iterator._group.notes_of_start(death, deaths.end_of(death, worker)[0])
    if restarts is None:
        return deaths.error_of(death, worker, history=start_notes, report=report)
    count, notes = restarts.restarts_of(death.worker_id), (*start_notes, *restarts.notes(death.worker_id))
    return deaths.error_of(death, worker, count, notes, _was_out_of_memory(iterator, death, worker), report)


def _process_of(iterator: Any, death: Death) -> Any:
    """The process that has died, or None: programs can reach the list and may have emptied it."""
    workers = iterator._workers
    return workers[death.worker_id] if death.worker_id < len(workers) else None


def _was_out_of_memory(iterator: Any, death: Death, worker: Any) -> bool:
    found: bool = iterator._group.was_out_of_memory(death, deaths.end_of(death, worker)[0])
    return found


def _decide(iterator: Any, restarts: Restarts, death: Death) -> float | None:
    """Seconds until a worker is to be started again; None: not at all."""
    if restarts.is_counted(death):
        return restarts.on_death(death)
    worker = _process_of(iterator, death)
    out_of_memory = _was_out_of_memory(iterator, death, worker)
    return restarts.on_death(death, deaths.cause(death, worker, out_of_memory), death.has_begun, out_of_memory)


def _replace(iterator: Any, restarts: Restarts, death: Death, job: Job, unblock: list[int]) -> None:
    """Starts the process, and says so."""
    worker_id, counters = death.worker_id, ledger.of(iterator)
    _warn_of_fork(iterator)
    watched = counters.workers()
    if watched is not None:
        watched.keep(worker_id)
    pid = iterator._group.replace(worker_id, iterator._context, iterator._dataset, job, unblock)
    restarts.on_restart(death)
    if watched is not None:
        watched.replace(worker_id, pid)
    line = restarts.line_of(worker_id)
    counters.faults.note_restart(line, death.stalled, iterator._group.was_out_of_memory(death, None))
    fault_log.warning(
        "DataLoader %s. It was started again as pid %d: %d of max_restarts=%d in this epoch",
        line,
        pid,
        restarts.survived,
        restarts.limit,
    )
    if iterator._seeding is None and loader_state.of(iterator).is_new(_NEW_STREAMS):
        logger.info(_NEW_STREAMS)


def _warn_of_fork(iterator: Any) -> None:
    """Warns once per loader where a fork may copy locks that other threads hold."""
    if process.start_method(iterator._context) != "fork":
        return
    hazard = hazard_of_fork()
    if hazard is not None and loader_state.of(iterator).is_new(FORK_WARNING):
        logger.warning(FORK_WARNING, hazard)
