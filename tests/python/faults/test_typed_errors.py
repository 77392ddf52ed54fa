"""The loader's own errors, what they keep alive, and batches whose unpickling fails or is interrupted."""

import gc
import os
import pickle
import signal
import types
import weakref

import pytest
from sample_data import Dying, Failing, Held, Numbers
from support import DataLoader, gone, run_script, rustloader, wait_until, worker_pids
from torch.utils.data import IterableDataset, Subset

pytestmark = pytest.mark.ours


def raised_by(function, *args, kind=Exception):
    with pytest.raises(kind) as caught:
        function(*args)
    return caught.value


class Rebinding(Failing):
    """The frame of `__getitem__` no longer holds the index."""

    def __getitem__(self, index):
        index = index % 3 + 4
        return super().__getitem__(index)


class Broken(IterableDataset):
    def __iter__(self):
        yield from range(3)
        raise ValueError("broken")


AT_5 = {5: ValueError}


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
@pytest.mark.parametrize("options", [{}, {"seed_by": "sample"}, {"max_restarts": 1}], ids=str)
def test_the_error_of_a_sample_has_a_note(method, options):
    """Its batch is numbered from the start of the epoch."""
    options = {"multiprocessing_context": method, "persistent_workers": True, **options}
    loader = DataLoader(Failing(8, AT_5), 2, num_workers=2, **options)
    for _ in range(2):
        iterator = iter(loader)
        next(iterator), next(iterator)
        error = raised_by(next, iterator, kind=ValueError)
        assert str(error).startswith("Caught ValueError in DataLoader worker process 0.\nOriginal Traceback")
        assert error.__notes__ == ["Worker 0 was fetching batch 2 (index [4, 5]), and was at sample 5."]
        assert next(iterator).tolist() == [6, 7]


@pytest.mark.parametrize(
    "dataset, arguments, note",
    [
        (lambda: Failing(8, AT_5), {"batch_size": None}, "batch 5 (index 5)."),
        (lambda: Rebinding(8, AT_5), {"batch_size": 4}, "batch 0 (index [0, 1, 2, 3])."),
        (lambda: Subset(Failing(8, AT_5), [6, 5, 4]), {"batch_size": 3}, "batch 0 (index [0, 1, 2])."),
        (Broken, {"batch_size": 2}, "batch 1."),
        (
            lambda: Failing(6, AT_5),
            {"batch_size": 6, "worker_threads": 2},
            "batch 0 (index [0, 1, 2, 3, 4, 5]), and was at sample 5.",
        ),
    ],
)
def test_a_note_names_no_uncertain_sample(dataset, arguments, note):
    error = raised_by(list, DataLoader(dataset(), num_workers=1, **arguments), kind=ValueError)
    assert error.__notes__ == [f"Worker 0 was fetching {note}"]


def test_the_death_of_an_idle_worker_has_no_index():
    loader = DataLoader(Numbers(2), num_workers=1, batch_size=None, persistent_workers=True)
    assert len(list(loader)) == 2
    pid = worker_pids(loader._iterator)[0]
    os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: gone(pid))
    error = raised_by(iter, loader, kind=rustloader.WorkerDiedError)
    assert (error.index, error.pid, error.__notes__) == (None, pid, ["Worker 0 had no outstanding batch."])


def test_a_timeout_is_an_error_of_two_kinds(tmp_path):
    iterator = iter(DataLoader(Held(2, 0, tmp_path / "go"), num_workers=1, batch_size=None, timeout=0.1))
    error = raised_by(next, iterator, kind=TimeoutError)
    (tmp_path / "go").touch()
    for it in (error, pickle.loads(pickle.dumps(error))):
        assert type(it) is rustloader.LoaderTimeoutError and isinstance(it, RuntimeError)
        assert str(it) == "DataLoader timed out after 0.1 seconds"


def test_a_handler_that_raises_while_an_exit_code_is_awaited_is_not_swallowed():
    from rustloader.supervision import deaths

    class Process:
        exitcode = 3

        @property
        def sentinel(self):
            signal.raise_signal(signal.SIGUSR1)

    def handler(*_):
        raise TimeoutError("handler")

    # What the engine reports when only the fork server knows how a worker ended.
    death = types.SimpleNamespace(worker_id=0, pid=1, exitcode=None, signal=None, index=None, stalled=False)
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(TimeoutError, match="handler"):
            deaths.error_of(death, Process())
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert deaths.error_of(death, None)().exitcode is None


def test_an_unraised_error_of_the_sampler_keeps_no_iterator_alive():
    """Its traceback refers to the iterator, which the garbage collector must be able to collect."""

    class Sampler:
        rest = 6

        def __iter__(self):
            return self

        def __next__(self):
            self.rest -= 1
            if self.rest < 0:
                raise LookupError("drawn")
            return 0

    iterator = iter(DataLoader(Numbers(4), sampler=Sampler(), num_workers=2, batch_size=None))
    # Four indices are drawn ahead. The third call draws the seventh.
    assert [next(iterator).item() for _ in range(3)] == [0, 0, 0]
    pids, reference = worker_pids(iterator), weakref.ref(iterator)
    del iterator
    gc.collect()
    assert reference() is None and all(map(gone, pids))


