"""Carries out what ``Restarts`` decides about dead workers, and makes the errors for final deaths."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

from rustloader._core import Death
from rustloader.errors import WorkerDiedError
from rustloader.metrics.ledger import Ledger
from rustloader.remote.context import is_remote
from rustloader.settings import names
from rustloader.settings.loader_state import LoaderState
from rustloader.supervision import deaths
from rustloader.supervision.restarts import FORK_WARNING, Restarts, hazard_of_fork
from rustloader.system.limited_log import faults as fault_log
from rustloader.workers import process, remote
from rustloader.workers.bootstrap import Job
from rustloader.workers.group import WorkerGroup, deferred_signals

logger = logging.getLogger("rustloader")

_NEW_STREAMS = (
    "a DataLoader: a restarted worker uses different random numbers; with seed_by='batch' or 'sample' it makes the "
    "same batches again"
)


class Supervisor:
    """Handles the deaths of a group's workers.

    Args:
        group: The workers.
        counters: The statistics of the iterator.
        state: The state of the iterator's loader, which ensures that some messages are logged only once per loader.
        restarts: Decides what happens after a death; None if every death is final.
        new_streams: Whether a restarted worker uses different random numbers.
    """

    def __init__(
        self, group: WorkerGroup, counters: Ledger, state: LoaderState, restarts: Restarts | None, new_streams: bool
    ) -> None:
        self._group, self._counters, self._state = group, counters, state
        self._restarts, self._new_streams = restarts, new_streams

    @property
    def restarts_workers(self) -> bool:
        """True if dead workers may be restarted."""
        return self._restarts is not None

    def begin_epoch(self) -> None:
        """Forgets the deaths of the previous epoch."""
        if self._restarts is not None:
            self._restarts.begin_epoch()

    def poison_of(self, worker_id: int) -> dict[int, dict[int, str]]:
        """Returns the samples that a worker must skip, in the form of `Job.poison`."""
        return {} if self._restarts is None else self._restarts.poison.get(worker_id, {})

    def replace_dead(self, death: Death, make_job: Callable[[Death], Job]) -> None:
        """Restarts a worker that has died, postpones its restart, or makes its death final. If this method raises, the
        engine reports the death again.

        Args:
            death: The value that the engine returned with `VACANT`.
            make_job: Makes the job of the new process.
        """
        restarts, engine = self._restarts, self._group.engine
        assert restarts is not None
        # The helper processes start before signals are blocked, because they would inherit the signal mask.
        process.start_helpers(self._group.context)
        # While signals are deferred, no signal handler can call `next` during this block. Another thread that calls
        # `next` gets the same answer from the engine, and waits for the lock.
        with self._deferred_signals() as unblock, restarts.lock:
            if restarts.is_settled(death):
                return
            seconds = self._decide(restarts, death)
            if seconds == 0.0:
                try:
                    self._replace(restarts, death, make_job(death), unblock)
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

    def error_of(self, death: Death) -> Callable[[], WorkerDiedError]:
        """Returns a function that makes the error for a final death."""
        worker = self._process_of(death)
        report, start_notes = self._group.notes_of_start(death, deaths.end_of(death, worker)[0])
        if self._restarts is None:
            return deaths.error_of(death, worker, history=start_notes, report=report)
        count = self._restarts.restarts_of(death.worker_id)
        notes = (*start_notes, *self._restarts.notes(death.worker_id))
        return deaths.error_of(death, worker, count, notes, self._was_out_of_memory(death, worker), report)

    def _deferred_signals(self) -> contextlib.AbstractContextManager[list[int]]:
        """Returns a context that defers signals while a local process starts. For a process on another machine it does
        nothing, because such a start takes seconds and cleans up after an interrupt itself."""
        return contextlib.nullcontext([]) if is_remote(self._group.context) else deferred_signals()

    def _process_of(self, death: Death) -> Any:
        """Returns the process object of a dead worker; None if the program, which has access to the list of processes,
        has emptied it."""
        processes = self._group.processes
        return processes[death.worker_id] if death.worker_id < len(processes) else None

    def _was_out_of_memory(self, death: Death, worker: Any) -> bool:
        return self._group.was_out_of_memory(death, deaths.end_of(death, worker)[0])

    def _decide(self, restarts: Restarts, death: Death) -> float | None:
        """Returns the number of seconds after which a worker is to be restarted; None if its death is final."""
        if restarts.is_counted(death):
            return restarts.on_death(death)
        worker = self._process_of(death)
        out_of_memory = self._was_out_of_memory(death, worker)
        return restarts.on_death(death, deaths.cause(death, worker, out_of_memory), death.has_begun, out_of_memory)

    def _replace(self, restarts: Restarts, death: Death, job: Job, unblock: list[int]) -> None:
        """Starts the process that replaces a dead worker, and logs the restart."""
        worker_id = death.worker_id
        self._warn_of_fork()
        cpu_times = self._counters.workers()
        if cpu_times is not None:
            cpu_times.keep(worker_id)
        pid = self._group.replace(worker_id, job, unblock)
        restarts.on_restart(death)
        if cpu_times is not None:
            cpu_times.replace(worker_id, pid)
        line = restarts.line_of(worker_id)
        self._counters.faults.note_restart(line, death.stalled, self._group.was_out_of_memory(death, None))
        name = self._counters.given_name
        fault_log.warning(
            "DataLoader %s. It was restarted as pid %d: %d of max_restarts=%d used in this epoch%s",
            line,
            pid,
            restarts.survived,
            restarts.limit,
            "" if name is None else f" of {names.title(name)}",
        )
        if self._new_streams and self._state.first_time(_NEW_STREAMS):
            logger.info(_NEW_STREAMS)

    def _warn_of_fork(self) -> None:
        """Warns once per loader if a restart forks this process although other threads run or an accelerator such as
        CUDA is initialized."""
        if process.start_method(self._group.context) != "fork":
            return
        hazard = hazard_of_fork()
        if hazard is not None and self._state.first_time(FORK_WARNING):
            logger.warning(FORK_WARNING, hazard)
