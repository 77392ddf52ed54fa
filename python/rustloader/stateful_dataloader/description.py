"""``describe``: describes a loader's state in words."""

from __future__ import annotations

import pickle
import reprlib
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

from rustloader.order.computed import samples_per_rank
from rustloader.order.stream import TORCH_SAMPLERS
from rustloader.stateful_dataloader import schema
from rustloader.stateful_dataloader.schema import OWN, DatasetState, Own, SamplerState
from rustloader.system.formatting import count_of, size, type_name

# Numbers larger than this are not accepted as counts.
_MAX_COUNT = 2**63 - 1
# Maximum number of keys or ordinals to list.
_MAX_LISTED = 8
_SAMPLERS = TORCH_SAMPLERS | {
    "stateful": "one with a state",
    "other": "one without a state, iterated again up to the position",
    "none": "none (the dataset is iterable)",
}


def describe(state: Any) -> str:
    """Describes a state in words: its origin, its position, its sampler, and the states of its dataset and workers.

    Accepts states of rustloader and of torchdata, and does not change them. The last line lists entries that are
    missing or have the wrong type, if there are any.

    Args:
        state: The result of ``state_dict()`` of a StatefulDataLoader.

    Returns:
        A string of several lines.

    Raises:
        TypeError: The state is not a dict.

    Examples:
        >>> loader = rustloader.StatefulDataLoader(range(10), batch_size=2)
        >>> batches = iter(loader)
        >>> batch = next(batches)
        >>> print(rustloader.stateful_dataloader.describe(loader.state_dict()))  # doctest: +ELLIPSIS
        written by: StatefulDataLoader of rustloader, without workers
        position: epoch 0, 1 batch delivered of 5; the next one is batch 1
        sampler: SequentialSampler, 10 indices in batches of 2
        dataset: map-style, 10 samples, without a state
        random numbers: base seed ...
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"describe() takes the dict that state_dict() returned, got {type_name(state)}")
    if not state:
        return "an empty state: load_state_dict() makes the loader start from scratch"
    if schema.SNAPSHOT not in state and schema.NUM_YIELDED not in state:
        return (
            f"not a state of a StatefulDataLoader: it has {_listed(state)}, but neither "
            f"{schema.SNAPSHOT!r} nor {schema.NUM_YIELDED!r}"
        )
    return "\n".join(_Description(state).lines())


class _Part(dict[Any, Any]):
    """A dict in a state. Adds entries that are missing or have the wrong type to ``problems``."""

    def __init__(self, entries: Mapping[Any, Any], path: str, problems: dict[str, None]) -> None:
        super().__init__(entries)
        self._path, self._problems = path, problems

    def value(self, key: str, *types: type) -> Any:
        """Returns the value of a key. If it is missing or has none of ``types`` (default: a count), adds a problem and
        returns None."""
        types = types or (int,)
        value, problem = self.get(key), None
        if key not in self:
            problem = "is missing"
        elif not isinstance(value, types):
            problem = f"must be of type {types[0].__name__}, is {type_name(value)}"
        elif isinstance(value, int) and not _is_count(value):
            problem = f"must be a number from 0 to {_MAX_COUNT}, is {_short(value)}"
        if problem is None:
            return value
        self._problems[f"{self._path}{_unquoted(key)} {problem}"] = None
        return None

    def part(self, key: str) -> _Part:
        """Returns the dict that is the value of a key. If there is none, adds a problem and returns an empty part."""
        return _Part(self.value(key, dict, Mapping) or {}, f"{self._path}{_unquoted(key)}.", self._problems)


class _Description:
    """The lines about one state."""

    def __init__(self, state: Mapping[Any, Any]) -> None:
        self._problems: dict[str, None] = {}
        empty = _Part({}, "", self._problems)
        self._state = _Part(state, "", self._problems)
        self._with_workers = schema.SNAPSHOT in state
        # Empty in torchdata's states.
        self._own = self._state.part(OWN) if OWN in state else empty
        self._snapshot = self._state.part(schema.SNAPSHOT) if self._with_workers else empty
        # The part that contains the position in the sampler.
        self._main = self._snapshot.part(schema.MAIN) if self._with_workers else self._state
        self._sampler_part = self._own.part(Own.SAMPLER) if self._own else empty
        self._sampler = SamplerState.of(self._sampler_part)

    def lines(self) -> list[str]:
        known = schema.KEYS_WITH_WORKERS if self._with_workers else schema.KEYS_WITHOUT_WORKERS
        lines = [
            f"written by: {self._writer()}",
            f"position: {self._position()}",
            *self._ahead(),
            *self._sampler_lines(),
            *self._dataset_line(),
            *self._seeds(),
            *self._workers(),
            *self._next_epoch(),
        ]
        others = [key for key in self._state if key not in known]
        if others:
            lines.append(f"other keys: {_listed(others)}")
        if self._problems:
            lines.append(f"problems: {'; '.join(self._problems)}")
        return lines

    def _writer(self) -> str:
        name = f"StatefulDataLoader of {'rustloader' if self._own else 'torchdata'}"
        version = self._own.value(Own.VERSION) if self._own else None
        if version is not None and version > schema.VERSION:
            name += f" in format {version}, which is newer than this rustloader's, {schema.VERSION}"
        if not self._with_workers:
            return f"{name}, without workers"
        count = self._main.value(schema.NUM_WORKERS)
        return f"{name}, with {'workers' if count is None else count_of(count, 'worker')}"

    def _position(self) -> str:
        steps = 0
        if self._with_workers:
            steps = self._state.value(schema.STEPS) or 0
            delivered = self._snapshot.value(schema.SNAPSHOT_STEP)
        else:
            delivered = self._state.value(schema.NUM_YIELDED)
        following = self._main.value(schema.SAMPLER_ITER_YIELDED)
        following = None if following is None else following + steps
        epoch = self._own.value(Own.EPOCH) if self._own else None
        text = "" if epoch is None else f"epoch {epoch}, "
        total = self._total()
        text += "an unknown number of batches" if delivered is None else count_of(delivered + steps, "batch")
        text += " delivered" if total is None else f" delivered of {total:,}"
        if self._state.value(schema.FINISHED, bool):
            return f"{text}; the epoch has ended, and the next iter() begins another one"
        if following is None:
            return text
        if total is not None and following >= total:
            return f"{text}; the loop had not ended, and the next iter() yields no batches"
        written = self._own.value(Own.DELIVERED) if self._own else following
        moved = "" if written in (None, following) else f" (edited: it was batch {written})"
        return f"{text}; the next one is batch {following}{moved}"

    def _total(self) -> int | None:
        """Returns the number of batches in an epoch; None if the state does not contain enough to compute it."""
        sampler, batch_size = self._sampler, self._sampler.batch_size
        before, length = _resharded(sampler.start, sampler.length)
        if not _is_count(length) or sampler.kind == "none":
            return None
        if batch_size is None:
            return before + length
        if not _is_count(batch_size) or batch_size < 1 or not self._is_of_torch():
            return None
        return before + (length // batch_size if sampler.drop_last is True else -(-length // batch_size))

    def _is_of_torch(self) -> bool:
        """Returns True if the sampler is torch's and yields indices. The length of other samplers may count batches."""
        return _unquoted(self._sampler.kind) in TORCH_SAMPLERS

    def _ahead(self) -> Iterator[str]:
        ahead = self._own.value(Own.AHEAD, list, tuple) if self._own else None
        if ahead:
            words = f"batch {_listed(ahead)} was" if len(ahead) == 1 else f"batches {_listed(ahead)} were"
            yield f"ahead: {words} delivered already (in_order=False)"

    def _sampler_lines(self) -> Iterator[str]:
        if self._own:
            yield f"sampler: {self._sampler_words()}"
        for key in (schema.INDEX_SAMPLER_STATE, schema.SAMPLER_ITER_STATE):
            state = self._main.get(key)
            if state is not None and not (isinstance(state, Mapping) and state.keys() == {schema.SAMPLES_YIELDED}):
                drawn = state.get(schema.SAMPLES_YIELDED) if isinstance(state, Mapping) else None
                words = f", {count_of(drawn, 'sample')} drawn" if _is_count(drawn) else ""
                yield f"sampler's state: {key}, {_pickled_size(state)}{words}"

    def _sampler_words(self) -> str:
        kind = self._sampler_part.value(Own.KIND, str)
        text = "unknown" if kind is None else _SAMPLERS.get(kind, _short(kind))
        length, batch_size = self._sampler.length, self._sampler.batch_size
        if _is_count(length) and kind != "none":
            indices = "index" if length == 1 else "indices"
            text += f", {length:,} {indices}" if self._is_of_torch() else f", length {length:,}"
        if _is_count(batch_size):
            text += f" in batches of {batch_size:,}"
        if self._sampler.drop_last is True:
            text += ", without an incomplete last batch"
        return text + _start_words(self._sampler.start)

    def _dataset_line(self) -> Iterator[str]:
        if not self._own:
            return
        part = self._own.part(Own.DATASET)
        kind = part.value(Own.KIND, str) if part else None
        dataset = DatasetState.of(part)
        words = ["unknown" if kind is None else {"map": "map-style"}.get(kind, kind)]
        if _is_count(dataset.length):
            words.append(count_of(dataset.length, "sample"))
        if isinstance(dataset.stateful, bool):
            words.append("with a state" if dataset.stateful else "without a state")
        yield f"dataset: {', '.join(words)}"

    def _seeds(self) -> Iterator[str]:
        words = []
        base_seed = self._own.get(Own.BASE_SEED) if self._own else self._main.get(schema.BASE_SEED)
        if base_seed is not None:
            words.append(f"base seed {_short(base_seed)}")
        seeds = self._own.get(Own.SEEDS)
        if isinstance(seeds, Mapping):
            numbers = [_short(seeds.get(key)) for key in (Own.BASE_SEED, Own.EPOCH)]
            words.append("seed_by with base seed {}, epoch {}".format(*numbers))
        if words:
            yield f"random numbers: {'; '.join(words)}"

    def _workers(self) -> Iterator[str]:
        records = self._own.get(Own.WORKERS)
        records = [*records] if isinstance(records, list | tuple) else []
        if not self._with_workers:
            if words := _snapshot_words(self._state, records):
                yield f"main process: {words}"
            return
        snapshots = self._snapshot.part(schema.WORKER_SNAPSHOTS)
        states = {
            _unquoted(name).replace("_", " "): _snapshot_words(snapshots.part(name), records[number:])
            for number, name in enumerate(snapshots)
        }
        if not any(states.values()):
            yield "workers: no states"
        else:
            yield from (f"{name}: {words or 'no state'}" for name, words in states.items())
        steps = self._state.get(schema.STEPS)
        if _is_count(steps) and steps > 0:
            yield f"since these snapshots: {count_of(steps, 'batch')}"

    def _next_epoch(self) -> Iterator[str]:
        draws = self._own.get(Own.NEXT)
        if isinstance(draws, Mapping):
            which = "first" if self._state.get(schema.FINISHED) is False else "next"
            words = f"base seed {_short(draws.get(Own.BASE_SEED))}{_start_words(draws.get(Own.SAMPLER))}"
            yield f"{which} epoch: {words}"


