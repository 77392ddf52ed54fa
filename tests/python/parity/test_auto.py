"""``num_workers="auto"`` in loaders, iterators, states and copies. Most tests stub the decisions;
test_auto_decision.py covers how they are made."""

import copy
import dataclasses
import logging
import os
import pickle
import signal
import time
import warnings

import pytest
import torch
from sample_data import Numbers
from stateful.datasets import CountingRecords
from support import TORCH_MODE, TorchDataLoader, gone, state_of, values, wait_until, worker_pids
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper

pytestmark = pytest.mark.ours

if not TORCH_MODE:
    import rustloader
    from rustloader import DataLoader, StatefulDataLoader
    from rustloader.auto import arguments, tuner
    from rustloader.auto.decision import Decision
    from rustloader.metrics import ledger
    from rustloader.settings import loader_state

    CLASSES = [DataLoader, StatefulDataLoader]
else:
    CLASSES = [None, None]
N = 24


class Stream(IterableDataset):
    """The numbers up to `n`, divided among the workers."""

    def __init__(self, n):
        self.n = n

    def __iter__(self):
        info = get_worker_info()
        yield from range(info.id, self.n, info.num_workers)


class Sharded(Stream):
    num_shards = 2

    @property
    def n_shards(self):
        raise RuntimeError("not known yet")


class ForThree(Stream):
    """Has data for the first three workers."""

    def __iter__(self):
        info = get_worker_info()
        yield from range(info.id, self.n, min(3, info.num_workers)) if info.id < 3 else ()


class Naps(Numbers):
    def __getitem__(self, index):
        time.sleep(0.02)
        return index


@pytest.fixture
def decisions(monkeypatch):
    """Stubs the decisions. The first epoch has two workers, and `counts` holds the numbers for later epochs; once it is
    empty, nothing changes. `seen` collects the inputs of each decision: (epoch, cores, limits)."""

    class Decisions:
        counts: list[int]
        seen: list

    def decide(epoch, cores, limits, history):
        Decisions.seen.append((epoch, cores, limits))
        workers = Decisions.counts.pop(0) if Decisions.counts else epoch.workers
        return Decision(workers, "" if workers == epoch.workers else "it was given", history)

    Decisions.counts, Decisions.seen = [], []
    monkeypatch.setattr(tuner, "decide", decide)
    monkeypatch.setattr(arguments, "initial_workers", lambda: 2)
    return Decisions


def workers_of(iterator):
    return len(iterator._workers)


def flat(batches):
    return sorted(x for batch in batches for x in batch)


# The argument


@pytest.mark.parametrize("cls", CLASSES)
def test_the_number_is_an_int_from_the_start(cls, decisions):
    for loader in (cls(Numbers(N), num_workers="auto"), cls(Numbers(N), 1, False, None, None, "auto")):
        assert type(loader.num_workers) is int and loader.num_workers == 2
        assert loader.prefetch_factor == 2


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("text", ["Auto", "", "4"])
def test_other_texts_are_refused(cls, text):
    wanted = rf'^num_workers option should be a non-negative integer or "auto", got num_workers={text!r}$'
    with pytest.raises(TypeError):  # torch's class of error
        TorchDataLoader(Numbers(4), num_workers=text)
    with pytest.raises(TypeError, match=wanted):
        cls(Numbers(4), num_workers=text)
    with pytest.raises(TypeError, match=wanted):
        cls(Numbers(4), 1, False, None, None, text)


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("persistent", [False, True])
def test_a_text_that_is_set_later_is_refused_at_iter(cls, persistent):
    loader = cls(Numbers(4), num_workers=1, persistent_workers=persistent)
    for text in ("auto", "2"):
        loader.num_workers = text
        with pytest.raises(TypeError, match=rf'^num_workers .* got {text!r}: pass num_workers="auto" to the constr'):
            iter(loader)
    loader.num_workers = 1
    assert len(list(loader)) == 4


