"""An index sampler, and the order of one epoch of it."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from types import CodeType
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler

from rustloader._core import call_into

logger = logging.getLogger("rustloader")

# A function that returns the next array of indices, and None after the last one.
NextArray = Callable[[], "np.ndarray | None"]
# A generator; None means torch's global generator.
Generator = torch.Generator | None
Start = dict[str, Any]
Begun = tuple[Iterator[Any], Start | None]


class Order:
    """An index sampler, and the order of one epoch of it.

    Each sampler class of torch has a subclass, and so have the batch samplers for sequences. This class itself serves
    samplers of which nothing is known.

    The start of an order determines the order, and can be saved. It is one of:

    * ``{}``: the order is ascending.
    * ``{"seed": int}``: the seed that a RandomSampler without a generator has drawn.
    * ``{"generator": tensor}``: the state of the sampler's own generator before the sampler's first draw.
    * ``{"global_generator": tensor}``: the state of torch's global generator before the sampler's first draw.
    * The settings of a DistributedSampler, as ``computed.shard_start`` returns them.
    * The place in a plan of batches, as ``SequenceBatchSampler`` returns it.

    Args:
        inner: The sampler of single indices, if torch's BatchSampler batches them; otherwise the index sampler itself.
        batches: torch's BatchSampler, or None.

    Attributes:
        name: The kind of the sampler in states: that of a subclass, ``"none"`` for the sampler that torch gives an
            iterable dataset, ``"stateful"`` for a sampler with a state, or ``"other"``.
        title: The sampler in messages; empty for the name of its class.
        describes_state: Whether the order includes what a ``state_dict`` of the sampler returns.
        sampler_class: The class of the sampler; None if the order cannot start at any position.
        code: The code object of torch's ``__iter__``; None if rustloader does not know this version of the code.
        drawn_from: The attribute whose length is the number of indices that a random sampler draws from.
        given: The start that an earlier run saved; None if there is none.
        recorded: The start of an order that began in this run.
        skip: Number of indices to skip.
        is_streamed: Whether an index stream yields the indices, rather than ``iter`` of this object.
    """

    name = "other"
    title = ""
    describes_state = False
    sampler_class: Any = None
    code: CodeType | None = None
    drawn_from: str | None = None
    given: Start | None = None
    recorded: Start | None = None
    skip = 0
    is_streamed = False
    # Whether torch still makes its draws, although `given` replaces their results.
    _owes_draws = False
    # Whether the start of the order is recorded at the first draw.
    _records = False

    def __init__(self, inner: Any, batches: Any = None) -> None:
        self.inner, self.batches = inner, batches
        # Only the first entry counts. A signal handler that calls `begun` during a call of `begun` may add a second.
        self._begun: list[Begun] = []
        # Makes other threads wait. Reentrant, because a signal handler may run in the thread that holds it.
        self._lock = threading.RLock()

    @property
    def index_sampler(self) -> Any:
        """The index sampler itself."""
        return self.inner if self.batches is None else self.batches

    @property
    def is_exact(self) -> bool:
        """True if the sampler is of ``sampler_class``, rather than of a subclass with the same ``__iter__``."""
        return type(self.inner) is self.sampler_class

    def arrays(self) -> NextArray | None:
        """Returns the source of an index stream's arrays; None if torch's generator must be used instead."""
        return None

    def resume(self, start: Mapping[str, Any] | None, owes_draws: bool, position: int) -> int:
        """Sets the start of the order to that of an earlier run, or to None to draw the order as torch does.

        Returns the number of index batches to skip. ``position`` is the number of those that were delivered, and
        ``owes_draws`` says whether torch's draws are still made, although ``start`` replaces their results.
        """
        self.given, self._owes_draws, self._records = None if start is None else dict(start), owes_draws, True
        return position

    @property
    def start(self) -> Start | None:
        """The start that was given or recorded; None until the sampler's first draw."""
        return self.recorded if self.given is None else self.given

    def begin(self) -> Start | None:
        """Makes the draws of the first ``next``, unless they have been made. Returns the start of the order; None if it
        cannot be saved."""
        if not self.is_streamed:
            return self.begun()[1]
        if self.start is None or self._owes_draws:
            self._record()
        return self.start

    def _record(self) -> None:
        """Makes the first draws of a stream, unless they have been made, and records the start of its order."""

    def begun(self, torch_iterator: Iterator[Any] | None = None) -> Begun:
        """Makes the draws for the first index, unless an earlier call has made them. ``torch_iterator`` is the iterator
        over the sampler, if torch has already created it."""
        with self._lock:
            if not self._begun:
                call_into(self._begun, self._first, torch_iterator)
            return self._begun[0]

    def _first(self, torch_iterator: Iterator[Any] | None) -> Begun:
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        iterator, _ = self.begun()
        return itertools.islice(iterator, self.skip, None) if self.skip else iterator

    def draw_next(self, use: Callable[[Generator], Generator]) -> Start | None:
        """Makes the draws of the next epoch's first ``next``, and returns the start of its order; None if the sampler
        has no generator. ``use`` maps the sampler's generator to the one to draw from."""
        return None

    def advance(self, following: Any) -> None:
        """Brings ``following``, a copy of the sampler, to the state in which the next epoch is expected to find it."""

    def entries(self) -> dict[str, Any]:
        """Returns the entries of a state that describe the sampler before an epoch. Draws nothing."""
        inner, data = self.inner, self.drawn_from
        batches = inner if isinstance(inner, BatchSampler) else self.batches
        return {
            "kind": self.name,
            "length": None if self.name == "none" else length_of(inner),
            "batch_size": _typed_attribute(int, batches, "batch_size"),
            "drop_last": _typed_attribute(bool, batches, "drop_last"),
            "data_length": data and length_of(getattr(inner, data)),
            "replacement": data and bool(inner.replacement),
        }

    def check_start(self, start: Mapping[str, Any]) -> None:
        """Raises ValueError if something is missing or wrong in the start in a state."""

    def place(self) -> tuple[int, int] | None:
        """Returns the number of ranks and the rank of the sampler; None if it does not divide its samples."""
        return None

    def check_place(self, start: Any) -> None:
        """Raises ValueError if a start is that of another rank."""
        place = self.place()
        if place is None or not isinstance(start, Mapping):
            return
        replicas, rank = start.get("num_replicas"), start.get("rank")
        if (replicas, rank) != place:
            raise ValueError(
                f"the state was saved on rank {rank} of {replicas}, and this is rank {place[1]} of {place[0]}: with "
                "in_order=False each rank has delivered other batches, so load this rank's own state, or save with "
                "in_order=True, where the state of any rank is enough"
            )

    def check_position(self, start: Any, position: int, loader: Any) -> None:
        """Raises ValueError if an epoch of ``loader`` has fewer batches than a state says were delivered."""
        # After a `reshard`, the remaining batches are counted from this ordinal.
        first = start.get("first") if isinstance(start, Mapping) else None
        delivered, total = position - (first if type(first) is int else 0), length_of(loader)
        if total is not None and delivered > total:
            raise ValueError(
                f"the state was taken after {delivered} batches, but an epoch of this loader has {total}: load it into "
                "a loader over the same dataset, with the same batch size"
            )

    def _warn_of_epoch(self) -> None:
        """Logs a warning if the given start is of another epoch than the sampler's."""
        assert self.given is not None
        saved, epoch = self.given["epoch"], self.inner.epoch
        if epoch != saved:
            logger.warning(
                "the loaded state is of epoch %s of the %s, whose epoch is now %s: the rest of epoch %s follows. Call "
                "set_epoch(%s) before the loop to silence this",
                *(saved, type(self.inner).__name__, epoch, saved, saved),
            )


def _typed_attribute(cls: type, sampler: Any, name: str) -> Any:
    value = getattr(sampler, name, None)
    return value if type(value) is cls else None


def length_of(sized: Any) -> int | None:
    """Returns the length of an object; None if ``len`` fails."""
    try:
        return len(sized)
    except Exception:
        return None


def array_of(permutation: torch.Tensor) -> np.ndarray:
    """Returns a permutation as a contiguous array. A plain CPU tensor is not copied."""
    if type(permutation) is torch.Tensor and permutation.device.type == "cpu":
        return permutation.numpy()
    return np.array(permutation.tolist(), np.int64)
