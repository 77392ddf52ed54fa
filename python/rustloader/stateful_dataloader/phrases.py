"""Formats the parts of a state, of the expected type or any other."""

from __future__ import annotations

import pickle
import reprlib
from collections.abc import Mapping
from typing import Any, TypeGuard

from rustloader.stateful_dataloader.schema import (
    DATASET_ITER_STATE,
    DATASET_STATE,
    FETCHER_ENDED,
    FETCHER_STATE,
    Own,
)
from rustloader.system.formatting import count_of, size, type_name

# Above every count.
_TOO_LARGE = 2**63
# Numbers and keys that are listed.
LISTED = 8


def start_words(start: Any) -> str:
    """Describes how the order of an epoch comes about."""
    if not isinstance(start, Mapping):
        return ""
    if "rank" in start:
        rank, ranks, epoch, consumed = (short(start.get(key)) for key in ("rank", "num_replicas", "epoch", "consumed"))
        before = f", behind {consumed} samples of earlier ranks" if consumed not in ("0", "None") else ""
        return f", rank {rank} of {ranks}, its epoch {epoch}{before}"
    if "seed" in start:
        return f", order by seed {short(start['seed'])}"
    return ", order by the state of its generator" if "generator" in start else ""


def resharded(start: Any, length: Any) -> tuple[int, Any]:
    """Returns, for a rank whose epoch was divided again, the number of batches before that, and the samples from there
    on."""
    consumed = start.get("consumed") if isinstance(start, Mapping) else 0
    if not is_count(consumed) or consumed == 0:
        return 0, length
    first, dataset, ranks = (start.get(key) for key in ("first", "dataset_length", "num_replicas"))
    if not (is_count(first) and is_count(dataset) and is_count(ranks)) or ranks == 0:
        return 0, None
    left = max(dataset - consumed, 0)
    return first, left // ranks if start.get("drop_last") is True else -(-left // ranks)


def snapshot_words(snapshot: Mapping[Any, Any], record: Any) -> list[str]:
    """Describes the snapshot and the record of a worker, or of the process without workers."""
    words = []
    fetcher = snapshot.get(FETCHER_STATE)
    iterator = fetcher.get(DATASET_ITER_STATE) if isinstance(fetcher, Mapping) else None
    for state, owner in ((snapshot.get(DATASET_STATE), "dataset"), (iterator, "iterator")):
        if state is not None:
            words.append(f"state of the {owner}: {pickled_size(state)}")
    replay = record.get(Own.REPLAY) if isinstance(record, Mapping) else None
    if is_count(replay) and replay > 0:
        words.append(f"{count_of(replay, 'batch')} to fetch again")
    if isinstance(fetcher, Mapping) and fetcher.get(FETCHER_ENDED) is True:
        words.append("at its end")
    return words


def is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and 0 <= value < _TOO_LARGE


class _Counter:
    """A file that counts what is written."""

    count = 0

    def write(self, data: Any) -> int:
        self.count += len(data)
        return len(data)


def pickled_size(value: Any) -> str:
    """Returns the size of a pickled value."""
    counter = _Counter()
    try:
        pickle.dump(value, counter, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception:
        return "cannot be pickled"
    return size(counter.count)


def plain(key: Any) -> str:
    """Returns a key without quotes."""
    return key if isinstance(key, str) else short(key)


def short(value: Any) -> str:
    """Returns a value in at most a few words."""
    try:
        return reprlib.repr(value)
    except Exception:  # an int with thousands of digits
        return f"<{type_name(value)}>"


def names(keys: Any) -> str:
    keys = list(keys)
    more = f" and {len(keys) - LISTED} more" if len(keys) > LISTED else ""
    return ", ".join(short(key) for key in keys[:LISTED]) + more
