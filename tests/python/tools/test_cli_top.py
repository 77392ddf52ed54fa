"""`rustloader top`: the loaders of other processes, and the messages for what cannot be shown."""

import contextlib
import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from types import SimpleNamespace
from unittest import mock

import pytest
import snapshots
from pinning_support import pinning
from sample_data import Numbers, Shards
from support import (
    STARTED,
    DataLoader,
    TorchDataLoader,
    gone,
    kill,
    mappings,
    open_files,
    rustloader,
    start_script,
    wait_until,
    worker_pids,
)

pytestmark = [pytest.mark.ours, pytest.mark.timeout(400)]

if rustloader is not None:
    from rustloader.caching.usage import CacheUsage
    from rustloader.metrics.finding import is_remote
    from rustloader.system import procfs
    from rustloader.tools import cli
    from rustloader.tools.top import command, model, processes, view

OWN = os.getpid()
HEAD = """
import json, os, sys, threading, time
import torch
from torch.utils.data import Dataset
import rustloader
from rustloader import DataLoader


class Items(Dataset):
    def __init__(self, stuck=None, seconds=0.001):
        self.stuck, self.seconds = stuck, seconds

    def __len__(self):
        return 100_000_000

    def __getitem__(self, i):
        time.sleep(3600 if i == self.stuck else self.seconds)
        return torch.tensor(i)


def say(**words):
    print(json.dumps(words), flush=True)
"""
LOOP = """
if __name__ == "__main__":
    loader = DataLoader(Items({items}), batch_size=4, num_workers=2, prefetch_factor=3, **{options})
    iterator = iter(loader)
    # One batch of each worker.
    next(iterator), next(iterator)
    say(workers=[worker.pid for worker in iterator._workers])
    for batch in iterator:
        time.sleep(0.001)
"""


@contextlib.contextmanager
def running(source, file=None, **kw):
    """Runs a script, in a new interpreter if it has a file. Yields its process and its first line of output."""
    process = start_script(source, file, head=HEAD, fresh=file is not None, **kw)
    try:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        yield process, json.loads(line)
    finally:
        kill(process)


