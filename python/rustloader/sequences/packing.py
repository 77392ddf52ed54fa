"""``PackingBatchSampler`` and ``pack``: sequences that are concatenated without padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import get_worker_info

from rustloader._core import SequencePlan, int_tensor
from rustloader.sequences.base import SequenceBatchSampler
from rustloader.sequences.lengths import Lengths, positive

# Maximum capacity of a pack. Planning takes 4 bytes per token of the capacity.
_MAX_CAPACITY = 1 << 24
_TOO_LONG = ("error", "truncate", "skip")
# The label of a sequence's first token, which no earlier token predicts. torch's losses ignore it.
_NO_LABEL = -100


class PackingBatchSampler(SequenceBatchSampler):
    """Yields batches of samples that fill packs of at most ``capacity`` tokens, for ``pack`` as the ``collate_fn``.

    The samples of an epoch are permuted and divided into windows. In each window they are packed by best fit, the
    longest first (D. S. Johnson, 1973). Then the packs are permuted. Arguments that are not described here are those of
    ``TokenBudgetBatchSampler``, and so is the order.

    Args:
        lengths: See ``TokenBudgetBatchSampler``.
        capacity: Maximum number of tokens of a pack, at most 16,777,216.
        packs_per_batch: Number of packs in a batch (default: 1). The last batch may have fewer.
        too_long: ``"error"`` refuses samples of more than ``capacity`` tokens; ``"skip"`` leaves them out; with
            ``"truncate"`` each gets its own pack, and ``pack`` needs ``max_length=capacity`` (default: ``"error"``).

    Raises:
        TypeError: See ``TokenBudgetBatchSampler``.
        ValueError: A length is not positive, or refused; an argument is out of range.

    Examples:
        >>> batches = rustloader.PackingBatchSampler([3, 9, 4, 5, 1, 6], capacity=10, shuffle=False)
        >>> list(batches)
        [[1, 4], [5, 2], [3, 0]]
        >>> loader = rustloader.DataLoader(range(6), batch_sampler=batches, collate_fn=rustloader.pack)
    """

    def __init__(
        self,
        lengths: Any,
        capacity: int,
        *,
        packs_per_batch: int = 1,
        too_long: Literal["error", "truncate", "skip"] = "error",
        window: int = 8192,
        shuffle: bool = True,
        seed: int = 0,
        num_replicas: int | None = None,
        rank: int | None = None,
        drop_last: bool = False,
    ) -> None:
        checked, room, packs = (
            Lengths(lengths),
            positive("capacity", capacity),
            positive("packs_per_batch", packs_per_batch),
        )
        if room > _MAX_CAPACITY or too_long not in _TOO_LONG:
            raise ValueError(
                f"capacity must be at most {_MAX_CAPACITY:,}, and too_long one of {', '.join(map(repr, _TOO_LONG))}, "
                f"got {capacity} and {too_long!r}"
            )
        if too_long == "error":
            checked.check_limit(room, "capacity", "raise capacity, or pass too_long='truncate' or 'skip'")
        self._packs = room, packs, too_long == "skip"
        settings = {"capacity": room, "packs_per_batch": packs, "too_long": str(too_long)}
        super().__init__(checked, settings, window, shuffle, seed, num_replicas, rank, drop_last)

    def _plan(self, order: tuple[bool, int, int, int]) -> SequencePlan:
        return SequencePlan.packs(self._lengths.array, order, *self._packs)


def pack(samples: Sequence[Any], *, max_length: int | None = None) -> dict[str, Any]:
    """Concatenates sequences without padding: a ``collate_fn`` for the batches of ``PackingBatchSampler``.

    Names and values are those of transformers' ``DataCollatorWithFlattening``, and the bounds of the sequences have
    FlashAttention's names. In a worker, the tensors are written straight to the memory of the batch.

    Args:
        samples: Dicts with ``"input_ids"`` and, if the labels differ from them, ``"labels"``; or only the token IDs.
            Both are lists, one-dimensional arrays, or tensors of integers. Other entries are ignored.
        max_length: Maximum number of tokens of a sequence; the others are left out (default: None, no maximum).

    Returns:
        A dict. N is the number of tokens, and S the number of sequences:

        * ``input_ids``: token IDs, int64, shape ``(1, N)``;
        * ``labels``: labels, int64, shape ``(1, N)``; -100 for the first token of each sequence;
        * ``position_ids``: the place of each token in its sequence, int64, shape ``(1, N)``;
        * ``cu_seqlens``: where each sequence begins, and N, int32, shape ``(S + 1,)``;
        * ``max_seqlen``: the length of the longest sequence, an int.

    Raises:
        TypeError: A sample has no token IDs, or they are not integers.
        ValueError: There is no sample; a sample is empty; only some have labels; or the labels and the token IDs of one
            differ in number.

    Examples:
        >>> batch = rustloader.pack([[5, 6, 7], [8, 9]])
        >>> batch["labels"], batch["cu_seqlens"]
        (tensor([[-100,    6,    7, -100,    9]]), tensor([0, 3, 5], dtype=torch.int32))
    """
    if not samples:
        raise ValueError("pack needs at least one sample")
    max_length = None if max_length is None else positive("max_length", max_length)
    ids = [_sequence(sample, number, "input_ids") for number, sample in enumerate(samples)]
    labels, have_labels = ids, [isinstance(sample, Mapping) and "labels" in sample for sample in samples]
    if any(have_labels):
        if not all(have_labels):
            raise ValueError(f"sample {have_labels.index(False)} of the batch has no 'labels', but others have")
        labels = [_sequence(sample, number, "labels") for number, sample in enumerate(samples)]
        for number, (one, other) in enumerate(zip(ids, labels, strict=True)):
            if len(one) != len(other):
                raise ValueError(f"sample {number} of the batch has {len(one)} token IDs, but {len(other)} labels")
    if max_length is not None:
        ids, labels = [it[:max_length] for it in ids], [it[:max_length] for it in labels]
    lengths = [len(it) for it in ids]
    bounds = np.cumsum([0, *lengths])
    batch = {name: _allocated(int(bounds[-1])) for name in ("input_ids", "labels", "position_ids")}
    # NumPy's calls are faster than torch's.
    own_ids, own_labels, positions = (row[0].numpy() for row in batch.values())
    np.concatenate(ids, out=own_ids)
    np.concatenate(labels, out=own_labels)
    own_labels[bounds[:-1]] = _NO_LABEL
    np.subtract(np.arange(len(positions)), np.repeat(bounds[:-1], lengths), out=positions)
    return batch | {"cu_seqlens": torch.from_numpy(bounds.astype(np.int32)), "max_seqlen": max(lengths)}


def _sequence(sample: Any, number: int, name: str) -> np.ndarray:
    """Returns an entry of a sample, or the sample itself, as an array."""
    if isinstance(sample, Mapping):
        if name not in sample:
            raise TypeError(f"sample {number} of the batch has no {name!r}, only {', '.join(map(repr, sample))}")
        sample = sample[name]
    tensor = int_tensor(sample) if isinstance(sample, (list, tuple)) else None
    try:
        array = np.asarray(sample if tensor is None else tensor)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name!r} of sample {number} of the batch must be integers: {error}") from error
    if array.ndim != 1 or not len(array):
        shape = array.shape
        raise ValueError(
            f"{name!r} of sample {number} of the batch must have one dimension and items, got shape {shape}"
        )
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name!r} of sample {number} of the batch must be integers, got {array.dtype}")
    return array


def _allocated(count: int) -> torch.Tensor:
    """Returns an uninitialized int64 tensor of shape ``(1, count)``; in a worker, in the memory of its batches, as in
    ``default_collate``."""
    if get_worker_info() is None:
        return torch.empty((1, count), dtype=torch.int64)
    storage = torch.UntypedStorage._new_shared(8 * count)
    return torch.empty(0, dtype=torch.int64).set_(storage, 0, (1, count), (count, 1))
