"""``describe``: a description of a loader's state in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rustloader.stateful_dataloader import schema
from rustloader.stateful_dataloader.phrases import (
    LISTED,
    is_count,
    names,
    pickled_size,
    plain,
    resharded,
    short,
    snapshot_words,
    start_words,
)
from rustloader.stateful_dataloader.schema import OWN, DatasetState, Own, SamplerState
from rustloader.system.formatting import count_of, type_name

_SAMPLERS = {
    "sequential": "SequentialSampler",
    "random": "RandomSampler",
    "distributed": "DistributedSampler",
    "subset": "SubsetRandomSampler",
    "weighted": "WeightedRandomSampler",
    "stateful": "one with a state",
    "other": "one without a state, iterated again up to the position",
    "none": "none (the dataset is iterable)",
}


def describe(state: Any) -> str:
    """Describes a state in words: its origin, its position, its sampler, and the states of dataset and workers.

    It reads states of rustloader and of torchdata, and changes nothing. Entries that are missing or of a wrong type are
    listed at the end.

    Args:
        state: The result of ``state_dict()`` of a StatefulDataLoader.

    Returns:
        Text of several lines.

    Raises:
        TypeError: The state is no dict.

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
        return "an empty state: load_state_dict() makes the loader begin anew"
    if schema.SNAPSHOT not in state and schema.NUM_YIELDED not in state:
        return (
            f"no state of a StatefulDataLoader: it has {names(state)}, but neither "
            f"{schema.SNAPSHOT!r} nor {schema.NUM_YIELDED!r}"
        )
    return "\n".join(_Description(state).lines())


