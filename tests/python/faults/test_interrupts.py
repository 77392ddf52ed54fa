"""Signal handlers that raise, abandoned calls, and starts that fail: nothing is lost and nothing hangs."""

import contextlib
import errno
import functools
import gc
import multiprocessing.process
import os
import signal
import sys
import threading
import time
import weakref

import pytest
import torch
from sample_data import Failing, Held, Numbers, Shards
from support import DataLoader, gone, in_time, outcome, run_script, rustloader, waits_in_next, while_next_waits

pytestmark = pytest.mark.ours


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("kind", ["tensors", "pickled", "pinned"])
def test_a_handler_that_raises_loses_no_batch_and_no_turn(kind):
    # In a process of its own: pytest-timeout uses this one's SIGALRM.
    status, out, err = run_script(f"""
        import contextlib
        from pinning_support import pinning
        from sample_data import Numbers
        kind = "{kind}"
        class Interrupted(Exception): pass
        armed = [False]
        def handler(signum, frame):
            if armed[0]:
                raise Interrupted
        signal.signal(signal.SIGALRM, handler)
        def epoch(loader):
            got, interrupts, ended = [], 0, False
            iterator = iter(loader)
            signal.setitimer(signal.ITIMER_REAL, 0.0002, 0.0002)
            while not ended:
                batch = None
                try:
                    armed[0] = True
                    # Not next(): an interrupt after a call, before the assignment, would lose it in this test.
                    for batch in iterator:
                        break
                    else:
                        ended = True
                    armed[0] = False
                except Interrupted:
                    armed[0] = False
                    interrupts += 1
                if batch is not None:
                    got.append(batch)
            signal.setitimer(signal.ITIMER_REAL, 0)
            return [int(next(iter(x["set"]))) if kind == "pickled" else x.item() for x in got], interrupts
        for in_order in (True, False):
            with pinning() if kind == "pinned" else contextlib.nullcontext():
                loader = DataLoader(Numbers(3000), num_workers=2, batch_size=None, in_order=in_order,
                                    collate_fn=(lambda x: {{"set": {{float(x)}}}}) if kind == "pickled" else None,
                                    pin_memory=kind == "pinned")
                interrupts = 0
                # On a busy machine, few signals may come in an epoch.
                for _ in range(100):
                    values, more = epoch(loader)
                    interrupts += more
                    assert sorted(values) == list(range(3000)), (len(values), more)
                    assert values == sorted(values) or not in_order
                    if interrupts > 10:
                        break
                assert interrupts > 10, interrupts
        print("all")
    """)
    assert (status, out, err) == (0, "all\n", "")


# A handler that raises, and an iterator of zeros that sends the signal before each of them, without running Python code
# in which the handler could run.
SIGNALS = """
        import ctypes, itertools
        from sample_data import Numbers
        class Interrupted(Exception): pass
        def handler(signum, frame):
            raise Interrupted
        signal.signal(signal.SIGUSR1, handler)
        def signals(count):
            return map(getattr(ctypes.CDLL(None), "raise"), [signal.SIGUSR1] * count)
"""


def test_a_signal_that_came_before_the_sampler_is_asked_does_not_end_its_generator():
    """A handler that raises inside a generator, such as a BatchSampler's, ends it, and with it the epoch."""
    status, out, err = run_script(
        SIGNALS
        + """
        ended = []
        def indices():
            try:
                for index in range(8):
                    yield index
            except Interrupted:
                ended.append(True)
                raise
        class Sampler:
            def __iter__(self):
                rest = indices()
                next(rest)
                return itertools.chain(signals(1), rest)
        loader = DataLoader(Numbers(8), sampler=Sampler(), batch_size=None, num_workers=1, prefetch_factor=2)
        try:
            iter(loader)
        except Interrupted:
            print("interrupted", ended)
    """
    )
    assert (status, out, err) == (0, "interrupted []\n", "")


@pytest.mark.parametrize("resumes", [True, False])
def test_a_batch_that_a_handler_interrupted_belongs_to_its_epoch(resumes):
    class Raises(list):
        """Raises where a signal handler could: the batch has arrived but is not yet returned."""

        def __setitem__(self, *_):
            raise Interrupted

    loader = DataLoader(Shards([3]), num_workers=1, batch_size=None, persistent_workers=True)
    whole = [batch.tolist() for batch in loader]
    iterator = iter(loader)
    iterator._workers_status = Raises([True])
    with pytest.raises(Interrupted):
        next(iterator)
    if resumes:
        iterator._workers_status = [True]
    else:
        iterator = iter(loader)
    assert [batch.tolist() for batch in iterator] == whole


