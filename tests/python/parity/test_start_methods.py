"""The same behavior whatever starts the workers: fork, forkserver, spawn (P14, P15, P17 to P20, P22, T25)."""

import itertools
import multiprocessing
import signal
import types

import numpy as np
import pytest
import torch
from orders import FLOATS, Meeting, MeetsWhenUnpickled, MethodCalls, Shares, collate
from sample_data import Dying, Epochs, Index, Pair, Record, Shards
from support import TORCH_MODE, DataLoader, children, epoch, in_time, outcome, outcomes, values, worker_pids

METHODS = ["fork", "forkserver", "spawn"]
PROCESSES = {"fork": "ForkProcess", "forkserver": "ForkServerProcess", "spawn": "SpawnProcess"}


@pytest.fixture(scope="module", params=METHODS)
def served(request):
    """A persistent loader with two workers, and the list of the index batches of its next epoch."""
    orders = [[("number", 0)]]
    loader = DataLoader(
        MethodCalls(),
        batch_sampler=orders,
        collate_fn=collate,
        num_workers=2,
        persistent_workers=True,
        multiprocessing_context=request.param,
    )
    epoch(loader)
    yield loader, orders
    loader._iterator._shutdown_workers()


@pytest.fixture(scope="module", params=METHODS)
def context(request):
    """A context object. Its first shared value creates a heap that multiprocessing never frees."""
    context = multiprocessing.get_context(request.param)
    context.Value("i", 0)
    return context


def asked(served, *orders):
    """The outcomes of an epoch with these orders, one in each batch."""
    loader, batches = served
    batches[:] = [[order] for order in orders]
    return outcomes(iter(loader), len(orders) + 1)


def workers_of(served, count):
    """(worker, pid, pid of its parent) of each batch."""
    return [batch[0] for _, batch in asked(served, *[("who",)] * count)[:-1]]


def test_batches_come_in_order_from_alternate_workers(served):
    loader, orders = served
    orders[:] = [[("number", 2 * i), ("number", 2 * i + 1)] for i in range(20)]
    assert values(epoch(loader)) == [[2 * i, 2 * i + 1] for i in range(20)]
    assert [worker for worker, _, _ in workers_of(served, 6)] == [0, 1] * 3


def test_the_workers_are_started_by_the_method_named(served):
    loader, _ = served
    method = loader.multiprocessing_context.get_start_method()
    assert {type(w).__name__ for w in loader._iterator._workers} == {PROCESSES[method]}
    mine = children()
    for (_, pid, parent), worker in zip(workers_of(served, 2), loader._iterator._workers, strict=True):
        assert pid == worker.pid and (pid in mine) == (method != "forkserver")
        assert parent in mine | {multiprocessing.current_process().pid}


def test_errors_come_at_their_place_and_next_goes_on(served):
    results = asked(served, ("number", 0), ("fail", "one"), ("number", 2), ("nonsense",), ("number", 4))
    assert results == [
        ("value", [0]),
        ("error", KeyError, "Caught KeyError in DataLoader worker process 1."),
        ("value", [2]),
        ("error", AttributeError, "Caught AttributeError in DataLoader worker process 1."),
        ("value", [4]),
        ("end",),
    ]


def test_three_epochs_of_persistent_workers(served):
    loader, orders = served
    pids = worker_pids(loader._iterator)
    for start in range(3):
        orders[:] = [[("number", i)] for i in range(start, start + 5)]
        assert values(epoch(loader)) == [[i] for i in range(start, start + 5)]
    assert worker_pids(loader._iterator) == pids


def test_a_new_epoch_after_a_break(served):
    loader, orders = served
    for taken in (1, 3, 5):
        orders[:] = [[("number", i)] for i in range(9)]
        assert values(itertools.islice(iter(loader), taken)) == [[i] for i in range(taken)]
    assert values(epoch(loader)) == [[i] for i in range(9)]


def test_default_collate_of_large_tensors_and_kept_batches(served):
    loader, orders = served
    orders[:] = [[("large", i), ("large", i + 1)] for i in range(12)]
    kept = epoch(loader)
    for _ in range(2):
        for batch in loader:
            batch.zero_()
    for i, batch in enumerate(kept):
        assert torch.equal(batch, torch.arange(FLOATS) + torch.tensor([[i], [i + 1]]))