class _Description:
    """The lines about one state, with notes on entries that are missing or of a wrong type."""

    def __init__(self, state: Mapping[Any, Any]) -> None:
        self._problems: dict[str, None] = {}
        self._state = state
        self._with_workers = schema.SNAPSHOT in state
        self._own = self._part(state, "", OWN) if OWN in state else {}
        self._snapshot = self._part(state, "", schema.SNAPSHOT) if self._with_workers else {}
        # The part with the position in the sampler.
        self._main = self._part(self._snapshot, schema.SNAPSHOT, schema.MAIN) if self._with_workers else state
        self._main_path = "_snapshot._main_snapshot" if self._with_workers else ""
        self._sampler_part = self._part(self._own, OWN, Own.SAMPLER) if self._own else {}
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
            lines.append(f"other keys: {names(others)}")
        if self._problems:
            lines.append(f"problems: {'; '.join(self._problems)}")
        return lines

    # Values, which the state may lack or have of a wrong type

    def _value(self, values: Mapping[Any, Any], path: str, key: str, *types: type) -> Any:
        """Returns a value of one of these types, or None with a note."""
        name = f"{path}.{plain(key)}" if path else plain(key)
        if key not in values:
            self._problems[f"{name} is missing"] = None
            return None
        value = values[key]
        if not isinstance(value, types):
            self._problems[f"{name} must be of type {types[0].__name__}, is {type_name(value)}"] = None
            return None
        if isinstance(value, int) and not is_count(value):
            self._problems[f"{name} must be a non-negative number, is {short(value)}"] = None
            return None
        return value

    def _part(self, values: Mapping[Any, Any], path: str, key: str) -> Mapping[Any, Any]:
        return self._value(values, path, key, dict, Mapping) or {}

    def _number(self, values: Mapping[Any, Any], path: str, key: str) -> int | None:
        number: int | None = self._value(values, path, key, int)
        return number

    # Lines

    def _writer(self) -> str:
        if not self._own:
            name = "StatefulDataLoader of torchdata"
        else:
            name = "StatefulDataLoader of rustloader"
            version = self._number(self._own, OWN, Own.VERSION)
            if version is not None and version > schema.VERSION:
                name += f" in format {version}, which is newer than this rustloader's, {schema.VERSION}"
        if not self._with_workers:
            return f"{name}, without workers"
        count = self._number(self._main, self._main_path, schema.NUM_WORKERS)
        return f"{name}, with {'workers' if count is None else count_of(count, 'worker')}"

    def _position(self) -> str:
        steps = self._number(self._state, "", schema.STEPS) or 0 if self._with_workers else 0
        if self._with_workers:
            delivered = self._number(self._snapshot, schema.SNAPSHOT, schema.SNAPSHOT_STEP)
        else:
            delivered = self._number(self._state, "", schema.NUM_YIELDED)
        following = self._number(self._main, self._main_path, schema.SAMPLER_ITER_YIELDED)
        following = None if following is None else following + steps
        text = ""
        if self._own and (epoch := self._number(self._own, OWN, Own.EPOCH)) is not None:
            text = f"epoch {epoch}, "
        total = self._total()
        text += "an unknown number of batches" if delivered is None else count_of(delivered + steps, "batch")
        text += " delivered" if total is None else f" delivered of {total:,}"
        if self._value(self._state, "", schema.FINISHED, bool):
            return f"{text}; the epoch has ended, and the next iter() begins another one"
        if following is None:
            return text
        if total is not None and following >= total:
            return f"{text}; the end was not reached, and the next iter() is an epoch without batches"
        written = self._number(self._own, OWN, Own.DELIVERED) if self._own else following
        moved = "" if written in (None, following) else f" (a program has moved it from {written})"
        return f"{text}; the next one is batch {following}{moved}"

    def _total(self) -> int | None:
        """Returns the batches of an epoch, if the state says so."""
        sampler, batch_size = self._sampler, self._sampler.batch_size
        first, length = resharded(sampler.start, sampler.length)
        if not is_count(length) or sampler.kind == "none":
            return None
        if batch_size is None:
            return first + length
        if not is_count(batch_size) or batch_size < 1 or not self._is_known():
            return None
        drops_last = sampler.drop_last is True
        return first + (length // batch_size if drops_last else -(-length // batch_size))

    def _is_known(self) -> bool:
        """Returns True if the sampler yields single indices. The length of another one may count batches."""
        return _SAMPLERS.get(plain(self._sampler.kind), "")[:1].isupper()

    def _ahead(self) -> Iterator[str]:
        ahead = (self._value(self._own, OWN, Own.AHEAD, list, tuple) if self._own else None) or ()
        if ahead:
            numbers = ", ".join(short(one) for one in ahead[:LISTED])
            more = f" and {len(ahead) - LISTED} more" if len(ahead) > LISTED else ""
            yield f"ahead: from there on, {numbers}{more} are delivered already (in_order=False)"

    def _sampler_lines(self) -> Iterator[str]:
        if self._own:
            yield f"sampler: {self._sampler_words()}"
        for key in (schema.INDEX_SAMPLER_STATE, schema.SAMPLER_ITER_STATE):
            state = self._main.get(key)
            if state is not None and not (isinstance(state, Mapping) and state.keys() == {schema.SAMPLES_YIELDED}):
                drawn = state.get(schema.SAMPLES_YIELDED) if isinstance(state, Mapping) else None
                words = f", {count_of(drawn, 'sample')} drawn" if is_count(drawn) else ""
                yield f"sampler's state: {key}, {pickled_size(state)}{words}"

    def _sampler_words(self) -> str:
        kind = self._value(self._sampler_part, f"{OWN}.{Own.SAMPLER}", Own.KIND, str)
        text = "unknown" if kind is None else _SAMPLERS.get(kind, short(kind))
        length, batch_size = self._sampler.length, self._sampler.batch_size
        if is_count(length) and kind != "none":
            indices = "index" if length == 1 else "indices"
            text += f", {length:,} {indices}" if self._is_known() else f", length {length:,}"
        if is_count(batch_size):
            text += f" in batches of {batch_size:,}"
        if self._sampler.drop_last is True:
            text += ", without a last one that is not full"
        return text + start_words(self._sampler.start)

    def _dataset_line(self) -> Iterator[str]:
        if not self._own:
            return
        part = self._part(self._own, OWN, Own.DATASET)
        kind = self._value(part, f"{OWN}.{Own.DATASET}", Own.KIND, str) if part else None
        dataset = DatasetState.of(part)
        words = ["unknown" if kind is None else {"map": "map-style"}.get(kind, kind)]
        if is_count(dataset.length):
            words.append(count_of(dataset.length, "sample"))
        if isinstance(dataset.stateful, bool):
            words.append("with a state" if dataset.stateful else "without a state")
        yield f"dataset: {', '.join(words)}"

    def _seeds(self) -> Iterator[str]:
        words = []
        base_seed = (self._own if self._own else self._main).get(Own.BASE_SEED if self._own else schema.BASE_SEED)
        if base_seed is not None:
            words.append(f"base seed {short(base_seed)}")
        seeds = self._own.get(Own.SEEDS)
        if isinstance(seeds, Mapping):
            numbers = [short(seeds.get(key)) for key in (Own.BASE_SEED, Own.EPOCH)]
            words.append("seed_by with base seed {}, epoch {}".format(*numbers))
        if words:
            yield f"random numbers: {'; '.join(words)}"

    def _workers(self) -> Iterator[str]:
        records = self._own.get(Own.WORKERS)
        records = records if isinstance(records, list | tuple) else []
        if not self._with_workers:
            words = snapshot_words(self._state, records[0] if records else None)
            if words:
                yield f"main process: {', '.join(words)}"
            return
        snapshots = self._part(self._snapshot, schema.SNAPSHOT, schema.WORKER_SNAPSHOTS)
        states = {}
        for number, name in enumerate(snapshots):
            snapshot = self._part(snapshots, "_snapshot._worker_snapshots", name)
            words = snapshot_words(snapshot, records[number] if number < len(records) else None)
            states[plain(name).replace("_", " ")] = ", ".join(words)
        if not any(states.values()):
            yield "workers: no states"
        else:
            yield from (f"{name}: {words or 'no state'}" for name, words in states.items())
        steps = self._state.get(schema.STEPS)
        if is_count(steps) and steps > 0:
            yield f"since these snapshots: {count_of(steps, 'batch')}"

    def _next_epoch(self) -> Iterator[str]:
        draws = self._own.get(Own.NEXT)
        if isinstance(draws, Mapping):
            words = f"base seed {short(draws.get(Own.BASE_SEED))}"
            which = "first" if self._state.get(schema.FINISHED) is False else "next"
            yield f"{which} epoch: {words}{start_words(draws.get(Own.SAMPLER))}"