def test_a_start_that_fails_half_way_is_an_error_and_the_next_one_works(monkeypatch):
    loader = DataLoader(Numbers(6), num_workers=2, persistent_workers=True, batch_size=None)
    iterator = iter(loader)
    next(iterator)
    os.kill(iterator._workers[1].pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="Killed"):
        list(iterator)
    starts = []
    real = multiprocessing.process.BaseProcess.start

    def start(self):
        starts.append(self)
        if len(starts) == 2:
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
        real(self)

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", start)
    with pytest.raises(OSError, match="Resource temporarily"):
        iter(loader)
    assert [x.item() for x in loader] == list(range(6))


def test_p19_the_timeout_is_paused_between_calls_of_next(tmp_path):
    timeout, go = 3, tmp_path / "go"

    def handler(signum, frame):
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        iterator = iter(DataLoader(Held(2, 0, go), num_workers=1, batch_size=None, timeout=timeout))
        start = time.monotonic()
        with pytest.raises(Interrupted):
            while_next_waits(os.kill, os.getpid(), signal.SIGUSR1)
            next(iterator)
        left = timeout - (time.monotonic() - start)
        time.sleep(timeout)
        thread, start = while_next_waits(go.touch), time.monotonic()
        result = outcome(next, iterator)
        # Without a batch, the call has waited for the remaining time.
        assert result == ("value", 0) or time.monotonic() - start >= left
        assert result == ("value", 0) or in_time(next, iterator) == ("value", 0)
        thread.join()
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.forks
def test_t14_an_inherited_iterator_is_dead_in_a_child():
    status, out, err = run_script("""
        import multiprocessing
        from sample_data import Numbers
        loader = DataLoader(Numbers(40), num_workers=2, persistent_workers=True, batch_size=None)
        iterator = iter(loader)
        first = next(iterator).item()
        pid = os.fork()
        if pid == 0:
            try:
                next(iterator)
            except RuntimeError as error:
                assert "belongs to the process" in str(error), error
                iterator._shutdown_workers()
                # A new epoch of the inherited loader has workers of its own.
                assert [x.item() for x in loader] == list(range(40))
                sys.exit(7)  # multiprocessing terminates its daemonic processes here
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        assert all(worker.is_alive() for worker in iterator._workers)
        print([first] + [x.item() for x in iterator] == list(range(40)))
        child = multiprocessing.Process(target=lambda: list(DataLoader(Numbers(4), num_workers=1)))
        child.start(), child.join()
        print(child.exitcode, len(list(loader)))
    """)
    assert (status, out, err) == (0, "True\n0 40\n", "")


def test_a_child_that_has_closed_everything_keeps_its_own_files():
    status, out, err = run_script("""
        import gc
        from sample_data import Numbers, Shards
        iterator = iter(DataLoader(Numbers(40), num_workers=2, batch_size=None))
        first = next(iterator).item()
        pid = os.fork()
        if pid == 0:
            os.closerange(3, 200)
            files = [os.open("/dev/null", os.O_RDONLY) for _ in range(60)]
            del iterator
            gc.collect()
            os._exit(sum(1 for fd in files if not os.path.exists(f"/proc/self/fd/{fd}")))
        print(os.waitpid(pid, 0)[1], [first] + [x.item() for x in iterator] == list(range(40)))
    """)
    assert (status, out, err) == (0, "0 True\n", "")


def test_a_shutdown_ends_the_wait_of_another_thread(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.3)
    loader = DataLoader(Held(2, 0, tmp_path / "never"), num_workers=1, batch_size=None)
    iterator = iter(loader)
    seen = []

    def take():
        try:
            next(iterator)
        except RuntimeError as error:
            seen.append(str(error))

    thread = threading.Thread(target=take)
    thread.start()
    assert waits_in_next(thread)
    iterator._shutdown_workers()
    thread.join(60)
    assert not thread.is_alive()
    assert seen == ["the DataLoader iterator has been shut down"]


def test_an_interrupt_while_the_last_reference_goes_is_not_lost():
    """Python only prints what is raised in a destructor. Here a stuck worker makes the destructor wait."""
    status, out, err = run_script("""
        import threading
        from rustloader.workers import group
        from sample_data import Slow
        group.INTERRUPT_AFTER = 2  # on a busy machine the end of the destructor may take a while
        loader = DataLoader(Slow(9, {1: 60, 2: 60}), num_workers=1, batch_size=None)
        iterator = iter(loader)
        next(iterator)
        try:
            threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
            del iterator
            threading.Event().wait()
        except KeyboardInterrupt:
            print("caught")
    """)
    assert (status, out, err) == (0, "caught\n", "")


