"""`prefetch_to_device` on a device that fails, with interrupts, and in forked children (`standin.py`)."""

import contextlib
import gc
import signal
import sys
from unittest import mock

import pytest
import torch
from prefetch_support import Raising, on, prefetch, tensors
from standin import StandIn
from support import run_script, rustloader

pytestmark = pytest.mark.ours

if rustloader is not None:
    from rustloader.device.prefetch.lane import Lane


@pytest.fixture(autouse=True)
def silent_destructors(monkeypatch):
    reported = []
    monkeypatch.setattr(sys, "unraisablehook", reported.append)
    yield
    gc.collect()
    assert reported == []


# Interrupts


def in_destructor(frame):
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


class Interrupted(Exception):
    pass


@pytest.fixture
def raises_at_a_signal():
    """A function that sets the error which a signal handler raises."""
    raised = []

    def handler(signum, frame):
        raise raised[-1]

    before = signal.signal(signal.SIGUSR1, handler)
    yield raised.append
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("error", [KeyboardInterrupt, Interrupted])
@pytest.mark.parametrize("first", range(1, 11))
def test_handler_that_raises_at_any_call_loses_no_batch(device, first, error, raises_at_a_signal):
    """A signal arrives at the k-th call of a function or return from C, where a handler may run."""
    raises_at_a_signal(error)
    folder = rustloader.__path__[0]
    rounds, where = 0, []
    for at in range(first, 2000, 10):
        counted, interrupts = [0], 0

        def profile(frame, event, argument, counted=counted, at=at):
            # Not at "return": Python runs no handler between the return of `__next__` and the loop.
            is_own = frame.f_code.co_filename.startswith(f"{folder}/device/prefetch/")
            if is_own and event in ("c_return", "call") and not in_destructor(frame):
                counted[0] += 1
                if counted[0] == at:
                    where.append((event, frame.f_code.co_name, frame.f_lineno))
                    signal.raise_signal(signal.SIGUSR1)

        items = [*tensors(3), ValueError("error"), *tensors(2, 3)]
        iterator, got = iter(prefetch(Raising(*items), depth=2)), []
        while True:
            sys.setprofile(profile)
            try:
                batch = next(iterator)
            except error:
                interrupts += 1
                continue
            except ValueError:
                got.append("error")
                continue
            except StopIteration:
                break
            finally:
                sys.setprofile(None)
            device.read(batch, got.append)
            device.run_all()
        assert got == [[0] * 4, [1] * 4, [2] * 4, "error", [3] * 4, [4] * 4], where[-1]
        assert iterator._position.returning == 0
        rounds += interrupts
        if not interrupts:
            break
    assert rounds > 10 and counted[0] < at and device.faults == []


def test_handler_that_raises_in_the_loader_is_not_an_error_of_the_loader(device, raises_at_a_signal):
    class Signaled(Raising):
        is_signaled = False

        def __next__(self):
            if len(self.items) == 2 and not self.is_signaled:
                self.is_signaled = True
                signal.raise_signal(signal.SIGUSR1)
            return super().__next__()

    raises_at_a_signal(Interrupted)
    iterator, got, before = iter(prefetch(Signaled(*tensors(5)), depth=2)), [], []
    while True:
        try:
            batch = next(iterator)
        except Interrupted:
            before += [len(got)]
        except StopIteration:
            break
        else:
            device.read(batch, got.append)
            device.run_all()
    # The fourth batch was to be drawn. An error of the loader would come after the three that were ahead.
    assert got == [[n] * 4 for n in range(5)] and len(before) == 1 and before[0] < 3


@pytest.mark.parametrize("moment", ["enter", "exit"])
def test_interrupt_while_the_stream_is_changed_leaves_the_program_on_its_own(device, moment):
    using, iterator = device.using, iter(prefetch(tensors(3)))

    class Interrupted:
        """Like torch's StreamContext, with a Ctrl-C after it sets the stream, or before it restores the old one."""

        def __init__(self, stream):
            self.stream = stream

        def __enter__(self):
            device.thread.stream = self.stream
            if moment == "enter":
                raise KeyboardInterrupt

        def __exit__(self, *error):
            raise KeyboardInterrupt

    device.using = Interrupted
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    assert device.current() is device.default
    device.using = using
    assert len(list(iterator)) == 3
    device.run_all()
    assert device.faults == []


class InPlace:
    """Moves its parts one after the other, and keeps what it has moved, as PyG's Data does."""

    def __init__(self, number, device):
        self.parts, self.device = [torch.full((4,), number), torch.full((4,), number)], device
        self.fails = number == 2

    def to(self, device, non_blocking=False):
        for place, part in enumerate(self.parts):
            if part.device.type == "cpu" and not hasattr(part, "moved"):
                self.parts[place] = self.device.copy(part)
                self.parts[place].moved = True
            if self.fails:
                self.fails = False
                raise KeyboardInterrupt
        return self


