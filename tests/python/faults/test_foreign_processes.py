"""Contexts whose processes are not multiprocessing's; signals are sent only to workers."""

import functools
import logging
import multiprocessing
import multiprocessing.context
import multiprocessing.process
import os
import queue
import threading
import time

import pytest
import torch
from sample_data import Numbers, Slow
from support import (
    TORCH_MODE,
    DataLoader,
    LoaderIter,
    config_of,
    from_engine,
    gone,
    outcome,
    values,
    wait_until,
    worker_pids,
)

if not TORCH_MODE:
    from rustloader import _core
    from rustloader.iterator import fallback
    from rustloader.settings.limits import StallLimits
    from rustloader.supervision import stalls
    from rustloader.system import cleanup, interrupts
    from rustloader.workers import group, serialize
    from rustloader.workers import process as worker_process

FORK = multiprocessing.get_context("fork")
NOT_A_SUBCLASS = "is not a subclass of multiprocessing.process.BaseProcess"


class AsThread(threading.Thread):
    """The interface of a process that torch needs, and nothing else, implemented by a thread."""

    number = staticmethod(os.getpid)

    @property
    def pid(self):
        return self.number()

    def run(self):
        try:
            super().run()
        finally:
            torch.utils.data._utils.worker._worker_info = None

    def terminate(self):
        raise AssertionError("a thread cannot be ended")


class ThreadQueue(queue.Queue):
    def cancel_join_thread(self):
        pass

    def close(self):
        pass


class Threads(multiprocessing.context.SpawnContext):
    """A context as a library would write it to run workers as threads."""

    Process = AsThread
    Queue = staticmethod(ThreadQueue)
    Event = staticmethod(threading.Event)


def threads(pid):
    """A context of threads whose PID is `pid(thread)`."""
    process = type("Process", (AsThread,), {"number": lambda self: pid(self)})
    return type("Context", (Threads,), {"Process": process})()


class Minimal:
    """A real process that exposes only what torch uses."""

    def __init__(self, target, args):
        self._process = FORK.Process(target=target, args=args)
        for name in ("start", "join", "is_alive", "terminate"):
            setattr(self, name, getattr(self._process, name))

    @property
    def pid(self):
        return self._process.pid

    @property
    def daemon(self):
        return self._process.daemon

    @daemon.setter
    def daemon(self, value):
        self._process.daemon = value


class StartsLater(FORK.Process):
    """Has no PID until a while after start() has returned."""

    def start(self):
        self._starting = threading.Thread(target=super().start)
        self._starting.start()

    def wait(self):
        if threading.current_thread() is not self._starting:
            self._starting.join()

    @property
    def pid(self):
        self.wait()
        return super().pid

    def is_alive(self):
        self.wait()
        return super().is_alive()

    def join(self, timeout=None):
        self.wait()
        super().join(timeout)


class ByThread(FORK.Process):
    """Derived from multiprocessing's class, but started as a thread of this process."""

    @staticmethod
    def _Popen(process):
        class Popen(threading.Thread):
            pid = os.getpid()
            finalizer = sentinel = None

            def poll(self):
                return None if self.is_alive() else 0

            def wait(self, timeout=None):
                self.join(timeout)
                return self.poll()

        popen = Popen(target=process.run, daemon=True)
        popen.start()
        return popen


def context(process, base=multiprocessing.context.ForkContext):
    return type("Context", (base,), {"Process": process})()


@staticmethod
def call(*args, **kw):
    return FORK.Process(*args, **kw)


FOREIGN = {
    "threads with this pid": (threads(lambda self: os.getpid()), NOT_A_SUBCLASS),
    "threads with a large pid": (threads(id), NOT_A_SUBCLASS),
    "a wrapper": (context(Minimal), NOT_A_SUBCLASS),
    "a function": (context(call), NOT_A_SUBCLASS),
    "a method": (context(lambda self, **kw: FORK.Process(**kw)), NOT_A_SUBCLASS),
    "a start that goes on later": (context(StartsLater), "has its own start"),
    "its own terminate": (context(type("P", (FORK.Process,), {"terminate": FORK.Process.kill})), "its own terminate"),
}


