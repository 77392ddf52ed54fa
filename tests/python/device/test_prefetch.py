"""`prefetch_to_device`: arguments, copies, devices and ends of loops, on a device without hardware (`standin.py`).

`test_prefetch_races.py` compares random programs with what they must read.
"""

import copy
import gc
import threading
import types
from unittest import mock

import pytest
import torch
from prefetch_support import Raising, ends_with, on, prefetch, tensors
from sample_data import Numbers
from support import DataLoader, rustloader, values

pytestmark = pytest.mark.ours

if rustloader is not None:
    from rustloader.device.prefetch.lane import Lane
    from rustloader.device.prefetch.streams import NoStreams, Streams, streams_of


class Callable(list):
    """A loader with special methods."""

    def __call__(self):
        return "called"

    def __bool__(self):
        return False


def test_special_methods_are_those_of_the_loader():
    batches = rustloader.prefetch_to_device(Callable([1, 2]), "cpu")
    assert (batches(), bool(batches), len(batches), 2 in batches) == ("called", False, 2, True)
    assert isinstance(batches, rustloader.DeviceLoader) and list(copy.copy(batches)) == [1, 2]
    with pytest.raises(TypeError, match="'DeviceLoader' object is not subscriptable"):
        batches[0]
    batches = rustloader.prefetch_to_device(Raising(1, 2), "cpu")
    assert bool(batches) and not callable(batches) and not hasattr(batches, "__len__") and list(batches) == [1, 2]
    with pytest.raises(TypeError, match="'DeviceLoader' has no len"):
        len(batches)


def test_arguments_are_checked():
    for depth in (0, -1, 1.0, True, None):
        with pytest.raises(ValueError, match=f"depth must be a positive integer, got {depth}"):
            prefetch([], depth=depth)
    with pytest.raises(TypeError, match="takes an iterable of batches, not an object of type <class 'int'>"):
        prefetch(3)
    with pytest.raises(ValueError, match="'meta', which holds no data"):
        prefetch([], device="meta")


# Copies


def test_batches_are_copied_ahead_and_the_first_one_waits_for_no_other(device):
    taken = []
    source = (taken.append(k) or torch.tensor([k]) for k in range(20))
    iterator = iter(prefetch(source, depth=3))
    ahead = []
    for k in range(6):
        assert next(iterator) is not None
        ahead.append(len(taken) - (k + 1))
    assert ahead == [0, 1, 2, 3, 3, 3]
    assert device.copies == len(taken) == 9


