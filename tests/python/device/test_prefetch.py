"""`prefetch_to_device`: order, errors, ends, types and states, on a device without hardware (`standin.py`)."""

import copy
import gc
import sys
import threading
import types
from unittest import mock

import pytest
import torch
from prefetch_support import prefetch, tensors
from sample_data import Numbers
from support import DataLoader, rustloader, values

pytestmark = pytest.mark.ours

if rustloader is not None:
    from rustloader.device.prefetch.lane import Lane
    from rustloader.device.prefetch.streams import NoStreams, Streams, streams_of


class Failing:
    """Yields the given items, and raises those that are errors. Like torch's loaders, it goes on after an error."""

    def __init__(self, *items):
        self.items = list(items)

    def __iter__(self):
        return self

    def __next__(self):
        if not self.items:
            raise StopIteration
        item = self.items.pop(0)
        if isinstance(item, BaseException):
            raise item
        return item


class Callable(list):
    """A loader with special methods."""

    def __call__(self):
        return "called"

    def __bool__(self):
        return False


# Special methods


def test_it_has_the_special_methods_of_its_loader():
    batches = rustloader.prefetch_to_device(Callable([1, 2]), "cpu")
    assert (batches(), bool(batches), len(batches), 2 in batches) == ("called", False, 2, True)
    assert isinstance(batches, rustloader.DeviceLoader) and list(copy.copy(batches)) == [1, 2]
    with pytest.raises(TypeError, match="'DeviceLoader' object is not subscriptable"):
        batches[0]


def test_it_has_no_special_methods_that_its_loader_lacks():
    batches = rustloader.prefetch_to_device(Failing(1, 2), "cpu")
    assert bool(batches) and not callable(batches) and not hasattr(batches, "__len__") and list(batches) == [1, 2]
    with pytest.raises(TypeError, match="'DeviceLoader' has no len"):
        len(batches)


# Order, ends, errors


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_batches_come_in_order_and_the_end_stays_the_end(device, depth, count):
    batches = prefetch(tensors(count), depth=depth)
    for _ in range(3):
        iterator, got = iter(batches), []
        for batch in iterator:
            device.read(batch, got.append)
        assert next(iterator, None) is None
        device.run_all()
        assert got == [[k] * 4 for k in range(count)]
    assert device.faults == [] and len(batches) == count


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


def test_the_consumers_stream_waits_and_the_program_does_not(device):
    iterator, got = iter(prefetch(tensors(2, 7))), []
    device.read(next(iterator), got.append)
    device.run(device.default)
    assert got == [], "the kernel ran before the copy"
    device.run_all()
    assert got == [[7] * 4] and device.faults == []


def test_an_error_keeps_its_place_and_the_loader_goes_on_after_it(device):
    one, two, three = tensors(3)
    iterator = iter(prefetch(Failing(one, two, ValueError("third"), three, KeyError("fifth")), depth=4))
    got = []
    for expected in (0, 1):
        device.read(next(iterator), got.append)
        device.run_all()
        assert got.pop() == [expected] * 4
    with pytest.raises(ValueError, match="third"):
        next(iterator)
    device.read(next(iterator), got.append)
    with pytest.raises(KeyError, match="fifth"):
        next(iterator)
    with pytest.raises(StopIteration):
        next(iterator)
    device.run_all()
    assert got == [[2] * 4]


def test_arguments_are_checked():
    for depth in (0, -1, 1.0, True, None):
        with pytest.raises(ValueError, match=f"depth must be a positive integer, got {depth}"):
            prefetch([], depth=depth)
    with pytest.raises(TypeError, match="takes an iterable of batches, not an object of type <class 'int'>"):
        prefetch(3)
    with pytest.raises(ValueError, match="'meta', which holds no data"):
        prefetch([], device="meta")


# Devices


def test_on_the_cpu_batches_are_handed_on_as_they_are():
    items = [torch.ones(2), {"a": "b"}, object()]
    for device in ("cpu", torch.device("cpu")):
        batches = prefetch(items, device=device)
        assert all(one is other for one, other in zip(batches, items, strict=True))
        assert batches.device == torch.device("cpu") and len(batches) == 3
        batches.close()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="for machines without an accelerator")
def test_without_an_accelerator_the_device_is_the_cpu():
    loader = DataLoader(Numbers(6), batch_size=2, num_workers=1)
    assert values(prefetch(loader)) == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises((RuntimeError, AssertionError)):
        prefetch(loader, device="cuda")