def run(*arguments, capsys):
    status = cli.main(["top", *map(str, arguments)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def as_json(pid, capsys, interval=0.2):
    status, out, err = run(pid, "--json", "--interval", interval, capsys=capsys)
    assert (status, err) == (0, ""), err
    return json.loads(out)


def refused(*arguments, capsys):
    status, out, err = run(*arguments, capsys=capsys)
    assert status == 2 and err.startswith("rustloader top: ") and err.count("\n") == 1, (status, out, err)
    return err.removeprefix("rustloader top: ").rstrip("\n")


def started(**options):
    """A running iterator of this process, and the pids of its workers."""
    iterator = iter(DataLoader(Numbers(10**6), **{"num_workers": 2} | options))
    next(iterator)
    return iterator, worker_pids(iterator)


def loop(stuck=None, seconds=0.001, **options):
    return LOOP.format(items=f"{stuck}, {seconds}", options=options)


# What is shown


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_live_process_is_shown(method, tmp_path, capsys):
    source = loop(multiprocessing_context=method, persistent_workers=method == "fork")
    with running(source, tmp_path / "script.py") as (process, printed):
        shown = {}

        def has_shares():
            """False if this process was stopped while it looked: what it saw is then from several moments."""
            shown.update(as_json(process.pid, capsys))
            (loader,) = shown["loaders"]
            shares = loader["main"]["shares"]
            of_main = 0.2 < sum(shares.values()) - shares["between"] <= 1.05 and shares["between"] < 0.8
            return of_main and all(0.5 < sum(worker["shares"].values()) <= 1.001 for worker in loader["workers"])

        assert wait_until(has_shares, STARTED), shown
        assert shown["pid"] == process.pid and "script.py" in shown["command"] and shown["memory_bytes"] > 1 << 20
        (loader,) = shown["loaders"]
        assert loader["name"] == loader["stats"]["name"] and loader["name"].startswith("script.py:")
        assert (loader["num_workers"], loader["prefetch_factor"], loader["in_order"]) == (2, 3, True)
        assert loader["persistent"] == (method == "fork") and not loader["pinning"]
        assert loader["main"]["state"] in ("next", "waiting", "step") and loader["interval_seconds"] >= 0.2
        assert loader["stats"]["batches"] >= loader["epoch_batches"] > 0 and loader["stats"]["epochs"] == 1
        assert [worker["pid"] for worker in loader["workers"]] == printed["workers"]
        for worker in loader["workers"]:
            assert worker["memory_bytes"] > 1 << 20 and worker["shared_bytes"] > 0
            if os.path.exists("/proc/self/smaps_rollup"):
                assert 0 < worker["pss_bytes"] <= worker["memory_bytes"]

        def goes_on():
            later = as_json(process.pid, capsys)["loaders"][0]
            return later["stats"]["batches"] > loader["stats"]["batches"] and later["batches_per_second"] > 0

        assert wait_until(goes_on, STARTED)


def test_pid_of_a_worker_shows_its_main_process_as_plain_text(capsys):
    iterator, pids = started(prefetch_factor=3, name="train")
    next(iterator)  # worker 1 has started
    status, out, err = run(pids[1], "--once", "--interval", "0.1", capsys=capsys)
    assert err == f"Process {pids[1]} is worker 1 of a loader of process {OWN}. Showing process {OWN}.\n"
    lines = out.splitlines()
    assert status == 0 and "\x1b" not in out and lines[0].startswith(f"process {OWN}: ")
    assert lines[2].startswith("loader 1      train: 2 workers, prefetch_factor=3; created ")
    assert [line.split()[:2] for line in lines[-2:]] == [[str(n), str(pids[n])] for n in (0, 1)]
    # Without a terminal nothing is drawn.
    assert run(OWN, "--interval", "0.1", capsys=capsys)[1].splitlines()[0] == lines[0]


def test_a_stuck_worker_stands_out_with_its_index_and_its_time(capsys):
    # Batch 41 is worker 1's.
    with running(loop(stuck=41 * 4 + 2)) as (process, printed):
        shown = []

        def stands_out():
            shown[:] = as_json(process.pid, capsys)["loaders"]
            worker, waits = shown[0]["workers"][1], shown[0]["main"]["state"] == "waiting"
            return worker["stuck"] and worker["shares"]["fetch"] > 0.9 and waits and shown[0]["epoch_batches"] == 41

        assert wait_until(stands_out, STARTED)
        worker = shown[0]["workers"][1]
        assert (worker["state"], worker["batch"], worker["index"]) == ("fetching", 41, "[164, 165, 166, 167]")
        assert worker["seconds"] >= 2 and worker["usual_batch_seconds"] < 1
        assert not shown[0]["workers"][0]["stuck"]
        out = run(process.pid, "--once", "--interval", "0.1", capsys=capsys)[1]
        pid = printed["workers"][1]
        assert f"  !           worker 1 (pid {pid}) has been fetching batch 41 for " in out
        assert "indices [164, 165, 166, 167]. Its batches take " in out and "\n    !1 " in out
        assert (
            "waiting for batch 41 for " in out and "verdict     The loop is waiting for the worker marked below." in out
        )


def test_the_statistics_are_those_that_the_process_itself_gives():
    with pinning():
        iterator = iter(DataLoader(Numbers(100), batch_size=4, num_workers=2, pin_memory=True))
        for _ in range(10):
            next(iterator)
        # Including the batches in flight.
        assert wait_until(lambda: sum(worker.tasks for worker in rustloader.stats(iterator).workers) == 14, STARTED)
        (look,) = model.observe(os.getpid())
        seen, own = model.Loader(os.getpid(), None, look).total, rustloader.stats(iterator)
        iterator._shutdown_workers()
        assert not model.observe(os.getpid())
    for name in ("num_workers", "iterators", "epochs", "batches", "bytes", "next_seconds", "first_seconds", "copies"):
        assert getattr(seen, name) == getattr(own, name), name
    assert [worker.pid for worker in seen.workers] == [worker.pid for worker in own.workers]
    assert [worker.tasks for worker in seen.workers] == [worker.tasks for worker in own.workers]
    assert seen.step_seconds > 0 and seen.workers[0].cpu_seconds > 0
    assert look.figures.pinning and seen.pinning.running and seen.pinning.seconds > 0


def test_the_verdict_is_on_the_last_minute_once_there_is_enough_of_it():
    def look(now, batches, **counts):
        zero = dict.fromkeys(COUNTS, 0) | dict.fromkeys(TIMES, 0.0)
        latest = figures(1)
        latest.now, latest.totals.counts = now, zero | {"epochs": 1, "batches": batches} | counts
        return model.Observation((1, 2), latest, (None,), (model.NO_TIME,))

    # All of the wait lies before the last seconds.
    waited = {"waited_seconds": 1000.0, "next_seconds": 1000.0}
    first, early = look(900.0, 1000, **waited), look(905.0, 1010, **waited)
    now = look(910.5, 1100, step_seconds=10.0, **waited)
    assert model.Loader(os.getpid(), None, now, [first]).verdict[0].kind == "step"
    assert model.Loader(os.getpid(), None, now, [first]).verdict[1] == 10.5
    for period in ([], [early]):
        verdict, seconds = model.Loader(os.getpid(), None, now, period).verdict
        assert verdict.kind != "step" and seconds is None
    period = [first, early, look(909.0, 1040), look(910.0, 1090)]
    assert [half.batches for half in model.Loader(os.getpid(), None, now, period)._halves()] == [40, 60]
    assert model.Loader(os.getpid(), None, now, [first])._halves() == ()


def test_between_two_epochs(capsys):
    kept, other = (DataLoader(Numbers(4), num_workers=1, persistent_workers=persistent) for persistent in (True, False))
    list(kept), list(other), list(kept)
    shown = []

    def is_idle():
        shown[:] = as_json(OWN, capsys)["loaders"]
        return shown[0]["workers"][0]["state"] == "idle"

    assert wait_until(is_idle), shown
    (loader,) = shown
    assert loader["main"]["state"] == "between" and loader["stats"]["epochs"] == 2
    assert loader["main"]["shares"]["between"] > 0.9
    assert (loader["stats"]["batches"], loader["epoch_batches"]) == (8, 4)
    out = run(OWN, "--once", "--interval", "0.1", capsys=capsys)[1]
    assert "  main        between two epochs for " in out and "epoch 2, 4 batches" in out
    assert "% between epochs or starting one\n" in out, out


def test_a_process_without_open_descriptors_is_seen_by_root_alone(capsys):
    source = """
        if __name__ == "__main__":
            iterator = iter(DataLoader(Items(), num_workers=1))
            next(iterator)
            os.closerange(3, 1000)
            say()
            time.sleep(3600)
    """
    with running(source) as (process, _):
        if os.geteuid() == 0:
            assert len(as_json(process.pid, capsys)["loaders"]) == 1
        else:
            assert "run this with sudo" in refused(process.pid, "--once", capsys=capsys)


def test_the_memory_of_workers_in_a_container_is_theirs_or_unknown(capsys, monkeypatch):
    assert processes.outer_pids(OWN) is None
    _iterator, (first, second) = started()
    monkeypatch.setattr(processes, "outer_pids", lambda pid: {OWN: OWN, first: second})
    zero, one = as_json(OWN, capsys)["loaders"][0]["workers"]
    assert zero["pid"] == second and zero["memory_bytes"] > 1 << 20
    assert (one["pid"], one["memory_bytes"]) == (None, None)
    assert " n/a" in run(OWN, "--once", "--interval", "0.1", capsys=capsys)[1]


# What the observed process notices


def test_a_look_opens_for_reading_alone_and_leaves_nothing_open(capsys, monkeypatch):
    flags, opened = [], os.open

    def noting_open(path, how, *rest):
        if str(path).startswith("/proc/"):
            flags.append(how & (os.O_ACCMODE | os.O_CREAT | os.O_TRUNC))
        return opened(path, how, *rest)

    _iterator, _ = started()
    monkeypatch.setattr(os, "open", noting_open)
    before = open_files(), mappings()
    as_json(OWN, capsys)
    assert flags and set(flags) == {os.O_RDONLY}
    assert (open_files(), mappings()) == before


# Which process


def test_without_a_pid_the_only_process_is_shown_or_all_are_listed(capsys, monkeypatch):
    known = [OWN]
    monkeypatch.setattr(processes, "pids", lambda: known)
    words = refused(capsys=capsys)
    assert words.startswith("no process") and "has a loader running on rustloader's engine now. " in words
    _iterator, pids = started()
    # Its workers have the arena open, and its other children may, too.
    known += pids
    status, out, err = run("--json", "--interval", "0.1", capsys=capsys)
    assert (status, json.loads(out)["pid"]) == (0, OWN)
    with running(loop()) as (other, _):
        known.append(other.pid)
        status, out, err = run(capsys=capsys)
        several = "several processes have running loaders; choose one: rustloader top PID"
        assert (status, err) == (2, f"rustloader top: {several}\n")
        heading, *rows = out.splitlines()
        assert heading.split() == ["pid", "rank", "loaders", "batches", "in", "next", "verdict", "command"]
        assert sorted(row.split()[:3] for row in rows) == sorted([str(pid), "-", "1"] for pid in (OWN, other.pid))
        status, out, err = run("--json", capsys=capsys)
        assert status == 2 and {process["pid"] for process in json.loads(out)["processes"]} == {OWN, other.pid}


def test_a_process_that_has_ended(capsys):
    child = subprocess.Popen(["true"])
    try:
        assert wait_until(lambda: gone(child.pid))
        absent = f"there is no process {child.pid}"
        assert refused(child.pid, "--once", capsys=capsys) in (f"process {child.pid} has ended", absent)
    finally:
        child.wait()
    assert refused(child.pid, "--once", capsys=capsys) == absent


def test_a_process_of_another_user(capsys, monkeypatch):
    def forbidden(pid):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(processes, "_open_arenas", forbidden)
    monkeypatch.setattr(processes, "user", lambda: "somebody")
    name = processes.owner(1)
    words = refused(1, "--once", capsys=capsys)
    assert words == f"process 1 belongs to {name}; run as that user or with sudo"
    monkeypatch.setattr(processes, "user", lambda: name)
    for uid, remedy in ((1000, "; run this with sudo"), (0, "")):
        monkeypatch.setattr(os, "geteuid", lambda uid=uid: uid)
        words = refused(1, "--once", capsys=capsys)
        assert words == f"process 1 does not let other processes of its user inspect it{remedy}"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process as another user")
def test_another_user_may_not_look():
    """What the kernel allows a process of another user to see."""
    _iterator, _ = started()
    child = os.fork()
    if child == 0:
        status = 2
        try:
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
            processes.loaders(OWN)
        except processes.NothingToSee as reason:
            status = str(reason) != f"process {OWN} belongs to root; run as that user or with sudo"
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_process_without_rustloader(capsys):
    with subprocess.Popen(["sleep", "600"]) as child:
        words = refused(child.pid, "--once", capsys=capsys)
        child.kill()
    assert words.startswith(f"process {child.pid} does not use rustloader's engine. Its loaders, if it has")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_process_whose_loaders_are_torchs(workers, capsys):
    iterator = iter(TorchDataLoader(Numbers(10), num_workers=workers))
    next(iterator)
    words = refused(OWN, "--once", capsys=capsys)
    begin = f"process {OWN} uses rustloader, but none of its loaders is running on the engine now"
    assert words.startswith(begin) and "num_workers=0" in words and "torch's own iterator" in words


@pytest.mark.parametrize("version", [77, None])
def test_an_arena_that_cannot_be_read(version, capsys):
    """It has another version's layout, or is damaged."""
    fd = os.memfd_create("rustloader", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, 1 << 20)
        header = struct.pack("<QIIII", 0x726C6F6164657201, 2, 8, 1024, version) if version else os.urandom(4096)
        os.pwrite(fd, header, 0)
        words = refused(os.getpid(), "--once", capsys=capsys)
    finally:
        os.close(fd)
    begin = f"the loaders of process {os.getpid()} cannot be read: "
    if version:
        assert words.startswith(f"{begin}the shared memory has layout version 77")
        assert f"this rustloader ({rustloader.__version__}) reads version 8" in words
    else:
        assert words.startswith(f"{begin}shared memory of the DataLoader is damaged")


def test_a_process_that_ends_between_two_looks(capsys, monkeypatch):
    with running(loop()) as (process, _):
        monkeypatch.setattr(time, "sleep", lambda seconds: kill(process))
        words = refused(process.pid, "--once", capsys=capsys)
        assert words in (f"process {process.pid} has ended", f"there is no process {process.pid}")


def test_stopped_processes_are_named(capsys):
    with running(loop()) as (process, _):
        worker = as_json(process.pid, capsys)["loaders"][0]["workers"][0]["pid"]
        for pid in (worker, process.pid):
            os.kill(pid, signal.SIGSTOP)
            assert wait_until(lambda pid=pid: procfs.is_stopped(pid))
        out = run(process.pid, "--once", "--interval", "0.1", capsys=capsys)[1]
        assert "main        stopped by a signal or a debugger\n" in out
        assert f"worker 0 (pid {worker}) is stopped by a signal or a debugger" in out and "\n    !0 " in out
        loader = as_json(process.pid, capsys)["loaders"][0]
        assert (loader["main"]["state"], loader["workers"][0]["state"]) == ("stopped", "stopped")
        for pid in (worker, process.pid):
            os.kill(pid, signal.SIGCONT)


def test_a_worker_that_has_died_stands_out(capsys):
    _iterator, pids = started()
    os.kill(pids[0], signal.SIGKILL)
    assert wait_until(lambda: gone(pids[0]))
    dead, alive = as_json(OWN, capsys)["loaders"][0]["workers"]
    assert (dead["state"], dead["memory_bytes"]) == ("ended", None) and alive["state"] != "ended"
    out = run(OWN, "--once", "--interval", "0.1", capsys=capsys)[1]
    assert f"worker 0 (pid {pids[0]}) has ended" in out and "\n    !0 " in out


def test_a_worker_that_leaves_while_it_is_observed_is_not_shown_as_dead(monkeypatch):
    iterator = iter(DataLoader(Shards([0, 100]), num_workers=2))
    leaving, read = iterator._workers[0].pid, processes.loaders

    def has_no_more():
        worker = read(os.getpid())[0].figures.workers[0]
        return worker.state == "idle" and worker.ready and not worker.queued

    assert wait_until(has_no_more, STARTED)

    def loaders(pid):
        found = read(pid)
        if not gone(leaving):
            assert found[0].figures.workers[0].state == "idle"
            next(iterator)  # worker 0 has no samples, and is told to leave
            assert wait_until(lambda: gone(leaving), STARTED)
        return found

    monkeypatch.setattr(processes, "loaders", loaders)
    (look,) = model.observe(os.getpid())
    leaver, worker = model.Loader(os.getpid(), None, look).workers
    assert (leaver.state, leaver.is_marked) == ("left", False) and not worker.is_marked


# Arguments, and missing packages


def test_without_rich_the_live_view_says_how_to_get_it(capsys, monkeypatch):
    monkeypatch.setattr(command, "_has_rich", lambda: False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    words = refused(os.getpid(), capsys=capsys)
    assert words == "the live view needs rich: pip install 'rustloader[cli]', or use --once or --json"


def test_neither_torch_nor_rich_is_imported_for_one_look():
    _iterator, _ = started()
    code = "import sys; from rustloader.tools.cli import main; main(sys.argv[1:]); "
    code += "print({'torch', 'rich'} & set(sys.modules))"
    command = [sys.executable, "-c", code, "top", str(OWN), "--once", "--interval", "0.1"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=STARTED)
    assert (ended.returncode, ended.stderr) == (0, "") and ended.stdout.endswith("set()\n")


# The live view


class Terminal:
    """`rustloader top` in a terminal of its own."""

    def __init__(self, *arguments, rows=24, columns=80):
        self._controller, self.tty = pty.openpty()
        fcntl.ioctl(self.tty, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.before = termios.tcgetattr(self.tty)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rustloader", "top", *map(str, arguments)],
            stdin=self.tty,
            stdout=self.tty,
            stderr=self.tty,
            env=os.environ | {"TERM": "xterm-256color"},
            start_new_session=True,
        )
        self.text = ""

    def read(self):
        while select.select([self._controller], [], [], 0.05)[0]:
            self.text += os.read(self._controller, 1 << 16).decode(errors="replace")
        return self.text

    def shows(self, text):
        return wait_until(lambda: text in self.read(), STARTED)

    def press(self, keys):
        os.write(self._controller, keys.encode())

    def status(self):
        assert wait_until(lambda: self.read() is None or self.process.poll() is not None, STARTED), self.text
        self.read()
        return self.process.returncode

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.process.kill()
        self.process.wait()
        os.close(self._controller)
        os.close(self.tty)


SHOWS, HIDES = "\x1b[?1049h", "\x1b[?1049l"


@pytest.mark.parametrize("end", ["q", "interrupt", "terminate"])
def test_the_live_view_ends_and_leaves_a_clean_terminal(end):
    _iterator, _ = started()
    with Terminal(OWN, "--interval", "0.1") as terminal:
        assert terminal.shows("loader 1") and terminal.shows("updated every 0.1 s; q quits"), terminal.text
        first = terminal.text.count("loader 1")
        assert wait_until(lambda: terminal.read().count("loader 1") > first + 2, STARTED)
        if end == "q":
            terminal.press("xq")
        else:
            os.kill(terminal.process.pid, signal.SIGINT if end == "interrupt" else signal.SIGTERM)
        assert terminal.status() == (143 if end == "terminate" else 0), terminal.text
        assert terminal.text.count(SHOWS) == terminal.text.count(HIDES) == 1 and "Traceback" not in terminal.text
        assert termios.tcgetattr(terminal.tty) == terminal.before


def test_the_live_view_ends_with_the_process():
    with running(loop()) as (process, _), Terminal(process.pid, "--interval", "0.1") as terminal:
        assert terminal.shows("loader 1"), terminal.text
        kill(process)
        assert terminal.status() == 0
        end = terminal.text.rpartition(HIDES)[2].strip()
        assert end.endswith((f"Process {process.pid} has ended.", f"There is no process {process.pid}.")), end


def test_the_live_view_waits_for_loaders():
    with Terminal(OWN, "--interval", "0.1") as terminal:
        assert terminal.shows("No loader is running now"), terminal.text
        _iterator, _ = started()
        assert terminal.shows("loader 1"), terminal.text
        terminal.press("q")
        assert terminal.status() == 0


class Totals(SimpleNamespace):
    """Figures that can be subtracted, like `_core.Totals`."""

    def since(self, earlier):
        def difference(now, before):
            return {name: max(0, value - before[name]) for name, value in now.items()}

        counts = difference(self.counts, earlier.counts)
        pairs = zip(self.workers, earlier.workers, strict=True)
        workers = [SimpleNamespace(**difference(vars(now), vars(before))) for now, before in pairs]
        return Totals(**vars(self) | {"counts": counts, "workers": workers})


def figures(workers, stuck=()):
    """A made-up result of `_core.inspect_arena` for a loader."""
    names = ("starting", "idle", "fetch", "collate", "pack", "left")
    times = dict.fromkeys(names, 1.0) | {"busy": 4.0, "fetch_cpu": 0.25, "fetch_measured": 1.0}
    counts = dict(pid=0, tasks=100, adopted=0, adopted_bytes=0, start_cpu=0.5, start_queued=0.0)
    counts |= {f"{name}_seconds": seconds for name, seconds in times.items()}
    index = "[10000, 10001, 10002, 10003, 10004, 10005, 10006, ... 256 in all]"
    common = dict(seconds_at_batch=99.0, index=index, queued=0, ready=0, warm=1 << 20)
    states = {False: dict(state="idle", seconds_in_state=0.1), True: dict(state="fetch", seconds_in_state=99.0)}
    totals = Totals(
        counts=dict.fromkeys(COUNTS, 10**9) | dict.fromkeys(TIMES, 1.0),
        workers=[SimpleNamespace(**counts) for _ in range(workers)],
        leased=1 << 40,
        warm=1 << 41,
        high_water=1 << 42,
        blocks=1000,
        pin_threads=1,
    )
    loader = dict(now=1000.0, started=100.0, pid=os.getpid(), name="train", state="waiting", seconds_in_state=98.7)
    loader |= dict(stopping=False, prefetch_factor=2, in_order=False, persistent=True, pinning=True, remote=False)
    observed = [SimpleNamespace(batch=n, **common | states[n in stuck]) for n in range(workers)]
    return SimpleNamespace(**loader, epoch_batches=123456, workers=observed, totals=totals)


COUNTS = "epochs batches bytes copies copied_bytes pickled pinned".split()
TIMES = [f"{name}_seconds" for name in "next waited first blocked sampler step pinning".split()]


def made_up(workers, stuck=()):
    look = model.Observation((1, 2), figures(workers, stuck), (None,) * workers, (model.NO_TIME,) * workers)
    return model.Loader(os.getpid(), None, look)


@pytest.mark.parametrize("width, height", [(80, 24), (200, 50), (60, 10), (96, 24)])
@pytest.mark.parametrize("count", [1, 2])
def test_the_view_fits_its_terminal_and_shows_what_stands_out(width, height, count):
    shown = [made_up(48, stuck={31}) for _ in range(count)]
    lines = view.plain(view.frame(12345, "python " + "x" * 300, shown, width, height)).splitlines()
    assert len(lines) <= height and all(len(line) <= width for line in lines), "\n".join(lines)
    assert any("!           worker 31 has been fetching batch 31" in line for line in lines)
    if height >= 24:
        assert sum(line.startswith("   !31 ") for line in lines) == count, "\n".join(lines)
        assert any("more workers: make the window taller" in line for line in lines)


def test_texts_of_frames():
    usage = CacheUsage(900, 100, 7_500_000_000, 1_100_000_000, limit=8_600_000_000)
    frames = {
        "80 columns": view.frame(1, "python train.py", [made_up(2, stuck={1})], 80),
        "96 columns, and caches": view.frame(1, "python train.py", [made_up(2)], 96, None, [usage, usage]),
        "24 lines": view.frame(1, "python train.py", [made_up(48, stuck={31}), made_up(48)], 80, 24),
        "23 lines": view.frame(1, "python train.py", [made_up(4), made_up(3)], 80, 23),
    }
    snapshots.check("top", {title: view.plain(frame) for title, frame in frames.items()})
    for height in (12, 20):
        assert len(view.frame(1, "python", [made_up(8)], 100, height, [usage])) <= height


def test_no_fetch_has_no_processor_time():
    look = made_up(1)._now
    loader = model.Loader(os.getpid(), look, look)
    assert loader.workers[0].fetch_cpu_share is None and loader.as_dict()["workers"][0]["fetch_cpu_share"] is None
    assert made_up(1).workers[0].fetch_cpu_share == 0.25


CACHES = """
if __name__ == "__main__":
    dataset = torch.utils.data.TensorDataset(torch.rand(100, 50))
    cached = rustloader.cache(dataset, memory="2MiB")
    filed = rustloader.cache(dataset, memory="1MiB", path="samples.cache")
    large = open("large", "w+b")
    large.write(bytes(1 << 20))
    samples = [cached[3], cached[3], cached[4], filed[5]]
    iterator = iter(DataLoader(Items(), batch_size=2, num_workers=1))
    next(iterator)
    say(usages=[vars(it.usage()) for it in (cached, filed)])
    time.sleep(600)
"""


def test_the_caches_of_a_process_are_shown_as_it_counts_them(tmp_path, capsys):
    """Caches in memory and in files."""
    with running(CACHES, cwd=tmp_path) as (process, printed):
        before = open_files()
        shown = as_json(process.pid, capsys)["caches"]
        key = "limit"
        assert sorted(shown, key=lambda usage: usage[key]) == sorted(printed["usages"], key=lambda usage: usage[key])
        assert {(usage["hits"], usage["misses"]) for usage in shown} == {(1, 2), (0, 1)}
        assert all(usage["samples_bytes"] >= 200 and usage["bytes_left"] > 0 for usage in shown)
        _, out, _ = run(process.pid, "--once", "--interval", "0.1", capsys=capsys)
        assert "cache       1 hit (33% of the samples), 2 misses, " in out
        assert open_files() == before


@pytest.mark.parametrize(
    "second, summary, rows", [(20_000_000, "50.0 MB", "30.0 20.0"), (None, "1.0 GB RSS", "500 500")]
)
def test_memory_is_pss_or_labelled_rss(second, summary, rows, monkeypatch):
    """A sum has one kind: RSS if the PSS of any worker is unknown."""
    left = [{"Pss": 30_000_000}, {} if second is None else {"Pss": second}]
    monkeypatch.setattr(procfs, "resident", lambda pid: 500_000_000)
    monkeypatch.setattr(procfs, "rollup", lambda pid: left.pop(0))
    look = model.Observation((1, 2), figures(2), (os.getpid(),) * 2, (model.WorkTime(),) * 2)
    *above, heading, one, two = view.plain(view.frame(1, "python", [model.Loader(1, None, look)], 160)).splitlines()
    assert next(line for line in above if line.startswith("  memory")).endswith(f"; workers {summary}")
    assert heading.split()[-2] == ("RSS" if second is None else "memory")
    assert [row.split(" MB")[0].split()[-1] for row in (one, two)] == rows.split()


def test_times_have_few_letters():
    times = {0: "0 ms", 0.9994: "999 ms", 0.9996: "1.0 s", 9.96: "10 s", 99.6: "1m40s", 3599: "59m59s", 3600: "1h00m"}
    assert {seconds: view._time(seconds) for seconds in times} == times


def test_an_interval_may_be_longer_than_the_time_that_looks_are_kept(monkeypatch):
    looks = iter([SimpleNamespace(key=1, figures=SimpleNamespace(now=now)) for now in (100.0, 190.0, 280.0)])
    monkeypatch.setattr(command, "observe", lambda pid: [next(looks)])
    monkeypatch.setattr(command, "Loader", lambda pid, before, now, period: (before, now, period))
    watch = command._History(1)
    for now in (100.0, 190.0, 280.0):
        monkeypatch.setattr(command.time, "monotonic", lambda now=now: now)
        watch.observe()
    ((before, now, period),) = watch.loaders()
    assert (before.figures.now, now.figures.now, [it.figures.now for it in period]) == (190.0, 280.0, [190.0])


def test_workers_elsewhere_have_the_verdict_of_workers_elsewhere():
    look = model.Observation((1, 2), figures(2), (None,) * 2, (model.NO_TIME,) * 2)
    loader = model.Loader(os.getpid(), None, look)
    assert not is_remote(model.stats_for_verdict(loader.total, look.figures))
    look.figures.remote = True
    scheduling = model.stats_for_verdict(loader.total, look.figures).scheduling
    assert scheduling.remote and scheduling.prefetch_factor == 2 and not scheduling.in_order
    with mock.patch.object(model.Stats, "verdict", lambda stats: SimpleNamespace(kind=stats.scheduling.remote)):
        assert loader.verdict[0].kind is True
    assert model.Loader(os.getpid(), None, look).as_dict()["stats"]["scheduling"] is None