def test_two_consumers_get_each_batch_once(device):
    count = 200
    iterator, got, errors = iter(prefetch(tensors(count), depth=3)), [], []

    def consume():
        with device.using(device.make()):
            try:
                got.extend(iterator)
            except BaseException as error:
                errors.append(error)

    threads = [threading.Thread(target=consume) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    device.run_all()
    assert errors == [] and sorted(x[0].item() for x in got) == list(range(count))
    assert next(iterator, None) is None


# Devices


@pytest.mark.skipif(torch.accelerator.is_available(), reason="for machines without an accelerator")
def test_without_an_accelerator_the_device_is_the_cpu():
    loader = DataLoader(Numbers(6), batch_size=2, num_workers=1)
    assert values(prefetch(loader)) == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises((RuntimeError, AssertionError)):
        prefetch(loader, device="cuda")


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")], ids=str)
def test_cpu_hands_batches_on_when_they_are_asked_for(device):
    items, taken = [torch.ones(2), {"a": "b"}, object()], []
    batches = prefetch(items, device=device)
    assert all(one is other for one, other in zip(batches, items, strict=True))
    assert batches.device == torch.device("cpu") and len(batches) == 3
    iterator = iter(prefetch((taken.append(k) or k for k in range(5)), device=device))
    for k in range(5):
        assert next(iterator) == k and taken == list(range(k + 1))
    assert next(iterator, None) is None


class FakeModule(types.ModuleType):
    def __init__(self, *names):
        super().__init__("fake")
        for name in names:
            setattr(self, name, mock.Mock())
        self.current_device = lambda: 3


STREAMS = ("Stream", "Event", "current_stream", "set_stream", "stream")


@pytest.mark.parametrize("names", [STREAMS, ("Event",)])
def test_device_is_that_of_the_thread_that_makes_the_prefetcher(names):
    module = FakeModule(*names)
    with mock.patch.object(torch, "get_device_module", lambda device: module):
        streams = streams_of("cuda")
        assert streams.device == torch.device("cuda", 3)
        assert type(streams) is (Streams if "Stream" in names else NoStreams)
        assert streams_of("cuda:1").device == torch.device("cuda", 1)
        with (
            mock.patch.object(torch.accelerator, "is_available", lambda: True),
            mock.patch.object(torch.accelerator, "current_accelerator", lambda: torch.device("cuda")),
        ):
            assert streams_of(None).device == torch.device("cuda", 3)
    # torch.mps has functions of these names, with other arguments.
    assert type(streams_of("mps")) is NoStreams


def test_module_of_the_device_is_called_as_torch_documents_it():
    module = FakeModule(*STREAMS)
    with mock.patch.object(torch, "get_device_module", lambda device: module):
        streams = streams_of("cuda:1")
    stream, event = streams.make(), streams.record("a stream", timed=True)
    module.Stream.assert_called_once_with(device=torch.device("cuda", 1))
    module.Event.assert_called_once_with(enable_timing=True)
    event.record.assert_called_once_with("a stream")
    streams.wait(stream, event)
    stream.wait_event.assert_called_once_with(event)
    assert streams.current() is module.current_stream.return_value
    module.current_stream.assert_called_with(torch.device("cuda", 1))
    module.device, module.stream = mock.MagicMock(), mock.MagicMock()
    with streams.using(stream):
        module.device.return_value.__enter__.assert_called_once_with()
        module.stream.return_value.__enter__.assert_called_once_with()
    module.device.assert_called_once_with(torch.device("cuda", 1))
    streams.restore(("of the device", "of the thread"))
    # `set_stream` also sets the current device, so the thread's own stream comes last.
    assert module.set_stream.mock_calls == [mock.call("of the device"), mock.call("of the thread")]
    module.current_stream.side_effect = lambda *device: ("stream of", *device)
    assert streams.save() == (("stream of", torch.device("cuda", 1)), ("stream of",))
    module.current_stream.side_effect = None
    event.query.return_value, event.elapsed_time.return_value = False, 1500.0
    assert streams.is_done(event) is False and streams.seconds(event, "end") == 1.5
    # A device that does not measure time.
    event.elapsed_time.side_effect = NotImplementedError("no clock")
    assert streams.seconds(event, "end") == 0.0
    streams.synchronize(event)
    event.synchronize.assert_called_once_with()
    tensor = mock.Mock()
    streams.record_stream(tensor, stream)
    tensor.record_stream.assert_called_once_with(stream)
    assert streams.is_capturing() is False
    module.is_current_stream_capturing = lambda: True
    assert streams.is_capturing() is True


def test_device_without_streams_waits_for_its_copies(monkeypatch):
    asked = []

    class Item:
        def to(self, device, non_blocking=None):
            asked.append(non_blocking)
            return self

    def to(tensor, device, non_blocking):
        asked.append(non_blocking)
        return tensor.clone()

    monkeypatch.setattr(torch.Tensor, "to", to)
    items = tensors(5)
    with on(NoStreams(torch.device("cpu"))):
        *got, _ = prefetch([*items, Item()])
    assert values(got) == values(items) and asked == [False] * 6
    assert all(one is not other for one, other in zip(got, items, strict=True))


# Ends of loops


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
    held.may_go_on.set()
    with prefetch(held) as batches:
        first, second = iter(batches), iter(batches)
        for _ in range(2):
            next(second)
        held.may_go_on.clear()
        held.is_reached.clear()
        got = []
        thread = threading.Thread(target=lambda: got.extend(next(first).tolist() for _ in range(2)))
        thread.start()
        assert held.is_reached.wait(60)
    assert device.live > 0
    held.may_go_on.set()
    thread.join(60)
    # The thread's last call has ended both loops.
    assert device.live == 0
    for iterator in (first, second):
        ends_with("after close", iterator)
    assert len(list(batches)) == 10
    device.run_all()
    assert device.faults == []


def test_close_within_next_frees_everything(device):
    def source():
        yield torch.ones(1)
        yield torch.ones(1)
        batches.close()
        yield torch.ones(1)

    batches = prefetch(source())
    iterator = iter(batches)
    next(iterator)
    next(iterator)
    gc.collect()
    assert device.live == 0
    ends_with("after close", iterator)


def test_iterator_is_destroyed_while_another_is_freed(device):
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


def test_close_on_the_cpu_ends_the_loop():
    ended = []

    class Source:
        def __iter__(self):
            try:
                yield from range(10)
            finally:
                ended.append(True)

    iterator = iter(prefetch(Source(), device="cpu"))
    assert [next(iterator), next(iterator)] == [0, 1]
    iterator.close()
    assert ended == [True]
    ends_with("after close", iterator)
    with prefetch([1, 2], device="cpu") as batches:
        iterator = iter(batches)
        assert next(iterator) == 1
    ends_with("after close", iterator)
    assert list(batches) == [1, 2]


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


# Calls that are refused


def test_next_within_next_is_refused(device):
    def source():
        yield torch.ones(1)
        ends_with("within another next", iterator)
        yield torch.zeros(1)

    iterator = iter(prefetch(source()))
    assert len(list(iterator)) == 2


def test_next_is_refused_in_a_capture_and_a_forked_child_and_loses_nothing(device):
    iterator = iter(prefetch(tensors(2)))
    device.capturing = True
    ends_with("while a graph is being captured", iterator)
    device.capturing = False
    with mock.patch.object(Lane, "_getpid", return_value=1):
        ends_with("forked process", iterator)
    assert len(list(iterator)) == 2


def test_loop_that_is_left_during_a_capture_records_nothing(device):
    # Keeps the host's tensors alive, as torch's allocator keeps pinned memory until its copy is done.
    items = tensors(4, 5)
    iterator, got = iter(prefetch(items, depth=1)), []
    first, batch = next(iterator), next(iterator)
    device.read(first, got.append)
    device.read(batch, got.append)
    del first
    device.capturing = True
    copying = device.streams[1]
    queued = copying.queued
    del iterator
    assert copying.queued == queued
    # torch's allocator waits for the streams that may still read them.
    assert device.handed_over == 2
    device.capturing = False
    device.run_all()
    del batch
    assert got == [[5] * 4, [6] * 4] and device.faults == [] and device.live == 0