@pytest.mark.parametrize(
    "cores, ranks, memory, bound, quota, wanted",
    [
        (8, None, 64, False, None, 8),
        (8, "4", 64, False, None, 2),
        (8, "16", 64, False, None, 1),
        (200, None, 512, False, None, 16),
        (8, "", 1, False, None, 4),
        (8, "2", 1, False, None, 2),
        (8, None, 0, False, None, 1),
        (8, "-2", 64, False, None, 8),
        (8, None, None, False, None, 8),
        # Ranks with cores of their own do not divide them. All ranks share a CPU quota, and the memory.
        (8, "4", 64, True, None, 8),
        (8, "2", 1, True, None, 2),
        (8, "4", 64, True, 8.0, 2),
        (8, "1", 64, True, 8.0, 8),
        (8, "x", 64, True, 8.0, 8),
    ],
)
def test_the_initial_number(monkeypatch, cores, ranks, memory, bound, quota, wanted):
    """The usable cores divided among the ranks, at most 16, and at most one per 256 MiB of a rank's memory."""
    limits = [] if memory is None else [(False, 1 << 50, 1 << 49), (True, 1 << 40, memory << 30)]
    monkeypatch.setattr("rustloader._core.memory_limits", lambda: limits)
    monkeypatch.setattr("rustloader.system.cores.usable_cores", lambda: cores)
    monkeypatch.setattr("rustloader.system.cores.cpu_quota", lambda: quota)
    monkeypatch.setattr("rustloader.system.local_ranks.are_bound", lambda cores: bound)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if ranks is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert arguments.initial_workers() == wanted


def test_the_initial_number_on_other_systems(monkeypatch):
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.setattr("os.cpu_count", lambda: 6)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert arguments.initial_workers() == 3


# Epochs


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("dataset", [Numbers, Stream])
def test_each_epoch_has_the_number_that_was_decided(cls, persistent, dataset, decisions):
    decisions.counts = [3, 3, 1, 4]
    loader = cls(dataset(N), num_workers="auto", batch_size=2, persistent_workers=persistent)
    numbers, old = [], []
    for _ in range(6):
        iterator = iter(loader)
        assert loader.num_workers == workers_of(iterator) == iterator._num_workers == len(iterator._workers_status)
        assert type(loader.num_workers) is int
        now = worker_pids(iterator)
        if numbers and numbers[-1] != len(now):
            assert not set(now) & set(old)
            wait_until(lambda before=old: all(map(gone, before)))
        elif numbers and persistent:
            assert now == old
        samples = sorted(x for batch in iterator for x in batch.tolist())
        assert samples == list(range(N))
        assert {epoch.workers for epoch, _, _ in decisions.seen} <= {*numbers}
        numbers.append(len(now))
        old = now
        del iterator
    assert numbers == [2, 3, 3, 1, 4, 4]


@pytest.mark.parametrize("persistent", [False, True])
def test_batches_are_torchs_whatever_the_number(persistent, decisions):
    decisions.counts = [4, 1]
    epochs = []
    for cls, count in ((TorchDataLoader, 2), (DataLoader, "auto")):
        generator = torch.Generator().manual_seed(3)
        loader = cls(Numbers(N), 3, True, num_workers=count, persistent_workers=persistent, generator=generator)
        epochs.append([values(loader) for _ in range(4)])
    assert epochs[0] == epochs[1]


@pytest.mark.parametrize("persistent", [False, True])
def test_the_figures_are_those_of_the_last_epoch(persistent, decisions):
    """Also if the program left it early, and whatever the number of workers was before."""
    decisions.counts = [3]
    loader = DataLoader(Naps(N), num_workers="auto", persistent_workers=persistent)
    for taken in (N, N, 13, N):
        iterator = iter(loader)
        for _ in range(taken):
            next(iterator)
        if taken == N:
            assert next(iterator, None) is None
    iter(loader)
    seen = [epoch for epoch, _, _ in decisions.seen]
    assert [epoch.workers for epoch in seen] == [2, 3, 3, 3]
    assert [epoch.batches for epoch in seen] == [N, N, 13, N]
    for epoch in seen:
        # Workers may still make batches of an epoch that the program has left.
        assert epoch.batches <= epoch.tasks <= N + 2 * epoch.workers
        assert 0.02 * (epoch.tasks - epoch.workers) <= epoch.busy and epoch.per_batch < 10 and epoch.waited > 0
        assert 0 <= epoch.cpu and 0.9 * epoch.busy <= epoch.measured <= epoch.busy
    assert all(cores > 0 for _, cores, _ in decisions.seen)


def test_batches_that_are_made_while_the_epoch_begins_count(decisions):
    """Otherwise, a worker that has made all its batches by then would seem to have had no data."""

    class Slow:
        def __iter__(self):
            yield from (0, 1)
            assert wait_until(lambda: sum(worker.tasks > 0 for worker in ledger.of(loader).totals().workers) == 2)

    loader = DataLoader(Numbers(2), sampler=Slow(), num_workers="auto")
    assert flat(list(loader)) == [0, 1]
    iter(loader)
    ((epoch, _, _),) = decisions.seen
    assert epoch.tasks == 2


