"""The process of ``check`` that has the user's loader on one engine, and takes its batches when it is asked to."""

from __future__ import annotations

import contextlib
import hashlib
import pickle
import random
from typing import Any, NamedTuple

from rustloader.probe.factory import Unusable
from rustloader.probe.failure import failure
from rustloader.probe.side import Side, end_workers

__all__ = ["CheckSide", "Event"]


class Event(NamedTuple):
    """The outcome of one call of ``next``.

    ``key`` is what both sides have to agree in. ``text`` is the error in a short form, ``details`` its traceback.
    """

    kind: str  # "batch", "error", "end", or "state": the random state after the epoch
    key: Any = None
    text: str = ""
    details: str = ""


class CheckSide(Side):
    """One loader on one engine. The methods are the requests, in this order, after ``load``.

    Args:
        number: for torch, numpy and random.
    """

    def __init__(self, target: str, engine: str, number: int, quiet: bool) -> None:
        super().__init__(target, engine, quiet)
        self._number = number
        self._iterator: Any = None
        self._batch: Any = None
        self._open: contextlib.ExitStack | None = None

    def about(self) -> dict[str, Any]:
        """Makes the loader. Returns what there is to say about it."""
        from torch.utils.data import IterableDataset

        self.seed(self._number)
        self.make()
        return {
            "num_workers": self.loader.num_workers,
            "in_order": getattr(self.loader, "in_order", True),
            "may_be_endless": isinstance(self.loader.dataset, IterableDataset),
        }

    def start(self) -> Event | None:
        """Starts the workers. Returns the error of this, if there is one."""
        self._open = contextlib.ExitStack()
        self._open.enter_context(self.on_engine())
        try:
            self._iterator = iter(self.loader)
        except (Exception, SystemExit) as error:
            return self._raised(error)
        self.began(self._iterator)
        return None

    def next(self) -> Event:
        """Takes a batch."""
        from rustloader.probe.leaves import summary

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
        """Ends the workers. Returns a digest of the random state."""
        import numpy as np
        import torch

        end_workers(self._iterator)
        assert self._open is not None
        self._open.close()
        state = (torch.get_rng_state().tolist(), np.random.get_state(), random.getstate())
        return _digest(pickle.dumps(state))

    def packed(self) -> bytes | None:
        """The last batch, pickled; None if that cannot be done."""
        try:
            return pickle.dumps(self._batch)
        except Exception:
            return None

    def difference(self, packed: bytes | None) -> str:
        """Where the last batch, which is torch's, differs from the engine's."""
        from rustloader.probe.leaves import difference, summary

        try:
            other = pickle.loads(packed or b"")
            if summary(other) == summary(self._batch):
                return "the batches differ in what a copy does not keep"
            return difference(self._batch, other)
        except Exception as error:
            return f"the batches differ; where cannot be said: {failure(error).text}"

    def _raised(self, error: BaseException) -> Event:
        """What both sides have to agree in of an error. The death of a worker is none: it ends the comparison."""
        self.failed(error)
        if self.dead is not None:
            raise error
        found = failure(error)
        return Event("error", found.text, str(found), found.details)


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()
