"""The iterator: torch's ``_MultiProcessingDataLoaderIter`` on top of the engine."""

from __future__ import annotations

import functools
import time
from typing import Any

from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind

from rustloader._core import Engine, observed
from rustloader.auto import tuner
from rustloader.auto.tuner import Tuner
from rustloader.iterator import compat, fallback
from rustloader.iterator.epochs import Epochs
from rustloader.iterator.passthrough import TorchMode
from rustloader.iterator.session import Session
from rustloader.metrics import ledger
from rustloader.settings import config as settings
from rustloader.settings import loader_state, options
from rustloader.settings.config import LoaderConfig
from rustloader.system.protocols import LoaderLike
from rustloader.system.torch_side import IterType, TorchIter
from rustloader.workers.definitions import CloudpickleMissing
from rustloader.workers.fork_server import UnguardedScript
from rustloader.workers.group import interrupt_again


class _IndexStreams(_BaseDataLoaderIter):
    """A base class whose ``_reset`` replaces torch's iterator over the sampler with an index stream.

    This class comes after torch's multi-process iterator in the MRO, so torch's ``_reset`` calls this one through
    ``super()``.
    """

    _epochs: Epochs | None = None

    def _reset(self, loader: LoaderLike, first_iter: bool = False) -> None:
        super()._reset(loader, first_iter)
        it: Any = self
        if self._epochs is not None:
            self._sampler_iter = self._epochs.index_batches(it, self._sampler_iter)


class _MultiProcessingDataLoaderIter(TorchIter, _IndexStreams, metaclass=IterType):
    """An iterator over a loader with worker processes.

    It has the interface of torch's class and delegates the work to one of two modes, which ``__init__`` chooses.
    Normally the engine does the work (`Session`). If the engine cannot be created, or cannot behave as torch does, then
    every method is torch's own (`TorchMode`), and the logger ``rustloader`` warns once per loader and reason.
    `fallback.why_not` lists the cases in which the engine cannot behave as torch does.
    """

    # None until `__init__` has chosen a mode; remains None if a subclass does not call `__init__`.
    _mode: Session | TorchMode | None = None
    # Defaults for methods that may run before `__init__` has finished.
    _shutdown = False
    _workers: list[Any] = []  # noqa: RUF012

    def __init__(self, loader: LoaderLike) -> None:
        if _MultiProcessingDataLoaderIter not in type(self).__mro__:
            # The class of `self` is a subclass of torch's iterator, defined before `install()`. To call its base
            # class's `__init__`, it looks up the base class by name in torch's module, and finds the engine's class.
            TorchIter.__init__(self, loader)
            return
        begin = time.monotonic()
        ledger.open_for(self, loader)
        loader_state.share(self, loader)
        config = settings.resolve(loader)
        tuned = tuner.follow(loader, config)
        if tuned is not None:
            config = config.changed(num_workers=tuned.count)
        if loader._dataset_kind == _DatasetKind.Iterable:
            options.check_iterable(loader)
        self._set_up(settings.view_for_torch(loader, config), config, self._epochs or Epochs(), tuned)
        settings.keep_iterator(loader, config, self)
        self._note_turnaround(begin)

    def _set_up(self, loader: LoaderLike, config: LoaderConfig, epochs: Epochs, tuned: Tuner | None) -> None:
        self._epochs = epochs
        reason = fallback.why_not(type(self), _MultiProcessingDataLoaderIter, loader)
        engine = None
        # The comparison raises torch's TypeError for values that are not numbers.
        if reason is None and not (config.num_workers <= 0 or config.prefetch_factor <= 0):
            config = epochs.adapted(loader, config)
            engine, reason = fallback.make_engine(config)
        if reason is not None:
            fallback.fall_back(self, reason, fallback.context_of(loader))
            fallback.warn_of_lost_options(self, config)
            self._mode = TorchMode(_MultiProcessingDataLoaderIter, epochs)
        else:
            epochs.init_torch_iterator(self, functools.partial(_BaseDataLoaderIter.__init__, self), loader)
            self._prefetch_factor = loader.prefetch_factor
            self._in_order = loader.in_order
            if engine is None:
                name = "num_workers" if self._num_workers <= 0 else "prefetch_factor"
                raise AssertionError(f"{name} must be greater than 0 for MultiProcessingDataLoaderIter")
            self._workers = []
            self._worker_init_fn = loader.worker_init_fn
            self._mode = Session(self, loader, config, engine, epochs, tuned)
        try:
            self._mode.start(self, loader)
        except (CloudpickleMissing, UnguardedScript) as error:
            # Its text says everything; the frames in between and pickle's notes would hide it.
            raise type(error)(*error.args) from None

    def _require_mode(self) -> Session | TorchMode:
        if self._mode is None:
            raise AssertionError("the DataLoader iterator was not initialized")
        return self._mode

    @property
    def _core(self) -> Engine | None:
        return None if self._mode is None else self._mode.engine

    def _engine(self) -> Engine:
        engine = self._core
        if engine is None:
            raise AssertionError("the DataLoader iterator has no engine")
        return engine

    @property
    def engine_batches(self) -> int:
        """Number of batches that the Rust engine has delivered; 0 if torch's own iterator does the work."""
        return 0 if self._mode is None else self._mode.batches

    def _reset(self, loader: LoaderLike, first_iter: bool = False) -> None:
        begin = time.monotonic()
        self._require_mode().begin(self, loader, first_iter)
        if not first_iter:
            self._note_turnaround(begin)

    def _note_turnaround(self, begin: float) -> None:
        if isinstance(self._mode, Session):
            self._mode.counters.turn_around(begin)

    def _reset_base(self, loader: LoaderLike, first_iter: bool) -> None:
        """Resets the state that torch's base class keeps, and installs the index stream of the new epoch."""
        _IndexStreams._reset(self, loader, first_iter)

    def __next__(self) -> Any:
        # There is no mode if a subclass calls only the constructor of torch's base class. It then has its own
        # `_next_data`, which `Session.next` calls.
        mode = self._mode or Session
        return mode.next_observed(self) if observed() else mode.next(self)

    def _next_data(self) -> Any:
        return (self._mode or self._require_mode()).next_data(self)

    def _shutdown_workers(self) -> None:
        """Ends the workers. Each worker exits as soon as it has finished its current sample. Workers that are still
        running after ``torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL`` seconds (5) are ended by signals; this is one
        deadline for all workers, not one for each.

        May be called from any thread, from a signal handler, more than once, and after the constructor has raised. Does
        nothing while the interpreter exits, or in a forked child.
        """
        if self._mode is not None:
            self._mode.shut_down(self)

    def _note_exit(self) -> None:
        """Records that the workers were ended because the interpreter exits."""
        self._shutdown = True

    def __del__(self) -> None:
        if self._epochs is not None:
            self._epochs.is_deleted = True
        try:
            self._shutdown_workers()
        except KeyboardInterrupt:
            interrupt_again()

    def _mark_worker_as_unavailable(self, worker_id: int, shutdown: bool = False) -> None:
        self._require_mode().dismiss(self, worker_id, shutdown)


compat.add_stand_ins(_MultiProcessingDataLoaderIter)
