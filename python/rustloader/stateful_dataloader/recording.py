"""The index batches of samplers that have a state, and the samplers' states at earlier positions."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from rustloader._core import call_into
from rustloader.order.base import Order
from rustloader.order.stream import batched, order_of
from rustloader.settings.limits import SNAPSHOT_ALLOWANCE, SNAPSHOT_SHARE
from rustloader.stateful_dataloader.inner import Inner, as_stateful, batch_state
from rustloader.stateful_dataloader.schema import SAMPLES_YIELDED, SamplerState, copied
from rustloader.stateful_dataloader.stateful import Stateful

# Maximum number of states to keep. When it is reached, every second state of the older half is dropped.
_MAX_STATES = 64


class Entry(NamedTuple):
    """The states of an index sampler and its iterator.

    Attributes:
        position: Number of index batches drawn before the states were taken.
        index_sampler_state: The state of the index sampler, or None.
        sampler_iter_state: The state of its iterator, or None.
    """

    position: int
    index_sampler_state: Any
    sampler_iter_state: Any


class _WithState(Order):
    name = "stateful"


def resumable(index_sampler: Any) -> Order:
    """Returns the order of a loader's index sampler, of which nothing is known if the sampler has a state."""
    order, cls = order_of(index_sampler), Order
    if order.describes_state:
        return order
    if isinstance(index_sampler, Stateful) or isinstance(order.inner, Stateful):
        cls = _WithState
    elif order.batches is None or type(order.batches.batch_size) is int:
        return order
    return cls(order.inner, order.batches)


def unstarted(order: Order) -> SamplerState:
    """Returns the state of a sampler before an epoch. Draws nothing, and makes no iterator."""
    state = SamplerState(**order.entries())
    if isinstance(order.index_sampler, Stateful):
        return replace(state, index_sampler_state=copied(order.index_sampler.state_dict()))
    if isinstance(order.inner, Stateful):
        return replace(state, sampler_iter_state=copied(batch_state(0, order.inner, None)))
    return after_batches(order, state, 0)


def after_batches(order: Order, state: SamplerState, number: int) -> SamplerState:
    """Returns a state with torchdata's state of batches of a sampler without a state: the number of samples in the
    first ``number`` batches."""
    if order.batches is None or state.batch_size is None:
        return state
    samples = number * state.batch_size
    samples = samples if state.length is None else min(samples, state.length)
    return replace(state, sampler_iter_state={SAMPLES_YIELDED: samples})


def may_be_stateful(order: Order, torch_iterator: Iterator[Any]) -> bool:
    """Returns True if a sampler or an iterator over it has a state, or may turn out to have one."""
    if order.name == "stateful" or isinstance(torch_iterator, Stateful):
        return True
    function = getattr(type(order.inner), "__iter__", None)
    # Generators and the iterators of built-in types have no state.
    return order.batches is not None and inspect.isfunction(function) and not inspect.isgeneratorfunction(function)


