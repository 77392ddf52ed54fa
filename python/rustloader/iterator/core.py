"""The iterator: torch's ``_MultiProcessingDataLoaderIter`` on top of the engine."""

from __future__ import annotations

import functools
from typing import Any

from torch.utils.data.dataloader import _BaseDataLoaderIter

from rustloader._core import Engine, observed
from rustloader.auto import tuner
from rustloader.auto.tuner import Tuner
from rustloader.iterator import compat, fallback, fetching
from rustloader.iterator.epochs import Epochs
from rustloader.iterator.passthrough import TorchsMode
from rustloader.iterator.session import Session
from rustloader.metrics import ledger
from rustloader.settings import config as settings
from rustloader.settings import loader_state
from rustloader.settings.config import LoaderConfig
from rustloader.system.protocols import LoaderLike
from rustloader.system.torch_side import IterType, TorchIter
from rustloader.workers.group import interrupt_again


class _Streams(_BaseDataLoaderIter):
    """Follows torch's iterator in the MRO, so that torch's own ``_reset`` makes an index stream, too."""

    _epochs: Epochs | None = None

    def _reset(self, loader: LoaderLike, first_iter: bool = False) -> None:
        super()._reset(loader, first_iter)
        it: Any = self
        if self._epochs is not None:
            self._sampler_iter = self._epochs.index_batches(it, self._sampler_iter)


class _MultiProcessingDataLoaderIter(TorchIter, _Streams, metaclass=IterType):
    """Iterates over a loader with worker processes.

    It has what torch promises of its class, and leaves the work to one of two modes, which ``__init__`` chooses.
    Normally the engine does it (`Session`). Where that cannot behave as torch does (`fallback.why_not` lists the cases,
    and the system may have no memfd), every method is torch's own (`TorchsMode`), and the logger ``rustloader`` warns
    once per loader and reason.
    """

    # None: `__init__` has not come that far, or was not called.
    _mode: Session | TorchsMode | None = None
    # Defaults for methods that may run before `__init__` has finished.
    _shutdown = False
    _workers: list[Any] = []  # noqa: RUF012

    def __init__(self, loader: LoaderLike) -> None:
        if _MultiProcessingDataLoaderIter not in type(self).__mro__:
            # A class made before `install()` calls its base by the name in torch's module.
            TorchIter.__init__(self, loader)
            return
        ledger.open_for(self, loader)
        loader_state.share(self, loader)
        config = settings.resolve(loader)
        tuned = tuner.follow(loader, config)
        if tuned is not None:
            config = config.changed(num_workers=tuned.count)
        fetching.check(loader)
        self._set_up(settings.torchs_view(loader, config), config, self._epochs or Epochs(), tuned)
        settings.keep_iterator(loader, config, self)

    def _set_up(self, loader: LoaderLike, config: LoaderConfig, epochs: Epochs, tuned: Tuner | None) -> None:
        self._epochs = epochs
        reason = fallback.why_not(type(self), _MultiProcessingDataLoaderIter, loader)
        engine = None
        # The comparison raises torch's TypeError for values of other types.
        if reason is None and not (config.num_workers <= 0 or config.prefetch_factor <= 0):
            config = epochs.adapted(loader, config)
            engine, reason = fallback.make_engine(config)
        if reason is not None:
            fallback.fall_back(self, reason, fallback.context_of(loader))
            fallback.tell_lost_options(self, config)
            self._mode = TorchsMode(_MultiProcessingDataLoaderIter, epochs)
        else:
            epochs.init_torchs(self, functools.partial(_BaseDataLoaderIter.__init__, self), loader)
            self._prefetch_factor = loader.prefetch_factor
            self._in_order = loader.in_order
            if engine is None:
                name = "num_workers" if self._num_workers <= 0 else "prefetch_factor"
                raise AssertionError(f"{name} must be greater than 0 for MultiProcessingDataLoaderIter")
            self._workers = []
            self._worker_init_fn = loader.worker_init_fn
            self._mode = Session(self, loader, config, engine, epochs, tuned)
        self._mode.start(self, loader)

    def _chosen(self) -> Session | TorchsMode:
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
        """Number of batches that the Rust engine has delivered; 0 when torch's own iterator does the work."""
        return 0 if self._mode is None else self._mode.batches

    def _reset(self, loader: LoaderLike, first_iter: bool = False) -> None:
        self._chosen().begin(self, loader, first_iter)

    def _reset_torchs(self, loader: LoaderLike, first_iter: bool) -> None:
        """Resets what all of torch's iterators have."""
        _Streams._reset(self, loader, first_iter)

    def __next__(self) -> Any:
        # Without a mode: a subclass that calls the base's constructor alone, and has its own `_next_data`.
        mode = self._mode or Session
        return mode.next_observed(self) if observed() else mode.next(self)

    def _next_data(self) -> Any:
        return (self._mode or self._chosen()).next_data(self)

    def _shutdown_workers(self) -> None:
        """Ends the workers. They exit between two samples; after ``torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL``
        seconds (5), one deadline for all, signals end them.

        Safe from any thread, from a signal handler, more than once, and after a failed construction. Does nothing
        while the interpreter exits, and in a forked child.
        """
        if self._mode is not None:
            self._mode.shut_down(self)

    def _note_exit(self) -> None:
        """Records that the interpreter's exit has ended the workers."""
        self._shutdown = True

    def __del__(self) -> None:
        if self._epochs is not None:
            self._epochs.is_deleted = True
        try:
            self._shutdown_workers()
        except KeyboardInterrupt:
            interrupt_again()

    def _mark_worker_as_unavailable(self, worker_id: int, shutdown: bool = False) -> None:
        self._chosen().dismiss(self, worker_id, shutdown)


compat.add_parts(_MultiProcessingDataLoaderIter)
