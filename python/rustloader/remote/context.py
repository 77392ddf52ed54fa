"""A multiprocessing context whose workers run on other machines and connect back."""

from __future__ import annotations

import abc
from dataclasses import dataclass, field
from multiprocessing.context import BaseContext
from typing import Any, NoReturn, Protocol

from rustloader.settings.limits import REMOTE_START


@dataclass(frozen=True)
class Call:
    """The parameters with which a worker connects back.

    Attributes:
        address: The address at which the main process listens.
        port: Its port for this worker.
        token: The secret by which both ends prove themselves. It does not travel over their connection.
        worker_id: The worker's number.
        generation: Number of processes that the worker had before.
    """

    address: str
    port: int
    token: bytes = field(repr=False)
    worker_id: int
    generation: int


class Started(Protocol):
    """A worker that was asked to start."""

    def failure(self) -> str | None:
        """Returns the reason why it has ended or cannot start; None while it starts or runs. Does not wait."""

    def waits_for(self) -> str:
        """Describes what it may be waiting for, for the error of a start that takes too long."""

    def kill(self) -> None:
        """Ends it in any state. Does not wait, and raises nothing if it is gone."""


class RemoteContext(BaseContext, abc.ABC):
    """A context for ``multiprocessing_context``, whose workers are started by ``launch`` and connect back.

    torch accepts any ``BaseContext``. Only rustloader's loader can use this one: everything by which torch's iterator
    would start a process raises.
    """

    _name = "remote"

    def get_start_method(self, allow_none: bool = False) -> str:
        """Returns the name of the way in which workers start."""
        return self._name

    def get_context(self, method: Any = None) -> Any:
        """Returns this context."""
        return self

    def _needs_engine(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(
            f"a {type(self).__name__} starts workers for rustloader's engine alone: use rustloader.DataLoader, or call "
            "rustloader.install() before the loader is made"
        )

    # torch's iterator comes here first.
    Queue = Event = Process = _needs_engine

    @property
    def start_seconds(self) -> float:
        """Seconds that the start of workers may take."""
        return REMOTE_START.get()

    @abc.abstractmethod
    def address(self) -> str:
        """Returns the address at which workers reach this process. If this machine has it, nothing listens on another
        one.
        """

    @abc.abstractmethod
    def dumps(self, value: Any) -> bytes:
        """Pickles the dataset, and functions, by value where the other machine cannot import them."""

    @abc.abstractmethod
    def put(self, blob: bytes) -> Any:
        """Keeps bytes for the workers, and returns what ``launch`` takes for them."""

    @abc.abstractmethod
    def launch(self, blob: Any, call: Call) -> Started:
        """Starts a process somewhere that calls ``rustloader.workers.remote.serve``."""


def is_remote(context: Any) -> bool:
    """Returns True if a context's workers run on other machines."""
    return isinstance(context, RemoteContext)
