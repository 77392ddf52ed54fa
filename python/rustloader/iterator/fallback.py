"""Decides whether the engine can serve a loader. If not, the loader falls back to torch's iterator, and the log says
why."""

from __future__ import annotations

import logging
import multiprocessing.context
import types
from multiprocessing.process import BaseProcess
from typing import Any

import torch.multiprocessing
from torch.utils.data import IterDataPipe, MapDataPipe, _utils
from torch.utils.data import dataloader as torch_dataloader

from rustloader._core import Engine
from rustloader.metrics import ledger
from rustloader.remote.context import is_remote
from rustloader.settings import loader_state, names, options
from rustloader.settings.config import LoaderConfig
from rustloader.settings.limits import stall_limits
from rustloader.supervision import stalls
from rustloader.system import interrupts
from rustloader.system.protocols import IteratorLike, LoaderLike
from rustloader.system.torch_side import TorchIter, is_defined_in
from rustloader.workers import serialize
from rustloader.workers.process import process_class

logger = logging.getLogger("rustloader")

_LOST_OPTIONS_TEXT = "%s of a DataLoader %s no effect: it runs on torch's own iterator"

# The attributes of a worker's Process object that torch uses. The engine uses none of them to wait for the process or
# to send it signals, which is equivalent only if these attributes are multiprocessing's own.
_PROCESS_METHODS = ("start", "join", "is_alive", "terminate", "pid")
# Methods of torch's loop that have no counterpart in the engine.
_UNUSED_METHODS = ("_try_put_index", "_process_data", "_get_data", "_try_get_data")
_FOREIGN_METHODS = (*_UNUSED_METHODS, "_mark_worker_as_unavailable")
# A subclass whose code uses one of these names takes part in torch's loop: for example, it contains a copy of torch's
# `_next_data`. Copied shutdown routines use other names, which `compat` provides.
_FOREIGN_NAMES = frozenset({*_UNUSED_METHODS, "_data_queue"})
# Methods of torch's iterator that the engine replaces or never calls.
_BYPASSED_METHODS = ("__init__", "__next__", "_next_data", "_reset", "_shutdown_workers", *_FOREIGN_METHODS)


def why_not(cls: type, base: type, loader: LoaderLike) -> str | None:
    """Returns the reason why the engine cannot serve a loader; None if it can.

    Args:
        cls: The class of the iterator: ``base`` or a subclass of it.
        base: The engine's iterator class.
        loader: The loader.
    """
    if isinstance(loader.dataset, (IterDataPipe, MapDataPipe)):
        return "its dataset is a DataPipe"
    foreign = _foreign_process(context_of(loader))
    if foreign is not None:
        return foreign
    return _replaced_part(TorchIter, base) or _foreign_part(cls, base)


def context_of(loader: LoaderLike) -> Any:
    """Returns the multiprocessing context that starts a loader's workers."""
    context = loader.multiprocessing_context
    return torch.multiprocessing if context is None else context


def _foreign_process(context: Any) -> str | None:
    """Describes how a context's processes differ from those of multiprocessing. Returns None if they do not differ, or
    if the context runs its workers on other machines."""
    if is_remote(context):
        return None
    cls = process_class(context)
    # If Process is a factory function, the class of its result is unknown until torch's iterator calls it.
    if not isinstance(cls, type) or not issubclass(cls, BaseProcess):
        return "the Process of its multiprocessing context is not a subclass of multiprocessing.process.BaseProcess"
    for name in _PROCESS_METHODS:
        if getattr(cls, name) is not getattr(BaseProcess, name):
            return f"the Process of its multiprocessing context has its own {name}"
    if not is_defined_in(cls._Popen, multiprocessing.context):  # type: ignore[attr-defined]
        return "the Process of its multiprocessing context has its own _Popen"
    return None


def _replaced_part(torch_class: type, engine_class: type) -> str | None:
    """Describes the part of torch's own iterator or worker that a program has replaced. Returns None if there is none.

    After ``install()``, torch's module contains ``engine_class`` instead of ``torch_class``. Programs may replace the
    methods of either class.
    """
    if not is_defined_in(_utils.worker._worker_loop, _utils.worker):
        return "torch.utils.data._utils.worker._worker_loop was replaced"
    for name in _BYPASSED_METHODS:
        if not is_defined_in(getattr(torch_class, name), torch_dataloader):
            return f"{name} of torch's own iterator was replaced"
    for name in _UNUSED_METHODS:
        if name in vars(engine_class):
            return f"{name} of the iterator was replaced"
    return None


def _foreign_part(cls: type, base: type) -> str | None:
    """Describes how a subclass of the iterator takes part in torch's own loop. Returns None if it does not."""
    for owner in cls.__mro__[: cls.__mro__.index(base)]:
        for name, value in vars(owner).items():
            if name in _FOREIGN_METHODS:
                return f"{cls.__qualname__} overrides {name}"
            function = getattr(value, "__func__", getattr(value, "fget", value))
            if isinstance(function, types.FunctionType):
                used = _FOREIGN_NAMES.intersection(function.__code__.co_names)
                if used:
                    return f"{cls.__qualname__}.{name} uses {min(used)}"
    return None


def fall_back(source: LoaderLike | IteratorLike, reason: str, context: Any = None) -> None:
    """Records that a loader or an iterator runs on torch's iterator. Logs each reason once per loader.

    Raises:
        RuntimeError: ``context`` runs the workers on other machines, and torch's iterator cannot use such workers.
    """
    if is_remote(context):
        raise RuntimeError(
            f"a DataLoader with a {type(context).__name__} needs rustloader's engine, which cannot serve it: {reason}"
        )
    counters = ledger.of(source)
    if counters.fall_back(reason):
        logger.warning("%s runs on torch's own iterator: %s", names.title(counters.given_name), reason)


def warn_of_lost_options(source: object, config: LoaderConfig) -> None:
    """Warns once per loader about the options that are set but that torch's iterator ignores, except those that only
    affect speed."""
    known = ((name, options.option_of(name)) for name in options.keywords())
    lost = [name for name, option in known if option.warns_if_lost and getattr(config, name) != option.default]
    if lost and loader_state.of(source).first_time(_LOST_OPTIONS_TEXT):
        logger.warning(_LOST_OPTIONS_TEXT, ", ".join(lost), "has" if len(lost) == 1 else "have")


def make_engine(config: LoaderConfig) -> tuple[Engine | None, str | None]:
    """Returns a new engine and None, or None and the reason why it cannot be created."""
    try:
        engine = Engine(
            config,
            stall_limits(),
            loads=serialize.loads,
            dump_index=serialize.dumps_index,
            is_interrupt=interrupts.is_interrupt,
            warn_stall=stalls.warn,
        )
    except (OSError, MemoryError) as error:
        return None, f"cannot create the engine: {error}"
    except OverflowError as error:
        return None, f"its settings are beyond the engine's limits: {error}"
    return engine, None
