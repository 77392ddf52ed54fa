"""`python -m rustloader bench`: what it measures, what it says, and that it leaves nothing."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import termios
import textwrap
import time
from itertools import pairwise

import pytest
import torch
from support import in_session, rustloader

pytestmark = pytest.mark.ours

if rustloader is not None:
    from rustloader import _cli
    from rustloader._cli import bench, memory, passes, probe, progress, results, timeline
    from rustloader._cli.engines import ENGINES
    from rustloader._cli.factory import Unusable
    from rustloader._cli.measure import Order

# Liveness of processes that import torch, on a machine that does much else.
LONG = 400.0

LOADERS = """
    import os, signal, time
    import torch
    import rustloader
    from torch.utils.data import DataLoader, Dataset

    class Numbers(Dataset):
        length = 96
        fails_at = None
        def __len__(self):
            return self.length
        def __getitem__(self, i):
            if i == self.fails_at:
                self.fail()
            return torch.full((8,), i)
        def fail(self):
            raise KeyError("on purpose")

    def torchs():
        print("the user's own words")
        return DataLoader(Numbers(), batch_size=4, shuffle=True, num_workers=2)
    def ours():
        return rustloader.DataLoader(Numbers(), batch_size=4, num_workers=2, persistent_workers=True)
    def single():
        return DataLoader(Numbers(), batch_size=4, timeout=0)
    def without_any():
        dataset = Numbers()
        dataset.length = 0
        return DataLoader(dataset, num_workers=1)
    def broken():
        raise OSError("no such data")
    def failing():
        dataset = Numbers()
        dataset.fails_at = 30
        return DataLoader(dataset, batch_size=4, num_workers=1)
    class Deadly(Numbers):
        def fail(self):
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(60)
    def deadly():
        dataset = Deadly()
        dataset.fails_at = 0
        return DataLoader(dataset, batch_size=4, num_workers=1)
    class Slow(Numbers):
        def __getitem__(self, i):
            open("working", "w").close()
            time.sleep(0.01)
            return i
    def slow():
        return DataLoader(Slow(), batch_size=4, num_workers=2, persistent_workers=True)
    def hanging():
        open("working", "w").close()
        time.sleep(600)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder to be in, with the loaders above in loaders.py; they are imported by other processes only."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loaders.py").write_text(textwrap.dedent(LOADERS))
    return tmp_path


