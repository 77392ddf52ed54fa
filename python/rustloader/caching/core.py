"""The function ``rustloader.cache``."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, overload

from torch.utils.data import Dataset

from rustloader._core import CacheTable
from rustloader.caching import files, limits
from rustloader.caching.dataset import CachedDataset, cached_of
from rustloader.caching.nodes import Origin
from rustloader.caching.wrapper import check
from rustloader.settings.option_values import Bytes, size_in_bytes
from rustloader.sharing.ranks import meet

_BYTES = Bytes()
_Sample = TypeVar("_Sample")
_Result = TypeVar("_Result")
_Sample_co = TypeVar("_Sample_co", covariant=True)


class _Samples(Protocol[_Sample_co]):
    def __getitem__(self, index: int, /) -> _Sample_co: ...


@overload
def cache(
    dataset: Dataset[_Sample] | _Samples[_Sample],
    memory: int | str | None = None,
    *,
    then: None = None,
    key: str | None = None,
    path: str | os.PathLike[str] | None = None,
    version: str = "",
) -> CachedDataset[_Sample]: ...
@overload
def cache(
    dataset: Dataset[_Sample] | _Samples[_Sample],
    memory: int | str | None = None,
    *,
    then: Callable[[_Sample], _Result],
    key: str | None = None,
    path: str | os.PathLike[str] | None = None,
    version: str = "",
) -> CachedDataset[_Result]: ...
def cache(
    dataset: Any,
    memory: int | str | None = None,
    *,
    then: Callable[[Any], Any] | None = None,
    key: str | None = None,
    path: str | os.PathLike[str] | None = None,
    version: str = "",
) -> CachedDataset[Any]:
    """Keeps the samples of a map-style dataset in memory that all workers on this machine share.

    ``cached[i]`` is ``then(dataset[i])``. ``dataset[i]`` is made once; later epochs and all workers read it from
    memory. ``then`` is called each time. So slow steps with a constant result belong in the dataset (reading, decoding,
    resizing), and random steps belong in ``then`` (cropping, flipping, noise).

    No process waits for another: a process that does not find a sample makes it, even if another process is making the
    same sample. A process that is killed leaves no partial sample in the cache. At its limit the cache accepts no more
    samples and continues to serve those that it has. It also accepts no more samples when the machine or a memory
    cgroup is nearly out of memory; the log reports this.

    Samples may be any objects that can be pickled. Trees of tensors, arrays, numbers, strings and bytes are not pickled
    and are faster. A sample read from the cache is a new object, which may be changed in place, and so is the argument
    of ``then``. A sample that cannot be pickled is made each time, as without a cache.

    A few samples of the first epoch are made twice and compared. If two differ, a warning names the index: the dataset
    is random, and every epoch would see its first result. With ``then``, making a sample does not change the random
    number generators of Python, NumPy and torch, so that ``then`` draws the same numbers whether a sample is made or
    read. (This does not hold in the threads of ``worker_threads``, which share the generators.)

    The cached dataset has the attributes and methods of the dataset; ``cached.dataset`` is the dataset itself. Workers
    share the cache under every start method. Workers on Ray share one cache per machine. The memory is freed when the
    last process that uses it ends.

    Args:
        dataset: A dataset with ``__getitem__`` and ``__len__``. The cache covers the indices from 0 to ``len(dataset) -
            1`` at the time of this call; the samples at other indices are made each time.
        memory: Maximum size of the cache in bytes, as a number or a string such as "8GiB". Default: half of the
            available memory, divided among the ranks of this machine unless they share the cache; with ``path``, half
            of the available space there. Memory is used only as samples are added.
        then: A function of one argument that is applied to each sample after the cache.
        key: A name under which the ranks of this machine share this cache, such as "train". The first rank creates the
            cache, and the others use it. All ranks must pass the same dataset, and make their calls with a key in the
            same order. The ranks are those that ``torchrun``, Slurm or MPI defines.
        path: A file for the samples, on a local disk or in /dev/shm. Later runs reuse it, and several programs of this
            user may use it at the same time. After a crash, the undamaged part of the file is used. The file is trusted
            like code, because samples may be pickles.
        version: A version of everything on which the samples in the file depend, such as the preprocessing. A file with
            a different ``version`` is refused.

    Returns:
        The cached dataset.

    Raises:
        OSError: The file cannot be opened or mapped.
        PermissionError: The file belongs to another user, others may write to it, or it is a symbolic link in a folder
            to which others may write.
        TypeError: The dataset is iterable, or lacks ``__getitem__`` or ``__len__``.
        ValueError: ``memory`` is more than is available, or too little for the index of 8 bytes per sample. Or the file
            belongs to another dataset, ``version`` or version of rustloader; the message says what differs. If samples
            differ, the access to a sample raises this error.

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
        return files.open_table(origin.path, dataset, rows, origin.memory, origin.version, files.new_token())

    def create() -> CacheTable:
        return CacheTable.create(rows, limits.of_memory(rows, origin.memory, is_shared=origin.key is not None))

    if origin.key is None:
        return create()
    table = meet(origin.key, create, math.inf, CacheTable, "cache")
    if table.rows != rows:
        raise ValueError(
            f"cache(key={origin.key!r}): this rank's dataset has {rows} samples, but that of the first rank "
            f"has {table.rows}: all ranks must make the same calls with a key, in the same order"
        )
    return table
