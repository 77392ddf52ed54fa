"""Index batches: torch's, cut from arrays with 8 bytes per index instead of lists of Python ints.

An index stream replaces the Python generator that iterates over one of these samplers of torch:

* a BatchSampler over a SequentialSampler, a RandomSampler or a DistributedSampler;
* a RandomSampler without a BatchSampler;
* the sampler of an iterable dataset, with or without a BatchSampler.

A stream yields the same ints and lists in the same order. From every random generator that the program can see, it
draws exactly when torch would. All other samplers, including subclasses and samplers with replaced methods, keep
torch's Python generator.

An exception raised by a signal handler ends a Python generator, and with it the epoch. It does not end a stream.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import operator
import sys
from collections.abc import Iterator
from types import CodeType, GeneratorType
from typing import Any

from torch.utils.data import BatchSampler, sampler
from torch.utils.data.dataloader import _InfiniteConstantSampler

from rustloader._core import IndexStream, call_into
from rustloader.order.base import NextArray, Order
from rustloader.order.computed import Constant, Distributed, Sequential
from rustloader.order.drawn import Random, Subset, Weighted
from rustloader.order.planned import Planned
from rustloader.system.interrupts import is_interrupt
from rustloader.system.torch_side import known_code

_CLASSES: tuple[type[Order], ...] = (Sequential, Random, Distributed, Subset, Weighted, Planned)
_CLASS_OF_CODE = {cls.code: cls for cls in _CLASSES if cls.code is not None}
# Samplers whose order can start at any position: class names, by kind.
KNOWN_SAMPLERS: dict[str, str] = {cls.name: cls.title or cls.sampler_class.__name__ for cls in _CLASSES}
# Reading attributes of other classes may run the program's code.
_TORCH_CLASSES = frozenset(
    {BatchSampler, _InfiniteConstantSampler, *(cls.sampler_class for cls in _CLASSES if cls is not Planned)}
)
BATCHES = known_code(BatchSampler.__iter__, sampler, "iter sampler drop_last batch_size zip itertools islice")


def order_of(index_sampler: Any) -> Order:
    """Returns the order of a loader's index sampler. Calls none of the sampler's methods."""
    is_batches = isinstance(index_sampler, BatchSampler) and _code_of(index_sampler) is BATCHES is not None
    inner = getattr(index_sampler, "sampler", None) if is_batches else index_sampler
    cls = Constant if isinstance(inner, _InfiniteConstantSampler) else _CLASS_OF_CODE.get(_code_of(inner), Order)
    return cls(inner, index_sampler if is_batches else None)


def _code_of(iterable: Any) -> Any:
    return getattr(getattr(type(iterable), "__iter__", None), "__code__", None)


def stream(index_sampler: Any, torch_iterator: Iterator[Any]) -> Iterator[Any]:
    """Returns the index stream of a loader's index sampler, or ``torch_iterator`` if it has none.

    ``torch_iterator`` is ``iter(index_sampler)``, before its first step.
    """
    if type(index_sampler) not in _TORCH_CLASSES:
        return torch_iterator
    return _stream(order_of(index_sampler), torch_iterator)


def from_position(order: Order, torch_iterator: Iterator[Any], position: int) -> Iterator[Any]:
    """Returns the index batches of a known sampler, without the first ``position``. The arguments are otherwise those
    of ``stream``."""
    is_sequential = isinstance(order, Sequential)
    if not (is_sequential and position):
        batches = _stream(order, torch_iterator)
        if isinstance(batches, IndexStream) and position:
            batches.skip(position)
        if isinstance(batches, IndexStream) or is_sequential:
            return batches
    order.skip = position if order.batches is None else position * int(order.batches.batch_size)
    if isinstance(order, Distributed) and order.batches is None:
        # torch read the sampler's settings when it created the iterator, so they are recorded now.
        order.begun(torch_iterator)
    return batched(order.batches, order)


def is_exact(index_sampler: Any) -> bool:
    """Returns True if an index sampler is of torch's class, so that its next epoch can be predicted."""
    return type(index_sampler) in _TORCH_CLASSES and order_of(index_sampler).is_exact


def predicted(index_sampler: Any) -> Any:
    """Returns a copy of an index sampler as the next epoch finds it, if the program only calls ``set_epoch`` with the
    next number until then. Returns None if the order cannot be predicted."""
    if not is_exact(index_sampler):
        return None
    order = order_of(index_sampler)
    inner, batches = copy.copy(order.inner), copy.copy(order.batches)
    order.advance(inner)
    if batches is None:
        return inner
    batches.sampler = inner
    return batches


