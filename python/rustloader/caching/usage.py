"""Sizes and counters of a cache."""

from dataclasses import dataclass

from rustloader.system.figures import figure


@dataclass(frozen=True)
class CacheUsage:
    """Sizes and counters of a cache, over all processes that use it.

    Attributes:
        hits: Number of samples that were read from the cache. With ``path``, counts this opening of the file: the call
            of ``cache``, and all processes that use its result.
        misses: Number of samples that the dataset had to make, counted like ``hits``.
        samples_bytes: Size of the samples in the cache, in bytes.
        bytes_left: Bytes that the cache may still use.
        bytes_unused: Bytes that the cache has lost to processes that were killed while writing, and to samples that
            two processes made at the same time.
        refused: Number of samples that the cache cannot keep: they cannot be pickled or unpickled, or are too large
            for a record.
        damaged: Number of samples that were found damaged in the cache's file and had to be made again.
        limit: Maximum size of the cache in bytes, including its index.
        lifetime_hits: Number of hits over the life of the cache: with ``path``, of all openings of the file.
        lifetime_misses: Number of misses over the life of the cache.

    Examples:
        >>> cached = rustloader.cache(torch.utils.data.TensorDataset(torch.zeros(3, 5)), memory="1MiB")
        >>> samples = [cached[1], cached[1], cached[2]]
        >>> usage = cached.usage()
        >>> usage.hits, usage.misses, usage.limit
        (1, 2, 1048576)
    """

    hits: int = figure(0, "cache_hits", "Samples read from the cache, in all processes.")
    misses: int = figure(0, "cache_misses", "Samples that the dataset had to make, in all processes.")
    samples_bytes: int = figure(0, "cache_bytes", "Size of the samples in the cache, in bytes.", gauge=True)
    bytes_left: int = 0
    bytes_unused: int = 0
    refused: int = 0
    damaged: int = 0
    limit: int = figure(0, "cache_limit_bytes", "Maximum size of the cache in bytes.", gauge=True, scalar=False)
    lifetime_hits: int = 0
    lifetime_misses: int = 0