def test_memory_that_an_interrupted_object_has_moved_is_watched(device):
    batches = prefetch([InPlace(number, device) for number in range(12)], depth=1)
    iterator, seen = iter(batches), 0
    while True:
        try:
            batch = next(iterator, None)
        except KeyboardInterrupt:
            continue
        if batch is None:
            break
        for part in batch.parts:
            device.read(part, lambda values, number=seen: None)
        seen += 1
        del batch, part
    device.run_all()
    assert seen == 12 and not device.faults


# A device that fails


class Injected(RuntimeError):
    """Raised by a driver call."""


class Failing:
    """Raises at the given call of a device's method: once, or from then on."""

    def __init__(self, device, name, at, sticky=False):
        self.device, self.name, self.left, self.sticky = device, name, at, sticky
        # Whether it raised while a copy was being queued.
        self.in_copy = False
        device.before_call = self

    def __call__(self, name):
        if name != self.name:
            return
        self.left -= 1
        if self.left == 0 or (self.sticky and self.left < 0):
            frame = sys._getframe()
            while frame is not None:
                self.in_copy |= frame.f_code is Lane.copy.__code__
                frame = frame.f_back
            raise Injected(name)

    @property
    def has_failed(self):
        return self.left <= 0


def program(device, leaves_early):
    """A loop that keeps a batch for a long time and goes on after an error. Returns the values that it has read.

    In its second half, all work of the device is held back.
    """
    batches = prefetch(tensors(9), depth=2)
    iterator, got, kept, number = iter(batches), [], None, 0
    while not (leaves_early and number == 6):
        try:
            batch = next(iterator)
        except StopIteration:
            break
        except Injected:
            continue
        device.read(batch, got.append)
        number += 1
        if number < 4:
            device.run_all()
        if number == 2:
            kept = batch
        batch = None
    if leaves_early:
        with contextlib.suppress(Injected):
            batches.close()
    del iterator, batches, kept
    device.run_all()
    return [values[0] for values in got]


@pytest.mark.parametrize("leaves_early", [False, True])
@pytest.mark.parametrize("name", ["record", "wait", "is_done", "synchronize", "record_stream"])
def test_call_that_fails_costs_at_most_the_batch_that_it_copies(name, leaves_early):
    for at in range(1, 200):
        device = StandIn()
        failing = Failing(device, name, at)
        with on(device):
            got = program(device, leaves_early)
        expected = [0, 1, 2, 3, 4, 5, 6, 7, 8]
        if failing.in_copy:
            missing = sorted(set(expected[: got[-1] + 1]) - set(got))
            assert len(missing) <= 1 and got == [k for k in expected if k in got], (at, got)
        else:
            assert got == expected[: len(got)] and len(got) == (6 if leaves_early else 9), (at, got)
        assert device.live == 0 and device.faults == [], at
        if not failing.has_failed:
            break
    assert at > 1 and not failing.has_failed


@pytest.mark.parametrize("name", ["record", "wait", "is_done", "synchronize"])
def test_device_that_has_failed_for_good_is_left_in_silence(name):
    for at in range(1, 12):
        device = StandIn()
        with on(device):
            iterator, failing = iter(prefetch(tensors(9))), Failing(device, name, at, sticky=True)
            with contextlib.suppress(Injected):
                for _ in range(9):
                    next(iterator)
            del iterator
        gc.collect()
    assert failing.has_failed or name == "synchronize"


def test_device_without_streams_left_is_an_error(device, monkeypatch):
    monkeypatch.setattr(device, "make", mock.Mock(side_effect=Injected("no more streams")))
    with pytest.raises(Injected):
        prefetch(tensors(1))


# Forks


def test_forked_child_frees_nothing_of_the_device():
    status, _, err = run_script("""
        import gc, weakref
        from prefetch_support import on, prefetch
        from standin import StandIn
        device, freed = StandIn(), []
        def made(k):
            host = torch.full((4,), k)
            weakref.finalize(host, freed.append, k).atexit = False
            return host
        with on(device):
            iterator = iter(prefetch(made(k) for k in range(9)))
        for _ in range(3):
            next(iterator)
        device.read(next(iterator), lambda values: None)
        before = device.live, len(freed)
        assert before[0] > 3
        pid = os.fork()
        if pid == 0:
            del iterator
            gc.collect()
            os._exit((device.live, len(freed)) != before)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        del iterator
        gc.collect()
        assert device.live == 0
    """)
    assert (status, err) == (0, ""), err


def test_forked_child_goes_on_on_the_cpu_although_a_thread_was_in_next():
    status, out, err = run_script("""
        import threading
        import rustloader
        asked, go = threading.Event(), threading.Event()
        class Source:
            number = 0
            def __iter__(self):
                return self
            def __next__(self):
                self.number += 1
                if self.number == 1:
                    asked.set()
                    go.wait()
                return self.number
        iterator = iter(rustloader.prefetch_to_device(Source(), "cpu"))
        threading.Thread(target=lambda: next(iterator), daemon=True).start()
        asked.wait()
        pid = os.fork()
        if pid == 0:
            print(next(iterator), flush=True)
            os._exit(0)
        os.waitpid(pid, 0)
        go.set()
    """)
    assert (status, out) == (0, "2\n"), err
