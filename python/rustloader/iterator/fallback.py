"""Whether a loader can have the engine; else it runs on torch's own iterator, and the log says why."""

from __future__ import annotations

import functools
import logging
import multiprocessing.context
from multiprocessing.process import BaseProcess
from typing import Any

import torch.multiprocessing
from torch.utils.data import IterDataPipe, MapDataPipe

from rustloader._core import Engine
from rustloader.iterator import compat
from rustloader.iterator.torch_side import TorchIter
from rustloader.metrics import ledger
from rustloader.workers import serialize, stalls

__all__ = ["context_of", "fall_back", "make_engine", "process_class", "why_not"]

logger = logging.getLogger("rustloader")

# What torch uses of a worker's process. The engine waits for the process itself and signals it, so it can stand in for
# multiprocessing's methods alone.
_PROCESS_METHODS = ("start", "join", "is_alive", "terminate", "pid")


def why_not(cls: type, ours: type, loader: Any) -> str | None:
    """Why the engine cannot do a loader's work; None when it can. The list is closed. ``cls`` is the iterator's class,
    ``ours`` or a subclass of it."""
    if isinstance(loader.dataset, (IterDataPipe, MapDataPipe)):
        return "its dataset is a DataPipe"
    foreign = _foreign_process(context_of(loader))
    if foreign is not None:
        return foreign
    return compat.replaced_part(TorchIter) or compat.foreign_part(cls, ours)


def context_of(loader: Any) -> Any:
    """What starts the workers of a loader."""
    context = loader.multiprocessing_context
    return torch.multiprocessing if context is None else context


def process_class(context: Any) -> Any:
    """The class of a context's processes, where it names one."""
    kind = getattr(context, "Process", None)
    while isinstance(kind, functools.partial):
        kind = kind.func
    return kind


def _foreign_process(context: Any) -> str | None:
    """How the processes of a context differ from those of multiprocessing; None when they do not."""
    kind = process_class(context)
    # What a function returns is known only after the call, which is then torch's to make.
    if not isinstance(kind, type) or not issubclass(kind, BaseProcess):
        return "the Process of its multiprocessing context is not a subclass of multiprocessing.process.BaseProcess"
    for name in _PROCESS_METHODS:
        if getattr(kind, name) is not getattr(BaseProcess, name):
            return f"the Process of its multiprocessing context has its own {name}"
    if not compat.is_torchs(kind._Popen, multiprocessing.context):  # type: ignore[attr-defined]
        return "the Process of its multiprocessing context has its own way to start"
    return None


def fall_back(source: Any, reason: str) -> None:
    """Notes that a loader, or an iterator of one, runs on torch's iterator. Logs each reason once per loader."""
    if ledger.of(source).fall_back(reason):
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
            stalls.limits(),
            loads=serialize.loads,
            dump_index=serialize.dump_index,
            warn_stall=stalls.tell,
        )
    except (OSError, MemoryError) as error:
        return None, f"no shared memory can be had: {error}"
    except OverflowError as error:
        return None, f"its settings are beyond the engine's limits: {error}"
    return engine, None