class Recorder(Iterator[Any]):
    """Yields the index batches of a sampler, and periodically keeps the sampler's states.

    Args:
        order: The sampler.
        torch_iterator: Its unstarted iterator.
        saved: The saved state of the sampler; None to start at the beginning of the epoch.
        position: Number of batches delivered before the epoch resumes.
        every: Number of index batches between two states to keep; 0 keeps only the first state.

    Attributes:
        to_skip: Number of index batches from the sampler's saved state to the position. They are yielded first, and
            the caller skips them.
    """

    def __init__(
        self, order: Order, torch_iterator: Iterator[Any], saved: SamplerState | None, position: int, every: int
    ) -> None:
        entry, at = None, 0
        if saved is not None and saved.has_states:
            # A program may have moved the position back to before the saved state.
            at = position if saved.state_position is None else min(saved.state_position, position)
            entry = Entry(at, saved.index_sampler_state, saved.sampler_iter_state)
        self.to_skip = position - at
        self._order = order
        self._index_sampler = order.index_sampler
        self._torch_iterator = torch_iterator
        self._saved = entry
        self._every = every
        self._inner: Inner | None = None
        self._iterator: Iterator[Any] | None = None
        # Makes other threads wait. Reentrant, because a signal handler may run in the thread that holds it.
        self._lock = threading.RLock()
        self._is_beginning = False
        self._position = at
        self._samples = 0
        # An index batch that was drawn, but not returned because of an interrupt.
        self._drawn: list[Any] = []
        self._entries: list[Entry] = [] if entry is None else [entry]
        self._error: Exception | None = None
        self._spent = 0.0
        self._began = time.monotonic()

    def begin(self) -> None:
        """Creates the iterator, and keeps its first state.

        A call from a signal handler that interrupts this method does nothing.
        """
        if self._iterator is not None:
            return
        with self._lock:
            if self._iterator is not None or self._is_beginning:
                return
            self._is_beginning = True
            try:
                # Either the sampler in torch's BatchSampler has the state, or the index sampler itself.
                is_inner = self._order.batches is not None and not isinstance(self._index_sampler, Stateful)
                iterator = self._begin_inner() if is_inner else self._begin_whole()
                if self._saved is None:
                    self._record(iterator, self._position, self._samples)
                self._iterator = iterator
            finally:
                self._is_beginning = False

    def _begin_inner(self) -> Iterator[Any]:
        saved = None if self._saved is None else self._saved.sampler_iter_state
        self._samples = 0 if saved is None else saved[SAMPLES_YIELDED]
        inner = Inner(self._order.inner, copied(saved))
        inner.begin()
        self._inner = inner
        return batched(self._order.batches, inner)

    def _begin_whole(self) -> Iterator[Any]:
        saved, iterator = self._saved, self._torch_iterator
        if saved is None:
            return iterator
        if saved.index_sampler_state is not None:
            as_stateful(self._index_sampler).load_state_dict(copied(saved.index_sampler_state))
            iterator = iter(self._index_sampler)
        if saved.sampler_iter_state is not None:
            as_stateful(iterator).load_state_dict(copied(saved.sampler_iter_state))
        return iterator

    def __next__(self) -> Any:
        if not self._drawn:
            if self._iterator is None:
                self.begin()
            call_into(self._drawn, next, self._iterator)
        batch = self._drawn[0]
        position = self._position + 1
        samples = self._samples
        if self._inner is not None:
            samples += len(batch)
        if self._every and position % self._every == 0 and self._has_time():
            self._record(self._iterator, position, samples)
        # Atomic for signal handlers.
        self._position, self._samples, self._drawn = position, samples, []
        return batch

    def _has_time(self) -> bool:
        return self._spent < SNAPSHOT_ALLOWANCE + SNAPSHOT_SHARE * (time.monotonic() - self._began)

    def _record(self, iterator: Iterator[Any] | None, position: int, samples: int) -> None:
        """Keeps the current state. If that fails, keeps the first error for ``entry`` to raise."""
        began = time.thread_time()
        try:
            entry = Entry(position, *copied(self._states(iterator, samples)))
        except Exception as error:
            self._error = self._error or error
            return
        entries = self._entries
        if len(entries) >= _MAX_STATES:
            half = len(entries) // 2
            entries = entries[:half:2] + entries[half:]
        # A new list, because another thread may be reading the old list.
        self._entries = [*entries, entry]
        self._spent += time.thread_time() - began

    def _states(self, iterator: Iterator[Any] | None, samples: int) -> tuple[Any, Any]:
        if self._inner is not None:
            return None, self._inner.state(samples)
        sampler = self._index_sampler
        return (
            sampler.state_dict() if isinstance(sampler, Stateful) else None,
            iterator.state_dict() if isinstance(iterator, Stateful) else None,
        )

    def entry(self, position: int) -> Entry | None:
        """Returns a copy of the newest state at or before a position; None if the sampler has no state.

        Raises:
            Exception: The sampler's ``state_dict`` failed; its error is raised.
        """
        self.begin()
        if self._error is not None:
            raise self._error
        newest = next((entry for entry in reversed(self._entries) if entry.position <= position), None)
        if newest is None or newest[1:] == (None, None):
            return None
        return Entry(*copied(tuple(newest)))
