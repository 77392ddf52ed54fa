"""Processes that end, fork or are killed while a pin thread works (S2, S3, S5, T14).

Each test ends a whole interpreter: one script forks a process for each way to end, which then exits as a script does.
"""

import json

import pytest
from support import run_script

# Many processes: slow on a busy machine.
pytestmark = [pytest.mark.ours, pytest.mark.timeout(900)]

HEAD = """
    import contextlib, gc, json, tempfile, threading, warnings
    from pinning_support import pinning, thread_name
    from sample_data import Given, Images, Numbers
    from support import gone, wait_until, waits_in_next, worker_pids
    from torch.utils.data import IterableDataset

    warnings.simplefilter("ignore", DeprecationWarning)

    class Act:
        act = None
        def pin_memory(self):
            return Act.act()

    class Large(IterableDataset):
        def __iter__(self):
            for i in range(100_000):
                yield torch.full((400_000,), float(i)), torch.tensor(i)

    def loader_of(dataset, **kw):
        return DataLoader(dataset, **({"batch_size": None, "num_workers": 2, "pin_memory": True} | kw))

    # At exit the collector would walk everything that torch has imported, twice: half a second for nothing.
    gc.freeze()
"""

EXITS = (
    HEAD
    + """
    def live():
        iterator = iter(loader_of(Large()))
        return iterator, next(iterator)

    def persistent():
        loader = loader_of(Numbers(9), persistent_workers=True)
        return list(loader), loader._iterator

    def fresh():
        return iter(loader_of(Large(), num_workers=1)),

    def traceback():
        def body():
            iterator = iter(loader_of(Large()))
            tell(iterator)
            next(iterator)
            raise ValueError("mine")
        try:
            body()
        except ValueError as error:
            return error,

    def acting(act):
        def start():
            began = threading.Event()
            Act.act = lambda: began.set() or act()
            iterator = iter(loader_of(Given([Act()] * 4)))
            began.wait(60)
            return iterator,
        return start

    def spin():
        while True:
            pass

    def naps():
        while True:
            time.sleep(0.001)

    def raises():
        raise SystemExit

    def stuck_after_shutdown():
        import torch.utils.data._utils as _utils
        _utils.MP_STATUS_CHECK_INTERVAL = 0.1
        (iterator,) = acting(naps)()
        tell(iterator)
        iterator._shutdown_workers()
        return iterator,

    def waiting_thread():
        Act.act = lambda: time.sleep(60)
        iterator = iter(loader_of(Given([Act()] * 4)))
        thread = threading.Thread(target=next, args=(iterator,), daemon=True)
        thread.start()
        assert waits_in_next(thread)
        return iterator, thread

    def slow_allocator():
        host.delay = 0.05
        return live()

    class Lasting:
        def __del__(self, sleep=time.sleep):
            sleep(3)

    def stuck_allocator():
        # The allocator returns while the interpreter tears down its modules.
        global lasting
        lasting = Lasting()
        (iterator,) = fresh()
        host.delay = 1.5
        host.threads.clear()
        next(iterator)
        wait_until(lambda: "rl_pin" in host.threads)
        return iterator,

    def dead_thread():
        return acting(raises)()

    WAYS = {
        "a live iterator": live, "a persistent one": persistent, "one not yet asked": fresh,
        "a frame that is kept alive": traceback, "a slow allocator": slow_allocator,
        "an allocator that outlasts the grace": stuck_allocator,
        "a type that spins": acting(spin), "a type that sleeps again and again": acting(naps),
        "a type that waits": acting(threading.Event().wait), "a thread in next()": waiting_thread,
        "a type that waited when all was shut down": stuck_after_shutdown, "a dead pin thread": dead_thread,
    }

    def tell(iterator):
        os.write(pipe, json.dumps(worker_pids(iterator)).encode() + b"\\n")

    results = {}
    context = pinning()
    host = context.__enter__()
    for name, way in WAYS.items():
        reader, pipe = os.pipe()
        errors = tempfile.TemporaryFile()
        start = time.monotonic()
        pid = os.fork()
        if pid == 0:
            os.dup2(errors.fileno(), 2)
            os.close(1)
            kept = way()
            for iterator in kept:
                if hasattr(iterator, "_workers"):
                    tell(iterator)
            break
        os.close(pipe)
        ended = wait_until(lambda: gone(pid), 120)
        if not ended:
            os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
        took = time.monotonic() - start
        with open(reader) as told:
            pids = [p for line in told.read().splitlines() for p in json.loads(line)]
        left = not wait_until(lambda: all(map(gone, pids)))
        errors.seek(0)
        results[name] = {
            "ended": ended, "status": status, "workers": len(set(pids)), "left": left,
            "stderr": errors.read().decode(),
        }
    else:
        print(json.dumps(results))
"""
)