def test_it_follows_real_figures(monkeypatch):
    """A worker takes at least 20 ms per batch and the loop no time: from one worker to four, the largest step."""
    monkeypatch.setattr(arguments, "initial_workers", lambda: 1)
    monkeypatch.setattr(arguments, "free_memory", lambda: None)
    monkeypatch.setattr(tuner, "effective_cores", lambda: 64.0)

    def decide(epoch, *rest):
        assert epoch.loop <= time.monotonic() - start
        # The machine may have stopped the loop outside its waits, which would count as the loop's own time.
        return decided(dataclasses.replace(epoch, step=0.0, own=0.0), *rest)

    decided, start = tuner.decide, time.monotonic()
    monkeypatch.setattr(tuner, "decide", decide)
    loader = DataLoader(Naps(40), num_workers="auto")
    assert len(list(loader)) == 40 and loader.num_workers == 1
    assert len(list(loader)) == 40 and loader.num_workers == 4


def test_workers_that_have_died_are_started_in_the_new_number(decisions):
    decisions.counts = [3]
    loader = DataLoader(Numbers(200), num_workers="auto", persistent_workers=True)
    iterator = iter(loader)
    next(iterator)
    os.kill(worker_pids(iterator)[0], signal.SIGKILL)
    with pytest.raises(RuntimeError, match="killed by signal"):
        list(iterator)
    assert len(list(loader)) == 200 and workers_of(iterator) == 3


def test_a_number_that_the_program_sets_turns_auto_off(decisions):
    decisions.counts = [3, 4]
    loader = DataLoader(Numbers(N), num_workers="auto")
    list(loader)
    list(loader)
    assert loader.num_workers == 3
    loader.num_workers = 1
    for _ in range(3):
        assert workers_of(iter(loader)) == loader.num_workers == 1
    loader.num_workers = 0
    assert len(list(loader)) == N
    assert decisions.counts == [4]