INDICES = [
    [1, [2, (3,)]],
    (1, 2),
    ("x", None),
    np.arange(3),
    np.zeros((2, 2)),
    torch.arange(3),
    torch.tensor(1),
    True,
    np.int64(3),
    "text",
    "x" * 100_000,
    {"k": [1, {2: 3}]},
    None,
    slice(1, 9, 2),
    range(3),
    1.5,
    b"abc",
    2**80,
    Pair(1, [Pair(2, None)]),
    Record("a custom object", torch.arange(2)),
]


@pytest.mark.parametrize("method", METHODS)
def test_t25_every_kind_of_index_arrives_as_it_was_yielded(method):
    loader = DataLoader(Index(), sampler=INDICES, batch_size=None, num_workers=1, multiprocessing_context=method)
    assert epoch(loader) == [[type(index).__name__, repr(index)] for index in INDICES]


@pytest.mark.ours  # torch prints the error in a thread and hangs
def test_t25_an_index_that_cannot_be_pickled_is_an_error_of_next(served):
    loader, orders = served
    orders[:] = [[("number", i)] for i in range(6)]
    orders[4] = [("number", (i for i in ()))]
    results = outcomes(iter(loader), 7)
    assert [o for o in results if o[0] == "error"] == [("error", TypeError, "cannot pickle 'generator' object")]
    assert [o for o in results if o[0] != "error"] == [*[("value", [i]) for i in (0, 1, 2, 3, 5)], ("end",)]


def test_a_loader_inside_of_a_worker(served):
    text = "Caught AssertionError in DataLoader worker process 0."
    results = asked(served, ("inner_loader", 1), ("inner_loader", 0), ("inner_loader", 2), ("inner_loader", 0))
    assert results == [("error", AssertionError, text), ("value", [[0, 1, 2]])] * 2 + [("end",)]
    loader, orders = served
    orders[:] = [[("inner_loader", 1)]]
    with pytest.raises(AssertionError, match="daemonic processes are not allowed to have children"):
        next(iter(loader))


def test_processes_inside_of_a_worker(served):
    results = asked(served, ("subprocess",), ("process",), ("fork", "os._exit"), ("fork", "sys.exit"), ("number", 4))
    error = ("error", AssertionError, "Caught AssertionError in DataLoader worker process 1.")
    assert results == [("value", ["42\n"]), error, ("value", [7]), ("value", [7]), ("value", [4]), ("end",)]


@pytest.mark.ours  # torch's main process takes the child's batch for the worker's, or fails on both
@pytest.mark.parametrize("how", ["raise", "return", "return a large tensor"])
def test_a_child_that_comes_back_out_of_the_dataset_does_not_speak_for_its_worker(served, how):
    for _ in range(2):
        results = asked(served, ("number", 0), ("fork", how), ("number", 2), ("fork", how), ("number", 4))
        assert results == [("value", [0]), ("value", [1]), ("value", [2]), ("value", [1]), ("value", [4]), ("end",)]
    loader, orders = served
    orders[:] = [[("large", i)] for i in range(4)]
    assert [batch[0, 0].item() for batch in epoch(loader)] == [0, 1, 2, 3]


def test_p19_p20_a_timeout_loses_nothing_and_a_death_is_named(context, tmp_path):
    orders = [("number", 0), ("hold", str(tmp_path / "go"), 1), ("number", 2)]
    if not TORCH_MODE:  # under forkserver torch cannot name the signal
        orders.append(("die", signal.SIGKILL))
    loader = DataLoader(
        MethodCalls(), sampler=orders, batch_size=None, num_workers=1, timeout=1, multiprocessing_context=context
    )
    iterator = iter(loader)
    late = ("error", RuntimeError, "DataLoader timed out after 1 seconds")

    assert in_time(next, iterator) == ("value", 0)  # the start of the worker may take a few seconds
    assert outcome(next, iterator) == late
    (tmp_path / "go").touch()
    assert in_time(next, iterator) == ("value", 1)
    assert in_time(next, iterator) == ("value", 2)
    if TORCH_MODE:
        assert in_time(next, iterator) == ("end",)
        return
    text = f"DataLoader worker (pid {iterator._workers[0].pid}) is killed by signal: Killed. "
    assert in_time(next, iterator) == ("error", RuntimeError, text)
    assert outcomes(iterator, 2) == [("error", RuntimeError, text)] * 2