def _start_words(start: Any) -> str:
    """Describes the start of an epoch's order."""
    if not isinstance(start, Mapping):
        return ""
    if "rank" in start:
        rank, ranks, epoch, consumed = (_short(start.get(key)) for key in ("rank", "num_replicas", "epoch", "consumed"))
        before = f", after {consumed} samples delivered before the reshard" if consumed not in ("0", "None") else ""
        return f", rank {rank} of {ranks}, sampler epoch {epoch}{before}"
    if "seed" in start:
        return f", order from seed {_short(start['seed'])}"
    return ", order from the state of its generator" if "generator" in start else ""


def _resharded(start: Any, length: Any) -> tuple[int, Any]:
    """Returns the number of a rank's batches before a ``reshard``, and the number of its samples after it.

    Without a ``reshard``, these are 0 and ``length``. The number of samples is None if the state is damaged.
    """
    consumed = start.get("consumed") if isinstance(start, Mapping) else 0
    if not _is_count(consumed) or consumed == 0:
        return 0, length
    first, dataset, ranks = (start.get(key) for key in ("first", "dataset_length", "num_replicas"))
    if not (_is_count(first) and _is_count(dataset) and _is_count(ranks)) or ranks == 0:
        return 0, None
    return first, samples_per_rank(max(dataset - consumed, 0), ranks, start.get("drop_last") is True)


