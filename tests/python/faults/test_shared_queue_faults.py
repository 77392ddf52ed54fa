"""dispatch="shared_queue" with deaths, signals and random programs: a task is delivered once, or its loss is named."""

import os
import random
import signal
import time

import pytest
import torch
from sample_data import Dying, DyingOnce, Numbers, Recorded, Slow
from support import (
    SOON,
    STARTED,
    DataLoader,
    finish,
    gone,
    outcomes,
    start_script,
    values,
    wait_until,
    while_next_waits,
    within,
    worker_pids,
)

pytestmark = pytest.mark.ours

KILLED = "DataLoader worker (pid {}) is killed by signal: Killed. "
# A long run has 300.
PROGRAMS = int(os.environ.get("RUSTLOADER_TEST_PROGRAMS", "40"))


def shared(dataset, workers=2, **kw):
    return DataLoader(dataset, num_workers=workers, dispatch="shared_queue", **kw)


def lasting_error(iterator):
    """The error of `next`, which each later call repeats."""
    with within(SOON), pytest.raises(RuntimeError) as caught:
        next(iterator)
    with pytest.raises(RuntimeError) as repeated:
        next(iterator)
    assert str(repeated.value) == str(caught.value)
    return caught.value


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_death_names_the_task_that_the_worker_held(workers):
    iterator = iter(shared(Dying(20, 7, signal.SIGKILL), workers, batch_size=None))
    pids = worker_pids(iterator)
    assert [next(iterator).item() for _ in range(7)] == list(range(7)), "complete batches come first"
    error = lasting_error(iterator)
    assert str(error) == KILLED.format(pids[error.worker_id])
    assert error.__notes__ == [f"Worker {error.worker_id} was assigned the batch with index 7."]
    assert wait_until(lambda: all(map(gone, pids)))


def test_tasks_of_other_workers_and_waiting_tasks_are_completed(tmp_path):
    dataset = Recorded(40, tmp_path / "sample", held=(0, 1))
    iterator = iter(shared(dataset, 3, batch_size=None, prefetch_factor=2))
    assert wait_until(lambda: dataset.reached(0) and dataset.reached(1))
    info = iterator._task_info
    victim = info[1][0]
    assert victim != info[0][0]
    os.kill(worker_pids(iterator)[victim], signal.SIGKILL)
    # The third worker completes the other four; then sample 0 is released.
    assert wait_until(lambda: sorted(dataset.made()) == list(range(6)))
    dataset.let_go(0)
    assert next(iterator).item() == 0
    error = lasting_error(iterator)
    assert (error.worker_id, error.index) == (victim, 1)
    completed = dataset.made()
    assert len(completed) == len(set(completed)) and set(range(6)) <= set(completed)


def test_out_of_order_every_batch_but_the_lost_one_comes_first(tmp_path):
    dataset = Recorded(40, tmp_path / "sample", held=(2,))
    iterator = iter(shared(dataset, 2, batch_size=None, in_order=False, prefetch_factor=3))
    delivered = [next(iterator).item() for _ in range(12)]
    assert wait_until(lambda: dataset.reached(2)) and 2 not in delivered and len(set(delivered)) == 12
    victim = iterator._task_info[2][0]
    os.kill(worker_pids(iterator)[victim], signal.SIGKILL)
    rest = outcomes(iterator, 40)
    delivered += [o[1] for o in rest if o[0] == "value"]
    assert 2 not in delivered and len(set(delivered)) == len(delivered) >= 12
    assert rest[-1][0] == "error" and "is killed by signal: Killed" in rest[-1][2]


@pytest.mark.parametrize("at", ["start", "work", "idle"])
def test_the_death_of_all_workers_is_an_error_and_no_hang(at, tmp_path):
    dataset = Recorded(40, tmp_path / "sample", held=(2, 3) if at == "work" else ())
    iterator = iter(shared(dataset, 2, batch_size=None, persistent_workers=True))
    if at == "work":
        assert [next(iterator).item() for _ in range(2)] == [0, 1]
        assert wait_until(lambda: dataset.reached(2) and dataset.reached(3))
    elif at == "idle":
        assert wait_until(lambda: len(dataset.made()) == 4)
    for pid in worker_pids(iterator):
        os.kill(pid, signal.SIGKILL)
    with within(SOON):
        results = outcomes(iterator, 45)
    assert [o[0] for o in results].count("value") <= 4 and results[-1][0] == "error"
    assert "is killed by signal: Killed" in results[-1][2]


