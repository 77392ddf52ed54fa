"""The ranks of a machine, as launchers describe them."""

import os
import subprocess
import sys

import pytest

from rustloader.system import local_ranks


@pytest.fixture
def environment(monkeypatch):
    """Sets the given variables of launchers, and unsets all others."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "OMPI_", "MPI_", "LOCAL_", "WORLD_")):
            monkeypatch.delenv(name)
    return lambda given: [monkeypatch.setenv(name, value) for name, value in given.items()]


@pytest.mark.parametrize(
    ("given", "size", "rank"),
    [
        ({}, None, None),
        ({"LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "0"}, 4, 0),
        ({"LOCAL_RANK": "3"}, None, 3),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}, 2, 1),
        ({"MPI_LOCALNRANKS": "3", "MPI_LOCALRANKID": "2"}, 3, 2),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_NODEID": "2", "SLURM_LOCALID": "1"}, 2, 1),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_NODEID": "3", "SLURM_LOCALID": "0"}, 1, 0),
        ({"LOCAL_WORLD_SIZE": "0", "MPI_LOCALNRANKS": "3"}, 3, None),
        # A launcher within another: torchrun as a step of Slurm.
        ({"LOCAL_WORLD_SIZE": "8", "LOCAL_RANK": "5", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_NODEID": "0"}, 8, 5),
    ],
)
def test_each_launcher_tells_size_and_rank(environment, given, size, rank):
    environment(given)
    assert (local_ranks.size(), local_ranks.rank()) == (size, rank)


@pytest.mark.parametrize("text", ["", "many", "-2", "+2", " 2", "2.0", "0x2", "1_0", "²", "٢", "9" * 10])
def test_what_is_no_number_counts_as_missing(environment, text):
    environment({"LOCAL_WORLD_SIZE": text, "LOCAL_RANK": text})
    assert (local_ranks.size(), local_ranks.rank()) == (None, None)
    environment({"MPI_LOCALNRANKS": "3", "MPI_LOCALRANKID": "0"})
    assert (local_ranks.size(), local_ranks.rank()) == (3, 0)


@pytest.mark.parametrize(
    "given",
    [
        {"LOCAL_WORLD_SIZE": "0"},
        {"SLURM_STEP_TASKS_PER_NODE": "0", "SLURM_NODEID": "0"},
        {"SLURM_STEP_TASKS_PER_NODE": "2"},
        {"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "1"},
        {"SLURM_STEP_TASKS_PER_NODE": "2,", "SLURM_NODEID": "0"},
        {"SLURM_STEP_TASKS_PER_NODE": "two", "SLURM_NODEID": "0"},
    ],
)
def test_sizes_that_tell_nothing(environment, given):
    environment(given)
    assert local_ranks.size() is None


def test_bound_ranks_have_other_cores_than_their_launcher(monkeypatch):
    launchers = sorted(os.sched_getaffinity(os.getppid()))
    assert not local_ranks.are_bound(launchers)
    assert local_ranks.are_bound([*launchers, 100_000]) and local_ranks.are_bound(launchers[:-1])
    monkeypatch.setattr(os, "getppid", lambda: 2**22 + 1)
    assert not local_ranks.are_bound([100_000])


QUERY = "import os; from rustloader.system import local_ranks; print(local_ranks.are_bound(os.sched_getaffinity(0)))"
# A shell that stays alive, and runs the rest of the command line.
WRAPPER = ["sh", "-c", '"$@"; exit', "sh"]
CORES = sorted(os.sched_getaffinity(0))


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
@pytest.mark.parametrize("wrappers", [0, 1, 2])
@pytest.mark.parametrize("bound", [False, True])
def test_wrappers_between_a_launcher_and_a_rank_belong_to_the_rank(environment, wrappers, bound):
    environment({})

    def bind():
        os.sched_setaffinity(0, CORES[:1] if bound else CORES)

    ranks = dict(os.environ, LOCAL_RANK="0", LOCAL_WORLD_SIZE="2")
    out = subprocess.check_output(
        [*wrappers * WRAPPER, sys.executable, "-c", QUERY], env=ranks, preexec_fn=bind, text=True
    )
    assert out == f"{bound}\n"


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
def test_a_launcher_that_is_bound_itself_has_not_bound_its_ranks(environment):
    """As in `taskset -c 0 torchrun`."""
    environment({})
    launch = (
        "import os, subprocess, sys; "
        "environment = dict(os.environ, LOCAL_RANK='0', LOCAL_WORLD_SIZE='2'); "
        f"subprocess.run([*{WRAPPER}, sys.executable, '-c', {QUERY!r}], env=environment)"
    )

    def bind():
        os.sched_setaffinity(0, CORES[:1])

    assert subprocess.check_output([sys.executable, "-c", launch], preexec_fn=bind, text=True) == "False\n"