def _snapshot_words(snapshot: Mapping[Any, Any], records: list[Any]) -> str:
    """Describes the snapshot of a worker or of the main process, and its record, which is the first of ``records``."""
    words = []
    fetcher = snapshot.get(schema.FETCHER_STATE)
    fetcher = fetcher if isinstance(fetcher, Mapping) else {}
    for owner, state in (
        ("dataset", snapshot.get(schema.DATASET_STATE)),
        ("iterator", fetcher.get(schema.DATASET_ITER_STATE)),
    ):
        if state is not None:
            words.append(f"state of the {owner}: {_pickled_size(state)}")
    replay = records[0].get(Own.REPLAY) if records and isinstance(records[0], Mapping) else None
    if _is_count(replay) and replay > 0:
        words.append(f"{count_of(replay, 'batch')} to fetch again")
    if fetcher.get(schema.FETCHER_ENDED) is True:
        words.append("at its end")
    return ", ".join(words)


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and 0 <= value <= _MAX_COUNT


class _ByteCounter:
    """A file object that only counts the bytes written to it."""

    count = 0

    def write(self, data: Any) -> int:
        self.count += len(data)
        return len(data)


def _pickled_size(value: Any) -> str:
    """Returns the pickled size of a value, in words."""
    counter = _ByteCounter()
    try:
        pickle.dump(value, counter, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception:
        return "cannot be pickled"
    return size(counter.count)


def _unquoted(key: Any) -> str:
    """Returns a key as text, without quotes if it is a string."""
    return key if isinstance(key, str) else _short(key)


def _short(value: Any) -> str:
    """Returns a shortened ``repr`` of a value."""
    try:
        return reprlib.repr(value)
    except Exception:  # an int with thousands of digits
        return f"<{type_name(value)}>"


def _listed(values: Any) -> str:
    values = list(values)
    more = f" and {len(values) - _MAX_LISTED} more" if len(values) > _MAX_LISTED else ""
    return ", ".join(map(_short, values[:_MAX_LISTED])) + more
