"""The end of the main process: SIGKILL, Ctrl-C, interpreter exit (S2, S3, S5)."""

import os
import signal

import pytest
from support import finish, gone, run_script, shared_memory_of, start_script, wait_until, within

pytestmark = pytest.mark.ours

START = """
    import rustloader
    from sample_data import Held, Images, Numbers, Slow
    from support import waits_in_next, while_main_is_in, while_next_waits, workers_report
    def told(iterator):
        print(*[w.pid for w in iterator._workers], flush=True)
        return iterator
"""


def started(source, **kw):
    """Starts a script that prints its workers' PIDs on its first line; returns (process, pids)."""
    process = start_script(START + source, **kw)
    return process, [int(p) for p in process.stdout.readline().split()]


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_s3_workers_leave_when_main_is_killed_even_inside_an_item(context):
    process, pids = started(f"""
    if __name__ == "__main__":
        dataset = Slow(9, {{4: 60, 5: 60}})
        loader = DataLoader(dataset, num_workers=2, batch_size=None, multiprocessing_context="{context}")
        iterator = told(iter(loader))
        for _ in range(4):
            next(iterator)
        assert workers_report(iterator, state="fetch")
        print("inside", flush=True)
        next(iterator)
    """)
    assert len(pids) == 2 and process.stdout.readline() == "inside\n", process.stderr.read()
    os.kill(process.pid, signal.SIGKILL)
    assert wait_until(lambda: all(map(gone, pids)), 20)
    finish(process)
    assert not shared_memory_of([*pids, process.pid])


def test_a_second_ctrl_c_while_the_workers_end_adds_no_traceback():
    process, pids = started("""
    from rustloader.workers import group
    group.EXIT_GRACE = 60
    while_main_is_in(group._gone, lambda _: print("ending", flush=True))
    iterator = told(iter(DataLoader(Slow(9, {1: 120}), num_workers=1, batch_size=None)))
    next(iterator)
    assert workers_report(iterator, state="fetch")
    print("ready", flush=True)
    time.sleep(120)
    """)
    assert process.stdout.readline() == "ready\n"
    os.kill(process.pid, signal.SIGINT)
    assert process.stdout.readline() == "ending\n"
    os.kill(process.pid, signal.SIGINT)
    with within(30):
        status, _, err = finish(process)
    assert status in (130, -signal.SIGINT)
    assert err.count("Traceback (most recent call last)") == 1, err
    assert err.rstrip().endswith("KeyboardInterrupt"), err
    assert wait_until(lambda: all(map(gone, pids)))


def exits(source, workers=2, silent=True):
    process, pids = started(source)
    with within(60):
        status, _, err = finish(process, 90)
    assert status == 0, err
    assert not (silent and err), err
    assert len(pids) == workers and wait_until(lambda: all(map(gone, pids)))


EXITS = {
    "live iterator": "kept = told(iter(loader)); next(kept)",
    "local iterator": "def f():\n        it = told(iter(loader)); next(it); sys.exit(0)\n    f()",
    "traceback": """def f():
        iterator = told(iter(loader)); next(iterator)
        raise ValueError("mine")
    try:
        f()
    except ValueError as e:
        kept = e""",
    "cycle": """class Holder: pass
    holder = Holder(); holder.it = told(iter(loader)); holder.me = holder; next(holder.it); del holder""",
    "persistent": """loader = DataLoader(Numbers(8), num_workers=2, persistent_workers=True)
    list(loader); told(loader._iterator)""",
    "many": """kept = [iter(loader) for _ in range(4)]
    [next(k) for k in kept]; told(kept[0])""",
    "thread": """import threading
    running = threading.Event()
    def f():
        it = told(iter(loader)); next(it); running.set()
        while True:
            next(it); it = iter(loader)
    threading.Thread(target=f, daemon=True).start()
    running.wait()""",
    "module": "sys.modules['math'].kept = told(iter(loader)); next(sys.modules['math'].kept)",
    "busy": """loader = DataLoader(Slow(9, dict.fromkeys(range(9), 120)), num_workers=2)
    kept = told(iter(loader)); assert workers_report(kept, state="fetch")""",
    "shared queue": """kept = told(iter(DataLoader(Numbers(90), num_workers=2, dispatch="shared_queue")))
    next(kept); assert workers_report(kept, state="idle")""",
    "stopped": """kept = told(iter(loader)); next(kept)
    os.kill(kept._workers[1].pid, signal.SIGSTOP)""",
    "stubborn": """def ignore(_): signal.signal(signal.SIGTERM, signal.SIG_IGN)
    loader = DataLoader(Slow(9, dict.fromkeys(range(9), 120)), num_workers=2, worker_init_fn=ignore)
    kept = told(iter(loader)); assert workers_report(kept, state="fetch")""",
}