class FakeModule(types.ModuleType):
    def __init__(self, *names):
        super().__init__("fake")
        for name in names:
            setattr(self, name, mock.Mock())
        self.current_device = lambda: 3


STREAMS = ("Stream", "Event", "current_stream", "set_stream", "stream")


@pytest.mark.parametrize("names", [STREAMS, ("Event",)])
def test_the_device_is_that_of_the_thread_that_makes_the_prefetcher(names):
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


def test_the_module_of_the_device_is_called_as_torch_documents_it():
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
    streams.synchronize(event)
    event.synchronize.assert_called_once_with()
    tensor = mock.Mock()
    streams.record_stream(tensor, stream)
    tensor.record_stream.assert_called_once_with(stream)
    assert streams.is_capturing() is False
    module.is_current_stream_capturing = lambda: True
    assert streams.is_capturing() is True


def test_a_device_without_streams_gets_each_batch_in_its_turn():
    streams = object.__new__(NoStreams)
    streams.device = torch.device("cpu")
    streams.copy = lambda tensor: tensor.clone()
    with mock.patch("rustloader.device.prefetch.loader.streams_of", lambda asked: streams):
        items = tensors(5)
        got = list(prefetch(items))
    assert [x.tolist() for x in got] == [x.tolist() for x in items]
    assert all(one is not other for one, other in zip(got, items, strict=True))


# Loops that end early


def test_close_ends_the_loops_and_frees_their_batches(device):
    with prefetch(tensors(10), depth=3) as batches:
        first, second = iter(batches), iter(batches)
        for _ in range(3):
            next(first)
            next(second)
        assert device.live > 0
    assert device.live == 0
    for iterator in (first, second):
        with pytest.raises(RuntimeError, match="after close"):
            next(iterator)
    assert len(list(batches)) == 10
    device.run_all()
    assert device.faults == []


def test_a_handler_that_closes_within_next_frees_everything(device):
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
    with pytest.raises(RuntimeError, match="after close"):
        next(iterator)


def test_next_within_next_is_refused(device):
    def source():
        yield torch.ones(1)
        with pytest.raises(RuntimeError, match="within another next"):
            next(iterator)
        yield torch.zeros(1)

    iterator = iter(prefetch(source()))
    assert len(list(iterator)) == 2


def test_a_capture_is_refused_and_loses_nothing(device):
    iterator = iter(prefetch(tensors(2)))
    device.capturing = True
    with pytest.raises(RuntimeError, match="while a graph is being captured"):
        next(iterator)
    device.capturing = False
    assert len(list(iterator)) == 2


def test_a_forked_child_is_refused(device):
    iterator = iter(prefetch(tensors(2)))
    with mock.patch.object(Lane, "_getpid", return_value=1), pytest.raises(RuntimeError, match="forked process"):
        next(iterator)
    assert len(list(iterator)) == 2


# Several streams and threads


def test_two_consumers_get_each_batch_once(device):
    count = 200
    iterator, got, errors = iter(prefetch(tensors(count), depth=3)), [], []

    def consume():
        with device.using(device.make()):
            try:
                for batch in iterator:
                    got.append(batch)
            except BaseException as error:
                errors.append(error)

    threads = [threading.Thread(target=consume) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    device.run_all()
    assert errors == [] and sorted(x[0].item() for x in got) == list(range(count))


# Signals


def in_destructor(frame):
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


def test_what_a_handler_raises_at_any_call_loses_no_batch(device):
    """A profile function raises at the k-th call of a function or return from C, where a handler may run."""
    folder = rustloader.__path__[0]
    rounds, where = 0, []
    for at in range(1, 2000):
        counted, interrupts = [0], 0

        def profile(frame, event, argument, counted=counted, at=at):
            # Not at "return": Python runs no handler between the return of `__next__` and the loop.
            is_own = frame.f_code.co_filename.startswith(f"{folder}/device/prefetch/")
            if is_own and event in ("c_return", "call") and not in_destructor(frame):
                counted[0] += 1
                if counted[0] == at:
                    where.append((event, frame.f_code.co_name, frame.f_lineno))
                    raise KeyboardInterrupt

        items = [*tensors(3), ValueError("error"), *tensors(2, 3)]
        iterator, got = iter(prefetch(Failing(*items), depth=2)), []
        while True:
            sys.setprofile(profile)
            try:
                batch = next(iterator)
            except KeyboardInterrupt:
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
    assert rounds > 100 and counted[0] < at and device.faults == []


def test_a_loop_that_is_left_during_a_capture_records_nothing(device):
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