@pytest.fixture(scope="module")
def exits():
    status, out, err = run_script(EXITS, 800)
    assert status == 0, err
    return json.loads(out)


@pytest.mark.parametrize(
    "way",
    [
        *("a live iterator", "a persistent one", "one not yet asked", "a frame that is kept alive", "a slow allocator"),
        *("a type that spins", "a type that sleeps again and again", "a type that waits"),
        *("a type that waited when all was shut down", "a thread in next()", "a dead pin thread"),
        "an allocator that outlasts the grace",
    ],
)
def test_s2_s5_the_interpreter_exits_in_silence_with(exits, way):
    ending = exits[way]
    assert ending["ended"], f"the process did not end\n{ending['stderr']}"
    assert (ending["status"], ending["stderr"]) == (0, "")
    assert ending["workers"] in (1, 2) and not ending["left"], "workers were left behind"


def test_s3_workers_leave_when_main_is_killed_while_it_pins():
    status, out, err = run_script(
        HEAD
        + """
    reader, pipe = os.pipe()
    pid = os.fork()
    if pid == 0:
        with pinning(delay=0.01):
            iterator = iter(loader_of(Large()))
            os.write(pipe, json.dumps(worker_pids(iterator)).encode() + b"\\n")
            for batch in iterator:
                os.write(pipe, b"a batch\\n")
    lines = os.fdopen(reader)
    pids = json.loads(lines.readline())
    assert lines.readline() == "a batch\\n"
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    print(wait_until(lambda: all(map(gone, pids))))
    """
    )
    assert (status, out) == (0, "True\n"), err


def test_t14_fork_while_the_thread_works():
    """50 forks while the thread is in the allocator, in a copy, or in between; every tenth child runs its own loader.
    Most children drop the iterator, and with it batches that the parent has pinned: to free one in the child would
    deadlock on the allocator's lock."""
    status, out, err = run_script(
        HEAD
        + """
    context = pinning(delay=0.01, locked=True)
    host = context.__enter__()
    loader = loader_of(Large(), prefetch_factor=8)
    iterator = iter(loader)
    for k in range(50):
        if k % 5 == 1:
            # Everything that may be outstanding is pinned and waits; `next` lets the thread continue.
            time.sleep(0.4)
        batch, label = next(iterator)
        assert batch[0] == batch[-1] and label == k // 2, (k, batch, label)
        del batch, label
        if k % 5 == 1:
            # On a busy machine the fork may miss the allocation, and then tests less.
            end = time.monotonic() + 1
            while not host.busy and time.monotonic() < end:
                time.sleep(0.0002)
        else:
            time.sleep(0.0003 * (k % 7))
        pid = os.fork()
        if pid == 0:
            thread = iterator._pin_memory_thread
            assert not thread.is_alive() and thread.join() is None
            if k % 10 == 0:
                context = pinning()
                context.__enter__()
                mine = [x.item() for x in loader_of(Numbers(8))]
                assert mine == list(range(8)), mine
            if k % 5 == 0:
                break
            del iterator, loader, thread
            os._exit(0)
        if not wait_until(lambda: gone(pid), 60):
            os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
        assert status == 0, f"child {k} ended with {status}, or hung and was killed"
    else:
        for k in range(50, 70):
            batch, label = next(iterator)
            assert batch[0] == batch[-1] and label == k // 2
        print("went on")
    """,
        800,
    )
    assert (status, out) == (0, "went on\n"), err
    assert err == ""