def _stream(order: Order, torch_iterator: Iterator[Any]) -> Iterator[Any]:
    batches = order.batches
    has_own_class = type(batches) not in (BatchSampler, type(None))
    if has_own_class or not _is_fresh(torch_iterator, order.code if batches is None else BATCHES, order.index_sampler):
        return torch_iterator
    if isinstance(order, Constant):
        return _endless(order, torch_iterator)
    if not _has_arrays(order):
        return torch_iterator
    order.is_streamed = True
    return IndexStream(torch_iterator, batches, functools.partial(_begin, order), _size_of, is_interrupt)


def _has_arrays(order: Order) -> bool:
    """Returns True if a stream can take a sampler's indices from arrays. With replacement, torch draws the indices in
    small chunks."""
    if isinstance(order, Random):
        return order.is_exact and vars(order.inner).get("replacement") is False
    return order.is_exact and isinstance(order, (Sequential, Distributed))


def _is_fresh(iterator: Iterator[Any], code: CodeType | None, index_sampler: Any) -> bool:
    """Returns True if an iterator is torch's own generator over ``index_sampler``, and has not made its first step."""
    return (
        type(iterator) is GeneratorType
        and iterator.gi_code is code
        and inspect.getgeneratorstate(iterator) == inspect.GEN_CREATED
        and inspect.getgeneratorlocals(iterator).get("self") is index_sampler
    )


def _endless(order: Constant, torch_iterator: Iterator[Any]) -> Iterator[Any]:
    has_code = _code_of(order.inner) is Constant.code is not None
    if type(order.inner) is not _InfiniteConstantSampler or not has_code:
        return torch_iterator
    if order.batches is None:
        return itertools.repeat(None)
    return Endless(order.batches) if type(vars(order.batches).get("batch_size")) is int else torch_iterator


class Endless:
    """The endless index batches of an iterable dataset, which contain None instead of indices."""

    def __init__(self, batches: BatchSampler) -> None:
        self._batches = batches

    def __iter__(self) -> Endless:
        return self

    def __next__(self) -> list[None]:
        return [None] * self._batches.batch_size


def _begin(order: Order) -> tuple[NextArray, int | None] | None:
    """Returns the source of a stream's arrays, and the batch size if all batches must have it (``drop_last``).

    Returns None if the stream must use torch's generator instead. A stream calls this in its first ``next``, because
    that is when torch's generator reads its sampler, which the program may have replaced.
    """
    now, batches = order_of(order.index_sampler), order.batches
    if not _has_arrays(now):
        return None
    if type(now) is type(order):
        order.inner, now = now.inner, order
    arrays = now.arrays()
    if arrays is None or batches is None or not batches.drop_last:
        return None if arrays is None else (arrays, None)
    size: Any = batches.batch_size
    return arrays, size if type(size) is int and 0 <= size < 2**32 else len([None] * size)


def _size_of(size: Any) -> int:
    """Returns a ``batch_size`` of any type as an int. If it is invalid, raises the error that ``islice`` raises in
    torch."""
    itertools.islice((), size)
    return sys.maxsize if size is None else operator.index(size)


class _Batches:
    """A stand-in for a BatchSampler in torch's code, with another sampler. Other attributes are the original's."""

    def __init__(self, batches: BatchSampler, inner: Any) -> None:
        self._batches = batches
        self.sampler = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


def batched(batches: BatchSampler | None, source: Any) -> Iterator[Any]:
    """Returns torch's iterator over the batches of a source's indices, or an iterator over its indices if there is no
    BatchSampler.

    The source is not read before the first ``next``.
    """
    if batches is not None:
        return BatchSampler.__iter__(_Batches(batches, source))  # type: ignore[arg-type]
    return _Lazily(source)


class _Lazily(Iterator[Any]):
    """An iterator that is created at the first ``next``. Unlike a generator, it goes on after an interrupt."""

    _iterator: Iterator[Any] | None = None

    def __init__(self, source: Any) -> None:
        self._source = source
        # The next item. After an interrupt, it remains here for the next call.
        self._drawn: list[Any] = []

    def __next__(self) -> Any:
        if self._iterator is None:
            self._iterator = iter(self._source)
        if not self._drawn:
            call_into(self._drawn, next, self._iterator)
        # Atomic for signal handlers.
        item, self._drawn = self._drawn[0], []
        return item
