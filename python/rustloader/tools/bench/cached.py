"""``bench --cache``: measures the gain from ``rustloader.cache``, and determines whether all samples fit into it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from rustloader.metrics.prediction import pays_from
from rustloader.system.formatting import size
from rustloader.tools.bench.comparison import BUSY, too_few
from rustloader.tools.bench.rates import SideRates, make_sides_comparable
from rustloader.tools.harness.layout import number, times
from rustloader.tools.probe.factory import Unusable

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

# The name of the engine that `--cache` adds.
CACHED = "cached"
# Minimum share of the second epoch's samples that come from the cache; the result mentions a smaller share.
_MIN_HITS = 0.95


@dataclass(frozen=True)
class Fit:
    """The size of a cache of the whole dataset, the memory available for it, and the hits in the second epoch.

    Attributes:
        samples: length of the dataset.
        sample_bytes: mean size of a sample in the cache in bytes.
        index_bytes: size of the empty cache in bytes.
        limit: maximum size of the cache in bytes.
        free: bytes of memory that were free before the cache was created; None if unknown.
        hits: share of the second epoch's samples that came from the cache.
        is_random: whether the dataset returned different samples for the same index.
    """

    samples: int
    sample_bytes: float
    index_bytes: int
    limit: int
    free: int | None
    hits: float
    is_random: bool

    @property
    def bytes(self) -> float:
        """Size of a cache of all samples in bytes, including the index."""
        return self.index_bytes + self.samples * self.sample_bytes

    @property
    def held(self) -> float:
        """The share of the samples that the cache can keep."""
        room = min(self.limit, self.limit if self.free is None else self.free) - self.index_bytes
        return min(1.0, max(0.0, room / max(1.0, self.samples * self.sample_bytes)))

    def __str__(self) -> str:
        room = f"{size(self.limit)} is allowed"
        room += "" if self.free is None else f", {size(self.free)} of memory was free"
        if self.held == 1:
            return f"All {self.samples:,} samples take about {size(self.bytes)} and fit: {room}."
        return f"All {self.samples:,} samples take about {size(self.bytes)}; {self.held:.0%} of them fit: {room}."


@dataclass
class CacheGain:
    """Rates of epochs that fill a new cache, and of second epochs with the same samples."""

    first: SideRates = field(default_factory=SideRates)
    second: SideRates = field(default_factory=SideRates)
    fit: Fit | None = None

    def text(self, without: SideRates, others: float = 0.0) -> str:
        """Describes the gain from the cache.

        ``without`` has the rates of the same loader without a cache, and ``others`` is the share of the cores that
        other processes used.
        """
        assert self.fit is not None
        if reason := too_few(len(self.second.passes), self.second.batches):
            return f"Too few to tell the gain from a cache: {reason}. {self.fit}"
        if others >= BUSY:
            return f"The gain from a cache is unknown, because other processes were busy. {self.fit}"
        plain = SideRates(without.passes)
        make_sides_comparable([self.first, self.second, plain])
        gain, filling, held = self.second.rate / plain.rate, plain.rate / self.first.rate, self.fit.held
        text = (
            f"With rustloader.cache the second epoch reaches {number(self.second.rate)} batches/s, {times(gain)} the "
        )
        text += f"rate without a cache. The epoch that fills the cache takes {times(filling)} the time: "
        epoch = pays_from(filling, held / gain + 1 - held)
        text += f"the cache pays from epoch {epoch} on. " if math.isfinite(epoch) else "the cache does not pay. "
        text += str(self.fit)
        if self.fit.hits < _MIN_HITS:
            text += f" Only {self.fit.hits:.0%} of the second epoch's samples were in the cache."
        elif held < 1:
            later = 1 / (held / gain + 1 - held)
            text += f" Epochs after the first would be about {times(later)} as fast as without a cache."
        if self.fit.is_random:
            text += " But the dataset returns different samples for the same index, and with a cache every epoch would "
            text += "get the first of them: pass random transforms as then=."
        return text

    def as_dict(self) -> dict[str, Any]:
        """Returns the results for JSON."""
        fit = None if self.fit is None else {**asdict(self.fit), "bytes": self.fit.bytes, "held": self.fit.held}
        return {"first_epoch": self.first.as_dict(), "second_epoch": self.second.as_dict(), "fit": fit}


class CachedLoader:
    """A loader whose dataset is wrapped in ``rustloader.cache``.

    Args:
        loader: the loader; its ``dataset`` is replaced.
        memory: maximum size of the cache in bytes.

    Raises:
        Unusable: the dataset cannot be cached, or there is not enough memory.
    """

    def __init__(self, loader: DataLoader[Any], memory: int) -> None:
        from rustloader._core import memory_limits

        self._loader, self._dataset, self._memory = loader, loader.dataset, memory
        self._free = min((free for _, _, free in memory_limits()), default=None)
        self.clear()

    def clear(self) -> None:
        """Replaces the cache with an empty one. The loader's workers must have exited."""
        import rustloader

        try:
            self._cached = rustloader.cache(self._dataset, memory=self._memory)
        except (TypeError, ValueError) as error:
            raise Unusable(f"--cache: {error}") from None
        # Written to `__dict__`, because a DataLoader rejects assignments to this attribute after its creation.
        self._loader.__dict__["dataset"] = self._cached

    def usage(self) -> Any:
        """Returns the usage of the cache."""
        return self._cached.usage()

    def fit(self, first: Any) -> Fit:
        """Describes the cache after the second epoch. ``first`` is its usage after the first epoch."""
        from rustloader.caching.keeping import RANDOM

        table, now = self._cached.table, self.usage()
        lookups = max(1, now.hits + now.misses - first.hits - first.misses)
        hits = now.hits - first.hits
        # A full cache accepts no more samples, so the second epoch's hits are the samples in it.
        kept = hits if table.closed else now.misses - now.refused
        return Fit(
            samples=table.rows,
            sample_bytes=now.samples_bytes / max(1, kept),
            index_bytes=table.overhead(table.rows),
            limit=table.limit,
            free=self._free,
            hits=hits / lookups,
            is_random=table.has_happened(RANDOM),
        )
