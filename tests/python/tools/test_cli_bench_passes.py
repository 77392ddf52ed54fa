"""`python -m rustloader bench`: passes over a loader, and memory."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch
from support import STARTED, rustloader, wait_until

pytestmark = pytest.mark.ours

if rustloader is not None:
    from rustloader.system.procfs import members
    from rustloader.tools.bench import passes
    from rustloader.tools.harness import memory
    from rustloader.tools.harness.machine import cpu_seconds
    from rustloader.tools.probe.deaths import describe_death
    from rustloader.tools.probe.leaves import nbytes
    from rustloader.tools.probe.side import ENGINES


# Passes


class Numbers(torch.utils.data.Dataset):
    def __init__(self, length, seconds=0.0):
        self.length, self.seconds = length, seconds

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        time.sleep(self.seconds)
        return torch.tensor(i), b"abc"


@pytest.mark.parametrize("engine", ["torch", "rustloader"])
@pytest.mark.parametrize("options", [{"num_workers": 0}, {"num_workers": 2}, {"num_workers": 1, "persistent": True}])
def test_a_pass_ends_where_it_should(engine, options):
    persistent = options.pop("persistent", False)
    loader = torch.utils.data.DataLoader(Numbers(12), batch_size=2, persistent_workers=persistent, **options)
    with ENGINES[engine]():
        whole = passes.run_pass(loader, passes.Limits(None, 60.0), count_bytes=nbytes)
        part = passes.run_pass(loader, passes.Limits(3, 60.0, step=0.001))
        short = passes.run_pass(loader, passes.Limits(None, 1e-9))
    assert (whole.batches, whole.complete, whole.batch_bytes) == (6, True, 2 * (8 + 3))
    assert (part.batches, part.complete, part.batch_bytes) == (3, False, 0)
    assert (short.batches, short.complete) == (2, False)  # the time begins with the first batch
    assert whole.batches_per_second == pytest.approx(6 / whole.seconds)
    assert whole.seconds >= whole.first_batch_seconds > 0 and whole.cpu_seconds_per_batch > 0
    if persistent:
        loader._iterator._shutdown_workers()


def test_a_long_pass_has_a_steady_rate():
    # Marks are 50 ms apart. The batches are slow, so that few of them follow the last mark.
    loader = rustloader.DataLoader(Numbers(60, 0.01), batch_size=1, num_workers=2, collate_fn=len)
    result = passes.run_pass(loader, passes.Limits(None, 60.0))
    assert result.complete and result.batches == 60
    assert result.steady_batches_per_second > 0 and result.steady_cpu_seconds_per_batch > 0


def test_the_share_of_other_processes(monkeypatch):
    """Of 2 cores, all processes use 16 s in 10 s, and the measured ones 4 s."""
    from rustloader.system import cores

    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(cores, "usable_cores", lambda: 2)
    begin, end = passes.Mark(0, 100.0, 7.0), passes.Mark(50, 110.0, 11.0)
    monkeypatch.setattr(passes, "busy_seconds", lambda: 516.0)
    assert passes._share_of_others(begin, end, 500.0) == 0.6
    assert passes._share_of_others(begin, end, 514.0) == 0.0
    assert passes._share_of_others(begin, end, None) is None
    monkeypatch.setattr(cores, "usable_cores", lambda: 1)  # a CPU quota
    assert passes._share_of_others(begin, end, 500.0) is None


STAT = """\
cpu  60 0 40 1000 50 0 0 0 0 0
cpu0 10 20 30 4000 5000 6 7 8 9 10
cpu1 100 0 0 0 0 0 0 0 0 0
cpu12 5000 0 0 0 0 0 0 0 0 0
intr 1 2 3
"""


def test_the_processor_time_of_all_processes(monkeypatch):
    from rustloader.system import cores

    monkeypatch.setattr(cores.os, "sysconf", lambda name: 100)
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(cores, "read", lambda path: STAT)
    assert cores.busy_seconds() == pytest.approx((10 + 20 + 30 + 6 + 7 + 8 + 100) / 100)
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda pid: {0, 7})
    assert cores.busy_seconds() is None
    for unknown in (None, "", "cpu0 0 0 0 0 0 0 0 0\ncpu7 0 0 0 0 0 0 0 0\n"):
        monkeypatch.setattr(cores, "read", lambda path, text=unknown: text)
        assert cores.busy_seconds() is None


def test_between_which_marks_the_rate_is_taken():
    early, late = passes.Mark(8, 2.0, 1.0), passes.Mark(32, 7.0, 5.0)
    assert passes.steady([early, passes.Mark(20, 3.0, 3.0), late], 40) == (early, late)
    assert passes.steady([early], 40) is None
    assert passes.steady([], 40) is None
    assert passes.steady([passes.Mark(24, 5.0, 4.0), late], 40) is None


class Watcher:
    def __init__(self):
        self.heard = []

    def on_start(self, iterator):
        self.heard.append(("began", len(iterator._workers)))
        self.workers = list(iterator._workers)

    def on_progress(self):
        self.heard.append(("beat", None))

    def on_error(self, error):
        self.heard.append(("failed", describe_death(self.workers, error)))


@pytest.mark.parametrize("engine", ["torch", "rustloader"])
def test_a_pass_is_watched(engine):
    watcher = Watcher()
    loader = torch.utils.data.DataLoader(Numbers(12), batch_size=2, num_workers=2)
    with ENGINES[engine]():
        passes.run_pass(loader, passes.Limits(None, 60.0), watcher=watcher)
    assert watcher.heard[:2] == [("began", 2), ("beat", None)]
    assert {what for what, _ in watcher.heard} == {"began", "beat"}


class Deadly(Numbers):
    """A worker exits at sample 5, once the file `begun` exists."""

    def __init__(self, length, begun):
        super().__init__(length)
        self.begun = begun

    def __getitem__(self, i):
        if i == 5:
            assert wait_until(self.begun.exists, STARTED)
            os._exit(3)
        return super().__getitem__(i)


@pytest.mark.parametrize("engine", ["torch", "rustloader"])
def test_a_worker_that_dies_is_found_before_the_end_of_the_pass_ends_all(engine, tmp_path):
    class Beginning(Watcher):
        def on_start(self, iterator):
            super().on_start(iterator)
            # Deaths come after this: torch may report an earlier one within iter(), where no watcher hears of it.
            (tmp_path / "begun").touch()

    watcher = Beginning()
    loader = torch.utils.data.DataLoader(Deadly(12, tmp_path / "begun"), batch_size=2, num_workers=3)
    with ENGINES[engine](), pytest.raises(RuntimeError, match="DataLoader worker"):
        passes.run_pass(loader, passes.Limits(None, 60.0), watcher=watcher)
    assert watcher.heard[-1] == ("failed", f"worker 2 (pid {watcher.workers[2].pid}) ended with exit code 3")


def test_the_processor_time_of_a_process_that_has_just_ended_is_nothing():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert cpu_seconds([process.pid]) > 0  # of this process alone


# Memory


HOLDER = """
    import mmap, os, sys, time
    MB = 1 << 20
    piece = b"x" * 4096  # larger objects would leave a heap behind
    private = bytearray(30 * MB)
    private[::4096] = private[1::4096]
    def shared(size):
        fd = os.memfd_create("rustloader-test")
        os.ftruncate(fd, size)
        return fd
    mapped = mmap.mmap(fd := shared(20 * MB), 20 * MB)
    for _ in range(20 * MB // 4096):
        mapped.write(piece)
    open_only = shared(10 * MB)
    for _ in range(10 * MB // 4096):
        os.write(open_only, piece)
    if os.fork() == 0:
        touched = sum(mapped[::4096])
    os.write(1, b"ready\\n")  # print may write in two steps, with the child's between them
    time.sleep(600)
"""


def test_memory_counts_each_page_once(monkeypatch):
    """A process and its child, which map the same 20 MB, hold the same 30 MB, and have the same 10 MB open."""

    def start(source):
        command = [sys.executable, "-c", textwrap.dedent(source)]
        return subprocess.Popen(command, process_group=0, stdout=subprocess.PIPE)

    holder, plain = (
        start(HOLDER),
        start("import mmap, os, time; os.fork(); os.write(1, b'ready\\n'); time.sleep(600)"),
    )
    try:
        for process in (holder, plain):
            assert [process.stdout.readline() for _ in range(2)] == [b"ready\n"] * 2
            assert len(list(members(process.pid))) == 2
        if memory.used(plain.pid) is None:
            pytest.skip("/proc has no smaps_rollup here")
        more = (memory.used(holder.pid) - memory.used(plain.pid)) / (1 << 20)
        assert 55 < more < 70
        monkeypatch.setattr(memory, "_SAMPLE_INTERVAL", 600.0)
        peak = memory.Peak(holder.pid)
        peak.sample()
        peak.sample()
        assert peak.samples == 1 and peak.bytes >= 55 << 20
    finally:
        for process in (holder, plain):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            process.stdout.close()
    # The child may take a moment to end.
    assert wait_until(lambda: memory.used(holder.pid) is None)
