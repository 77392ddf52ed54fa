"""Memory limits: a batch that exceeds one is a MemoryError, not an OOM kill; the next one is delivered."""

import re
import shutil

import pytest
import refusals
from cgroups import cgroup_of_400_mb, in_cgroup
from programs import wide

pytestmark = pytest.mark.ours

ADVICE = "; use a smaller batch_size, num_workers or prefetch_factor, or keep fewer batches"
NO_MEMORY = re.compile(
    r"MemoryError: cannot get (\d+) bytes of shared memory for a batch: (.*), (\d+) bytes are left" + ADVICE
)


@pytest.fixture
def small_cgroup():
    with cgroup_of_400_mb() as cgroup:
        yield cgroup


@pytest.mark.parametrize("expanded", [False, True], ids=["our collate", "torch's collate"])
def test_a_batch_beyond_the_cgroup_is_an_error_and_the_next_one_is_delivered(small_cgroup, expanded):
    join, limit, kills = small_cgroup
    errors, sizes = in_cgroup(join, wide, (10, 500, 20, 600, 30), expanded)
    assert sizes == [10, 20, 30] and kills() == 0
    for text, megabytes in zip(errors, (500, 600), strict=True):
        wanted, what, left = NO_MEMORY.fullmatch(text).groups()
        assert int(wanted) == megabytes << 20 and limit in what and int(left) < 400 << 20


def test_many_workers_together_do_not_exceed_the_cgroup(small_cgroup):
    """Each worker checks the limit before the others have touched their pages."""
    join, limit, kills = small_cgroup
    errors, sizes = in_cgroup(join, wide, [60] * 24, False, 6)
    assert kills() == 0 and len(errors) + len(sizes) == 24 and set(sizes) == {60}
    assert errors and all(limit in NO_MEMORY.fullmatch(text)[2] for text in errors)


# Simulated limits: (files, the description of the limit, the bytes left). The bytes left exclude the margin of 32 MB.
MEMINFO = f"MemTotal: {1 << 20} kB\nMemAvailable: {1 << 20} kB\nSwapTotal: 0 kB\nSwapFree: 0 kB\n"
TREES = {
    "version 2": (
        {
            "proc/self/cgroup": "0::/a/b\n",
            "cgroup/cgroup.controllers": "memory\n",
            "cgroup/a/memory.max": f"{100 << 20}\n",
            "cgroup/a/memory.current": f"{40 << 20}\n",
            "cgroup/a/b/memory.max": "max\n",
            "cgroup/a/b/memory.current": "0\n",
        },
        f"the memory cgroup /a is limited to {100 << 20} bytes (memory.max)",
        28 << 20,
    ),
    "version 1": (
        {
            "proc/self/cgroup": "4:memory:/a\n",
            "cgroup/memory/a/memory.limit_in_bytes": f"{90 << 20}\n",
            "cgroup/memory/a/memory.usage_in_bytes": f"{50 << 20}\n",
            "cgroup/memory/a/memory.stat": f"total_inactive_file {2 << 20}\ntotal_active_file {3 << 20}\n",
        },
        f"the memory cgroup /a is limited to {90 << 20} bytes (memory.limit_in_bytes)",
        13 << 20,
    ),
    "the machine": (
        {"proc/meminfo": MEMINFO.replace(f"MemAvailable: {1 << 20}", f"MemAvailable: {70 << 10}")},
        f"the machine has {1 << 30} bytes of memory and 0 bytes of swap",
        38 << 20,
    ),
}


@pytest.mark.forks
def test_simulated_limits_are_named_to_the_byte(tmp_path):
    cases, expected = [], []
    for name, (files, limit, left) in TREES.items():
        for path, text in {"proc/meminfo": MEMINFO, **files}.items():
            file = tmp_path / name / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        for program in ("wide", "wide_by_torchs_collate"):
            cases.append((program, "", "main", (("RUSTLOADER_MEMORY_ROOT", str(tmp_path / name)),)))
            text = (
                f"MemoryError: cannot get {50 << 20} bytes of shared memory for a batch: {limit}, {left} bytes are left"
            )
            expected.append([text + ADVICE] * 2)
    full = tmp_path / "full"
    shutil.copytree(tmp_path / "version 2", full)
    (full / "cgroup/a/memory.current").write_text(f"{100 << 20}\n")
    environment = (("RUSTLOADER_MEMORY_ROOT", str(full)),)
    # No memory is left: small batches are still delivered, and no arena is kept for reuse.
    cases += [("pooled", "", "main", environment), ("pooled", "", "main", ())]
    reports = [refusals.report_of(*case) for case in cases]
    for report, errors in zip(reports, expected, strict=False):
        assert report["value"] == [errors, [1, 2, 3]], report
    assert [report["value"] for report in reports[-2:]] == [[[], 0], [[], 1]]
    assert all(report["left"] == {} and report["output"] == "" and not report["hangs"] for report in reports)


def test_a_cache_stops_growing_when_memory_is_short(tmp_path):
    files, *_ = TREES["version 2"]
    for path, text in {"proc/meminfo": MEMINFO, **files}.items():
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    short = (("RUSTLOADER_MEMORY_ROOT", str(tmp_path)),)
    (tmp_path / "cgroup/a/memory.max").write_text(f"{1 << 30}\n")
    (tmp_path / "cgroup/a/memory.current").write_text(f"{(1 << 30) - (10 << 20)}\n")
    reports = [
        refusals.report_of("cached", "", "main", ()),
        refusals.report_of("cached", "", "main", short),
        # The system has no page for the sixth sample.
        refusals.report_of("cached", "pwrite:19+:ENOSPC", "main", ()),
    ]
    assert reports[0]["value"] == [True, 20, None] and reports[0]["log"] == []
    assert reports[1]["value"] == [True, 0, "no room"]
    assert reports[1]["log"] == [
        "WARNING cache(): no room for more samples: 0 bytes of samples are kept; the others are made each time"
    ]
    right, hits, closed = reports[2]["value"]
    assert right and 0 < hits < 20 and closed == "no room"
    (line,) = reports[2]["log"]
    assert line.startswith("WARNING cache(): samples can no longer be written; the cache accepts no more: [Errno 28]")
