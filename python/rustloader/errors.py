"""Errors about workers and failed samples. All are RuntimeErrors. Those that torch also raises have torch's texts."""

from typing import Any


class WorkerDiedError(RuntimeError):
    """Raised by ``next()`` and ``iter()`` when a worker process has died, and again by each later ``next()``.

    Args:
        text: The message.
        worker_id: The worker's ID, from 0.
        pid: The process ID of the worker.
        exitcode: The exit code, or the negated number of the signal that killed the worker; None if unknown.
        index: The index batch that the worker should have fetched, as the sampler yielded it; None if it had none.
        restarts: Number of times that the worker had been restarted.

    Examples:
        >>> error = rustloader.WorkerDiedError("it died", worker_id=1, pid=4711, exitcode=-9)
        >>> error.worker_id, error.exitcode
        (1, -9)
    """

    def __init__(
        self,
        text: str = "",
        *,
        worker_id: int = -1,
        pid: int = 0,
        exitcode: int | None = None,
        index: Any = None,
        restarts: int = 0,
    ) -> None:
        super().__init__(text)
        self.worker_id = worker_id
        self.pid = pid
        self.exitcode = exitcode
        self.index = index
        self.restarts = restarts


class WorkerStalledError(WorkerDiedError):
    """Raised like ``WorkerDiedError``, when a worker was killed because a batch took longer than ``stall_timeout``.

    Examples:
        >>> isinstance(rustloader.WorkerStalledError("it was stuck"), rustloader.WorkerDiedError)
        True
    """


class ErrorLimitExceeded(RuntimeError):
    """Raised by ``next()`` when more samples have failed in an epoch than ``max_errors`` allows.

    Each later ``next()`` raises it again, because the error ends the epoch.

    Args:
        text: The message, which names the first failed samples.
        failures: The failed samples of the epoch as ``rustloader.Failure`` objects, in the order in which their batches
            were delivered; at most the first 1,000.

    Examples:
        >>> rustloader.ErrorLimitExceeded("3 samples have failed").failures
        ()
    """

    def __init__(self, text: str = "", failures: tuple[Any, ...] = ()) -> None:
        super().__init__(text)
        self.failures = failures


class LoaderTimeoutError(RuntimeError, TimeoutError):
    """Raised by ``next()`` and ``iter()`` after ``timeout`` seconds without a batch. The next call continues to wait.

    Examples:
        >>> isinstance(rustloader.LoaderTimeoutError("too late"), TimeoutError)
        True
    """


for _error in (WorkerDiedError, WorkerStalledError, LoaderTimeoutError, ErrorLimitExceeded):
    # Tracebacks and pickles then name the module from which programs import the classes.
    _error.__module__ = "rustloader"
