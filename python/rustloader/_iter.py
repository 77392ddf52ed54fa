"""The iterator: torch's ``_MultiProcessingDataLoaderIter`` with our engine under it."""

from __future__ import annotations

import atexit
import contextlib
import errno
import logging
import multiprocessing.process
import os
import signal
import sys
import time
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from multiprocessing import forkserver, resource_tracker
from pickle import PicklingError
from typing import Any, cast

import torch
import torch.multiprocessing
from torch.utils.data import IterDataPipe, MapDataPipe, _utils
from torch.utils.data import dataloader as torch_dataloader
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind

from rustloader import _core, _internals, _pin, _worker
from rustloader._core import Engine

__all__ = ["_MultiProcessingDataLoaderIter"]

logger = logging.getLogger("rustloader")

# multiprocessing's own set of the children that it ends and joins at the interpreter's exit.
_mp_children: set[Any] = multiprocessing.process._children  # type: ignore[attr-defined]

_TorchIter = torch_dataloader._MultiProcessingDataLoaderIter

# What `Engine.next` and `Engine.begin` answer; the same numbers stand in src/python/engine.rs.
_BATCH, _ERROR, _DEAD, _END, _TIMED_OUT, _NO_PIN_THREAD = range(6)

# Seconds from SIGTERM to SIGKILL on shutdown; at the interpreter's exit, for leaving by itself and from SIGTERM on.
_KILL_AFTER = 0.5
_EXIT_GRACE = 0.5
_EXIT_KILL_AFTER = 0.2

# Seconds from a worker's end to the fork server's word on how it ended.
_STATUS_AFTER = 1.0

# Every iterator with workers, for the interpreter's exit.
_live: weakref.WeakSet[_MultiProcessingDataLoaderIter] = weakref.WeakSet()

# True while torch's own iterators are to count as instances of ours.
_installed = False


