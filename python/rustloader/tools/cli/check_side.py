"""The part of ``check`` that runs in the process with the user's loader."""

from __future__ import annotations

import contextlib
import hashlib
import pickle
import random
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from rustloader.settings import options
from rustloader.tools.probe.factory import Unusable
from rustloader.tools.probe.failure import failure
from rustloader.tools.probe.side import Side, end_workers

# Options of rustloader that can change batches: torch's iterator ignores them.
_CHANGING = ("seed_by", "dispatch", "worker_threads", "on_error")

_ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}")


class Event(NamedTuple):
    """The outcome of a call of ``next``.

    Equal outcomes have the same ``kind`` and ``key``. For an error, ``text`` is its short form and ``details`` its
    traceback.
    """

    kind: str  # "batch", "error", "end", or "state": the random state after the epoch
    key: Any = None
    text: str = ""
    details: str = ""


class CheckSide(Side):
    """A loader on one engine.

    Each public method answers the request of the same name: after ``load`` come ``about``, ``start``, ``next``, and
    at the end of the comparison ``finish``. ``number`` seeds torch, NumPy and random.
    """

    def __init__(self, target: str, engine: str, number: int, quiet: bool) -> None:
        super().__init__(target, engine, quiet)
        self._number = number
        self._iterator: Iterator[Any] = iter(())
        self._batch: Any = None
        self._open: contextlib.ExitStack | None = None

    def about(self) -> dict[str, Any]:
        """Creates the loader. Returns a description of it."""
        from torch.utils.data import IterableDataset

        self.seed(self._number)
        self.make()
        return {
            "num_workers": self.loader.num_workers,
            "in_order": getattr(self.loader, "in_order", True),
            "may_be_endless": isinstance(self.loader.dataset, IterableDataset),
        }

    def start(self) -> Event | None:
        """Creates the iterator, which starts the workers. Returns the event for an error; None if there was none."""
        self._open = contextlib.ExitStack()
        self._open.enter_context(self.on_engine())
        try:
            self._iterator = iter(self.loader)
        except (Exception, SystemExit) as error:
            return self._raised(error)
        self.on_start(self._iterator)
        return None

    def next(self) -> Event:
        """Takes the next batch. Returns the event for it, or for the error in its place."""
        from rustloader.tools.probe.leaves import summary

        self._batch = None
        try:
            self._batch = next(self._iterator)
        except StopIteration:
            return Event("end")
        except (Exception, SystemExit) as error:
            return self._raised(error)
        try:
            return Event("batch", _digest(repr(summary(self._batch)).encode(errors="surrogatepass")))
        except Exception as error:
            event = self._raised(error)
            raise Unusable(f"a batch cannot be compared: {event.text}", event.details) from None

    def finish(self) -> bytes:
        """Shuts down the workers. Returns a digest of this process's random state."""
        import numpy as np
        import torch

        end_workers(self._iterator)
        assert self._open is not None
        self._open.close()
        state = (torch.get_rng_state().tolist(), np.random.get_state(), random.getstate())
        return _digest(pickle.dumps(state))

    def changing_options(self) -> list[str]:
        """Returns the names of the loader's options that can change batches."""
        return [name for name in _CHANGING if options.in_force(self.loader, name) != options.option_of(name).default]

    def packed(self) -> bytes | None:
        """Returns the last batch, pickled; None if it cannot be pickled."""
        try:
            return pickle.dumps(self._batch)
        except Exception:
            return None

    def difference(self, packed: bytes | None) -> str:
        """Describes how the last batch, from torch's iterator, differs from the engine's batch.

        ``packed`` is the engine's batch, pickled.
        """
        from rustloader.tools.probe.leaves import difference, summary

        try:
            other = pickle.loads(packed or b"")
            if summary(other) == summary(self._batch):
                return "the batches differ in something that pickling does not preserve"
            return difference(self._batch, other)
        except Exception as error:
            return f"the batches differ, but the difference cannot be located: {failure(error).text}"

    def _raised(self, error: BaseException) -> Event:
        """Returns the event for an error. If a worker has died, raises the error again, which ends the comparison."""
        self.on_error(error)
        if self.death is not None:
            raise error
        described = failure(error)
        # An object whose `repr` has its address is at another one in another process.
        return Event("error", _ADDRESS.sub("0x...", described.text), str(described), described.details)


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()
