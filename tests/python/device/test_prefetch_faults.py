"""`prefetch_to_device` on a device that fails, and closed or interrupted at bad moments (`standin.py`)."""

import collections.abc
import contextlib
import gc
import sys
import threading
from unittest import mock

import pytest
import torch
from prefetch_support import prefetch, tensors
from standin import StandIn
from support import run_script, rustloader

pytestmark = pytest.mark.ours

if rustloader is not None:
    from rustloader.device.prefetch.lane import Lane
    from rustloader.device.prefetch.streams import NoStreams, streams_of


@pytest.fixture(autouse=True)
def silent_destructors(monkeypatch):
    reported = []
    monkeypatch.setattr(sys, "unraisablehook", reported.append)
    yield
    gc.collect()
    assert reported == []


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


def program(device, failing, leaves_early):
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
def test_a_call_that_fails_costs_at_most_the_batch_that_it_copies(name, leaves_early):
    for at in range(1, 200):
        device = StandIn()
        failing = Failing(device, name, at)
        with mock.patch("rustloader.device.prefetch.loader.streams_of", lambda asked, device=device: device):
            got = program(device, failing, leaves_early)
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
def test_a_device_that_has_failed_for_good_is_left_in_silence(name):
    for at in range(1, 12):
        device = StandIn()
        with mock.patch("rustloader.device.prefetch.loader.streams_of", lambda asked, device=device: device):
            iterator, failing = iter(prefetch(tensors(9))), Failing(device, name, at, sticky=True)
            with contextlib.suppress(Injected):
                for _ in range(9):
                    next(iterator)
            del iterator
        gc.collect()
    assert failing.has_failed or name == "synchronize"


def test_a_device_without_streams_left_is_an_error_and_no_more():
    class Full(StandIn):
        def make(self):
            raise Injected("no more streams")

    with mock.patch("rustloader.device.prefetch.loader.streams_of", lambda asked: Full()), pytest.raises(Injected):
        prefetch(tensors(1))


# Interrupts


@pytest.mark.parametrize("moment", ["enter", "exit"])
def test_an_interrupt_while_the_stream_is_changed_leaves_the_program_on_its_own(device, moment):
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


# close()


class Held:
    """Yields numbered batches; waits for the test before the third."""

    def __init__(self):
        self.is_reached, self.may_go_on = threading.Event(), threading.Event()

    def __iter__(self):
        for k in range(10):
            if k == 2:
                self.is_reached.set()
                assert self.may_go_on.wait(60)
            yield torch.full((4,), k)


def test_close_ends_all_loops_while_a_thread_is_in_next_of_one(device):
    held = Held()
    batches = prefetch(held)
    first, second = iter(batches), iter(batches)
    held.may_go_on.set()
    for _ in range(2):
        next(second)
    held.may_go_on.clear()
    held.is_reached.clear()
    got = []

    def consume():
        got.extend(next(first).tolist() for _ in range(2))

    thread = threading.Thread(target=consume)
    thread.start()
    assert held.is_reached.wait(60)
    batches.close()
    assert device.live > 0
    held.may_go_on.set()
    thread.join(60)
    # The thread's last call has ended both loops.
    assert device.live == 0
    for iterator in (first, second):
        with pytest.raises(RuntimeError, match="after close"):
            next(iterator)
    device.run_all()
    assert device.faults == []


def test_an_iterator_that_is_destroyed_while_another_is_freed(device):
    """As the garbage collector may do at any call."""
    batches = prefetch(tensors(10), depth=3)
    first, second = iter(batches), [iter(batches)]
    for _ in range(3):
        next(first)
        next(second[0])
    synchronize = device.synchronize

    def collecting(event):
        second.clear()
        synchronize(event)

    device.synchronize = collecting
    first.close()
    assert second == [] and device.live == 0
    device.run_all()
    assert device.faults == []


# Other devices


def test_a_device_without_streams_waits_for_its_copies():
    asked = []

    class Item:
        def to(self, device, non_blocking=None):
            asked.append(non_blocking)
            return self

    streams = NoStreams(torch.device("cpu"))
    with (
        mock.patch("rustloader.device.prefetch.loader.streams_of", lambda asked: streams),
        mock.patch.object(torch.Tensor, "to", lambda self, device, non_blocking: asked.append(non_blocking) or self),
    ):
        list(prefetch([torch.ones(1), Item()]))
    assert asked == [False, False]


def test_on_the_cpu_close_ends_the_loop():
    ended = []

    class Source:
        def __iter__(self):
            try:
                yield from range(10)
            finally:
                ended.append(True)

    batches = prefetch(Source(), device="cpu")
    iterator = iter(batches)
    assert [next(iterator), next(iterator)] == [0, 1]
    iterator.close()
    assert ended == [True]
    with pytest.raises(RuntimeError, match="after close"):
        next(iterator)
    with prefetch([1, 2], device="cpu") as batches:
        iterator = iter(batches)
        assert next(iterator) == 1
    with pytest.raises(RuntimeError, match="after close"):
        next(iterator)
    assert list(batches) == [1, 2]


def test_on_the_cpu_the_loader_is_asked_for_no_batch_ahead():
    taken = []
    iterator = iter(prefetch((taken.append(k) or k for k in range(5)), device="cpu"))
    for k in range(5):
        assert next(iterator) == k and taken == list(range(k + 1))
    assert next(iterator, None) is None


def test_a_forked_child_frees_nothing_of_the_device():
    status, _, err = run_script("""
        import gc, os, weakref
        import rustloader.device.prefetch.loader
        from standin import StandIn
        device = StandIn()
        rustloader.device.prefetch.loader.streams_of = lambda asked: device
        freed = []
        def made(k):
            host = torch.full((4,), k)
            weakref.finalize(host, freed.append, k).atexit = False
            return host
        iterator = iter(rustloader.prefetch_to_device(made(k) for k in range(9)))
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


def test_what_an_interrupted_object_has_moved_is_watched(device):
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


class BuildsItems(collections.abc.Mapping):
    """Builds its items at each access."""

    def __getitem__(self, key):
        return torch.full((4,), 7)

    def __iter__(self):
        return iter("ab")

    def __len__(self):
        return 2


def test_items_that_a_container_makes_anew_live_until_they_are_copied(device):
    batch = next(iter(prefetch([BuildsItems()])))
    gc.collect()
    device.run_all()
    assert set(batch) == {"a", "b"} and not device.faults


def test_loops_on_the_cpu_do_not_wait_for_one_another():
    asked, go = threading.Event(), threading.Event()

    def slow():
        asked.set()
        assert go.wait(60)
        yield 1

    class Source:
        def __init__(self):
            self.loops = [slow(), iter([2])]

        def __iter__(self):
            return self.loops.pop(0)

    batches, received = prefetch(Source(), device="cpu"), []
    first = iter(batches)
    thread = threading.Thread(target=lambda: received.append(next(first)))
    thread.start()
    assert asked.wait(60)
    assert next(iter(batches)) == 2
    go.set()
    thread.join()
    assert received == [1]


def test_on_the_cpu_a_forked_child_goes_on_although_a_thread_was_in_next():
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


def test_apples_device_has_no_streams_of_its_own():
    """torch.mps has functions of these names, with other arguments."""
    assert type(streams_of("mps")) is NoStreams
