"""Epochs that survive deaths: a few rounds of `make stress KIND=restarts` and `KIND=soak`, and a real memory limit."""

import re
import tempfile
import time

import pytest
from cgroups import cgroup_of_400_mb, report_in_cgroup
from sample_data import Numbers, first_time
from support import DataLoader
from test_fault_drivers import drive

import rustloader

pytestmark = [pytest.mark.ours, pytest.mark.timeout(400)]

TORCHS_TEXT = r"DataLoader worker \(pid \d+\) is killed by signal: Killed\. "
OUT_OF_MEMORY = "Its memory cgroup was out of memory."


@pytest.mark.random
def test_kills_at_random_moments_change_no_batch():
    drive("restarts", "--epochs", 30, "--seed", 1)


@pytest.mark.parametrize("kind", ["map", "queue", "stream"])
def test_restarts_leave_nothing_behind_in_the_iterator(kind):
    drive("restarts", "--leaks", 30, "--kind", kind)


@pytest.mark.random
def test_a_soak_with_restarts_stalls_and_bad_samples():
    drive("soak", "--minutes", 0.15, "--seed", 1)


# Memory


class Hungry(Numbers):
    """Sample 5 allocates memory until the kernel kills its process: every time, or only the first time."""

    def __init__(self, n, marker=None):
        super().__init__(n)
        self.marker = marker

    def __getitem__(self, i):
        if i == 5 and (self.marker is None or first_time(self.marker)):
            with open("/proc/self/oom_score_adj", "w") as file:
                file.write("1000")  # the kernel kills this process first
            kept = [bytearray(b"x") * (32 << 20) for _ in range(100)]
            raise AssertionError(f"{len(kept) * 32} MB did not exceed the limit")
        return super().__getitem__(i)


def starved(once, max_restarts):
    """Runs one epoch; returns the numbers delivered, the error, the faults in `stats`, and the time taken."""
    with tempfile.TemporaryDirectory() as folder:
        dataset = Hungry(12, f"{folder}/marker" if once else None)
        loader = DataLoader(dataset, batch_size=None, num_workers=2, max_restarts=max_restarts)
        numbers, error, start = [], None, time.monotonic()
        try:
            for batch in loader:
                numbers.append(int(batch))
        except rustloader.WorkerDiedError as died:
            error = {"text": str(died), "restarts": died.restarts, "exitcode": died.exitcode, "notes": died.__notes__}
        seconds = time.monotonic() - start
        faults = rustloader.stats(loader).faults
    counts = {"restarts": faults.restarts, "out_of_memory": faults.out_of_memory, "stalls": faults.stalls}
    return {"numbers": numbers, "error": error, "seconds": seconds, "faults": counts, "deaths": faults.deaths}


def in_small_cgroup(once, max_restarts):
    with cgroup_of_400_mb() as (join, _, kills):
        report = report_in_cgroup(join, starved, once, max_restarts)
        return report["value"], kills(), report["log"]


def test_a_worker_that_ran_out_of_memory_is_named_and_replaced_after_a_pause():
    report, kills, log = in_small_cgroup(True, 2)
    assert report["numbers"] == list(range(12)) and report["error"] is None, report
    assert kills == 1 and report["faults"] == {"restarts": 1, "out_of_memory": 1, "stalls": 0}, report
    assert len(report["deaths"]) == 1 and "out of memory" in report["deaths"][0], report
    assert len(log) == 1 and "out of memory" in log[0], log
    assert report["seconds"] >= 0.1


def test_where_each_restart_runs_out_of_memory_the_epoch_ends_within_max_restarts():
    report, kills, _ = in_small_cgroup(False, 2)
    assert report["numbers"] == list(range(5)), report
    assert kills == 3 and report["faults"] == {"restarts": 2, "out_of_memory": 2, "stalls": 0}, report
    error = report["error"]
    assert (
        re.fullmatch(TORCHS_TEXT + re.escape(OUT_OF_MEMORY), error["text"])
        and error["restarts"] == 2
        and error["exitcode"] == -9
    ), error
    assert sum(note.count("out of memory") for note in error["notes"]) >= 2, error
    # The pauses before the two restarts.
    assert report["seconds"] >= 0.3


def test_without_restarts_a_death_by_memory_has_torchs_text():
    """It does not give the cause: without an option nothing changes."""
    report, kills, _ = in_small_cgroup(False, 0)
    assert kills == 1 and report["numbers"] == list(range(5)), report
    assert re.fullmatch(TORCHS_TEXT, report["error"]["text"]) and report["error"]["restarts"] == 0, report