def test_a_wait_ends_with_the_last_worker(tmp_path):
    dataset = Recorded(9, tmp_path / "sample", held=(0, 1))
    iterator = iter(shared(dataset, batch_size=None))
    pids = worker_pids(iterator)
    thread = while_next_waits(lambda: [os.kill(pid, signal.SIGKILL) for pid in pids])
    assert "is killed by signal: Killed" in str(lasting_error(iterator))
    thread.join()


def test_a_stopped_worker_keeps_one_task_and_the_others_continue():
    iterator = iter(shared(Slow(60, dict.fromkeys(range(60), 0.01)), 3, batch_size=None, in_order=False))
    delivered = [next(iterator).item() for _ in range(5)]
    pid = worker_pids(iterator)[0]
    os.kill(pid, signal.SIGSTOP)
    try:
        delivered += [next(iterator).item() for _ in range(50)]
    finally:
        os.kill(pid, signal.SIGCONT)
    delivered += values(iterator)
    assert sorted(delivered) == list(range(60))


def test_a_persistent_loader_starts_new_workers_after_a_death(tmp_path):
    dataset = DyingOnce(12, 5, signal.SIGKILL, str(tmp_path / "died"))
    loader = shared(dataset, batch_size=None, persistent_workers=True)
    with pytest.raises(RuntimeError, match="DataLoader worker"):
        list(loader)
    for _ in range(2):
        assert values(loader) == list(range(12))


def test_a_death_while_a_new_epoch_begins_is_named(tmp_path):
    dataset = Recorded(40, tmp_path / "sample", held=(1, 2))
    loader = shared(dataset, batch_size=None, persistent_workers=True, prefetch_factor=4)
    iterator = iter(loader)
    assert next(iterator).item() == 0 and wait_until(lambda: dataset.reached(1) and dataset.reached(2))
    # It holds a task of the epoch that is abandoned.
    os.kill(worker_pids(iterator)[0], signal.SIGKILL)
    with within(SOON), pytest.raises(RuntimeError, match="is killed by signal: Killed"):
        iter(loader)
    dataset.let_go(1)
    dataset.let_go(2)
    assert values(loader) == list(range(40))


START = """
    from sample_data import Numbers, Slow
    from support import while_next_waits, workers_report
    def told(iterator):
        print(*[w.pid for w in iterator._workers], flush=True)
        return iterator
    def shared(dataset, **kw):
        return DataLoader(dataset, num_workers=2, batch_size=None, dispatch="shared_queue", **kw)
"""


def started(source):
    process = start_script(START + source)
    return process, [int(pid) for pid in process.stdout.readline().split()]


def test_ctrl_c_gives_one_traceback_and_leaves_no_worker():
    process, pids = started("""
    iterator = told(iter(shared(Slow(9, {1: 120, 2: 120}))))
    next(iterator)
    while_next_waits(lambda: print("ready", flush=True))
    list(iterator)
    """)
    assert process.stdout.readline() == "ready\n"
    os.killpg(process.pid, signal.SIGINT)
    with within(60):
        status, _, err = finish(process)
    assert status in (130, -signal.SIGINT)
    assert err.count("Traceback (most recent call last)") == 1 and err.rstrip().endswith("KeyboardInterrupt"), err
    assert len(pids) == 2 and wait_until(lambda: all(map(gone, pids)))


