"""``TokenBudgetBatchSampler``: batches of at most a number of tokens."""

from __future__ import annotations

from typing import Any

from rustloader._core import SequencePlan
from rustloader.sequences.base import SequenceBatchSampler
from rustloader.sequences.lengths import Lengths, positive


class TokenBudgetBatchSampler(SequenceBatchSampler):
    """Yields batches of samples of similar length, with at most ``max_tokens`` tokens after padding.

    The samples of an epoch are permuted and divided into windows. Each window is sorted by length, in ascending and in
    descending order in turn, and the result is cut where one more sample would exceed the budget. Then the batches are
    permuted. The ranks take them in turn, and each gets equally many.

    The order comes from Philox4x64-10 (J. K. Salmon and others, SC 2011), and is the same on all ranks and platforms.
    It depends on the arguments and the epoch: call ``set_epoch`` before each epoch.

    Args:
        lengths: Number of tokens of each sample: an array, tensor, memory-mapped file, or sequence of positive
            integers, shape ``(len(dataset),)``. They are copied, with 4 bytes per sample.
        max_tokens: Maximum number of tokens of a batch: the number of its samples times its longest length.
        max_samples: Maximum number of samples of a batch (default: None, no maximum).
        window: Number of samples that are sorted together. A larger window means less padding, and batches that are
            more alike from epoch to epoch (default: 8192).
        shuffle: False keeps the order of samples and batches, except within a window (default: True).
        seed: Seed of the order, the same on all ranks (default: 0).
        num_replicas: Number of ranks (default: None, that of the process group, or 1 without one).
        rank: Rank of this process (default: None, its rank in the process group, or 0 without one).
        drop_last: If the batches do not divide evenly among the ranks, True drops the last of them, and False repeats
            the first (default: False).
        pad_to_multiple_of: The longest length of a batch is padded to a multiple of this number (default: 1).

    Raises:
        TypeError: A length or an argument is not an integer.
        ValueError: A length is not positive, or exceeds ``max_tokens``; an argument is out of range.

    Examples:
        >>> batches = rustloader.TokenBudgetBatchSampler([3, 9, 4, 9, 1, 7], max_tokens=18, shuffle=False)
        >>> list(batches)
        [[4, 0, 2], [5, 1], [3]]
        >>> loader = rustloader.DataLoader(range(6), batch_sampler=batches)
    """

    def __init__(
        self,
        lengths: Any,
        max_tokens: int,
        *,
        max_samples: int | None = None,
        window: int = 8192,
        shuffle: bool = True,
        seed: int = 0,
        num_replicas: int | None = None,
        rank: int | None = None,
        drop_last: bool = False,
        pad_to_multiple_of: int = 1,
    ) -> None:
        checked, tokens = Lengths(lengths), positive("max_tokens", max_tokens)
        multiple = positive("pad_to_multiple_of", pad_to_multiple_of)
        max_samples = None if max_samples is None else positive("max_samples", max_samples)
        checked.check_limit(tokens, "max_tokens", "raise max_tokens, or shorten the sample", multiple)
        self._budget = tokens, max_samples or len(checked.array), multiple
        settings = {"max_tokens": tokens, "max_samples": max_samples, "pad_to_multiple_of": multiple}
        super().__init__(checked, settings, window, shuffle, seed, num_replicas, rank, drop_last)

    def _plan(self, order: tuple[bool, int, int, int]) -> SequencePlan:
        return SequencePlan.budget(self._lengths.array, order, *self._budget)