def logged(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "rustloader"]


@pytest.mark.handover
@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("workers", [1, 2])
def test_processes_that_only_look_like_processes_are_left_to_torch(name, workers, caplog):
    foreign, reason = FOREIGN[name]
    loader = DataLoader(Numbers(5), batch_size=None, num_workers=workers, multiprocessing_context=foreign)
    with caplog.at_level(logging.WARNING, logger="rustloader"), from_engine(0):
        assert values(loader) == [0, 1, 2, 3, 4]
    if not TORCH_MODE:
        (line,) = logged(caplog)
        assert line.endswith(reason), line


@pytest.mark.ours
def test_a_class_that_starts_something_else_is_left_to_torch():
    loader = DataLoader([0], num_workers=1, multiprocessing_context=context(ByThread))
    reason = fallback.why_not(LoaderIter, LoaderIter, loader)
    assert reason == "the Process of its multiprocessing context has its own _Popen"


class Wraps(multiprocessing.context.BaseContext):
    """A context that forwards all attributes but its start method, and is false."""

    def __init__(self, real):
        self.real = real

    def __getattribute__(self, name):
        if name in ("real", "__class__"):
            return object.__getattribute__(self, name)
        if name == "get_start_method":
            raise RuntimeError("asked for the start method, as torch never does")
        return getattr(self.real, name)

    def __bool__(self):
        return False


class Subclass(FORK.Process):
    """Overrides `run`, as a subclass may."""

    def run(self):
        super().run()


class Named(multiprocessing.context.ForkContext):
    _name = "no such method"
    Process = functools.partial(FORK.Process, name="mine")


SERVED = {
    "fork": Wraps(multiprocessing.get_context("fork")),
    "forkserver": Wraps(multiprocessing.get_context("forkserver")),
    "spawn": Wraps(multiprocessing.get_context("spawn")),
    "partial": Named(),
    "subclass": context(Subclass),
}


@pytest.mark.parametrize("name", SERVED)
def test_contexts_that_lead_to_multiprocessings_processes_keep_the_engine(name):
    loader = DataLoader(Numbers(3), batch_size=None, num_workers=1, multiprocessing_context=SERVED[name])
    iterator = iter(loader)
    process = iterator._workers[0]
    assert process.name == "mine" or name != "partial"
    if name in ("forkserver", "spawn"):
        assert process._start_method == name
    with from_engine(3):
        assert values(iterator) == [0, 1, 2]


# Signals


@pytest.mark.ours
def test_descends_is_true_of_descendants_only():
    assert not any(map(_core.descends, (os.getpid(), os.getppid(), 0, -1, -(2**40), 2**40, id(None), 1)))
    for method in ("fork", "forkserver"):
        iterator = iter(DataLoader(Numbers(2), num_workers=2, multiprocessing_context=method))
        assert all(map(_core.descends, worker_pids(iterator)))
        iterator._shutdown_workers()
        # The fork server may be slow to reap its children.
        assert wait_until(lambda iterator=iterator: not any(map(_core.descends, worker_pids(iterator))))


@pytest.mark.ours
def test_s9_a_stranger_is_watched_and_not_signaled():
    """A process that a worker's class started in its own way, and that outlives its parent."""
    callbacks = serialize.loads, serialize.dumps_alone, interrupts.is_interrupt, stalls.warn
    engine = _core.Engine(config_of(num_workers=1), StallLimits(0.0, 0.0, 0.0), *callbacks)
    read, write = os.pipe()
    if os.fork() == 0:
        stranger = os.fork()
        if stranger == 0:
            time.sleep(1000)
        os.write(write, str(stranger).encode())
        os._exit(0)
    os.wait()
    stranger = int(os.read(read, 20))
    try:
        engine.started(0, stranger)
        assert engine.alive() == 1
        for number in (15, 9):
            engine.signal_all(number)
        assert not wait_until(lambda: engine.alive() == 0, 0.3)
    finally:
        os.kill(stranger, 9)
        os.close(read)
        os.close(write)
    assert wait_until(lambda: engine.alive() == 0)


