"""States around errors, deaths, interrupts and timeouts are available and exact."""

import os
import signal
import threading
import time

import pytest
from sample_data import Failing, Held, Numbers, runtime_error
from stateful import datasets
from stateful.datasets import unchanged
from support import wait_until, while_next_waits
from torch.utils.data import IterableDataset, get_worker_info

from rustloader import LoaderTimeoutError
from rustloader.stateful_dataloader import StatefulDataLoader

pytestmark = pytest.mark.ours

DATASETS = {
    "map": lambda: datasets.Records(40),
    "stateful map": lambda: datasets.CountingRecords(40),
    "iterable": lambda: datasets.Shards((25, 15), with_generator=False),
    "generator": lambda: datasets.GeneratorShards((25, 15)),
    "stateless": lambda: datasets.StatelessShards((25, 15)),
}


def make(kind="map", **kw):
    return StatefulDataLoader(DATASETS[kind](), **{"num_workers": 2, "collate_fn": unchanged, **kw})


def take(iterator, number):
    return [next(iterator) for _ in range(number)]


def position(state):
    """The number of batches that a state counts."""
    return state["_num_yielded"] if "_num_yielded" in state else state["_snapshot"]["_snapshot_step"]


def test_after_a_death_before_the_first_state_the_epoch_begins_again():
    """Without a snapshot of the worker, only the beginning is left to resume from, and it is exact."""

    for kind in ("iterable", "stateless"):
        loader = make(kind, worker_init_fn=die)
        with pytest.raises(RuntimeError):
            next(iter(loader))
        state = loader.state_dict()
        loader = make(kind)
        loader.load_state_dict(state)
        assert list(loader) == list(make(kind))


def die(_):
    os._exit(3)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_iter_after_an_error_in_place_of_the_first_batch_of_a_resume_begins_the_next_epoch(workers):
    def make():
        dataset = Failing(8, {3: runtime_error})
        return StatefulDataLoader(dataset, 2, num_workers=workers, collate_fn=unchanged)

    loader = make()
    take(iter(loader), 1)
    state = loader.state_dict()
    loader = make()
    loader.load_state_dict(state)
    with pytest.raises(RuntimeError, match="of two lines"):
        next(iter(loader))
    assert next(iter(loader)) == [0, 1]


class RefusesOnce(datasets.GeneratorShards):
    """Fails to load a state until the file exists."""

    def __init__(self, file):
        super().__init__((6, 4))
        self.file = file

    def load_state_dict(self, state):
        if not self.file.exists():
            self.file.touch()
            raise KeyError("refused")
        super().load_state_dict(state)


def test_iter_after_a_worker_could_not_load_its_state_resumes_again(tmp_path):
    def make():
        return StatefulDataLoader(RefusesOnce(tmp_path / "tried"), num_workers=1, collate_fn=unchanged)

    loader = make()
    first = take(iter(loader), 3)
    state = loader.state_dict()
    rest = list(make())[3:]
    loader = make()
    loader.load_state_dict(state)
    with pytest.raises(KeyError, match="refused"):
        next(iter(loader))
    assert first and list(loader) == rest


@pytest.mark.parametrize("pinned", [False, True])
def test_a_state_while_next_waits(tmp_path, host, pinned):
    """A state for a thread or a signal handler does not count what `next` has not returned."""
    files = [tmp_path / name for name in ("first", "second")]
    for file, ask in zip(files, (by_thread, by_handler), strict=True):
        loader = StatefulDataLoader(Held(12, 6, file), 2, num_workers=2, pin_memory=pinned)
        iterator = iter(loader)
        delivered = [batch.tolist() for batch in take(iterator, 3)]
        before = loader.state_dict()
        states = []
        signal.signal(signal.SIGUSR1, lambda *_, arguments=(loader, states, file): by_thread(*arguments))
        with asking(ask, loader, states, file):
            delivered.append(next(iterator).tolist())
        assert states == [before]
        assert position(loader.state_dict()) == 4
        delivered += [batch.tolist() for batch in iterator]
        assert delivered == [[i, i + 1] for i in range(0, 12, 2)]


class asking:
    """Asks for a state while the body waits in next(), and then releases the sample."""

    def __init__(self, ask, *arguments):
        self.thread = while_next_waits(ask, *arguments)

    def __enter__(self):
        pass

    def __exit__(self, *_):
        self.thread.join(60)
        assert not self.thread.is_alive()


def by_thread(loader, states, file):
    try:
        states.append(loader.state_dict())
    finally:
        file.touch()


def by_handler(loader, states, file):
    os.kill(os.getpid(), signal.SIGUSR1)
    assert wait_until(file.exists)


@pytest.fixture(autouse=True)
def handlers_kept():
    old = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, old)


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("kind", [KeyboardInterrupt, Interrupted])
def test_an_interrupt_in_next_counts_nothing(tmp_path, kind):
    def handler(*_):
        raise kind

    signal.signal(signal.SIGUSR1, handler)
    file = tmp_path / "go"
    loader = StatefulDataLoader(Held(12, 6, file), 2, num_workers=2, shuffle=False)
    iterator = iter(loader)
    delivered = [batch.tolist() for batch in take(iterator, 3)]
    before = loader.state_dict()
    for _ in range(2):
        thread = while_next_waits(os.kill, os.getpid(), signal.SIGUSR1)
        with pytest.raises(kind):
            next(iterator)
        thread.join(60)
        assert loader.state_dict() == before
    file.touch()
    delivered += [batch.tolist() for batch in iterator]
    assert delivered == [[i, i + 1] for i in range(0, 12, 2)]
    resumed = StatefulDataLoader(Numbers(12), 2, num_workers=1)
    resumed.load_state_dict(before)
    assert [batch.tolist() for batch in resumed] == delivered[3:]