def run(*arguments, capsys):
    status = _cli.main(["bench", *arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


# The command


@pytest.mark.slow
@pytest.mark.timeout(LONG)
def test_a_loader_is_measured_on_both_engines(folder, capsys):
    status, out, err = run("loaders.py:torchs", "--epochs", "2", "--step", "0.002", capsys=capsys)
    assert status == 0, err
    lines = out.splitlines()
    assert lines[0].startswith("loaders.py:torchs: 2 epochs of each loader in turn")
    assert lines[1] == "2 workers, started each epoch (fork), prefetch_factor=2"
    rows = {line[:15].strip(): line[15:].split() for line in lines if line}
    assert rows[""] == ["torch", "rustloader", "ratio"]
    for name in ("batches/s", "MB/s", "CPU a batch", "first batch", "memory"):
        assert name in rows, out
    assert "Verdict on rustloader's: " in out and "--step SECONDS" not in out
    assert "the user's own words" not in out
    assert "%" not in err  # no bar in a pipe


class Terminal(io.StringIO):
    """What is written to a terminal, or to a pipe."""

    def __init__(self, is_one):
        super().__init__()
        self.isatty = lambda: is_one


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("tqdm", [True, False])
def test_a_bar_only_on_a_terminal_and_with_tqdm(terminal, tqdm, monkeypatch):
    if tqdm:
        module = pytest.importorskip("tqdm", reason="the bar is optional, and tqdm is not installed")
        monkeypatch.setattr(module.tqdm, "monitor_interval", 0)  # it would leave a thread
    else:
        monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr(sys, "stderr", Terminal(terminal))
    with progress.Progress(4) as bar:
        for number in range(4):
            bar.say(f"epoch {number}")
            bar.step()
    written = sys.stderr.getvalue()
    assert ("epoch 3" in written and "75%" in written) if terminal and tqdm else written == ""


@pytest.mark.slow
@pytest.mark.timeout(LONG)
@pytest.mark.parametrize("tqdm", [True, False])
def test_a_command_on_a_terminal(tqdm, folder):
    if tqdm:
        pytest.importorskip("tqdm", reason="the bar is optional, and tqdm is not installed")
    else:
        (folder / "tqdm.py").write_text("raise ImportError('not installed')")
    main, terminal = os.openpty()
    termios.tcsetwinsize(terminal, (24, 80))  # tqdm writes nothing where there is no room
    command = [sys.executable, "-m", "rustloader", "bench", "loaders.py:torchs", "--epochs", "1"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=terminal) as process:
        os.close(terminal)
        written = b""
        with contextlib.suppress(OSError):  # how Linux says that the other end is closed
            while piece := os.read(main, 4096):
                written += piece
        out = process.stdout.read().decode()
    os.close(main)
    assert process.returncode == 0 and "batches/s" in out, written
    assert "%" not in out.splitlines()[0] and "\r" not in out
    assert (b"warming up" in written) == tqdm, written


@pytest.mark.slow
@pytest.mark.timeout(LONG)
def test_a_sweep_as_json(folder, capsys):
    arguments = ("--workers", "2,0,2", "--epochs", "2", "--batches", "20", "--json")
    status, out, err = run("loaders.py:ours", *arguments, capsys=capsys)
    assert status == 0, err
    said = json.loads(out)
    assert set(said) == {"factory", "machine", "settings", "results", "recommendation"}
    assert said["factory"] == "loaders.py:ours"
    assert said["machine"]["rustloader"] == rustloader.__version__ and said["machine"]["torch"] == torch.__version__
    loader = {
        "prefetch_factor": 2,
        "batch_size": 4,
        "persistent_workers": True,
        "pin_memory": False,
        "start_method": "fork",
    }
    assert said["settings"] == {"epochs": 2, "batches": 20, "seconds": 5.0, "step": 0.0, "loader": loader}
    alone, two = said["results"]
    assert (alone["workers"], two["workers"]) == (0, 2)
    assert alone["rustloader"] == alone["torch"] and alone["verdict"] is None
    assert two["verdict"]["kind"] != "unknown" and two["verdict"]["sentence"].endswith("."), two["verdict"]
    # One to five epochs to warm up, and two that are measured.
    assert two["verdict"]["stats"]["batches"] in range(60, 141, 20)
    for side in (alone["torch"], two["torch"], two["rustloader"]):
        assert [(epoch["batches"], epoch["complete"]) for epoch in side["epochs"]] == [(20, False)] * 2
        assert side["batch_bytes"] == 4 * 8 * 8
        kind = "steady_" if side["steady"] else ""
        rates = [epoch[f"{kind}batches_per_second"] for epoch in side["epochs"]]
        assert side["batches_per_second"] == pytest.approx(sum(rates) / 2) and min(rates) > 0
        assert side["megabytes_per_second"] == pytest.approx(side["batches_per_second"] * 256 / 1e6)
        assert side["cpu_seconds_per_batch"] > 0 and side["first_batch_seconds"] > 0 and side["memory_bytes"] >= 0
    ratio = two["rustloader"]["batches_per_second"] / two["torch"]["batches_per_second"]
    assert two["ratio"]["batches_per_second"] == pytest.approx(ratio)
    for name in ("torch", "rustloader"):
        rates = {point["workers"]: point[name]["batches_per_second"] for point in said["results"]}
        assert said["recommendation"][name] == results.best(rates)
    assert "5%" in said["recommendation"]["rule"]


@pytest.mark.slow
@pytest.mark.timeout(LONG)
def test_a_plot(folder):
    pytest.importorskip("matplotlib", reason="--plot is optional, and matplotlib is not installed")
    # In a process of its own, because matplotlib keeps files open.
    arguments = ("loaders.py:torchs", "--workers", "1,2", "--epochs", "1", "--plot", "bench.png")
    done = subprocess.run([sys.executable, "-m", "rustloader", "bench", *arguments], capture_output=True, text=True)
    out = done.stdout
    assert done.returncode == 0, done.stderr
    assert "the user's own words" in done.stderr and "the user's own words" not in out
    assert out.endswith("The picture is in bench.png.\n") and "Recommended: num_workers=" in out and "<-" in out
    assert (folder / "bench.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_a_plot_that_cannot_be_is_told_before_anything_is_measured(folder, capsys, monkeypatch):
    monkeypatch.setattr(bench, "_Bench", None)
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    assert run("x:y", "--plot", "a.png", capsys=capsys) == (
        2,
        "",
        "rustloader bench: --plot needs matplotlib: pip install 'rustloader[plot]'\n",
    )
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: object())
    for path in ("no/such/folder/a.png", str(folder)):
        status, _, err = run("x:y", "--plot", path, capsys=capsys)
        assert (status, err) == (2, f"rustloader bench: no file can be written at {path}\n")


def test_help_says_what_and_how(capsys):
    with pytest.raises(SystemExit) as ended:
        _cli.main(["bench", "--help"])
    out = capsys.readouterr().out
    assert ended.value.code == 0 and "examples:\n  python -m rustloader bench train.py:make_loader" in out


@pytest.mark.parametrize(
    "arguments, text",
    [
        ([], "required: factory"),
        (["x:y", "--workers", "1,a"], "invalid list of numbers value: '1,a'"),
        (["x:y", "--workers", "-1"], "argument --workers"),
        (["x:y", "--workers=-1"], "invalid list of numbers value: '-1'"),
        (["x:y", "--seconds", "0"], "invalid number of seconds value: '0'"),
        (["x:y", "--seconds", "nan"], "invalid number of seconds value: 'nan'"),
        (["x:y", "--step=-1"], "invalid number of seconds value: '-1'"),
        (["x:y", "--epochs", "0"], "invalid positive number value: '0'"),
    ],
)
def test_mistakes_are_usage_errors(arguments, text, capsys):
    with pytest.raises(SystemExit) as ended:
        _cli.main(["bench", *arguments])
    assert ended.value.code == 2 and text in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(LONG)
@pytest.mark.parametrize(
    "target, text",
    [
        ("no_such_module:f", "there is no module 'no_such_module'"),
        ("loaders:broken", "OSError: no such data\n\nloaders:broken failed; it is called without arguments\n"),
        ("loaders.py:single", "num_workers=0, which is torch's own loop; give it workers"),
        ("loaders.py:without_any", "the loader of loaders.py:without_any gave no batch"),
        ("loaders.py:failing", "KeyError: 'on purpose'\n\n\ntorch's iterator failed\n"),
        ("loaders.py:deadly", "the process with torch's iterator ended: SIGKILL"),
    ],
)
def test_what_gives_no_loader_or_no_batches(target, text, folder, capsys):
    status, out, err = run(target, capsys=capsys)
    assert status == 2 and err.startswith("rustloader bench: ") and text in err, err
    assert len(out.splitlines()) == 1 and "_cli" not in err


@pytest.mark.slow
@pytest.mark.timeout(LONG)
def test_a_loader_that_the_engine_does_not_serve_is_no_comparison(folder):
    (folder / "loaders.py").write_text(
        textwrap.dedent("""
            from torch.utils.data import DataLoader
            class Own(DataLoader):
                def __iter__(self):
                    yield from ([1], [2])
            def own():
                return Own([1, 2], num_workers=1)
        """)
    )
    with probe.Probe(Order("loaders:own", "rustloader", None, os.getpid())) as process:
        assert process.answer()["num_workers"] == 1
        with pytest.raises(Unusable, match="nothing to compare: the Rust engine delivered nothing"):
            process.ask("run", 0, passes.Limits(None, 5.0), True)


# Ends


def await_end(session, seconds=60.0):
    """Whether a session has no process left within so many seconds."""
    deadline = time.monotonic() + seconds
    while in_session(session) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not in_session(session)


@pytest.mark.slow
@pytest.mark.timeout(LONG)
@pytest.mark.parametrize(
    "target, number, status",
    [("slow", signal.SIGINT, 130), ("slow", signal.SIGKILL, -signal.SIGKILL), ("hanging", signal.SIGINT, 130)],
)
def test_an_end_leaves_no_process(target, number, status, folder):
    command = [sys.executable, "-m", "rustloader", "bench", f"loaders.py:{target}", "--seconds", "300"]
    kw = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, start_new_session=True, **kw) as process:
        try:
            while not (folder / "working").exists():
                assert process.poll() is None, process.communicate()
                time.sleep(0.05)
            os.kill(process.pid, number)
            _, err = process.communicate(timeout=LONG / 2)
            assert process.returncode == status, err
            assert await_end(process.pid), in_session(process.pid)
        finally:
            for pid in in_session(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    if number == signal.SIGINT:
        assert err.endswith("\nrustloader bench: interrupted\n") and "Traceback" not in err


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
        whole = passes.run_pass(loader, passes.Limits(None, 60.0), weigh=True)
        part = passes.run_pass(loader, passes.Limits(3, 60.0, step=0.001))
        short = passes.run_pass(loader, passes.Limits(None, 1e-9))
    assert (whole.batches, whole.complete, whole.batch_bytes) == (6, True, 2 * (8 + 3))
    assert (part.batches, part.complete, part.batch_bytes) == (3, False, 0)
    assert (short.batches, short.complete) == (2, False)  # the time begins with the first one
    assert whole.batches_per_second == pytest.approx(6 / whole.seconds)
    assert whole.seconds >= whole.first_batch_seconds > 0 and whole.cpu_seconds_per_batch > 0
    if persistent:
        loader._iterator._shutdown_workers()


def test_a_long_pass_has_a_steady_rate():
    loader = rustloader.DataLoader(Numbers(60, 0.004), batch_size=1, num_workers=2, collate_fn=len)
    result = passes.run_pass(loader, passes.Limits(None, 60.0))
    assert result.complete and result.batches == 60
    assert result.steady_batches_per_second > 0 and result.steady_cpu_seconds_per_batch > 0


def test_between_which_marks_the_rate_is_taken():
    early, late = passes.Mark(8, 2.0, 1.0), passes.Mark(32, 7.0, 5.0)
    assert passes.steady([early, passes.Mark(20, 3.0, 3.0), late], 40) == (early, late)
    assert passes.steady([early], 40) is None
    assert passes.steady([], 40) is None
    assert passes.steady([passes.Mark(24, 5.0, 4.0), late], 40) is None


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
    os.write(1, b"ready\\n")  # print may take two steps, and the child's come between
    time.sleep(600)
"""


def test_memory_counts_each_page_once(tmp_path):
    """A process and its child, which map the same 20 MB, hold the same 30 MB, and have the same 10 MB open."""

    def started(source):
        command = [sys.executable, "-c", textwrap.dedent(source)]
        return subprocess.Popen(command, process_group=0, stdout=subprocess.PIPE)

    holder, plain = (
        started(HOLDER),
        started("import mmap, os, time; os.fork(); os.write(1, b'ready\\n'); time.sleep(600)"),
    )
    try:
        for process in (holder, plain):
            assert [process.stdout.readline() for _ in range(2)] == [b"ready\n"] * 2
            assert len(list(memory.members(process.pid))) == 2
        if memory.used(plain.pid) is None:
            pytest.skip("/proc has no smaps_rollup here")
        more = (memory.used(holder.pid) - memory.used(plain.pid)) / (1 << 20)
        assert 55 < more < 70
        peak = memory.Peak(holder.pid)
        peak.look()
        peak.look()
        assert peak.looks == 1 and peak.bytes >= 55 << 20
    finally:
        for process in (holder, plain):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            process.stdout.close()
    assert memory.used(holder.pid) is None


# Timelines


@pytest.mark.parametrize("engine", ["torch", "rustloader"])
def test_what_workers_do_when(engine, tmp_path):
    begun = []
    loader = torch.utils.data.DataLoader(Numbers(24, 0.001), batch_size=2, num_workers=2)
    recorder = timeline.Recorder(str(tmp_path), begun.append)
    loader.worker_init_fn = recorder
    before = time.monotonic()
    with ENGINES[engine]():
        asked, got = timeline.watch(loader, passes.Limits(None, 60.0))
    after = time.monotonic()
    assert len(asked) == len(got) == 12
    times = [moment for pair in zip(asked, got, strict=True) for moment in pair]
    assert all(a <= b for a, b in pairwise([before, *times, after]))
    spans = recorder.spans()
    assert set(spans) == {0, 1}
    for worker in spans.values():
        kinds = {kind: [(a, b) for what, a, b in worker if what == kind] for kind in ("fetch", "collate", "send")}
        assert [len(kinds[kind]) for kind in kinds] == [6, 6, 6 if engine == "rustloader" else 0]
        for (begin, end), (inner, inner_end) in zip(kinds["fetch"], kinds["collate"], strict=True):
            assert before <= begin <= inner <= inner_end <= end <= after
            assert inner - begin >= 0.002  # the samples take that long


def test_a_timeline_has_its_limits(tmp_path):
    loader = rustloader.DataLoader(Numbers(24), batch_size=2, num_workers=1)
    asked, got = timeline.watch(loader, passes.Limits(5, 60.0, step=0.001))
    assert len(asked) == len(got) == 5
    assert len(timeline.watch(loader, passes.Limits(None, 1e-9))[1]) == 1


# What is said of it


def a_pass(rate, **kw):
    figures = {
        "batches": 100,
        "complete": True,
        "steady_batches_per_second": 2 * rate,
        "steady_cpu_seconds_per_batch": 0.001,
        "seconds": 100 / rate,
        "first_batch_seconds": 0.5,
        "batches_per_second": rate,
        "cpu_seconds_per_batch": 0.002,
    }
    return passes.Pass(**figures | kw)


def a_point(workers, theirs, ours, **kw):
    def side(rates):
        return results.Side([a_pass(rate) for rate in rates], 1e6, 50_000_000)

    return results.Point(workers, side(theirs), side(ours), **kw)


def test_only_rates_of_one_kind_are_compared():
    one, other = a_point(1, (10,), (20,)), a_point(2, (10,), (20,))
    results.settle([one, other])
    assert [one.torch.rate, one.rustloader.rate, one.torch.median("cpu_seconds_per_batch")] == [20, 40, 0.001]
    other.torch.passes.append(a_pass(10, steady_batches_per_second=None))
    results.settle([one, other])
    assert [one.torch.rate, one.rustloader.rate, one.torch.median("cpu_seconds_per_batch")] == [10, 20, 0.002]


def test_the_fewest_workers_that_will_do():
    assert results.best({1: 10.0, 2: 95.0, 4: 100.0, 8: 99.0}) == 2
    assert results.best({1: 10.0, 2: 94.9, 4: 100.0, 8: 99.0}) == 4
    assert results.best({0: 5.0}) == 0


@pytest.mark.parametrize(
    "theirs, ours, words",
    [
        ((10, 11, 12), (30, 33, 36), "rustloader is 3 times as fast as torch."),
        ((10, 11, 12), (5, 5.5, 6), "rustloader is slower than torch, 0.50x."),
        ((10, 11, 14), (12, 13, 15), "As fast as each other, as far as these epochs tell (1.18x)."),
    ],
)
def test_the_headline(theirs, ours, words):
    assert results.headline(a_point(2, theirs, ours)) == words


def test_the_tables():
    point = a_point(2, (1000.0, 1200.0, 900.0), (4.0, 5.0, 6.0))
    assert results.table(point).splitlines() == [
        "                         torch   rustloader   ratio",
        "batches/s                1,000         5.00   0.01x",
        "  of the epochs   900.0..1,200   4.00..6.00",
        "MB/s                     1,000         5.00   0.01x",
        "CPU a batch               2 ms         2 ms   1.00x",
        "first batch             500 ms       500 ms   1.00x",
        "memory                   50 MB        50 MB   1.00x",
    ]
    alone = results.Point(0, point.torch, point.torch)
    table = results.sweep_table([alone, point], 2).splitlines()
    assert table[2].split()[:3] == ["0", "1,000", "="] and table[3].endswith("<-") and not table[2].endswith("<-")
    assert "torch's own loop" in results.table(alone)


def a_timeline(workers, scale):
    spans = {
        worker: [("fetch", scale * k, scale * (k + 0.8)) for k in range(60)]
        + [("send", scale * (k + 0.8), scale * (k + 0.9)) for k in range(60)]
        for worker in range(workers)
    }
    asked = [scale * k for k in range(60)]
    return {"workers": workers, "skipped": 8, "asked": asked, "got": [t + scale / 2 for t in asked], "spans": spans}


@pytest.mark.parametrize("step", [0.0, 0.01])
def test_the_picture(step):
    pytest.importorskip("matplotlib", reason="--plot is optional, and matplotlib is not installed")
    from rustloader._cli.picture import draw

    timelines = {"torch": a_timeline(20, 0.02), "rustloader": a_timeline(20, 0.01)}
    points = [a_point(1, (10, 11), (20, 21)), a_point(20, (30, 31), (60, 61))]
    figure = draw("train.py:make_loader", points, 20, timelines, step)
    theirs, ours, rates = figure.axes
    assert theirs.get_title("left") == "torch, 20 workers: 52 batches in 1,040 ms"
    assert ours.get_title("left") == "rustloader, 20 workers: 52 batches in 520 ms"
    assert theirs.get_xlim() == ours.get_xlim() == (0, pytest.approx(1040))
    lanes = [label.get_text() for label in ours.get_yticklabels()]
    assert lanes == ["main", *(f"worker {k} of 20" for k in range(16))]
    words = {text.get_text() for text in theirs.get_legend().get_texts()}
    assert {"worker: fetch", "worker: send", "main: in next()"} <= words
    assert ("main: training step" in words) == bool(step) and "worker: collate" not in words
    assert {line.get_label() for line in rates.get_lines()} >= {"torch", "rustloader"}
    assert "num_workers=20" in rates.get_title("left")
    assert [tick for tick in rates.get_xticks()] == [1, 20]
    assert len(draw("x", points[1:], 20, timelines, step).axes) == 2
    assert len(draw("x", points, 1, {}, step).axes) == 1