def test_an_interrupt_in_a_workers_exit_functions_prints_nothing():
    """With torch, multiprocessing prints a traceback."""
    status, out, err = run_script("""
        import multiprocessing.util
        from sample_data import Numbers
        def interrupt():
            os.kill(os.getpid(), signal.SIGINT)
        def init_fn(worker_id):
            multiprocessing.util.Finalize(None, interrupt, exitpriority=98)
            multiprocessing.util.Finalize(None, print, args=("leaves",), kwargs={"flush": True}, exitpriority=99)
        print([int(x) for x in DataLoader(Numbers(4), num_workers=1, batch_size=None, worker_init_fn=init_fn)])
    """)
    assert (status, out.splitlines(), err) == (0, ["leaves", "[0, 1, 2, 3]"], "")


def test_repeated_interrupts_print_nothing_wherever_they_hit_a_worker():
    status, out, err = run_script("""
        import multiprocessing, threading
        from sample_data import Numbers
        shoot = multiprocessing.Event()
        def shots():
            shoot.wait()
            while True:
                os.kill(os.getpid(), signal.SIGINT)
        def init_fn(worker_id):
            threading.Thread(target=shots, daemon=True).start()
        loader = DataLoader(Numbers(4), num_workers=2, batch_size=None, worker_init_fn=init_fn, persistent_workers=True)
        print([int(x) for x in loader])
        shoot.set()
        for worker in loader._iterator._workers:
            worker.join()
    """)
    assert (status, out, err) == (0, "[0, 1, 2, 3]\n", "")


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
@pytest.mark.forks
def test_a_signal_during_a_fork_is_not_lost_where_there_are_other_threads(name):
    """The kernel delivers it to a thread that does not block it. Python then runs the handler in the fork's hooks,
    which discard exceptions."""
    status, out, err = run_script(
        f"""
        import threading
        from sample_data import Numbers
        number = signal.{name}
        def handler(*_):
            raise KeyError("it came")
        signal.signal(number, handler)
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
        times, armed = 0, True
        def send():
            global times
            if armed:
                times += 1
                os.kill(os.getpid(), number)
        os.register_at_fork(before=send)
        loader = DataLoader(Numbers(4), num_workers=2, batch_size=None)
        try:
            list(loader)
            print("lost")
        except KeyError as error:
            print(error, times, signal.getsignal(number) is handler)
        armed = False
        try:
            os.kill(os.getpid(), number)
            time.sleep(60)
        except KeyError:
            print([int(x) for x in loader])
        """
    )
    assert (status, out.splitlines(), err) == (0, ["'it came' 2 True", "[0, 1, 2, 3]"], "")


@pytest.mark.forks
@pytest.mark.parametrize("installs", ["signal.signal(signal.SIGINT, handler)", ""], ids=["handler", "default"])
def test_an_interrupt_while_a_thread_starts_workers_wakes_the_main_thread(installs):
    status, out, err = run_script(
        f"""
        import threading
        class Came(Exception): pass
        def handler(*_):
            raise Came
        {installs}
        armed, ends = threading.Event(), threading.Event()
        def send():
            if armed.is_set() and threading.current_thread() is thread:
                armed.clear()
                os.kill(os.getpid(), signal.SIGINT)
        os.register_at_fork(before=send)
        def epochs():
            while not ends.is_set():
                list(DataLoader(range(2), num_workers=1, batch_size=None))
        def switches():
            return [line for line in open(f"/proc/self/task/{{os.getpid()}}/status") if "ctxt" in line]
        def arm():
            before = None
            while before != switches():  # main is still awake
                before = switches()
                time.sleep(0.05)
            armed.set()
        thread = threading.Thread(target=epochs)
        thread.start()
        for _ in range(20):
            arming = threading.Thread(target=arm)
            arming.start()
            try:
                thread.join()
            except (Came, KeyboardInterrupt):
                arming.join()
        ends.set()
        thread.join()
        print("woken each time")
        """
    )
    assert (status, out, err) == (0, "woken each time\n", "")