def test_a_timeout_counts_nothing(tmp_path):
    file = tmp_path / "go"
    loader = StatefulDataLoader(Held(12, 6, file), 2, num_workers=2, timeout=0.5)
    iterator = iter(loader)
    delivered = []
    with pytest.raises(RuntimeError, match="DataLoader timed out"):
        while True:
            try:
                delivered.append(next(iterator).tolist())
            except RuntimeError:
                if len(delivered) == 3:
                    raise
    state = loader.state_dict()
    assert position(state) == 3
    file.touch()
    resumed = StatefulDataLoader(Numbers(12), 2)
    resumed.load_state_dict(state)
    assert [batch.tolist() for batch in resumed] == [[6, 7], [8, 9], [10, 11]]


class FailingState(datasets.CountingRecords):
    """Its state cannot be taken after some samples."""

    def __init__(self, size, error):
        super().__init__(size)
        self.error = error

    def state_dict(self):
        if self.made > 4:
            if self.error:
                raise ZeroDivisionError("no state")
            return {"made": self.made, "lock": threading.Lock()}
        return super().state_dict()


@pytest.mark.parametrize("raises, kind", [(True, ZeroDivisionError), (False, TypeError)])
def test_a_dataset_whose_state_cannot_be_taken_any_more(raises, kind):
    """state_dict() raises its error. Batches are delivered all the same, and earlier states remain available."""

    def loader():
        return StatefulDataLoader(FailingState(24, raises), num_workers=2, collate_fn=unchanged)

    everything = list(loader())
    running = loader()
    iterator = iter(running)
    first = take(iterator, 7)
    state = running.state_dict()
    first += take(iterator, 5)
    for _ in range(2):
        with pytest.raises(kind, match="in the state of the dataset, in DataLoader worker process"):
            running.state_dict()
    assert running.state_dict(back=5) == state
    assert first + list(iterator) == everything
    resumed = loader()
    resumed.load_state_dict(state)
    assert list(resumed) == everything[7:]


def test_a_forked_child_has_no_state_and_harms_none():
    loader = make("map", batch_size=2)
    iterator = iter(loader)
    take(iterator, 4)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            with pytest.raises(RuntimeError, match="belongs to the process that this one was forked from"):
                loader.state_dict()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    state = loader.state_dict()
    rest = list(iterator)
    other = make("map", batch_size=2)
    other.load_state_dict(state)
    assert list(other) == rest


class Stuck(IterableDataset):
    """While the file `stuck` exists, the `iter` of worker 1 does not return."""

    def __init__(self, folder):
        self.folder = folder

    def __iter__(self):
        info = get_worker_info()
        while info.id == 1 and (self.folder / "stuck").exists():
            time.sleep(0.01)
        return iter(range(info.id, 100, info.num_workers))


def test_a_worker_that_does_not_start_holds_up_neither_states_nor_a_new_epoch(tmp_path):
    (tmp_path / "stuck").touch()
    loader = StatefulDataLoader(Stuck(tmp_path), batch_size=2, num_workers=2, timeout=6, persistent_workers=True)
    iterator = iter(loader)
    assert next(iterator).tolist() == [0, 2]
    state = loader.state_dict()
    (tmp_path / "stuck").unlink()
    expected = [batch.tolist() for batch in iterator]
    resumed = StatefulDataLoader(Stuck(tmp_path), batch_size=2, num_workers=2)
    resumed.load_state_dict(state)
    assert [batch.tolist() for batch in resumed] == expected
    (tmp_path / "stuck").touch()
    for _ in range(2):
        with pytest.raises(LoaderTimeoutError):
            iter(loader)
    (tmp_path / "stuck").unlink()
    assert [batch.tolist() for batch in loader] == [[0, 2], *expected]
    assert loader.state_dict()["_rustloader"]["epoch"] == 1


def test_next_after_an_iter_that_failed_is_an_error(tmp_path):
    def make():
        return StatefulDataLoader(Stuck(tmp_path), batch_size=2, num_workers=2, timeout=6, persistent_workers=True)

    loader = make()
    iterator = iter(loader)
    whole = [batch.tolist() for batch in iterator]
    pids = [worker.pid for worker in iterator._workers]
    (tmp_path / "stuck").touch()
    for _ in range(2):
        with pytest.raises(LoaderTimeoutError):
            iter(loader)
        # Its epoch has not begun, and no batch of it could have an exact state.
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"this epoch has not begun, because iter\(\) raised .*: call iter"):
                next(iterator)
    state = loader.state_dict()
    (tmp_path / "stuck").unlink()
    resumed = make()
    resumed.load_state_dict(state)
    assert [batch.tolist() for batch in resumed] == [batch.tolist() for batch in loader] == whole
    # The workers are kept.
    assert iter(loader) is iterator and [worker.pid for worker in iterator._workers] == pids
    assert next(iterator).tolist() == whole[0] and position(loader.state_dict()) == 1