@pytest.mark.parametrize("name", EXITS)
def test_s2_s5_the_interpreter_exits_whatever_holds_the_iterator(name):
    source = f"""
    loader = DataLoader(Numbers(40), num_workers=2)
    {EXITS[name]}
    """
    # In a thread, next() may report that the iterator has been shut down.
    exits(source, silent=name != "thread")


# Where a daemon thread is when finalization begins. It resumes while the modules are torn down, and up to Python 3.13
# is terminated on the spot, with Rust's frames on its stack.
SAMPLER = """class Sampler:
        def __iter__(self):
            yield from range(4)
            nap(HOW)
        def __len__(self):
            return 40
    loader = DataLoader(Numbers(40), num_workers=2, batch_size=None, sampler=Sampler(), prefetch_factor=1)"""
DAEMON_THREADS = {
    "sampler": SAMPLER.replace("HOW", ""),
    "computing sampler": SAMPLER.replace("HOW", "time.monotonic"),
    "method for the next index": """class Iter(rustloader.iterator.core._MultiProcessingDataLoaderIter):
        drawn = 0
        def _next_index(self):
            self.drawn += 1
            if self.drawn == 5:
                nap()
            return super()._next_index()
    class Loader(DataLoader):
        def _get_iterator(self):
            return Iter(self)
    loader = Loader(Numbers(40), num_workers=2, batch_size=None, prefetch_factor=1)""",
    "index that is pickled": """class Key:
        def __init__(self, number):
            self.number = number
        def __reduce__(self):
            if self.number == 4:
                nap()
            return Key, (self.number,)
    class Keyed(Numbers):
        def __getitem__(self, key):
            return torch.tensor(key.number)
    keys = [Key(i) for i in range(40)]
    loader = DataLoader(Keyed(40), num_workers=2, batch_size=None, sampler=keys, prefetch_factor=1)""",
    "batch that is unpickled": """class Item:
        def __init__(self, number):
            self.number = number
        def __setstate__(self, state):
            if state["number"] == 2:
                nap()
    class Items(Numbers):
        def __getitem__(self, i):
            return Item(i)
    loader = DataLoader(Items(40), num_workers=2, batch_size=None, prefetch_factor=1)""",
    "log": """import logging
    class Handler(logging.Handler):
        def createLock(self):
            self.lock = None  # logging's own exit hook would wait for the lock
        def emit(self, record):
            nap()
    logging.getLogger("rustloader").addHandler(Handler())
    os.environ.update(RUSTLOADER_STALL_ITEM_SECONDS="0.2", RUSTLOADER_STALL_STACK_SECONDS="0")
    loader = DataLoader(Slow(40, {2: 60, 3: 60}), num_workers=2, batch_size=None, prefetch_factor=1)""",
    "section without the GIL": """import rustloader
    class Endless:
        def __iter__(self):
            there.set()
            while True:
                rustloader._core._trim_pool()
    loader = DataLoader(Numbers(40), num_workers=2)""",
}