@pytest.mark.forks
def test_a_sigterm_that_comes_after_a_ctrl_c_during_a_start_is_not_lost():
    """The start holds both back, and the handler of the first one raises."""
    status, out, err = run_script(
        """
        from sample_data import Numbers
        class Terminated(Exception): pass
        def handler(*_):
            raise Terminated
        signal.signal(signal.SIGTERM, handler)
        armed = True
        def send():
            if armed:
                os.kill(os.getpid(), signal.SIGINT)
        os.register_at_fork(before=send)
        loader = DataLoader(Numbers(4), num_workers=2, batch_size=None)
        try:
            list(loader)
        except KeyboardInterrupt:
            print("interrupted")
        armed = False
        for number in (signal.SIGTERM, signal.SIGINT):
            try:
                os.kill(os.getpid(), number)
                time.sleep(60)
            except (Terminated, KeyboardInterrupt) as error:
                print(type(error).__name__)
        print([int(x) for x in loader], signal.pthread_sigmask(signal.SIG_BLOCK, []))
        """
    )
    expected = ["interrupted", "Terminated", "KeyboardInterrupt", "[0, 1, 2, 3] set()"]
    assert (status, out.splitlines(), err) == (0, expected, "")


# A start that is interrupted while it closes a file leaves that to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_handler_that_raises_at_any_line_of_a_start_leaves_no_worker(method, monkeypatch):
    from rustloader.workers import process
    from rustloader.workers.group import WorkerGroup

    pids, lines = [], []

    def start(worker, name, start=process.start):
        start(worker, name)
        pids.append(worker.pid)

    def handler(*_):
        raise Interrupted

    def interrupted_at(number):
        """Calls iter(loader), with a signal at the line of this number in the starts."""

        def trace(frame, *_):
            return trace_line if frame.f_code is WorkerGroup._start_one.__code__ else None

        def trace_line(frame, event, _):
            if event == "line":
                lines.append(frame.f_lineno)
                if len(lines) == number:
                    signal.raise_signal(signal.SIGUSR1)
            return trace_line

        lines.clear()
        tracer = sys.gettrace()
        sys.settrace(trace)
        try:
            return iter(loader)
        finally:
            sys.settrace(tracer)

    monkeypatch.setattr(process, "start", start)
    before, mask = signal.signal(signal.SIGUSR1, handler), signal.pthread_sigmask(signal.SIG_BLOCK, [])
    loader = DataLoader(Numbers(4), num_workers=2, batch_size=None, multiprocessing_context=method)
    try:
        assert [x.item() for x in interrupted_at(None)] == list(range(4))
        count = len(lines)
        for number in range(1, count + 1):
            with pytest.raises(Interrupted):
                interrupted_at(number)
            assert all(map(gone, pids)), f"line {lines[-1]}"
            assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == mask, f"line {lines[-1]}"
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(pids) > count / 2 > 5


@pytest.mark.ours
@pytest.mark.parametrize("kind", ["function", "resets itself", "method", "object", "partial", "varargs", "cached"])
def test_an_error_of_a_handler_is_recognized(kind):
    from rustloader.system.interrupts import is_interrupt

    def handler(number, frame):
        if kind == "resets itself":
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
        raise TimeoutError

    class Handler:
        def method(self, number, frame):
            raise TimeoutError

        __call__ = method

    handlers = {
        "method": Handler().method,
        "object": Handler(),
        "partial": functools.partial(lambda x, number, frame: handler(number, frame), 1),
        "varargs": lambda *arguments: handler(*arguments),
        "cached": functools.lru_cache(handler),
    }

    def interrupted():
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        time.sleep(60)

    before = signal.signal(signal.SIGALRM, handlers.get(kind, handler))
    try:
        assert is_interrupt(error_of(interrupted))
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.ours
def test_an_error_of_the_code_itself_is_no_interrupt():
    from rustloader.system.interrupts import is_interrupt

    def handler(*arguments):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, handler)
    try:
        # The code calls the handler itself, as it may one that saves a checkpoint; or an interrupt is being handled.
        assert not is_interrupt(error_of(handler))
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            assert not is_interrupt(error_of(lambda: {}["missing"]))
    finally:
        signal.signal(signal.SIGALRM, before)


def error_of(function):
    try:
        function()
    except Exception as error:
        return error
    raise AssertionError("no error")


@pytest.mark.ours
@pytest.mark.parametrize("kw", [{}, {"on_error": "skip"}], ids=str)
@pytest.mark.parametrize("stateful", [False, True])
def test_an_error_that_was_examined_keeps_nothing_alive(stateful, kw):
    loader_class = rustloader.StatefulDataLoader if stateful else rustloader.DataLoader
    gc.disable()
    try:
        iterator = loader_class(Failing(8, {1: ValueError}), batch_size=2, **kw)._get_iterator()
        kept = weakref.ref(iterator)
        with contextlib.suppress(ValueError):
            next(iterator)
        del iterator
        assert kept() is None
    finally:
        gc.enable()
