"""The same behavior whatever starts the workers: fork, forkserver, spawn (P14, P15, P17 to P20, P22, T25, T26)."""

import multiprocessing
import signal
import types

import numpy as np
import pytest
import torch
from orders import Meeting, MeetsWhenUnpickled, MethodCalls, Shares, collate
from parity_table import drain, rows
from sample_data import Dying, Index, Pair, Record, WholeIndex, as_list
from support import TORCH_MODE, DataLoader, children, epoch, in_time, outcome, outcomes, values, worker_pids

METHODS = ["fork", "forkserver", "spawn"]
PROCESSES = {"fork": "ForkProcess", "forkserver": "ForkServerProcess", "spawn": "SpawnProcess"}


def calls(orders, method):
    return dict(
        dataset=MethodCalls(),
        batch_sampler=orders,
        collate_fn=collate,
        num_workers=2,
        persistent_workers=True,
        multiprocessing_context=method,
    )


def numbers(count):
    return [[("number", 2 * i), ("number", 2 * i + 1)] for i in range(count)]


# What each epoch of one persistent loader asks, one order a batch, and after how many calls of next() it is left.
EPOCHS = {
    "order": (numbers(20), 99),
    "left early": (numbers(9), 3),
    "after that": (numbers(2), 99),
    "seeds": ([[("draw",)]] * 4, 99),
    "errors": ([[("number", 0)], [("fail", "one")], [("number", 2)], [("nonsense",)], [("number", 4)]], 99),
    "large": ([[("large", i), ("large", i + 1)] for i in range(6)], 99),
    "loaders": ([[("inner_loader", workers)] for workers in (1, 0, 2, 0)], 99),
    "children": ([[("subprocess",)], [("process",)], [("fork", "os._exit")], [("fork", "sys.exit")]], 99),
}


@rows(method=METHODS)
def test_epochs(DataLoader, method):
    orders = []
    loader = DataLoader(**calls(orders, method))
    for orders[:], limit in EPOCHS.values():
        yield from drain(iter(loader), limit)


@pytest.fixture(scope="module", params=METHODS)
def served(request):
    """A persistent loader with two workers, and the list of the index batches of its next epoch."""
    orders = [[("number", 0)]]
    loader = DataLoader(**calls(orders, request.param))
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


def test_the_workers_are_started_by_the_method_named(served):
    loader, _ = served
    method = loader.multiprocessing_context.get_start_method()
    assert {type(w).__name__ for w in loader._iterator._workers} == {PROCESSES[method]}
    mine = children()
    for (_, [who]), worker in zip(asked(served, ("who",), ("who",))[:-1], loader._iterator._workers, strict=True):
        _, pid, parent = who
        assert pid == worker.pid and (pid in mine) == (method != "forkserver")
        assert parent in mine | {multiprocessing.current_process().pid}


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
BATCHES = [
    *([1, 2], [3]),
    *((1, 2), (3,)),
    *np.arange(6).reshape(2, 3),
    *torch.arange(6).reshape(2, 3),
    range(3),
    list(range(100_000)),
    [np.int64(3), True, 2**70],
]


@pytest.mark.parametrize("method", METHODS)
def test_t25_every_kind_of_index_arrives_as_it_was_yielded(method):
    kw = dict(num_workers=1, multiprocessing_context=method)
    loader = DataLoader(Index(), sampler=INDICES, batch_size=None, **kw)
    assert epoch(loader) == [[type(index).__name__, repr(index)] for index in INDICES]
    for dataset in (Index(), WholeIndex()):
        expected = list(DataLoader(dataset, batch_sampler=BATCHES, collate_fn=as_list))
        assert epoch(DataLoader(dataset, batch_sampler=BATCHES, collate_fn=as_list, **kw)) == expected


@pytest.mark.ours  # torch prints the error in a thread and hangs
def test_t25_an_index_that_cannot_be_pickled_is_an_error_of_next(served):
    results = asked(served, *(("number", i if i != 4 else (n for n in ())) for i in range(6)))
    assert [o for o in results if o[0] == "error"] == [("error", TypeError, "cannot pickle 'generator' object")]
    assert [o for o in results if o[0] != "error"] == [*[("value", [i]) for i in (0, 1, 2, 3, 5)], ("end",)]


@pytest.mark.ours  # torch's main process takes the child's batch for the worker's, or fails on both
@pytest.mark.parametrize("how", ["raise", "return", "return a large tensor"])
def test_a_child_that_comes_back_out_of_the_dataset_does_not_speak_for_its_worker(served, how):
    for _ in range(2):
        results = asked(served, ("number", 0), ("fork", how), ("number", 2), ("fork", how), ("number", 4))
        assert results == [("value", [0]), ("value", [1]), ("value", [2]), ("value", [1]), ("value", [4]), ("end",)]


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
    assert [in_time(next, iterator) for _ in range(2)] == [("value", 1), ("value", 2)]
    if TORCH_MODE:
        assert in_time(next, iterator) == ("end",)
        return
    text = f"DataLoader worker (pid {iterator._workers[0].pid}) is killed by signal: Killed. "
    assert [in_time(next, iterator) for _ in range(3)] == [("error", RuntimeError, text)] * 3


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
    with pytest.raises(RuntimeError, match=rf"DataLoader worker \(pid {worker_pids(iterator)[0]}\) {text}"):
        next(iterator)


@pytest.mark.parametrize("by_value", [False, pytest.param(True, marks=pytest.mark.ours)])
def test_t26_datasets_that_hold_tensors_locks_values_arrays_and_queues(context, by_value):
    dataset = Shares(8, context)
    if by_value:
        dataset.refused_by_the_standard_pickle = lambda: 0
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