def test_more_workers_than_cores_are_no_reason_to_warn(decisions):
    decisions.counts = [len(os.sched_getaffinity(0)) + 1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*multi-threaded.*", DeprecationWarning)  # Python's own about forks
        loader = DataLoader(Numbers(N), num_workers="auto")
        list(loader)
        list(loader)
        assert loader.num_workers == len(os.sched_getaffinity(0)) + 1


def test_no_more_workers_than_worker_affinity_has_entries(decisions):
    core = min(os.sched_getaffinity(0))
    loader = DataLoader(Numbers(N), num_workers="auto", worker_affinity=[core])
    assert workers_of(iter(loader)) == loader.num_workers == 1
    loader = DataLoader(Numbers(N), num_workers="auto", worker_affinity=[core] * 3)
    list(loader)
    list(loader)
    _, _, limits = decisions.seen[-1]
    assert (3, "worker_affinity has 3 entries") in limits


@pytest.mark.warns
def test_torchs_loop_keeps_the_initial_number(decisions):
    decisions.counts = [5]
    loader = DataLoader(IterableWrapper(range(8)), num_workers="auto", batch_size=None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # each worker delivers all samples
        for _ in range(3):
            assert len(list(loader)) == 16 and loader.num_workers == 2
    assert decisions.seen == []


# Limits


def limits_seen(decisions):
    return [[(limit.maximum, limit.reason) for limit in limits] for _, _, limits in decisions.seen]


@pytest.mark.parametrize("persistent", [False, True])
def test_memory_is_read_from_workers_that_run(persistent, decisions, monkeypatch):
    asked = []

    def private(pid):
        assert state_of(pid) not in (None, "Z", "X")
        asked.append(pid)
        return (1 << 30) * len(asked)

    monkeypatch.setattr(tuner, "private_bytes", private)
    # However long a reading takes, the next one is allowed.
    monkeypatch.setattr(tuner.Allowance, "has_remaining", lambda self: True)
    monkeypatch.setattr(arguments, "free_memory", lambda: 9 << 30)
    loader = DataLoader(Numbers(N), num_workers="auto", persistent_workers=persistent)
    list(loader)
    list(loader)
    # Workers of 1 and 2 GiB: half of the free 9 GiB is for more workers of the larger size.
    assert limits_seen(decisions) == [[(4, "a worker takes 2.1 GB of memory, and 9.7 GB is free")]]


def test_memory_is_read_for_a_part_of_the_time(monkeypatch):
    now, asked = [0.0], []

    def slow_read(pid):
        now[0] += 0.1
        asked.append(pid)
        return 1 << 30

    monkeypatch.setattr(tuner, "private_bytes", slow_read)
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr(arguments, "free_memory", lambda: 9 << 30)
    subject = tuner.Tuner(2)
    for seconds in (0, 1, 11):
        now[0] += seconds
        subject.note_memory([1, 2, 3])
    assert asked == [1, 1] and subject._memory.maximum == 6


def test_a_dataset_says_how_many_shards_it_has(decisions, monkeypatch):
    monkeypatch.setattr(tuner, "private_bytes", lambda pid: None)
    loader = DataLoader(Sharded(N), num_workers="auto", batch_size=2)
    list(loader)
    list(loader)
    assert limits_seen(decisions) == [[(2, "the dataset has 2 shards")]]


def test_workers_without_data_count(decisions, monkeypatch):
    monkeypatch.setattr(tuner, "private_bytes", lambda pid: None)
    decisions.counts = [5]
    loader = DataLoader(ForThree(N), num_workers="auto")
    for _ in range(3):
        assert flat(values(loader)) == list(range(N))
    assert limits_seen(decisions) == [[], [(3, "only 3 workers had data")]]


def test_ranks_share_the_cores(decisions, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(tuner, "effective_cores", lambda: 8.0)
    monkeypatch.setattr("rustloader.system.local_ranks.are_bound", lambda cores: False)
    loader = DataLoader(Numbers(N), num_workers="auto")
    list(loader)
    iter(loader)
    assert decisions.seen[0][1] == 2.0


# The log


def test_a_change_is_one_line(decisions, caplog):
    caplog.set_level(logging.INFO, "rustloader")
    decisions.counts = [3, 3, 1]
    loader = DataLoader(Numbers(N), num_workers="auto", seed_by="sample", name="digits")
    for _ in range(5):
        list(loader)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", f'num_workers="auto" of the DataLoader digits over Numbers: {change}, because it was given')
        for change in ("3 workers instead of 2", "1 worker instead of 3")
    ]


def test_a_limit_is_told_once(decisions, caplog, monkeypatch):
    def decide(epoch, cores, limits, history):
        return Decision(epoch.workers, "", history, f"{epoch.batches} cores are too few")

    monkeypatch.setattr(tuner, "decide", decide)
    caplog.set_level(logging.INFO, "rustloader")
    loader = DataLoader(Numbers(N), num_workers="auto", name="held")
    for _ in range(4):
        list(loader)
    prefix = 'num_workers="auto" of the DataLoader held stays at 2 workers, although its loop waits for batches: '
    assert [record.getMessage() for record in caplog.records] == [f"{prefix}{N} cores are too few"]


@pytest.mark.parametrize("seed_by", [None, "worker", "batch", "sample"])
@pytest.mark.parametrize("installed", [False, True])
def test_seeds_by_worker_are_told_once_for_each_loader(decisions, caplog, seed_by, installed):
    caplog.set_level(logging.INFO, "rustloader")
    decisions.counts = [3, 4, 3, 4]
    with rustloader.installed(seed_by=seed_by if installed else None):
        caplog.clear()
        for _ in range(2):
            loader = DataLoader(Numbers(4), num_workers="auto", seed_by=None if installed else seed_by)
            for _ in range(3):
                list(loader)
    notices = [record for record in caplog.records if 'seed_by="sample" makes them independent' in record.getMessage()]
    assert len(notices) == (2 if seed_by in (None, "worker") else 0)
    assert all(record.levelno == logging.INFO for record in notices)


# Copies


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_a_copy_goes_on_by_itself(cls, how, decisions):
    decisions.counts = [3, 4]
    loader = cls(Numbers(N), num_workers="auto")
    list(loader)
    list(loader)
    other = how(loader)
    assert type(other.num_workers) is int and other.num_workers == 3
    # The first epoch of the copy has no figures to decide from.
    assert len(list(other)) == N and other.num_workers == 3
    assert len(list(other)) == N and (other.num_workers, loader.num_workers) == (4, 3)


# install()


@pytest.mark.parametrize("persistent", [False, True])
def test_install_counts_for_loaders_that_ask_for_workers(persistent, decisions):
    decisions.counts = [3, 1]
    loader = TorchDataLoader(Numbers(N), num_workers=1, persistent_workers=persistent)
    alone = TorchDataLoader(Numbers(N))
    with rustloader.installed(num_workers="auto"):
        for wanted in (2, 3, 1, 1):
            iterator = iter(loader)
            assert workers_of(iterator) == iterator._num_workers == wanted
            assert flat(values(iterator)) == list(range(N))
            assert loader.num_workers == 1
            assert rustloader.stats(loader).num_workers == wanted
        assert type(iter(alone)).__name__ == "_SingleProcessDataLoaderIter"
        assert rustloader.stats(alone).num_workers == 0
    with rustloader.installed():
        list(loader)
        assert workers_of(iter(loader)) == 1
        assert rustloader.stats(loader).num_workers == 1


def test_install_counts_for_our_loaders_with_a_number(decisions):
    decisions.counts = [4]
    loader = DataLoader(Numbers(N), num_workers=7)
    with rustloader.installed(num_workers="auto"):
        assert [workers_of(iter(loader)) for _ in range(3)] == [2, 4, 4]
    assert loader.num_workers == 7


# States


def saved(state, tmp_path):
    """The state after a round trip through a file that may contain plain types and tensors only."""
    torch.save(state, tmp_path / "state.pt")
    return torch.load(tmp_path / "state.pt", weights_only=True)


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("taken", [0, 5, 8, N // 2 - 1])
def test_an_iterable_dataset_resumes_with_the_number_of_its_state(taken, persistent, decisions, tmp_path):
    decisions.counts = [3]
    loader = StatefulDataLoader(Stream(N), 2, num_workers="auto", persistent_workers=persistent)
    first = values(loader)
    iterator = iter(loader)
    before = [next(iterator).tolist() for _ in range(taken)]
    state = saved(loader.state_dict(), tmp_path)
    rest = values(iterator)
    assert loader.num_workers == 3 and flat(before + rest) == flat(first)

    loader = StatefulDataLoader(Stream(N), 2, num_workers="auto", persistent_workers=persistent)
    assert loader.num_workers == 2
    loader.load_state_dict(state)
    assert values(loader) == rest
    assert type(loader.num_workers) is int and loader.num_workers == 3
    decisions.counts = [1]
    assert flat(values(loader)) == list(range(N)) and loader.num_workers == 1


def test_a_state_under_install_resumes_under_install_alone(decisions):
    decisions.counts = [3]
    with rustloader.installed(num_workers="auto"):
        loader = StatefulDataLoader(Stream(N), num_workers=1)
        list(loader)
        iterator = iter(loader)
        next(iterator)
        state = loader.state_dict()
        rest = values(iterator)
        other = StatefulDataLoader(Stream(N), num_workers=1)
        other.load_state_dict(state)
        assert values(other) == rest and other.num_workers == 1
    other.load_state_dict(state)
    with pytest.raises(AssertionError, match="num_workers=3, but this loader has num_workers=1"):
        iter(other)


def test_persistent_workers_with_a_state_of_their_own_stay(decisions):
    decisions.counts = [3]
    loader = StatefulDataLoader(CountingRecords(N), num_workers="auto", persistent_workers=True)
    iterator = iter(loader)
    pids = worker_pids(iterator)
    for _ in range(3):
        list(loader)
    assert worker_pids(iterator) == pids and decisions.seen == []


# Statistics and commands


def test_statistics_say_that_the_number_is_automatic(decisions):
    decisions.counts = [3]
    loader = DataLoader(Numbers(N), num_workers="auto", persistent_workers=True)
    for wanted in (2, 3):
        list(loader)
        stats = rustloader.stats(loader)
        assert stats.num_workers == stats.scheduling.auto_workers == wanted
        assert f"with {wanted} workers (auto)" in str(stats)
    fixed = DataLoader(Numbers(N), num_workers=2, name="fixed")
    list(fixed)
    assert rustloader.stats(fixed).scheduling.auto_workers is None and "auto" not in str(rustloader.stats(fixed))


def test_a_measurement_has_one_number(decisions):
    decisions.counts = [3]
    loader = DataLoader(Numbers(N), num_workers="auto")
    loader_state.forget_auto(loader)
    assert [workers_of(iter(loader)) for _ in range(2)] == [2, 2] and decisions.seen == []
    loader_state.forget_auto(loader)
    assert vars(loader).keys() == vars(TorchDataLoader(Numbers(N))).keys()


def test_the_number_of_a_state_is_not_cut_to_the_entries_of_worker_affinity(decisions):
    core = min(os.sched_getaffinity(0))
    loader = StatefulDataLoader(Stream(N), 2, num_workers=4)
    iterator = iter(loader)
    before = [next(iterator).tolist() for _ in range(5)]
    state = loader.state_dict()

    loader = StatefulDataLoader(Stream(N), 2, num_workers="auto", worker_affinity=[core] * 2)
    loader.load_state_dict(state)
    with pytest.raises(ValueError, match="2 of 4 workers"):
        list(loader)
    loader = StatefulDataLoader(Stream(N), 2, num_workers="auto", worker_affinity=[core] * 4)
    loader.load_state_dict(state)
    assert flat(before + values(loader)) == list(range(N))
