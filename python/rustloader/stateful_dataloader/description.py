"""``describe``: describes a loader's state in words."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from typing import Any

from rustloader.order.stream import KNOWN_SAMPLERS
from rustloader.stateful_dataloader.schema import SNAPSHOT, SamplerState, State
from rustloader.system.formatting import count_of, size, type_name
from rustloader.workers.snapshots import WorkerStart


def describe(state: Any) -> str:
    """Describes a state of rustloader or torchdata in words: its position, its sampler, and the states in it.

    Args:
        state: The result of ``state_dict()`` of a StatefulDataLoader.

    Returns:
        A string of several lines; one line with the reason if the state cannot be loaded.

    Raises:
        TypeError: The state is not a dict.

    Examples:
        >>> loader = rustloader.StatefulDataLoader(range(10), batch_size=2)
        >>> batch = next(iter(loader))
        >>> print(rustloader.stateful_dataloader.describe(loader.state_dict()))  # doctest: +ELLIPSIS
        written by: StatefulDataLoader of rustloader, without workers
        position: epoch 0, 1 batch delivered of 5; the next one is batch 1
        sampler: SequentialSampler, 10 samples in batches of 2
        dataset: map-style, 10 samples, without a state
        random numbers: base seed ...
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"describe() takes the dict that state_dict() returned, got {type_name(state)}")
    if not state:
        return "an empty state: load_state_dict() makes the loader start from scratch"
    try:
        return "\n".join(_lines(State.from_torchdata(state), SNAPSHOT in state))
    except Exception as error:
        return f"cannot be {'loaded' if isinstance(error, ValueError) else 'described'}: {error}"


def _lines(state: State, has_workers: bool) -> Iterator[str]:
    is_own = state.dataset is not None
    workers = f"with {count_of(state.num_workers, 'worker')}" if has_workers else "without workers"
    yield f"written by: StatefulDataLoader of {'rustloader' if is_own else 'torchdata'}, {workers}"
    yield f"position: {f'epoch {state.epoch}, ' if is_own else ''}{_position(state)}"
    if state.ahead:
        yield f"ahead: {', '.join(map(str, state.ahead))} (delivered already, in_order=False)"
    if state.dataset is not None:
        yield f"sampler: {_sampler_words(state.sampler or SamplerState())}"
        length = "" if state.dataset.length is None else f", {count_of(state.dataset.length, 'sample')}"
        has_state = "with a state" if state.dataset.stateful else "without a state"
        yield f"dataset: {'iterable' if state.dataset.is_iterable else 'map-style'}{length}, {has_state}"
    seeds = [] if state.base_seed is None else [f"base seed {state.base_seed}"]
    seeds += [] if state.seeds is None else ["seed_by with base seed {}, epoch {}".format(*state.seeds)]
    if seeds:
        yield f"random numbers: {'; '.join(seeds)}"
    for number, start in enumerate(state.workers):
        if words := _worker_words(start):
            yield f"{f'worker {number}' if has_workers else 'main process'}: {words}"
    if state.next is not None:
        which = "next" if state.finished else "first"
        yield f"{which} epoch: base seed {state.next.base_seed}{_start_words(state.next.sampler)}"


def _position(state: State) -> str:
    delivered, following, total = state.yielded + state.steps, state.low + state.steps, _total(state.sampler)
    text = f"{count_of(delivered, 'batch')} delivered" + ("" if total is None else f" of {total:,}")
    if state.finished:
        return f"{text}; the epoch has ended, and the next iter() begins another one"
    if total is not None and following >= total:
        return f"{text}; the loop had not ended, and the next iter() yields no batches"
    return f"{text}; the next one is batch {following}"


def _total(sampler: SamplerState | None) -> int | None:
    """Returns the number of batches in an epoch; None if it is unknown, as after a ``reshard``."""
    if sampler is None or sampler.length is None or sampler.kind not in KNOWN_SAMPLERS:
        return None
    batches, rest = divmod(int(sampler.length), sampler.batch_size or 1)
    return None if (sampler.start or {}).get("consumed") else batches + bool(rest and not sampler.drop_last)


def _sampler_words(sampler: SamplerState) -> str:
    text = KNOWN_SAMPLERS.get(sampler.kind, str(sampler.kind))
    if sampler.length is not None and sampler.kind in KNOWN_SAMPLERS:
        text += f", {count_of(sampler.length, 'sample')}"
    text += f" in batches of {sampler.batch_size:,}" if sampler.batch_size else ""
    text += ", without an incomplete last batch" if sampler.drop_last else ""
    return text + _start_words(sampler.start)


def _start_words(start: Mapping[str, Any] | None) -> str:
    if not start:
        return ""
    if "rank" in start:
        consumed = f", after {start['consumed']} samples before the reshard" if start.get("consumed") else ""
        return f", rank {start['rank']} of {start['num_replicas']}, sampler epoch {start['epoch']}{consumed}"
    if "seed" in start:
        return f", order from seed {start['seed']}"
    return ", order from the state of its generator" if "generator" in start else ""


def _worker_words(start: WorkerStart) -> str:
    parts = ("dataset", start.dataset_state), ("iterator", start.iterator_state)
    words = [f"state of the {owner}: {_pickled_size(part)}" for owner, part in parts if part is not None]
    words += [f"{count_of(start.replayed, 'batch')} to fetch again"] * bool(start.replayed)
    return ", ".join(words + ["at its end"] * start.ended)


def _pickled_size(value: Any) -> str:
    try:
        return size(len(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)))
    except Exception:
        return "cannot be pickled"
