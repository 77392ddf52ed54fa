"""`worker_affinity`: the cores that workers run on, from their first import on; what doctor reports about ranks."""

import os
import re
import textwrap

import pytest
from sample_data import Numbers, first_time
from support import DataLoader, epoch, run_script, rustloader
from torch.utils.data import get_worker_info

from rustloader.settings.options import option_of
from rustloader.system import local_ranks, procfs
from rustloader.workers import affinity

pytestmark = pytest.mark.ours

ALLOWED = sorted(os.sched_getaffinity(0))
needs_two = pytest.mark.skipif(len(ALLOWED) < 2, reason="this process may use one core only")


class Cores(Numbers):
    """A sample is the worker, its cores when the dataset was unpickled, and its cores now."""

    arrived = None

    def __setstate__(self, state):
        self.__dict__.update(state, arrived=sorted(os.sched_getaffinity(0)))

    def __getitem__(self, i):
        return get_worker_info().id, self.arrived, sorted(os.sched_getaffinity(0))


class DyingOnce(Cores):
    """Like `Cores`, but sample `at` ends its worker if the marker file does not exist yet."""

    def __init__(self, n, at, marker):
        super().__init__(n)
        self.at, self.marker = at, marker

    def __getitem__(self, i):
        if i == self.at and first_time(self.marker):
            os._exit(1)
        return super().__getitem__(i)


def cores(method="fork", workers=2, dataset=None, **kw):
    loader = DataLoader(dataset or Cores(workers), num_workers=workers, batch_size=None, collate_fn=tuple, **kw)
    loader.multiprocessing_context = method
    return epoch(loader)


@needs_two
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_workers_run_on_their_cores_before_the_dataset_comes(method):
    first, second = ALLOWED[:2]
    samples = cores(method, worker_affinity=[second, (first, second)])
    arrived = [None, None] if method == "fork" else [[second], [first, second]]
    assert samples == [(0, arrived[0], [second]), (1, arrived[1], [first, second])]
    assert sorted(os.sched_getaffinity(0)) == ALLOWED


@needs_two
def test_spread_deals_the_cores_to_the_workers():
    samples = cores(workers=2, worker_affinity="spread")
    assert [now for _, _, now in samples] == affinity.spread(ALLOWED, 2)
    with rustloader.installed(worker_affinity="spread"):
        assert cores(workers=2) == samples


def test_without_the_option_workers_have_all_cores():
    assert [now for _, _, now in cores()] == [ALLOWED, ALLOWED]


@needs_two
@pytest.mark.warns
@pytest.mark.parametrize("option", ["spread", "list"])
def test_a_worker_in_place_of_a_dead_one_has_its_cores_when_the_program_is_bound_to_one(tmp_path, option):
    wanted = ALLOWED[:2] if option == "list" else "spread"
    loader = DataLoader(
        DyingOnce(8, 3, tmp_path / "died"),
        num_workers=2,
        batch_size=None,
        collate_fn=tuple,
        worker_affinity=wanted,
        max_restarts=1,
    )
    iterator = iter(loader)
    samples = [next(iterator)]
    try:
        os.sched_setaffinity(0, ALLOWED[:1])
        samples += iterator
    finally:
        os.sched_setaffinity(0, ALLOWED)
    dealt = [[core] for core in ALLOWED[:2]] if option == "list" else affinity.spread(ALLOWED, 2)
    assert (tmp_path / "died").exists() and [now for _, _, now in samples] == dealt * 4


@pytest.mark.parametrize(
    ("count", "workers", "dealt"),
    [
        (4, 4, [[10], [11], [12], [13]]),
        (4, 2, [[10, 11], [12, 13]]),
        (4, 3, [[10], [11], [12, 13]]),
        (2, 5, [[10], [11], [10], [11], [10]]),
        (1, 2, [[10], [10]]),
    ],
)
def test_how_cores_are_dealt(count, workers, dealt):
    assert affinity.spread(range(10, 10 + count), workers) == dealt


@pytest.mark.parametrize(
    ("rank", "ranks", "part"),
    [
        ("0", "2", [0, 1]),
        ("1", "2", [2, 3]),
        ("5", "8", [1]),
        ("", "2", [0, 1, 2, 3]),
        ("2", "2", [0, 1, 2, 3]),
        ("x", "y", [0, 1, 2, 3]),
    ],
)
def test_ranks_with_the_cores_of_their_launcher_divide_them(rank, ranks, part, monkeypatch):
    monkeypatch.setattr(local_ranks, "are_bound", lambda cores: False)
    monkeypatch.setenv("LOCAL_RANK", rank)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert list(affinity.cores_of_rank(range(4))) == part
    monkeypatch.setattr(local_ranks, "are_bound", lambda cores: True)
    assert list(affinity.cores_of_rank(range(4))) == [0, 1, 2, 3]


@needs_two
@pytest.mark.parametrize("bound", [False, True])
def test_two_ranks_of_one_machine(bound):
    """A launcher with two ranks of two workers each, bound to cores or not."""
    source = f"""
    import os
    from rustloader.workers import affinity
    if {bound}:
        os.sched_setaffinity(0, {{{ALLOWED[1]}}})
    print(affinity.of_workers("spread", 2))
    """
    launch = f"""
    import os, subprocess, sys
    os.sched_setaffinity(0, {ALLOWED[:2]})
    for rank in "01":
        env = dict(os.environ, LOCAL_RANK=rank, LOCAL_WORLD_SIZE="2")
        print(subprocess.check_output([sys.executable, "-c", {textwrap.dedent(source)!r}], env=env, text=True), end="")
    """
    status, out, err = run_script(launch, head="")
    assert (status, err) == (0, "")
    first, second = ALLOWED[:2]
    assert out.splitlines() == [str([[second]] * 2)] * 2 if bound else [str([[first]] * 2), str([[second]] * 2)]


def test_a_core_that_the_process_may_not_use():
    text = (
        f"worker_affinity gives core 99999 to worker 1, but this process may use only {procfs.core_ranges(ALLOWED)}; "
        "choose from these, or allow the program more cores (taskset, Slurm, the container's cpuset)"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        cores(worker_affinity=[ALLOWED[0], [ALLOWED[0], 99999]])


def test_too_few_entries_and_too_many():
    text = "worker_affinity has cores for 1 of 2 workers; give it one entry for each worker, or 'spread'"
    with pytest.raises(ValueError, match=f"^{text}$"):
        cores(worker_affinity=[ALLOWED[0]])
    assert len(cores(worker_affinity=[ALLOWED[0], ALLOWED[0], 99999])) == 2


def test_without_workers_it_has_no_effect():
    loader = DataLoader(range(2), worker_affinity=[99999])
    assert [int(x) for x in loader] == [0, 1] and sorted(os.sched_getaffinity(0)) == ALLOWED


@pytest.mark.parametrize("text", ["", "0/", "a", "3-2", "0//1", "-1"])
def test_texts_that_name_no_cores(text):
    with pytest.raises(ValueError):
        option_of("worker_affinity").kind.parse(text)


@pytest.mark.parametrize(("numbers", "text"), [([], ""), ([3], "3"), ([8, 0, 1, 2, 5, 6], "0-2,5-6,8")])
def test_cores_as_the_kernel_writes_them(numbers, text):
    assert procfs.core_ranges(numbers) == text
