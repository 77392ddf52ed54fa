"""Finds shuffle buffers in Hugging Face's streams, ``datasets.IterableDataset``.

The states of these streams do not contain the samples in the buffers.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any

logger = logging.getLogger("rustloader")

# The attributes in which a stream and its parts keep further parts.
_OF_STREAM = "_ex_iterable"
_PARTS = frozenset({_OF_STREAM, "ex_iterable", "ex_iterables"})
# Maximum number of parts to visit.
_MAX_PARTS = 10_000
_WARNING = (
    "%s has a shuffle buffer of %d samples, which its state_dict() does not include: a loop that resumes from this "
    "state misses some samples and gets others twice, or fails. Shuffle before to_iterable_dataset(), shuffle only the "
    "order of the shards with shuffle(buffer_size=1, max_buffer_input_shards=1), or resume at the end of an epoch"
)


def warn(dataset: Any) -> None:
    """Logs a warning if a stateful dataset is, or has as an attribute, a stream with a shuffle buffer."""
    size = 0
    with contextlib.suppress(Exception):
        size = largest(dataset)
    if size > 1:
        logger.warning(_WARNING, type(dataset).__qualname__, size)


def largest(dataset: Any) -> int:
    """Returns the size of the largest shuffle buffer in samples; 0 without one. Runs none of the dataset's code."""
    candidates = [dataset, *_attributes(dataset).values()]
    waiting = [it for it in candidates if _OF_STREAM in _attributes(it)]
    size = 0
    for _ in range(_MAX_PARTS):
        if not waiting:
            break
        attributes = _attributes(waiting.pop())
        if type(attributes.get("buffer_size")) is int:
            size = max(size, attributes["buffer_size"])
        for name in attributes.keys() & _PARTS:
            part = attributes[name]
            waiting += part if type(part) is list else [part]
    return size


def _attributes(obj: Any) -> dict[str, Any]:
    try:
        return dict(object.__getattribute__(obj, "__dict__"))
    except AttributeError:
        return {}
