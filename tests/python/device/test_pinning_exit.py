"""Processes that exit while a pin thread works, waits or is stuck (S2, S5).

One script forks a process for each way, which then exits as a script does. `faults.ends` ends them in other ways, and
`faults.forks` forks them.
"""

import json

import pytest
from support import run_script

# Many processes: slow on a busy machine.
pytestmark = [pytest.mark.ours, pytest.mark.timeout(900)]

# A type may spin, sleep again and again, wait or end the thread while it is pinned.
WAYS = ["slow_allocator", "allocator_outlasts_the_grace", "type_spins", "type_naps", "type_waits", "dead_pin_thread"]
WAYS += ["thread_in_next", "stuck_after_shutdown"]

SCRIPT = """
    import gc, json, tempfile, threading, warnings
    from pinning_support import pinning
    from sample_data import Given
    from support import gone, wait_until, waits_in_next, worker_pids
    from torch.utils.data import IterableDataset, _utils

    warnings.simplefilter("ignore", DeprecationWarning)
    # At exit the collector would walk everything that torch has imported, twice: half a second for nothing.
    gc.freeze()

    class Act:
        def pin_memory(self):
            return Act.act()

    class Large(IterableDataset):
        def __iter__(self):
            for i in range(100_000):
                yield torch.full((400_000,), float(i))

    class Lasting:
        def __del__(self, sleep=time.sleep):
            sleep(3)

    def start(dataset, workers=2):
        iterator = iter(DataLoader(dataset, batch_size=None, num_workers=workers, pin_memory=True))
        os.write(pipe, json.dumps(worker_pids(iterator)).encode() + b"\\n")
        return iterator

    def start_acting(act):
        began = threading.Event()
        Act.act = lambda: began.set() or act()
        iterator = start(Given([Act()] * 4))
        began.wait(60)
        return iterator

    def slow_allocator():
        host.delay = 0.05
        iterator = start(Large())
        return iterator, next(iterator)

    def allocator_outlasts_the_grace():
        # The allocator returns while the interpreter tears down its modules.
        global lasting
        lasting = Lasting()
        iterator = start(Large(), workers=1)
        host.delay = 1.5
        host.threads.clear()
        next(iterator)
        wait_until(lambda: "rl_pin" in host.threads)
        return iterator

    def spin():
        while True:
            pass

    def nap():
        while True:
            time.sleep(0.001)

    def end_thread():
        raise SystemExit

    def type_spins():
        return start_acting(spin)

    def type_naps():
        return start_acting(nap)

    def type_waits():
        return start_acting(threading.Event().wait)

    def dead_pin_thread():
        return start_acting(end_thread)

    def thread_in_next():
        iterator = start_acting(lambda: time.sleep(60))
        thread = threading.Thread(target=next, args=(iterator,), daemon=True)
        thread.start()
        assert waits_in_next(thread)
        return iterator, thread

    def stuck_after_shutdown():
        _utils.MP_STATUS_CHECK_INTERVAL = 0.1
        iterator = start_acting(nap)
        iterator._shutdown_workers()
        return iterator

    results = {}
    context = pinning()
    host = context.__enter__()
    for way in WAYS:
        reader, pipe = os.pipe()
        errors = tempfile.TemporaryFile()
        pid = os.fork()
        if pid == 0:
            os.dup2(errors.fileno(), 2)
            os.close(1)
            kept = globals()[way]()
            break
        os.close(pipe)
        ended = wait_until(lambda: gone(pid), 120)
        if not ended:
            os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
        with open(reader) as lines:
            pids = json.loads(lines.readline() or "[]")
        left = not wait_until(lambda: all(map(gone, pids)))
        errors.seek(0)
        results[way] = [ended, status, errors.read().decode(), len(pids) in (1, 2), left]
    else:
        print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def exits():
    status, out, err = run_script(f"    WAYS = {WAYS}\n{SCRIPT}", 800)
    assert status == 0, err
    return json.loads(out)


@pytest.mark.parametrize("way", WAYS)
def test_s2_s5_the_interpreter_exits_in_silence(exits, way):
    ended, status, errors, started, left = exits[way]
    assert ended, f"the process did not end\n{errors}"
    assert (status, errors) == (0, "")
    assert started and not left, "workers were left behind"