@pytest.mark.ours
def test_only_real_processes_are_killed_after_a_failed_start():
    class Lies(FORK.Process):
        pid = os.getpid()

        def kill(self):
            raise AssertionError("this process was to be killed")

    thread = AsThread()
    thread.kill = Lies.kill
    for process in (Lies(), thread, FORK.Process(), None):
        worker_process.kill(process)
    real = FORK.Process(target=time.sleep, args=(1000,))
    real.start()
    worker_process.kill(real)
    assert real.exitcode == -9


# The first error


@pytest.mark.handover
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # from torch's half-built iterator
def test_the_error_of_a_start_that_torchs_iterator_cannot_clean_up():
    started = []

    class SecondFails(AsThread):
        terminate = None  # no way to end it

        def __init__(self, target, args):
            super().__init__(target=target, args=args)
            self.indices = args[2]

        def start(self):
            started.append(self)
            if len(started) == 2:
                raise OverflowError("no second thread")
            super().start()

    loader = DataLoader(Numbers(4), num_workers=2, multiprocessing_context=context(SecondFails, Threads))
    with pytest.raises(OverflowError, match="no second thread"):
        iter(loader)
    # torch leaves its thread waiting for an index.
    started[0].indices.put(None)
    started[0].join()


class Broken(LoaderIter):
    has_failed = False

    def _shutdown_workers(self):
        super()._shutdown_workers()
        if not self.has_failed:
            self.has_failed = True
            raise KeyError("the shutdown")


@pytest.mark.ours
def test_the_error_of_a_start_comes_before_that_of_the_shutdown():
    class SecondIsRefused(FORK.Process):
        created = 0

        def __init__(self, *args, **kw):
            type(self).created += 1
            if self.created == 2:
                raise OverflowError("no second process")
            super().__init__(*args, **kw)

    with pytest.raises(OverflowError, match="no second process") as caught:
        Broken(DataLoader(Numbers(4), num_workers=2, multiprocessing_context=context(SecondIsRefused)))
    assert caught.value.__notes__ == ["rustloader: cleaning up after this error also failed: KeyError: 'the shutdown'"]


@pytest.mark.ours
@pytest.mark.warns
def test_a_process_that_cannot_be_joined_holds_up_no_other(caplog, monkeypatch):
    monkeypatch.setattr(worker_process, "STATUS_AFTER", "no number")  # the join of each process raises a TypeError
    iterator = iter(DataLoader(Numbers(4), num_workers=2, batch_size=None))
    next(iterator)
    pids = worker_pids(iterator)
    for process in iterator._workers:
        process._popen.poll = lambda *args: None
    iterator._shutdown_workers()
    assert all(map(gone, pids))
    lines = [line for line in logged(caplog) if line.startswith("a step of a DataLoader's shutdown failed: TypeError")]
    assert len(lines) == 2, caplog.text
    assert iterator._mode.group not in group._live
    for process in iterator._workers:
        del process._popen.poll
        process.join()


@pytest.mark.ours
@pytest.mark.forks
def test_a_death_is_reported_when_the_list_of_workers_was_emptied():
    iterator = iter(DataLoader(Slow(4, {1: 60}), num_workers=2, batch_size=None))
    next(iterator)
    processes = list(iterator._workers)
    iterator._workers.clear()
    assert wait_until(lambda: iterator._core.worker_status(1)["state"] == "fetch")
    processes[1].kill()
    kind, error, text = outcome(next, iterator)
    assert (kind, error) == ("error", RuntimeError) and f"DataLoader worker (pid {processes[1].pid}) is killed" in text
    iterator._shutdown_workers()
    for process in processes:
        process.join()


@pytest.mark.ours
def test_an_interrupt_while_cleaning_up_is_raised():
    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cleanup.clean_up_after(ValueError(), interrupted)
    with pytest.raises(KeyboardInterrupt):
        cleanup.quietly(interrupted)
