"""The start itself: scripts, what cannot be sent to a worker, many workers (P9, S8)."""

import re
import signal
import sys
import threading
import warnings
from multiprocessing import forkserver

import pytest
import torch
from orders import Holds, PickledOnce
from sample_data import WhoAmI
from support import (
    TORCH_MODE,
    DataLoader,
    children,
    children_of,
    epoch,
    finish,
    gone,
    in_session,
    mappings,
    open_files,
    run_script,
    start_script,
    trim_pool,
    wait_until,
    within,
    worker_pids,
)

MINE = """
    class Mine(torch.utils.data.Dataset):
        def __len__(self):
            return 4
        def __getitem__(self, i):
            return i, SEEN
    SEEN = None
    def collate(samples):
        return "mine", samples
    def init(worker):
        global SEEN
        SEEN = f"init {worker}"
    def loader(**kw):
        return DataLoader(Mine(), batch_size=2, num_workers=1, collate_fn=collate, worker_init_fn=init, **kw)
"""
BATCHES = [("mine", [(0, "init 0"), (1, "init 0")]), ("mine", [(2, "init 0"), (3, "init 0")])]
DEATH = re.compile(r"(RuntimeError|rustloader\.WorkerDiedError):? DataLoader worker \(pid.*\) exited unexpectedly")


@pytest.mark.timeout(400)
def test_a_script_without_a_guard_is_the_error_of_multiprocessing_and_nothing_is_left(tmp_path):
    source = MINE + '    print(list(loader(multiprocessing_context="%s")))'
    process = start_script(source % "spawn", file=tmp_path / "script.py")
    status, out, err = finish(process, 300)
    assert (status, out) == (1, "")
    assert "An attempt has been made to start a new process before the" in err
    assert DEATH.search(err.replace("\n", " ")), err
    assert TORCH_MODE or "The worker ended before it could load its arguments; its own error is on stderr." in err
    assert wait_until(lambda: not in_session(process.pid))
    # Under fork there is nothing to guard.
    assert run_script(source % "fork", file=tmp_path / "other.py") == (0, f"{BATCHES}\n", "")


@pytest.mark.ours
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("argument", "arguments"),
    [
        ("dataset", "Mine([0, 1])"),
        ("collate_fn", "range(4), collate_fn=f"),
        ("worker_init_fn", "range(4), worker_init_fn=f"),
    ],
)
def test_what_a_worker_cannot_load_is_in_the_error(argument, arguments, workers, method, tmp_path):
    source = f"""
    if __name__ == "__main__":
        class Mine(list):
            pass
        def f(arg):
            return arg
        iterator = iter(DataLoader({arguments}, num_workers={workers}, multiprocessing_context="{method}"))
        for _ in range(2):
            try:
                next(iterator)
            except RuntimeError as error:
                print(error, *error.__notes__, sep="\\n")
    """
    if argument != "dataset":
        source = source.replace("class Mine(list)", "class Other(list)")
    status, out, err = run_script(source, 300, file=tmp_path / "script.py")
    assert err == ""  # Python prints nothing of its own
    lost = re.escape(
        f"exit code 1. It could not load its {argument}. Caught AttributeError in DataLoader worker process"
    )
    assert (
        status == 0
        and len(re.findall(rf"DataLoader worker \(pid \d+\) exited unexpectedly with {lost} [01]", out)) == 2
    )
    text = r"module '\w+' has no attribute" if sys.version_info >= (3, 14) else "Can't get attribute"
    assert len(re.findall(f"AttributeError: {text}", out)) == 2 and "Details are lost" not in out
    assert out.count("move these into a module, or use multiprocessing_context='fork'.") == 2


def failed_start(loader):
    """The error of iter(), and the warnings before it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            iter(loader)
        except Exception as error:
            return type(error), str(error), [(w.category, str(w.message)) for w in caught if "pickle" in str(w.message)]
    raise AssertionError("the workers were started")


@pytest.mark.ours  # torch leaves queues behind and, if the second worker does not start, the first one
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_start_that_failed_leaves_nothing(method):
    loader = DataLoader(Holds(3, [lambda: 0, threading.Lock()]), num_workers=2, multiprocessing_context=method)
    failed_start(loader)  # starts the helper processes of multiprocessing
    before = children(), mappings(), sorted(open_files().values())
    failed_start(loader)
    trim_pool()
    assert (children(), mappings(), sorted(open_files().values())) == before


@pytest.mark.ours
def test_a_worker_that_was_started_before_the_start_failed_is_ended():
    def started():
        return children_of(forkserver._forkserver._forkserver_pid)

    loader = DataLoader(PickledOnce(3), num_workers=2, multiprocessing_context="forkserver")
    assert failed_start(loader)[:2] == (TypeError, "no second time")
    # The fork server learns of an exit a moment after we do.
    assert wait_until(lambda: started() == set())


@pytest.mark.parametrize("workers", [16, 64])
def test_many_workers(workers, monkeypatch):
    dataset = WhoAmI(2 * workers)
    before = len(open_files())
    loader = DataLoader(dataset, num_workers=workers, batch_size=None, persistent_workers=True)
    expected = [[i, i % workers] for i in range(2 * workers)]
    for _ in range(2):
        assert epoch(loader) == expected
    if not TORCH_MODE:
        # For each worker, its pidfd and the two pipes of its Process.
        assert len(open_files()) - before <= 3 * workers + 4
    iterator = iter(loader)
    assert next(iterator) == [0, 0]
    pids = worker_pids(iterator)
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 240)
    with within(120):  # far less than the wait for workers that do not exit by themselves
        iterator._shutdown_workers()
    assert len(set(pids)) == workers and all(map(gone, pids))


@pytest.mark.timeout(400)
def test_the_fork_server_starts_the_users_processes_with_ctrl_c_open(tmp_path):
    """SIGINT is blocked while workers start; all processes of a server started at that time would inherit the mask."""
    source = """
    import multiprocessing, signal
    from multiprocessing import resource_tracker
    def blocked(connection):
        connection.send(signal.pthread_sigmask(signal.SIG_BLOCK, []))
    if __name__ == "__main__":
        resource_tracker.ensure_running()
        list(DataLoader(range(2), num_workers=1, multiprocessing_context="forkserver"))
        context = multiprocessing.get_context("forkserver")
        ours, theirs = context.Pipe()
        process = context.Process(target=blocked, args=(theirs,))
        process.start()
        print(ours.recv())
        process.join()
    """
    assert run_script(source, seconds=300, file=tmp_path / "script.py") == (0, "set()\n", "")


@pytest.mark.parametrize("blocked", [False, True])
@pytest.mark.forks
def test_p26_workers_have_the_signal_mask_of_the_main_process(blocked):
    before = signal.pthread_sigmask(signal.SIG_BLOCK if blocked else signal.SIG_UNBLOCK, {signal.SIGINT})
    try:
        mains = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        loader = DataLoader([0], num_workers=1, collate_fn=lambda samples: signal.pthread_sigmask(signal.SIG_BLOCK, ()))
        assert list(loader) == [mains]
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mains
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
