"""Starts dead workers again, as ``Restarts`` decides."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from rustloader._core import Death, Engine
from rustloader.metrics import ledger
from rustloader.workers import deaths, process
from rustloader.workers.bootstrap import Job
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
    engine: Engine = iterator._engine()
    # Another thread in `next` gets the same answer.
    with restarts.lock:
        if restarts.is_settled(death):
            return
        seconds = _decide(iterator, restarts, engine, death)
        if seconds == 0.0:
            try:
                _replace(iterator, restarts, death, make_job(death))
                return
            except OSError as error:
                if not process.is_refused(error):
                    raise
                seconds = restarts.on_failed_start(death, error)
        if seconds is None:
            engine.give_up(death.worker_id)
            restarts.settle(death)
        else:
            engine.postpone(death.worker_id, seconds)


def process_of(iterator: Any, worker_id: int) -> Any:
    """The process of a worker, or None: programs can reach the list and may have emptied it."""
    workers = iterator._workers
    return workers[worker_id] if worker_id < len(workers) else None


def _decide(iterator: Any, restarts: Restarts, engine: Engine, death: Death) -> float | None:
    """Seconds until a worker is to be started again; None: not at all."""
    if restarts.is_counted(death):
        return restarts.on_death(death)
    status = engine.worker_status(death.worker_id)
    begun = None if status["state"] == "starting" else status["task"]
    under_way = death.task is not None and begun == death.first_task + death.task
    cause = deaths.cause(death, process_of(iterator, death.worker_id))
    return restarts.on_death(death, cause, under_way)


def _replace(iterator: Any, restarts: Restarts, death: Death, job: Job) -> None:
    """Starts the process, and says so."""
    worker_id = death.worker_id
    _warn_of_fork(iterator)
    watched = ledger.of(iterator).workers()
    if watched is not None:
        watched.keep(worker_id)
    pid = iterator._group.replace(worker_id, iterator._context, iterator._dataset, job)
    restarts.on_restart(death)
    if watched is not None:
        watched.replace(worker_id, pid)
    logger.warning(
        "DataLoader %s. It was started again as pid %d: %d of max_restarts=%d in this epoch",
        restarts.line_of(worker_id),
        pid,
        restarts.survived,
        restarts.limit,
    )
    if iterator._seeding is None and ledger.of(iterator).is_new(_NEW_STREAMS):
        logger.info(_NEW_STREAMS)


def _warn_of_fork(iterator: Any) -> None:
    """Warns once per loader where a fork may copy locks that other threads hold."""
    if process.start_method(iterator._context) != "fork":
        return
    hazard = hazard_of_fork()
    if hazard is not None and ledger.of(iterator).is_new(FORK_WARNING):
        logger.warning(FORK_WARNING, hazard)