class FailsToCollate:
    def __call__(self, samples):
        raise KeyError("collated")


class FailsToDraw:
    def __iter__(self):
        # Beyond the tasks that begin an epoch: iter() raises the errors of those.
        yield from [0] * 6
        raise LookupError("drawn")


class Hopeless:
    """Cannot be unpickled in the main process."""

    def __init__(self, pid=None):
        self.pid = os.getpid() if pid is None else pid

    def __setstate__(self, state):
        if os.getpid() != state["pid"]:
            raise ValueError("unpickled")


WAYS = {
    "dataset": (ValueError, lambda go: dict(dataset=Failing(4, {1: ValueError}), batch_size=None)),
    "collate": (KeyError, lambda go: dict(dataset=Numbers(4), collate_fn=FailsToCollate())),
    "sampler": (LookupError, lambda go: dict(dataset=Numbers(4), sampler=FailsToDraw(), batch_size=None)),
    "unpickling": (ValueError, lambda go: dict(dataset=Numbers(4), collate_fn=lambda _: Hopeless())),
    "death": (RuntimeError, lambda go: dict(dataset=Dying(4, 1, signal.SIGKILL), batch_size=None)),
    "timeout": (RuntimeError, lambda go: dict(dataset=Held(4, 1, go), batch_size=None, timeout=0.2)),
}


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_an_error_keeps_no_worker_without_the_garbage_collector(way, persistent, tmp_path):
    kind, options = WAYS[way]
    pids = []

    def run():
        iterator = iter(DataLoader(num_workers=2, persistent_workers=persistent, **options(tmp_path / "go")))
        pids.extend(worker_pids(iterator))
        errors = 0
        while errors < 2:
            try:
                next(iterator)
            except StopIteration:
                break
            except kind:
                errors += 1
        (tmp_path / "go").touch()
        return errors

    gc.collect()
    gc.disable()
    try:
        assert run() >= 1
        # The destructor has waited for the workers.
        assert all(map(gone, pids))
    finally:
        gc.enable()


TORCHS_FRAMES = ("__next__", "_next_data", "reraise")


def test_the_traceback_of_a_dataset_error_shows_torchs_frames():
    error = raised_by(list, DataLoader(Failing(2, {0: ValueError}), num_workers=1, batch_size=None), kind=ValueError)
    names, trace = [], error.__traceback__
    while trace is not None:
        names.append(trace.tb_frame.f_code.co_name)
        trace = trace.tb_next
    assert [name for name in names if name in TORCHS_FRAMES] == list(TORCHS_FRAMES)


# Batches whose unpickling in the main process runs `hook`.
UNPICKLED = """
    from sample_data import Given, untouched
    main, calls = os.getpid(), []
    class Interrupted(Exception): pass
    class Item:
        def __init__(self, number): self.number = number
        def __setstate__(self, state):
            self.number = state["number"]
            if os.getpid() == main:
                calls.append(self.number)
                hook(self.number)
    def handler(*_): raise Interrupted
    def take(iterator):
        try:
            return next(iterator).number
        except StopIteration:
            return "end"
        except BaseException as error:
            return type(error).__name__
    def start(count=3):
        items = Given([Item(i) for i in range(count)])
        return iter(DataLoader(items, num_workers=1, batch_size=None, collate_fn=untouched))
"""


@pytest.mark.parametrize("kind", ["ValueError", "SystemExit", "MemoryError"])
def test_user_code_that_fails_to_unpickle_a_batch_runs_once(kind):
    source = f"""
    def hook(number):
        if number == 1:
            raise {kind}("by itself")
    iterator = start()
    print([take(iterator) for _ in range(4)], calls)
    """
    status, out, err = run_script(UNPICKLED + source)
    assert (status, out, err) == (0, f"[0, '{kind}', 2, 'end'] [0, 1, 2]\n", "")


# test_interrupts.py has all kinds of handlers.
@pytest.mark.parametrize(
    "handler, in_context, name",
    [
        ("handler", False, "Interrupted"),
        ("handler", True, "ValueError"),
        ("signal.default_int_handler", False, "KeyboardInterrupt"),
    ],
)
def test_a_handler_interrupts_an_unpickling_and_the_next_call_returns_the_batch(handler, in_context, name):
    source = f"""
    armed = [True]
    def hook(number):
        if number == 1 and armed:
            armed.clear()
            try:
                signal.raise_signal(signal.SIGALRM)
            except Exception:
                if {in_context}:
                    raise ValueError("in its place")
                raise
    signal.signal(signal.SIGALRM, {handler})
    iterator = start()
    print([take(iterator) for _ in range(5)], calls)
    """
    status, out, err = run_script(UNPICKLED + source)
    assert (status, out, err) == (0, f"[0, '{name}', 1, 2, 'end'] [0, 1, 1, 2]\n", "")