@pytest.mark.parametrize("where", ["idle", "fetch"])
def test_the_interpreter_exits_in_mid_epoch(where):
    process, pids = started(f"""
    iterator = told(iter(shared(Slow(90, dict.fromkeys(range(1, 90), 120 if "{where}" == "fetch" else 0)))))
    next(iterator)
    assert workers_report(iterator, state="{where}")
    """)
    with within(60):
        status, _, err = finish(process)
    assert (status, err) == (0, "")
    assert len(pids) == 2 and wait_until(lambda: all(map(gone, pids)))


def test_workers_exit_when_the_main_process_is_killed():
    process, pids = started("""
    iterator = told(iter(shared(Numbers(90))))
    next(iterator)
    print("ready", flush=True)
    time.sleep(120)
    """)
    assert process.stdout.readline() == "ready\n"
    os.kill(process.pid, signal.SIGKILL)
    assert len(pids) == 2 and wait_until(lambda: all(map(gone, pids)), SOON)
    finish(process)


class Uneven(Numbers):
    """The time that a sample takes depends only on its index."""

    def __init__(self, n, scale):
        super().__init__(n)
        self.scale = scale

    def __getitem__(self, i):
        time.sleep(self.scale * random.Random(i).choice([0, 0, 0, 1, 1, 5]))
        return torch.tensor(i)


class Program:
    """One loader, and what happens in each of its epochs."""

    def __init__(self, seed):
        rng = random.Random(f"shared queue {seed}")
        self.n = rng.choice([0, 1, 2, 5, 20, 60])
        self.size = rng.choice([None, None, 1, 3])
        self.in_order = rng.random() < 0.7
        self.options = {
            "workers": rng.randint(1, 4),
            "prefetch_factor": rng.randint(1, 4),
            "persistent_workers": rng.random() < 0.5,
            "reorder_window": rng.choice([None, 1, 2, 7, 64, 200, "200KiB"]),
        }
        self.scale = rng.choice([0, 0, 0.0005, 0.002])
        kinds = ["full", "full", "break", "kill", "stop"]
        self.epochs = [(rng.choice(kinds), rng.randint(0, 20), rng.random()) for _ in range(rng.randint(1, 4))]

    def run(self):
        numbers = list(range(self.n))
        size = self.size or 1
        batches = [numbers[i : i + size] for i in range(0, self.n, size)]
        loader = shared(
            Uneven(self.n, self.scale), batch_size=self.size, in_order=self.in_order, sampler=numbers, **self.options
        )
        for kind, moment, choice in self.epochs:
            try:
                iterator = iter(loader)
            except RuntimeError as error:
                # A death after the last batch of the previous epoch.
                assert "is killed by signal: Killed" in str(error)
                iterator = iter(loader)
            delivered, ended = self.epoch(iterator, kind, moment, choice)
            if self.in_order:
                assert delivered == batches[: len(delivered)], (kind, delivered)
            else:
                assert len({tuple(b) for b in delivered}) == len(delivered) and all(b in batches for b in delivered), (
                    kind,
                    delivered,
                )
            if ended == "end":
                assert len(delivered) == len(batches), (kind, delivered)
        if loader._iterator is not None:
            loader._iterator._shutdown_workers()

    def epoch(self, iterator, kind, moment, choice):
        """The batches of an epoch, and how it ended."""
        delivered = []
        while True:
            if len(delivered) == moment:
                if kind == "break":
                    return delivered, kind
                if kind == "stop":
                    iterator._shutdown_workers()
                    assert outcomes(iterator, 1) == [("end",)]
                    return delivered, kind
                if kind == "kill":
                    pids = worker_pids(iterator)
                    os.kill(pids[int(choice * len(pids))], signal.SIGKILL)
                    kind = "killed"
            try:
                delivered.append(next(iterator).reshape(-1).tolist())
            except StopIteration:
                return delivered, "end"
            except RuntimeError as error:
                assert kind == "killed" and "is killed by signal: Killed" in str(error), error
                return delivered, kind


@pytest.mark.timeout(STARTED + 2 * PROGRAMS)
def test_random_programs_deliver_each_batch_once():
    for seed in range(PROGRAMS):
        program = Program(seed)
        try:
            program.run()
        except BaseException as error:
            error.add_note(f"program {seed}: {vars(program)}")
            raise