def _call(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


# Warnings with `stacklevel=2` name the file of whoever called the function that warns: torch's, and users' filters go
# by it. This calls a function from a frame that is torch's by file and module.
_in_torch: Callable[..., Any] = types.FunctionType(
    _call.__code__.replace(co_filename=torch_dataloader.__file__), vars(torch_dataloader)
)


class _IterType(type):
    def __instancecheck__(cls, instance: object) -> bool:
        if super().__instancecheck__(instance):
            return True
        return _installed and cls is _MultiProcessingDataLoaderIter and isinstance(instance, _TorchIter)


class _MultiProcessingDataLoaderIter(_TorchIter, metaclass=_IterType):
    """Iterates over a loader with worker processes.

    It has two modes, settled before anything else happens in ``__init__``. With the *engine*, workers, order and
    transport are ours. Where the engine cannot keep a promise of torch's (the list is closed: DataPipes, a
    ``_worker_loop`` or a method of torch's iterator that a program has replaced, a subclass with hooks that the engine
    has no place for, a system without memfd) the iterator is torch's own in every method, and the logger ``rustloader``
    says so once.
    """

    # What methods need that may run before `__init__` has come far, or without it.
    _core: Engine | None = None
    _passthrough = False
    _shutdown = False
    _workers: list[Any] = []  # noqa: RUF012
    _death: str | None = None
    _death_note: str | None = None
    _ended = False
    _rescued: list[Any] | None = None

    def __init__(self, loader: Any) -> None:
        reason = _why_not(type(self), loader)
        core = None
        # Compared as in torch, whose TypeError says how.
        if reason is None and not (loader.num_workers <= 0 or loader.prefetch_factor <= 0):
            core, reason = _make_engine(loader)
        if reason is not None:
            _tell_handover(reason)
            self._passthrough = True
            try:
                _in_torch(super().__init__, loader)
            except BaseException:
                self._abandon_torchs()
                raise
            return
        _in_torch(_BaseDataLoaderIter.__init__, self, loader)
        self._prefetch_factor = loader.prefetch_factor
        self._in_order = loader.in_order
        if core is None:
            name = "num_workers" if self._num_workers <= 0 else "prefetch_factor"
            raise AssertionError(f"{name} must be greater than 0 for MultiProcessingDataLoaderIter")
        self._core = core
        self._context = loader.multiprocessing_context or torch.multiprocessing
        self._worker_init_fn = loader.worker_init_fn
        self._workers = []
        self._start_workers()
        self._reset(loader, first_iter=True)

    def _abandon_torchs(self) -> None:
        """Ends what torch's constructor had started before it failed: its own clean-up needs what was not made."""
        try:
            super()._shutdown_workers()
        except AttributeError:
            for process in self._workers:
                process.kill()
                process.join()

    # --- workers -----------------------------------------------------------------------------------------------

    def _start_workers(self) -> None:
        _live.add(self)
        core = self._engine()
        try:
            self._start_processes(core)
            if self._pin_memory:
                core.start_pinning(_pin.Pinner(self._pin_memory_device))
                self._pin_memory_thread = _pin.Thread(core)  # type: ignore[assignment]
                self._pin_memory_thread_done_event = _pin.DoneEvent(core)  # type: ignore[assignment]
        except BaseException:
            # Half of the workers are no use; a further iter() of a persistent loader starts anew.
            self._shutdown_workers()
            raise

    def _start_processes(self, core: Engine) -> None:
        _start_helpers(self._context)
        with _sigint_blocked() as was_open:
            job = _worker.Job(
                dataset_kind=self._dataset_kind,
                auto_collation=self._auto_collation,
                collate_fn=self._collate_fn,
                drop_last=self._drop_last,
                base_seed=int(self._base_seed),
                init_fn=self._worker_init_fn,
                num_workers=self._num_workers,
                unblock_sigint=was_open,
            )
            _core.begin_forks()
            try:
                for worker_id in range(self._num_workers):
                    process = self._context.Process(
                        target=_worker.run, args=(_worker.Connection(core), [self._dataset], job, worker_id)
                    )
                    process.daemon = True
                    try:
                        process.start()
                    except (TypeError, AttributeError, PicklingError):
                        _in_torch(warnings.warn, _PICKLE_WARNING, None, 1)
                        raise
                    except OSError as error:
                        if error.errno in _REFUSED_STARTS:
                            what = f"worker {worker_id} of a DataLoader with {self._num_workers} cannot be started"
                            error.strerror = f"{error.strerror}: {what}; {_REFUSED_STARTS[error.errno]}"
                        raise
                    self._workers.append(process)
                    core.started(worker_id, process.pid)
            finally:
                _core.end_forks()

    def _restart(self) -> None:
        """New workers for a persistent loader whose workers have died or were shut down."""
        self._shutdown_workers()
        core, reason = _make_engine(self)
        if core is None:
            raise RuntimeError(f"the workers of the DataLoader cannot be started again: {reason}")
        self._core = core
        self._workers.clear()
        self._shutdown = False
        self._death = self._death_note = None
        self._start_workers()

    def _engine(self) -> Engine:
        if self._core is None:
            raise AssertionError("the DataLoader iterator was not initialized")
        return self._core

    @property
    def engine_batches(self) -> int:
        """Number of batches that the Rust engine has delivered; 0 when torch's own iterator does the work."""
        return 0 if self._core is None else self._core.batches

    # --- an epoch ----------------------------------------------------------------------------------------------

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        if self._passthrough:
            super()._reset(loader, first_iter)
            return
        core = self._engine()
        _BaseDataLoaderIter._reset(self, loader, first_iter)
        self._ended = False
        if not first_iter and (self._shutdown or self._death is not None or not core.is_ours):
            self._restart()
            core = self._engine()
            first_iter = True
        self._rescued = None
        hand: list[Any] = [None, None]
        core.begin(hand, self._draw(), first_iter)
        code, value = hand
        if code != _END:
            self._died_or_late(code, value)
        self._workers_status = [True] * self._num_workers

    def _draw(self) -> Callable[[], Any]:
        """What gives the next index. Without a frame of ours between, an interrupt cannot lose one on its way."""
        if _internals.is_torchs(type(self)._next_index, torch_dataloader):
            return cast("Callable[[], Any]", self._sampler_iter.__next__)
        return self._next_index

    def __next__(self) -> Any:
        if self._passthrough:
            return super().__next__()
        if _core.observed():
            with torch.autograd.profiler.record_function(self._profile_name):
                return self._counted_next()
        return self._counted_next()

    def _counted_next(self) -> Any:
        if self._sampler_iter is None:
            self._reset()  # type: ignore[call-arg]
        data = self._next_data()
        self._num_yielded += 1
        # Still no call: see `_next_data`.
        length: Any = self._IterableDataset_len_called
        if length is not None and self._num_yielded > length and self._dataset_kind == _DatasetKind.Iterable:
            text = _LENGTH_WARNING.format(self._dataset, length, self._num_yielded)
            if _LENGTH_WARNING_POINTS_TO_THE_CALLER:
                warnings.warn(text, stacklevel=3)
            else:
                _in_torch(warnings.warn, text, None, 1)
        return data

    def _next_data(self) -> Any:
        if self._passthrough:
            return super()._next_data()
        self._look_for_the_end()
        if self._shutdown:
            # As torch's, whose workers are then all marked as unavailable.
            raise StopIteration
        hand, self._rescued = self._rescued, None
        if hand is None:
            hand = [None, None]
            core = self._engine()
            try:
                core.next(hand, self._draw())
                if self._dataset_kind == _DatasetKind.Iterable:
                    self._workers_status[:] = core.active() or self._workers_status
            except BaseException as error:
                if hand[0] is not None:
                    # A signal handler has raised just after the answer came: it is the next call's.
                    self._rescued = hand
                elif isinstance(error, RuntimeError):
                    # Another thread may have found the end, or a death, while this one waited.
                    self._look_for_the_end()
                raise
        # From here to the return there is no call, so no signal handler can come between and take the batch away.
        code, value = hand
        if code == _BATCH:
            return value
        if code == _ERROR:
            value.reraise()
        if code == _END:
            self._ended = True
            if not self._persistent_workers:
                self._shutdown_workers()
            raise StopIteration
        self._died_or_late(code, value)
        raise AssertionError(f"an answer of the engine that is none: {code}")

    def _look_for_the_end(self) -> None:
        """Raises what a further `next` raises after the epoch's end or a death."""
        if self._ended:
            raise StopIteration
        if self._death is not None:
            raise self._death_error()

    def _died_or_late(self, code: int, value: Any) -> None:
        if code == _TIMED_OUT:
            raise RuntimeError(f"DataLoader timed out after {self._timeout} seconds")
        if code == _DEAD:
            self._note_death(value)
            raise self._death_error()
        if code == _NO_PIN_THREAD:
            self._death = "Pin memory thread exited unexpectedly"
            self._death_note = value or None
            core = self._engine()
            core.close()
            # Its last word comes just before its end.
            core.join_pinning(_EXIT_GRACE)
            raise self._death_error()

    def _note_death(self, worker_id: int) -> None:
        """Takes note of a death that is to be raised now, and tells the other workers to leave."""
        core = self._engine()
        index = core.oldest_index(worker_id)
        if index is not None:
            text = repr(index)
            text = text if len(text) <= 200 else text[:200] + "..."
            self._death_note = f"Worker {worker_id} was to fetch the batch of index {text}."
        self._death = self._describe_death(worker_id)
        core.close()

    def _death_error(self) -> RuntimeError:
        error = RuntimeError(self._death)
        if self._death_note is not None:
            error.add_note(self._death_note)
        return error

    def _describe_death(self, worker_id: int) -> str:
        process = self._workers[worker_id]
        status = self._engine().exit_status(worker_id)
        if status is None:
            # Under forkserver the main process is not the parent: the fork server alone knows, and says it a little
            # later.
            process.join(_STATUS_AFTER)
        if status is None and process.exitcode:
            code = process.exitcode
            status = ("code", code, "") if code > 0 else ("signal", -code, _signal_name(-code))
        if status is None or status[:2] == ("code", 0):
            return f"DataLoader worker (pid(s) {process.pid}) exited unexpectedly"
        kind, number, name = status
        if kind == "code":
            return (
                f"DataLoader worker (pid {process.pid}) exited unexpectedly with exit code {number}. "
                "Details are lost due to multiprocessing. Rerunning with num_workers=0 may give better error trace."
            )
        text = f"DataLoader worker (pid {process.pid}) is killed by signal: {name}. "
        if number == signal.SIGBUS:
            text += (
                "It is possible that dataloader's workers are out of shared memory. "
                "Please try to raise your shared memory limit."
            )
        return text

    # --- the end -----------------------------------------------------------------------------------------------

    def _shutdown_workers(self) -> None:
        """Ends the workers: they leave between two samples, or after the deadline of
        ``torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL`` seconds (5) for all together are made to.

        Safe from any thread, from a signal handler, more than once, and after a failed construction. Does nothing
        while the interpreter exits, and in a forked child.
        """
        if self._passthrough:
            super()._shutdown_workers()
            return
        core = self._core
        if core is None or self._shutdown or not core.is_ours or _exiting():
            return
        self._shutdown = True
        self._workers_status = [False] * self._num_workers
        _end([self], _utils.MP_STATUS_CHECK_INTERVAL, _KILL_AFTER)

    def __del__(self) -> None:
        self._shutdown_workers()

    # --- what copied code reaches for --------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        # What stands in no __dict__: see `_internals`. With torch's iterator all of it does.
        return _internals.attribute(self, name)

    def _mark_worker_as_unavailable(self, worker_id: int, shutdown: bool = False) -> None:
        if self._passthrough:
            super()._mark_worker_as_unavailable(worker_id, shutdown)
        else:
            self._dismiss(worker_id)

    def _dismiss(self, worker_id: int) -> None:
        """A copied shutdown routine tells a worker to leave; when it has told them all, they do."""
        self._workers_status[worker_id] = False
        if not any(self._workers_status):
            self._engine().close()


def _exiting() -> bool:
    return _utils is None or _utils.python_exit_status is True or _utils.python_exit_status is None


def _end(iterators: list[_MultiProcessingDataLoaderIter], grace: float, kill_after: float) -> None:
    """Ends the workers of iterators, all within one deadline: ``grace`` seconds to leave by themselves, ``kill_after``
    more after SIGTERM, then SIGKILL. An interrupt meanwhile goes straight to SIGKILL and is raised again."""
    cores = [iterator._engine() for iterator in iterators]

    def gone(seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        for core in cores:
            while not core.wait_gone(deadline - time.monotonic()):
                if time.monotonic() >= deadline:
                    return False
        return True

    start = time.monotonic()
    try:
        for core in cores:
            core.stop_pinning()
        for core in cores:
            core.close()
        # The pin threads first: they read what the workers write.
        for core in cores:
            core.join_pinning(grace - (time.monotonic() - start))
        if not gone(grace - (time.monotonic() - start)):
            for core in cores:
                core.signal_all(signal.SIGTERM)
            gone(kill_after)
    finally:
        for core in cores:
            core.signal_all(signal.SIGKILL)
        # Nothing outlives SIGKILL for long, but a process in the kernel's uninterruptible sleep does.
        gone(5.0)
        for iterator, core in zip(iterators, cores, strict=True):
            for process in iterator._workers:
                if core.alive() == 0:
                    process.join()
                # Where somebody else has reaped it, multiprocessing would keep it among the living for ever.
                _mp_children.discard(process)
            core.finish()
            _live.discard(iterator)


def _end_all() -> None:
    """The interpreter's exit: runs before torch's hook, which switches ``__del__`` off, and before multiprocessing's,
    which joins daemonic processes without limit."""
    here = [it for it in list(_live) if not it._shutdown and it._core is not None and it._core.is_ours]
    for iterator in here:
        # A daemon thread in its `next` must not wake up to an error that it can only print.
        iterator._engine().close(exiting=True)
    _end(here, _EXIT_GRACE, _EXIT_KILL_AFTER)
    for iterator in here:
        iterator._shutdown = True


def _forget_in_child() -> None:
    """In a forked child the workers are somebody else's: multiprocessing must not end them at the child's exit."""
    for iterator in list(_live):
        _mp_children.difference_update(iterator._workers)


atexit.register(_end_all)
os.register_at_fork(after_in_child=_forget_in_child)


def _why_not(cls: type, loader: Any) -> str | None:
    """Why the engine cannot do a loader's work; None when it can. The list is closed."""
    if not sys.platform.startswith("linux"):
        return f"the engine needs Linux, and this is {sys.platform}"
    if isinstance(loader.dataset, (IterDataPipe, MapDataPipe)):
        return "its dataset is a DataPipe"
    return _internals.replaced_part(_TorchIter) or _internals.foreign_part(cls, _MultiProcessingDataLoaderIter)


def _tell_handover(reason: str) -> None:
    logger.warning("a DataLoader runs on torch's own iterator: %s", reason)


def _other_iterator(get_iterator: Callable[..., Any]) -> str | None:
    """Why torch's loader would not make torch's iterator, and so ours not the one in its place; None when it would."""
    if not _internals.is_torchs(get_iterator, torch_dataloader):
        return "DataLoader._get_iterator of torch was replaced"
    iterator = torch_dataloader._MultiProcessingDataLoaderIter
    if iterator is not _TorchIter and not issubclass(iterator, _MultiProcessingDataLoaderIter):
        return "torch.utils.data.dataloader._MultiProcessingDataLoaderIter was replaced"
    return None


def _make_engine(settings: Any) -> tuple[Engine | None, str | None]:
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
        )
    except (OSError, MemoryError) as error:
        return None, f"no shared memory can be had: {error}"
    return engine, None


def _start_helpers(context: Any) -> None:
    """Starts multiprocessing's own helper processes, which live on: with SIGINT blocked they would hand that on to
    every process that the user starts later."""
    method = context.get_start_method()
    if method == "forkserver":
        forkserver.ensure_running()
    elif method == "spawn":
        resource_tracker.ensure_running()


@contextlib.contextmanager
def _sigint_blocked() -> Iterator[bool]:
    """Keeps SIGINT out while workers are started, so that none is interrupted before it can catch it; says whether the
    workers are to let it in."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield signal.SIGINT not in before
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _signal_name(number: int) -> str:
    return signal.strsignal(number) or f"Unknown signal {number}"


# The way out where the system has no process, or no descriptor, for a worker.
_REFUSED_STARTS = {
    errno.EAGAIN: "raise `ulimit -u` (RLIMIT_NPROC), or the cgroup's pids.max, or use a smaller num_workers",
    errno.ENOMEM: "the machine or the address space (`ulimit -v`, RLIMIT_AS) has no memory left for one more process",
    errno.EMFILE: "raise `ulimit -n` (RLIMIT_NOFILE), or close files that are no longer needed",
    errno.ENFILE: "raise the sysctl fs.file-max",
}
_PICKLE_WARNING = (
    "Got pickle error when attempting to start a worker Process. "
    "This might be because the worker Process arguments are not picklable. "
    "Python 3.14+ changed the multiprocessing start method in non-Mac POSIX platforms "
    "to 'forkserver', which requires the worker Process arguments to be picklable. "
    "You can also try multiprocessing.set_start_method('fork')."
)
_LENGTH_WARNING = (
    "Length of IterableDataset {} was reported to be {}(when accessing len(dataloader)), but {} samples have been "
    "fetched. For multiprocessing data-loading, this could be caused by not properly configuring the "
    "IterableDataset replica at each worker. Please see "
    "https://pytorch.org/docs/stable/data.html#torch.utils.data.IterableDataset for examples."
)
# Older versions of torch have theirs point into torch's own file.
_LENGTH_WARNING_POINTS_TO_THE_CALLER = ("stacklevel",) in _BaseDataLoaderIter.__next__.__code__.co_consts
