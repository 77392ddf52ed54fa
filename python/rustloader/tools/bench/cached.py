"""``bench --cache``: what ``rustloader.cache`` around the program's dataset gains, and whether it fits."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from rustloader.system.texts import size
from rustloader.tools.bench.comparison import too_few
from rustloader.tools.bench.rates import SideRates, settle_sides
from rustloader.tools.harness.layout import number, times
from rustloader.tools.probe.factory import Unusable

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

# The engine's name in results.
CACHED = "cached"
# Minimum share of the samples of a second epoch that come from the cache, for a gain that is the cache's.
_MOSTLY = 0.95


@dataclass(frozen=True)
class Fit:
    """The memory that a cache of the whole dataset takes, and its hits.

    Attributes:
        samples: the dataset's length.
        sample_bytes: mean bytes of a sample in the cache.
        index_bytes: bytes that the cache takes before the first sample.
        limit: bytes that the cache may take.
        free: bytes of memory that were left before there was one; None if unknown.
        hits: share of the second epoch's samples that came from the cache.
        is_random: whether samples differed when they were made again.
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
        """Bytes of all samples, with the index."""
        return self.index_bytes + self.samples * self.sample_bytes

    @property
    def held(self) -> float:
        """The share of the samples that the cache can keep."""
        room = min(self.limit, self.limit if self.free is None else self.free) - self.index_bytes
        return min(1.0, max(0.0, room / max(1.0, self.samples * self.sample_bytes)))

    def __str__(self) -> str:
        room = f"{size(self.limit)} are allowed"
        room += "" if self.free is None else f", {size(self.free)} of memory were free"
        if self.held == 1:
            return f"All {self.samples:,} samples take about {size(self.bytes)} and fit: {room}."
        return f"All {self.samples:,} samples take about {size(self.bytes)}; {self.held:.0%} of them fit: {room}."


@dataclass
class CacheGain:
    """Epochs that fill a new cache, and epochs of the same samples after them."""

    first: SideRates = field(default_factory=SideRates)
    second: SideRates = field(default_factory=SideRates)
    fit: Fit | None = None

    def text(self, without: SideRates) -> str:
        """Describes the gain from a cache over the same loader without one."""
        assert self.fit is not None
        if reason := too_few(len(self.second.passes), self.second.batches):
            return f"Too few to tell what a cache gains: {reason}. {self.fit}"
        plain = SideRates(without.passes)
        settle_sides([self.first, self.second, plain])
        gain = self.second.rate / plain.rate
        text = f"With rustloader.cache the second epoch has {number(self.second.rate)} batches/s: "
        text += f"{times(self.second.rate / self.first.rate)} the first one, which fills it, and {times(gain)} that "
        text += f"without a cache. {self.fit}"
        if self.fit.hits < _MOSTLY:
            text += f" Only {self.fit.hits:.0%} of the second epoch's samples were in the cache."
        elif self.fit.held < 1:
            rest = 1 / (self.fit.held / gain + 1 - self.fit.held)
            text += f" Epochs after the first would be about {times(rest)} as fast as without a cache."
        if self.fit.is_random:
            text += " But samples differ when they are made again, and all epochs would see the first ones: move what "
            text += "is random into then=."
        return text

    def as_dict(self) -> dict[str, Any]:
        """Returns the figures for JSON."""
        fit = None if self.fit is None else {**asdict(self.fit), "bytes": self.fit.bytes, "held": self.fit.held}
        return {"first_epoch": self.first.as_dict(), "second_epoch": self.second.as_dict(), "fit": fit}


class Wrapped:
    """A loader whose dataset is in a cache.

    Args:
        loader: the loader.
        memory: bytes that the cache may take.

    Raises:
        Unusable: the dataset cannot be cached, or there is not as much memory.
    """

    def __init__(self, loader: DataLoader[Any], memory: int) -> None:
        from rustloader._core import memory_limits

        self._loader, self._dataset, self._memory = loader, loader.dataset, memory
        self._free = min((free for _, _, free in memory_limits()), default=None)
        self.renew()

    def renew(self) -> None:
        """Empties the cache. The loader's workers must have ended."""
        import rustloader

        try:
            self._cached = rustloader.cache(self._dataset, memory=self._memory)
        except (TypeError, ValueError) as error:
            raise Unusable(f"--cache: {error}") from None
        # torch refuses to set the attribute.
        self._loader.__dict__["dataset"] = self._cached

    def usage(self) -> Any:
        """Returns the content and the counters of the cache."""
        return self._cached.usage()

    def fit(self, first: Any) -> Fit:
        """Returns the figures of the second epoch. ``first`` is the usage after the first one."""
        from rustloader.caching.dataset import RANDOM

        table, now = self._cached.table, self.usage()
        lookups = max(1, now.hits + now.misses - first.hits - first.misses)
        hits = now.hits - first.hits
        # A full cache has not kept what was missed.
        kept = hits if table.closed else now.misses - now.refused
        return Fit(
            samples=table.rows,
            sample_bytes=now.samples_bytes / max(1, kept),
            index_bytes=table.overhead(table.rows),
            limit=table.limit,
            free=self._free,
            hits=hits / lookups,
            is_random=not table.is_news(RANDOM),
        )
