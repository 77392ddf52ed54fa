"""A multiprocessing context whose workers run on other machines and connect back to the main process."""

from __future__ import annotations

import abc
from dataclasses import dataclass, field
from multiprocessing.context import BaseContext
from typing import Any, NoReturn, Protocol

from rustloader.settings.limits import REMOTE_START


@dataclass(frozen=True)
class Call:
    """The parameters that a worker needs to connect back to the main process.

    Attributes:
        address: The address at which the worker reaches the main process.
        port: The port on which the main process listens for this worker.
        token: The secret with which both ends authenticate themselves. It is never sent over their connection.
        worker_id: The worker's ID.
        generation: Number of earlier processes of this worker.
    """

    address: str
    port: int
    token: bytes = field(repr=False)
    worker_id: int
    generation: int


class Started(Protocol):
    """A worker whose start has been requested."""

    def failure(self) -> str | None:
        """Returns the reason why the worker has ended or cannot start; None while it is starting or running. Does not
        wait."""

    def waits_for(self) -> str:
        """Describes what the worker may be waiting for, for the error that is raised if its start takes too long."""

    def kill(self) -> None:
        """Ends the worker, even if it is still starting. Does not wait, and does not raise if the worker is gone."""


class RemoteContext(BaseContext, abc.ABC):
    """A context for ``multiprocessing_context``. Its ``launch`` starts the workers, which then connect to this process.

    torch accepts any ``BaseContext``, but only rustloader's engine can use this one: the attributes that torch's
    iterator uses to start a process raise RuntimeError.
    """

    _name = "remote"

    def get_start_method(self, allow_none: bool = False) -> str:
        """Returns the name of this context's start method."""
        return self._name

    def get_context(self, method: Any = None) -> Any:
        """Returns this context."""
        return self

    def _needs_engine(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(
            f"a {type(self).__name__} starts workers only for rustloader's engine: use rustloader.DataLoader, or call "
            "rustloader.install() before the loader is made"
        )

    # The attributes that torch's iterator uses first.
    Queue = Event = Process = _needs_engine

    @property
    def start_seconds(self) -> float:
        """The number of seconds that the start of workers may take."""
        return REMOTE_START.get()

    @abc.abstractmethod
    def address(self) -> str:
        """Returns the address at which workers reach this process. If this machine has the address, the process listens
        only on it; otherwise, for example behind NAT, on all interfaces.
        """

    @abc.abstractmethod
    def dumps(self, value: Any) -> bytes:
        """Pickles the dataset or functions for a worker: by value if its machine cannot import their definitions."""

    @abc.abstractmethod
    def put(self, blob: bytes) -> Any:
        """Stores bytes for the workers, and returns a reference to these bytes, which is passed to ``launch``."""

    @abc.abstractmethod
    def launch(self, blob: Any, call: Call) -> Started:
        """Starts a worker process, on any machine. The process must call ``rustloader.workers.remote.serve``.

        Args:
            blob: The result of ``put``.
            call: The parameters that the process needs to connect back.
        """


def is_remote(context: Any) -> bool:
    """Returns True if a context's workers run on other machines."""
    return isinstance(context, RemoteContext)
