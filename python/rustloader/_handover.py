"""Whether a loader can have the engine; else it runs on torch's own iterator, and the log says why."""

from __future__ import annotations

import logging
from typing import Any

from torch.utils.data import IterDataPipe, MapDataPipe

from rustloader import _internals, _ledger, _stall
from rustloader._core import Engine
from rustloader._torchs import TorchIter

__all__ = ["fall_back", "make_engine", "why_not"]

logger = logging.getLogger("rustloader")


def why_not(cls: type, ours: type, loader: Any) -> str | None:
    """Why the engine cannot do a loader's work; None when it can. The list is closed. ``cls`` is the iterator's class,
    ``ours`` or a subclass of it."""
    if isinstance(loader.dataset, (IterDataPipe, MapDataPipe)):
        return "its dataset is a DataPipe"
    return _internals.replaced_part(TorchIter) or _internals.foreign_part(cls, ours)


def fall_back(source: Any, reason: str) -> None:
    """Notes that a loader, or an iterator of one, runs on torch's iterator. Logs each reason once per loader."""
    if _ledger.of(source).fall_back(reason):
        logger.warning("a DataLoader runs on torch's own iterator: %s", reason)


def make_engine(settings: Any) -> tuple[Engine | None, str | None]:
    """An engine for the settings of a loader or of an iterator; or why there is none."""

    def setting(name: str) -> Any:
        return getattr(settings, name) if hasattr(settings, name) else getattr(settings, "_" + name)

    try:
        engine = Engine(
            setting("num_workers"),
            setting("prefetch_factor"),
            bool(setting("in_order")),
            bool(setting("persistent_workers")),
            float(setting("timeout")),
            _stall.limits(),
        )
    except (OSError, MemoryError) as error:
        return None, f"no shared memory can be had: {error}"
    except OverflowError as error:
        return None, f"its settings are beyond the engine's limits: {error}"
    return engine, None
