"""``rustloader.cache``."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

from rustloader._core import CacheTable
from rustloader.caching import files, limits
from rustloader.caching.dataset import CachedDataset, cached_of
from rustloader.caching.nodes import Origin
from rustloader.caching.wrapper import check
from rustloader.settings.option_values import Bytes, size_in_bytes
from rustloader.sharing.ranks import meet

_BYTES = Bytes()


def cache(
    dataset: Any,
    memory: int | str | None = None,
    *,
    then: Callable[[Any], Any] | None = None,
    key: str | None = None,
    path: str | os.PathLike[str] | None = None,
    version: str = "",
) -> CachedDataset:
    """Keeps the samples of a map-style dataset in memory that all workers of this machine share.

    ``cached[i]`` is ``then(dataset[i])``. ``dataset[i]`` is made once and then read from memory, in later epochs and
    in every worker. ``then`` is called each time. So what is slow and always the same belongs in the dataset
    (reading, decoding, resizing), and what is random belongs in ``then`` (cropping, flipping, noise).

    No process waits for another: one that misses a sample makes it, even if another makes the same one. A process that
    is killed leaves no part of a sample behind. At its limit the cache takes no more samples and goes on serving
    those that it has. It takes none, either, once the machine or a memory cgroup is nearly out of memory; the log
    says so.

    Samples may be anything that can be pickled. Trees of tensors, arrays, numbers, strings and bytes are not pickled
    and are faster. A sample that comes out is a new object, which may be changed in place. One that cannot be pickled
    is made each time, as without a cache.

    A few samples of the first epoch are made twice and compared. If two differ, a warning names the index, for the
    dataset is random: its first result would be all that is ever seen. With ``then``, making a sample leaves the
    random number generators of Python, NumPy and torch as they were, so that ``then`` draws the same numbers whether
    a sample was made or read (not in the threads of ``worker_threads``, which share the generators).

    Attributes and methods of the dataset can be reached through the cached one; ``cached.dataset`` is the dataset
    itself. Workers share the cache under every start method. Workers on Ray have one for each machine. The memory
    goes with the last process that uses it.

    Args:
        dataset: A dataset with ``__getitem__`` and ``__len__``. The cache is for the indices from 0 to ``len(dataset) -
            1`` at this moment; for others the dataset is asked each time.
        memory: The most bytes that the cache takes, as a number or a text such as "8GiB". Default: half of the memory
            that is left, divided by the ranks of this machine unless they share it; with ``path``, half of the space
            that is left there. Memory is used as samples come, not before.
        then: A function of one argument that is applied to each sample after the cache.
        key: A name for this cache among the ranks of this machine, such as "train": they all share the first one's. All
            ranks must give the same dataset, and use a key in the same order. ``torchrun``, Slurm and MPI say which
            ranks there are.
        path: A file for the samples, which later runs use again, on a local disk or in /dev/shm. Programs may use it at
            the same time. After a crash it is used as far as it is whole.
        version: A version of all that the samples in the file depend on, such as the preprocessing: a file of another
            ``version`` is refused.

    Returns:
        The cached dataset.

    Raises:
        OSError: The file cannot be opened or mapped.
        TypeError: The dataset is iterable, or lacks ``__getitem__`` or ``__len__``.
        ValueError: ``memory`` is more than is left, or too little for the index, 8 bytes for each sample. Or the file
            belongs to another dataset, another ``version`` or another rustloader. The text says what differs.

    Examples:
        >>> images = torch.utils.data.TensorDataset(torch.zeros(100, 3, 8, 8))
        >>> cached = rustloader.cache(images, memory="64MiB", then=lambda sample: sample[0] + torch.rand(1))
        >>> loader = rustloader.DataLoader(cached, batch_size=10, num_workers=2)
        >>> epochs = [sum(len(batch) for batch in loader) for _ in range(2)]
        >>> epochs, cached.usage().hits, cached.usage().misses
        ([100, 100], 100, 100)
    """
    check(dataset, then, key, path, version)
    if memory is not None:
        _BYTES.check("memory", memory)
    rows = len(dataset)
    origin = Origin(
        None if memory is None else size_in_bytes(memory), key, None if path is None else os.fsdecode(path), version
    )
    return cached_of(dataset, _table(dataset, rows, origin), then, origin)


def _table(dataset: Any, rows: int, origin: Origin) -> CacheTable:
    if origin.path is not None:
        return files.opened(origin.path, dataset, rows, origin.memory, origin.version)

    def made() -> CacheTable:
        return CacheTable.create(rows, limits.of_memory(rows, origin.memory, is_shared=origin.key is not None))

    if origin.key is None:
        return made()
    table = meet(origin.key, made, math.inf, CacheTable, "cache")
    if table.rows != rows:
        raise ValueError(
            f"cache(key={origin.key!r}): this rank's dataset has {rows} samples, and that of the first rank "
            f"has {table.rows}: with a key all ranks give the same dataset, and use the key in the same order"
        )
    return table
