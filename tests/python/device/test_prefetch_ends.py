"""`prefetch_to_device` in whole processes: exit, forks, Ctrl-C; also on a GPU, where there is one."""

import json
import threading
from unittest import mock

import pytest
import torch
from prefetch_support import prefetch, tensors
from sample_data import Images
from standin import StandIn
from support import DataLoader, finish, gone, run_script, start_script, values, wait_until

pytestmark = [pytest.mark.ours, pytest.mark.timeout(300)]

HEAD = """
    import gc, json, threading
    import rustloader
    from prefetch_support import on
    from rustloader.device.prefetch.streams import NoStreams
    from sample_data import Numbers, Slow
    from standin import StandIn

    class Cloning(NoStreams):
        def __init__(self):
            self.device, self.copy = torch.device("cuda", 0), torch.Tensor.clone

    side = {side!r}
    if side != "card":
        device = StandIn() if side == "stand-in" else Cloning()
        on(device).__enter__()

    def prefetched(dataset):
        loader = DataLoader(dataset, num_workers=2, batch_size=2, pin_memory=side == "card")
        return rustloader.prefetch_to_device(loader)

    def pids(iterator):
        return [worker.pid for worker in iterator._inner._workers]

    def say(*words):
        print(*words, flush=True)
"""
CARD = pytest.param(
    "card",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")],
)
sides = pytest.mark.parametrize("side", ["stand-in", "without streams", CARD])


def run(side, source):
    status, out, err = run_script(HEAD.format(side=side) + source)
    assert (status, err) == (0, ""), err
    return out


def started(side, source):
    """Starts a script that prints its workers' pids in its first line. Returns (process, pids)."""
    process = start_script(HEAD.format(side=side) + source)
    return process, [int(pid) for pid in process.stdout.readline().split()]


@sides
@pytest.mark.parametrize(
    "keep",
    [
        "kept = iterator",
        "kept = [iterator]; kept.append(kept); gc.disable(); del kept, iterator, batches",
        "kept = threading.local(); kept.iterator = iterator; sys.modules['kept'] = kept",
    ],
    ids=["variable", "cycle", "module"],
)
def test_a_loop_that_is_under_way_at_the_exit(side, keep):
    run(
        side,
        f"""
    batches = prefetched(Numbers(40))
    iterator = iter(batches)
    batch = [next(iterator) for _ in range(3)]
    {keep}
        """,
    )


@sides
def test_a_daemon_thread_that_is_in_next_at_the_exit(side):
    run(
        side,
        """
    iterator = iter(prefetched(Slow(40, {20: 30})))
    taken = threading.Event()
    def consume():
        for k, _ in enumerate(iterator):
            if k == 6:
                taken.set()
    threading.Thread(target=consume, daemon=True).start()
    assert taken.wait(60)
    time.sleep(0.3)
        """,
    )


@sides
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_child_ends_in_peace_and_the_loop_goes_on(side):
    out = run(
        side,
        """
    import warnings
    warnings.simplefilter("ignore", DeprecationWarning)
    iterator = iter(prefetched(Numbers(40)))
    got = [next(iterator) for _ in range(3)]
    pid = os.fork()
    if pid == 0:
        try:
            next(iterator)
        except RuntimeError as error:
            assert "forked process" in str(error)
        else:
            raise AssertionError
        del iterator
        gc.collect()
        sys.exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    got += iterator
    if side == "stand-in":
        device.run_all()
        assert device.faults == []
    say(json.dumps([x.tolist() for x in got]))
        """,
    )
    assert json.loads(out) == [[k, k + 1] for k in range(0, 40, 2)]


@sides
def test_a_ctrl_c_in_next_ends_the_loop_and_its_workers(side):
    process, pids = started(
        side,
        """
    from support import wait_until, waits_in_next
    iterator = iter(prefetched(Slow(40, {20: 60})))
    first = next(iterator)
    say(*pids(iterator))
    def interrupt():
        # Sample 20, in the eleventh batch, takes a minute.
        if wait_until(lambda: iterator._inner._num_yielded == 10) and waits_in_next():
            os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=interrupt).start()
    try:
        for k, batch in enumerate(iterator):
            say(k)
    except KeyboardInterrupt:
        del iterator
        gc.collect()
        say("interrupted")
        """,
    )
    assert len(pids) == 2
    status, out, err = finish(process)
    assert (status, err) == (0, "") and out.endswith("interrupted\n")
    assert wait_until(lambda: all(map(gone, pids)), 20)


# In this process


def test_the_pin_thread_and_the_prefetcher_together(host, device):
    """Pinned memory goes to the next batch once it is freed, unless a copy still reads it."""
    device.is_pinned, copy = host.owns, device.copy

    def copy_pinned(tensor):
        use = host.use(tensor)
        moved = copy(tensor)
        device._queue(device.current(), use.done)
        return moved

    device.copy = copy_pinned
    dataset = Images(60)
    batches, sums = prefetch(DataLoader(dataset, batch_size=4, num_workers=2, pin_memory=True), depth=2), []
    for epoch in range(3):
        for k, (images, labels) in enumerate(batches):
            device.read(images, lambda values: sums.append(sum(values)))
            device.read(labels, lambda values: None)
            # The copies are held back for some batches, and then run.
            if k % 5 == epoch:
                device.run_all()
            del images, labels
    device.run_all()
    expected = [sum(x.sum().item() for x in map(dataset.image, range(k, k + 4))) for k in range(0, 60, 4)]
    assert sums == pytest.approx(expected * 3)
    assert host.reused > 0 and device.faults == [] and device.live == 0


def test_two_devices_at_once():
    devices, items, got = [StandIn(index=index) for index in range(2)], tensors(30), [[], []]
    with mock.patch("rustloader.device.prefetch.loader.streams_of", lambda asked: devices[torch.device(asked).index]):
        both = [prefetch(items, device=f"cuda:{index}") for index in range(2)]

    def consume(index):
        for batch in both[index]:
            devices[index].read(batch, got[index].append)
            devices[index].run_all()

    for pair in zip(*both, strict=True):
        for device, batch, values_read in zip(devices, pair, got, strict=True):
            device.read(batch, values_read.append)
    del pair, batch
    for device in devices:
        device.run_all()
    threads = [threading.Thread(target=consume, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for index, device in enumerate(devices):
        assert both[index].device == torch.device("cuda", index)
        assert got[index] == values(items) * 2
        assert device.copies == 60 and device.faults == [] and device.live == 0