@pytest.mark.parametrize("where", DAEMON_THREADS)
def test_s2_a_daemon_thread_may_resume_while_the_interpreter_ends(where):
    exits(f"""
    import gc, threading
    gc.freeze()
    class Lasting:
        def __del__(self, sleep=time.sleep):
            sleep(1)
    lasting = Lasting()
    there = threading.Event()
    def nap(how=lambda: time.sleep(0.01)):
        there.set()
        while True:
            how()
    Endless = None
    {DAEMON_THREADS[where]}
    iterator = told(iter(loader))
    def run():
        for _ in iterator if Endless is None else Endless():
            pass
    threading.Thread(target=run, daemon=True).start()
    assert there.wait(60)
    """)


def test_workers_that_a_daemon_thread_is_ending_do_not_hold_up_the_exit():
    """multiprocessing's exit hook would join them without a timeout."""
    source = """
    import threading
    torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 600
    def init_fn(_):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    loader = DataLoader(Slow(9, {1: 600}), num_workers=1, batch_size=None, worker_init_fn=init_fn)
    iterator = told(iter(loader))
    next(iterator)
    assert workers_report(iterator, state="fetch")
    threading.Thread(target=iterator._shutdown_workers, daemon=True).start()
    while not iterator._core.closing:
        time.sleep(0.01)
    """
    exits(source, workers=1)


def test_a_daemon_thread_does_not_mistake_the_exit_for_the_end_of_its_epoch():
    status, out, err = run_script("""
        import threading
        from rustloader.workers import group
        from sample_data import Numbers
        has_one, go, ended = threading.Event(), threading.Event(), threading.Event()
        iterator = iter(DataLoader(Numbers(40), num_workers=2))
        def run():
            for _ in iterator:
                has_one.set()
                go.wait()
            ended.set()
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        assert has_one.wait(60)
        group._end_all()
        go.set()
        print(ended.wait(1), thread.is_alive(), list(iterator))
    """)
    assert (status, out, err) == (0, "False True []\n", "")


def test_a_shutdown_does_not_wait_on_a_file_that_reuses_the_number_of_a_sentinel():
    """multiprocessing would wait for it, without a timeout."""
    status, out, err = run_script("""
        from sample_data import Numbers
        loader = DataLoader(Numbers(8), num_workers=2, batch_size=None, multiprocessing_context="forkserver")
        iterator = iter(loader)
        next(iterator)
        silent, _ = os.pipe()
        for worker in iterator._workers:
            os.dup2(silent, worker.sentinel)
        iterator._shutdown_workers()
        print("through")
    """)
    assert (status, out, err) == (0, "through\n", "")


def test_a_foreign_sigterm_that_is_pending_at_the_shutdown_does_not_hide_mains(tmp_path):
    """Two pending SIGTERMs merge into one, with the sender of the first."""
    status, out, err = run_script(
        f"""
        import pathlib, subprocess
        from sample_data import Numbers
        from support import while_main_is_in
        from rustloader.workers import group
        folder = pathlib.Path({str(tmp_path)!r})
        class Busy(Numbers):
            def __getitem__(self, i):
                if i == 1:
                    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
                    (folder / "there").touch()
                    while not (folder / "go").exists():
                        time.sleep(0.01)
                    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
                    time.sleep(60)
                return torch.tensor(i)
        signal.signal(signal.SIGTERM, lambda *_: None)
        group.KILL_AFTER = 60
        torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.1
        iterator = iter(DataLoader(Busy(4), num_workers=1, batch_size=None))
        next(iterator)
        while not (folder / "there").exists():
            time.sleep(0.01)
        [worker] = iterator._workers
        subprocess.run(["kill", "-TERM", str(worker.pid)], check=True)
        # The worker continues once the main process has sent its own SIGTERM and waits for the worker to end.
        def go_on(frame):
            if frame.f_locals["seconds"] != group.KILL_AFTER:
                return False
            (folder / "go").touch()
        while_main_is_in(group._gone, go_on)
        iterator._shutdown_workers()
        print(worker.exitcode)
        """
    )
    assert (status, out, err) == (0, "0\n", "")
