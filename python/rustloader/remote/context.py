"""A multiprocessing context whose workers run on other machines and connect back."""

from __future__ import annotations

import abc
from dataclasses import dataclass, field
from multiprocessing.context import BaseContext
from typing import Any, NoReturn, Protocol

from rustloader.settings.limits import REMOTE_START


@dataclass(frozen=True)
class Call:
    """The parameters with which a worker connects back to the main process.

    Attributes:
        address: The address on which the main process listens.
        port: The port on which it listens for this worker.
        token: The secret with which both ends authenticate themselves. It is never sent over their connection.
        worker_id: The worker's number.
        generation: Number of earlier processes of the worker.
    """

    address: str
    port: int
    token: bytes = field(repr=False)
    worker_id: int
    generation: int


class Started(Protocol):
    """A worker that was asked to start."""

    def failure(self) -> str | None:
        """Returns the reason why the worker has ended or cannot start; None while it starts or runs. Does not wait."""

    def waits_for(self) -> str:
        """Describes what the worker may be waiting for, for the error about a start that takes too long."""

    def kill(self) -> None:
        """Ends the worker in any state. Does not wait, and does not raise if the worker is gone."""


class RemoteContext(BaseContext, abc.ABC):
    """A context for ``multiprocessing_context``. ``launch`` starts its workers, which then connect to this process.

    torch accepts any ``BaseContext``, but only rustloader's engine can use this one: all attributes with which torch's
    iterator would start a process raise.
    """

    _name = "remote"

    def get_start_method(self, allow_none: bool = False) -> str:
        """Returns the name of the start method of these workers."""
        return self._name

    def get_context(self, method: Any = None) -> Any:
        """Returns this context."""
        return self

    def _needs_engine(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(
            f"a {type(self).__name__} starts workers for rustloader's engine alone: use rustloader.DataLoader, or call "
            "rustloader.install() before the loader is made"
        )

    # The attributes that torch's iterator uses first.
    Queue = Event = Process = _needs_engine

    @property
    def start_seconds(self) -> float:
        """Maximum number of seconds that the start of workers may take."""
        return REMOTE_START.get()

    @abc.abstractmethod
    def address(self) -> str:
        """Returns the address at which workers reach this process. The process listens on this address alone, if this
        machine has it.
        """

    @abc.abstractmethod
    def dumps(self, value: Any) -> bytes:
        """Pickles the dataset and functions: by value if the other machine cannot import their definitions."""

    @abc.abstractmethod
    def put(self, blob: bytes) -> Any:
        """Stores bytes for the workers, and returns a reference to them, which ``launch`` takes."""

    @abc.abstractmethod
    def launch(self, blob: Any, call: Call) -> Started:
        """Starts a process on some machine, which calls ``rustloader.workers.remote.serve``.

        Args:
            blob: The result of ``put``.
            call: The parameters with which the process connects back.
        """


def is_remote(context: Any) -> bool:
    """Returns True if a context's workers run on other machines."""
    return isinstance(context, RemoteContext)