@pytest.mark.ours
@pytest.mark.parametrize(
    ("how", "text"),
    [(signal.SIGKILL, "is killed by signal: Killed. "), (3, "exited unexpectedly with exit code 3. ")],
    ids=["signal", "exit code"],
)
def test_p20_where_the_kernel_keeps_no_status_the_fork_server_has_it(how, text, monkeypatch):
    from rustloader._core import DEAD
    from rustloader.iterator.session import Session

    def on_an_older_kernel(self, it, code, death):
        """A kernel that keeps no status of a process that another one has reaped."""
        assert code == DEAD
        known = {name: getattr(death, name) for name in ("worker_id", "pid", "index", "stalled")}
        raise_for(self, it, code, types.SimpleNamespace(**known, exitcode=None, signal=None))

    raise_for = Session._raise_for
    monkeypatch.setattr(Session, "_raise_for", on_an_older_kernel)
    loader = DataLoader(Dying(4, 1, how), num_workers=1, batch_size=None, multiprocessing_context="forkserver")
    iterator = iter(loader)
    assert next(iterator) == 0
    with pytest.raises(RuntimeError, match=rf"DataLoader worker \(pid {iterator._workers[0].pid}\) {text}"):
        next(iterator)


@pytest.mark.parametrize("method", METHODS)
def test_iterable_datasets_of_uneven_workers_and_several_epochs(method):
    context = torch.multiprocessing.get_context(method)
    options = dict(num_workers=2, multiprocessing_context=context)
    loader = DataLoader(Epochs(), batch_size=None, persistent_workers=True, **options)
    for e in range(3):
        assert [tuple(s) for s in epoch(loader)] == [(w, e, i) for i in range(3) for w in range(2)]
    assert {type(w).__name__ for w in loader._iterator._workers} == {PROCESSES[method]}
    loader._iterator._shutdown_workers()
    if method != "spawn":  # it takes seconds, and nothing in it depends on the method
        loader = DataLoader(Shards([1, 3]), batch_size=2, **options)
        assert values(epoch(loader)) == [[[0, 0]], [[1, 0], [1, 1]], [[1, 2]]]


def test_datasets_that_hold_tensors_locks_values_arrays_and_queues(context):
    dataset = Shares(8, context)
    loader = DataLoader(dataset, batch_size=None, num_workers=2 if context.get_start_method() != "spawn" else 1)
    loader.multiprocessing_context = context
    assert [int(x) for x in epoch(loader)] == list(range(8))
    assert dataset.value.value == 8 and list(dataset.array) == [i * i for i in range(8)]
    assert sorted(dataset.queue.get(timeout=60) for _ in range(8)) == list(range(8))
    # torch's reducer puts the tensor into shared memory; a forked worker has a copy of its own.
    sent = context.get_start_method() != "fork"
    assert dataset.tensor.is_shared() == sent
    assert dataset.tensor.tolist() == [-i if sent else i for i in range(8)]
    dataset.queue.close()
    dataset.queue.join_thread()


@pytest.mark.parametrize(("method", "workers"), [("fork", 4), ("forkserver", 4), ("spawn", 3)])
def test_the_starts_of_workers_overlap(method, workers, tmp_path):
    """Each worker waits during start-up until all others are starting: started one by one they would deadlock."""
    (tmp_path / "unpickling").mkdir()
    (tmp_path / "init").mkdir()
    init_fn = Meeting(tmp_path / "init", workers)
    # It is sent after the dataset, and does not fit into a pipe.
    init_fn.ballast = bytes(1 << 20)
    loader = DataLoader(
        MeetsWhenUnpickled(workers, Meeting(tmp_path / "unpickling", workers)),
        num_workers=workers,
        worker_init_fn=init_fn,
        multiprocessing_context=method,
    )
    assert values(epoch(loader)) == [[i] for i in range(workers)]
    assert len(list((tmp_path / "init").iterdir())) == workers
    assert len(list((tmp_path / "unpickling").iterdir())) == (0 if method == "fork" else workers)
