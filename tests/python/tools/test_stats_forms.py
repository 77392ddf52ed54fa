"""The forms of statistics: one line, a text, a table in a notebook, pickles; and what they leave out."""

import html.parser
import json
import pickle
import re
import threading
import types
import typing
import warnings

import numpy as np
import pytest
from support import TORCH_MODE, DataLoader

pytestmark = pytest.mark.ours

if not TORCH_MODE:
    import rustloader
    from rustloader import (
        ArenaStats,
        CopyStats,
        Fallback,
        PinningStats,
        SchedulingStats,
        SlowBatch,
        Stats,
        TransferStats,
        WorkerStats,
    )
    from rustloader._core import WorkerTotals, figures
    from rustloader.metrics import cpu_time as processor
    from rustloader.system.formatting import count_of, duration, short_index, size

MANY = f"[{', '.join(map(str, range(1000, 1016)))}, ... 256 in all]"


def full(**more):
    """Statistics in which nothing is zero."""
    return Stats(
        **{
            "num_workers": 2,
            "cores": 4,
            "iterators": 2,
            "epochs": 2,
            "batches": 200,
            "bytes": 3_200_000,
            "next_seconds": 6.0,
            "first_seconds": 1.0,
            "waited_seconds": 4.0,
            "blocked_seconds": 0.5,
            "sampler_seconds": 0.25,
            "step_seconds": 2.0,
            "turnaround_seconds": 1.5,
            "workers": (
                WorkerStats(0, 4711, True, 120_000_000, 100, 0.5, 0.25, 5.0, 0.75, 0.125, 5.5, 0.0625, 0.0, 0.5, 2.5),
                WorkerStats(1, 4712, False, 0, 100, fetch_seconds=4.0),
            ),
            "slowest": (SlowBatch(MANY, 1, 0.5, 0.1, 0.1), SlowBatch("<&>", 0, 0.3)),
            "blocking": (SlowBatch("[8, 9]", 0, 0.25, 0.05, 0.0, 0.2),),
            "recent_seconds": (0.3, 0.7),
            "scheduling": SchedulingStats(reorder_window="64MiB"),
            "arena": ArenaStats(1_000, 2_000_000, 3_000_000, 1),
            "copies": CopyStats(1, 5_000, 2),
            "pinning": PinningStats(True, 200, 0.5),
            "transfers": TransferStats(200, 3_200_000, 0.5, 0.125, "it has no pin_memory()"),
            "fallbacks": (Fallback("its dataset is a <DataPipe>", 1),),
        }
        | more
    )


def test_the_repr_is_one_line():
    assert repr(full()) == "<rustloader.Stats: 200 batches (3.2 MB) in 2 epochs with 2 workers>"
    one = Stats(num_workers=1, iterators=1, epochs=1, batches=1)
    assert repr(one) == "<rustloader.Stats: 1 batch in 1 epoch with 1 worker>"
    assert repr(Stats(note="with num_workers=0, ...")) == "<rustloader.Stats: no statistics: with num_workers=0, ...>"


def test_all_that_is_not_zero_is_printed():
    assert str(full()).splitlines() == [
        "200 batches (3.2 MB) in 2 epochs with 2 workers",
        "  step          2 s, training step, between two calls of next()",
        "  waited        4 s, 500 ms of it while later batches were ready",
        "  first         1 s, waiting for the first batch of 2 epochs",
        "  own work      1 s, 250 ms of it in the sampler",
        "  turnaround    1.5 s, in iter(), and ending the workers",
        "  worker 0      100 batches: fetch 5 s, fetch CPU 1 s, collate 750 ms, pack 125 ms, idle 250 ms, "
        "start 500 ms, processor 5.5 s (pid 4711, 120 MB)",
        "  worker 1      100 batches: fetch 4 s (ended)",
        "  slow batch    700 ms on worker 1: [1000, 1001, 1002, 1003, 1004, 1005, ... 256 in all]",
        "  slow batch    300 ms on worker 0: <&>",
        "  blocking      waited 200 ms for [8, 9], which took 300 ms on worker 0",
        "  arena         1.0 kB leased, 2.0 MB warm, 3.0 MB at the peak, 1 block",
        "  copies        1 copy (5.0 kB)",
        "  pickled       2 batches",
        "  pin thread    200 batches in 500 ms",
        "  to the device 200 batches (3.2 MB) in 500 ms, 75% overlapped",
        "  not pinned    it has no pin_memory()",
        "  torch's loop  1 iterator, not in these statistics: its dataset is a <DataPipe>",
    ]


def test_what_is_zero_is_left_out():
    stats = Stats(num_workers=1, iterators=1, epochs=1, batches=3, workers=(WorkerStats(0, tasks=3),))
    assert str(stats) == "3 batches in 1 epoch with 1 worker\n  worker 0      3 batches (ended)"
    assert not re.search(r" 0(\.0+)? (s|ms|B|kB)\b", str(full(blocked_seconds=0.0, sampler_seconds=0.0)))


def test_of_many_workers_some_are_shown():
    workers = tuple(WorkerStats(n, tasks=1) for n in range(40))
    lines = str(full(workers=workers)).splitlines()
    assert len([line for line in lines if line.startswith("  worker")]) == 16
    assert "  ...           24 more workers" in lines
    assert "24 more" in full(workers=workers)._repr_html_()


class Cells(html.parser.HTMLParser):
    """The cells of tables, and all tags with their attributes."""

    def __init__(self, text):
        super().__init__()
        self.tables, self.tags, self.open = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, attrs))
        if tag not in ("br",):
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.tables[-1][-1][-1] += data


def test_the_table_of_a_notebook():
    text = full()._repr_html_()
    cells = Cells(text)
    assert cells.open == []
    loop, workers, rest = cells.tables
    assert loop[0] == ["loop", "time", "share", ""]
    assert [row[:3] for row in loop[1:]] == [
        ["step", "2 s", "21%"],
        ["waited", "4 s", "42%"],
        ["first", "1 s", "11%"],
        ["own work", "1 s", "11%"],
        ["turnaround", "1.5 s", "16%"],
    ]
    head, *rows = workers
    assert head == [
        *("worker", "batches", "fetch", "fetch CPU", "collate", "pack", "idle", "start", "processor", "process")
    ]
    assert all(len(row) == len(head) for row in rows)
    assert rows[1] == ["1", "100", "4 s", "", "", "", "", "", "", "ended"]
    assert ["slow batch", "300 ms on worker 0: <&>"] in rest
    assert full().verdict().sentence in html.unescape(text)


def test_the_table_is_escaped_and_sets_no_colours():
    text = full(note="", fallbacks=(Fallback("<script>alert(1)</script>", 1),))._repr_html_()
    assert "<script" not in text and "&lt;script&gt;" in text
    assert "<script" not in Stats(note="<script>")._repr_html_()
    # Fixed colors would be illegible in one of the two themes.
    assert all(attrs == [] for _, attrs in Cells(text).tags)


def test_tables_of_no_figures():
    cells = Cells(Stats(note="with num_workers=0, torch's own loop runs", batches=1)._repr_html_())
    assert cells.tables == [[["torch's loop", "1 batch so far"]]] and cells.open == []
    assert Cells(Stats()._repr_html_()).tables == []


# Classes


CLASSES = [
    "Stats",
    "WorkerStats",
    "SlowBatch",
    "SchedulingStats",
    "LargeAttribute",
    "ArenaStats",
    "CopyStats",
    "PinningStats",
    "TransferStats",
    "Fallback",
]
CLASSES += ["Verdict"]


@pytest.mark.parametrize("name", CLASSES)
def test_classes_are_the_packages(name):
    cls = getattr(rustloader, name)
    assert (cls.__module__, cls.__qualname__) == ("rustloader", name)
    assert repr(cls) == f"<class 'rustloader.{name}'>"
    # Types, not strings that need resolving.
    hints = typing.get_type_hints(cls)
    assert set(cls.__dataclass_fields__) == set(hints) and not any(isinstance(hint, str) for hint in hints.values())


def test_counters_have_the_names_of_fields():
    totals = figures([])
    parts = {"copies", "copied_bytes", "pickled", "pinned", "pinning_seconds"}
    assert totals.counts.keys() - parts <= Stats.__dataclass_fields__.keys()
    others = {"id", "rss_bytes", "cpu_seconds", "queued_seconds", "unmeasured_seconds", "private_bytes"}
    assert WorkerStats.__dataclass_fields__.keys() - others <= {*dir(WorkerTotals)}


def test_pickles_name_the_package():
    stats = full()
    data = pickle.dumps((stats, stats.verdict()), protocol=4)
    assert pickle.loads(data) == (stats, stats.verdict())
    assert b"rustloader._" not in data and b"rustloader" in data


def test_the_kind_of_a_verdict_is_a_literal():
    assert typing.get_type_hints(rustloader.Verdict)["kind"] == rustloader.VerdictKind
    assert typing.get_origin(rustloader.VerdictKind) is typing.Literal
    assert {"step", "workers", "dataset", "storage"} <= set(typing.get_args(rustloader.VerdictKind))


# Texts


@pytest.mark.parametrize(
    ("count", "what", "text"),
    [
        (1, "worker", "1 worker"),
        (0, "worker", "0 workers"),
        (2, "batch", "2 batches"),
        (1, "batch", "1 batch"),
        (2500, "copy", "2,500 copies"),
    ],
)
def test_counts(count, what, text):
    assert count_of(count, what) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (1e-9, "0.001 us"),
        (5e-5, "50 us"),
        (0.0123, "12.3 ms"),
        (0.9996, "1 s"),
        (0.9994, "999 ms"),
        (3, "3 s"),
        (12345.6, "12,346 s"),
    ],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_sizes():
    assert [size(count) for count in (0, 999, 1_000, 1_500_000, 2_000_000_000)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "1.5 MB",
        "2.0 GB",
    ]


@pytest.mark.parametrize(
    ("index", "text"),
    [
        ("[1, 2]", "[1, 2]"),
        (MANY, "[1000, 1001, 1002, 1003, 1004, 1005, ... 256 in all]"),
        (f"({', '.join(['12345678'] * 6)})", "(12345678, 12345678, 12345678, ...)"),
        ("7" * 60, "7" * 40 + "..."),
    ],
)
def test_short_indices(index, text):
    assert short_index(index) == text


# CPU time, and cores


def test_the_processor_time_of_this_process_and_of_none():
    import os
    import time

    time_of = processor.time_of_process(os.getpid())
    assert abs(time_of.cpu - sum(os.times()[:4])) < 1 and time_of.queued is not None
    end = time.process_time() + 0.1
    while time.process_time() < end:
        pass
    assert processor.time_of_process(os.getpid()).cpu >= time_of.cpu + 0.09
    assert processor.time_of_process(2**22 + 1) is None


def test_ended_children_of_a_worker_count():
    import os
    import subprocess
    import sys

    before = processor.time_of_process(os.getpid()).cpu
    subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.5: pass"], check=True)
    assert processor.time_of_process(os.getpid()).cpu >= before + 0.45


def test_a_number_that_another_process_has_by_now():
    import os

    start = processor.start_time(os.getpid())
    assert start and start.isdecimal() and processor.start_time(2**22 + 1) is None
    assert processor.time_of_process(os.getpid(), start) is not None
    assert processor.time_of_process(os.getpid(), str(int(start) + 1)) is None


def test_time_of_work_is_all_since_the_start():
    figures = types.SimpleNamespace(start_cpu=2.0, start_queued=0.5, busy_seconds=4.75)
    assert processor.time_of_work(processor.ProcessorTime(5.0, 0.75), figures) == (3.0, 0.25, 0.0)
    assert processor.time_of_work(processor.ProcessorTime(1.9, None), figures) == (0.0, None, 0.0)
    assert processor.time_of_work(None, figures) == (None, None, 4.75)
    # It has not reached its first task.
    figures.start_cpu = 0.0
    assert processor.time_of_work(processor.ProcessorTime(1.0, 0.5), figures) == (0.0, 0.0, 0.0)


def test_sums_of_times_keep_the_unknown_apart():
    known, unknown = processor.WorkTime(1.0, 0.5), processor.WorkTime(unmeasured=4.0)
    assert processor.sum_by_worker([known, unknown], [unknown, unknown, known]) == [
        (1.0, 0.5, 4.0),
        (None, None, 8.0),
        known,
    ]
    assert processor.sum_by_worker([known], [processor.WorkTime(1.0)]) == [(2.0, None, 0.0)]


class Ended:
    """The workers of an iterator that has ended."""

    ended = True

    def __init__(self, busy=lambda: None):
        self.busy = busy

    def times(self):
        self.busy()
        return [processor.WorkTime(1.0, 0.0)]


def test_iterators_that_start_at_once_are_all_counted():
    from rustloader.metrics.ledger import Ledger

    ledger, other = Ledger(), []

    def meanwhile():
        if not other:
            other.append(threading.Thread(target=ledger._watch, args=(Ended(),)))
            other[0].start()
            other[0].join()

    ledger._watch(Ended(meanwhile))
    ledger._watch(Ended())
    assert other and ledger.cpu_times() == [(3.0, 0.0, 0.0)]


def test_a_child_does_not_wait_for_the_ledgers_lock():
    import os
    import signal

    from rustloader.metrics import ledger as ledger_module

    ledger, held, done = ledger_module.Ledger(), threading.Event(), threading.Event()

    def hold():
        with ledger_module._swap_lock:
            held.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(60)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        ledger._watch(Ended())
        os._exit(len(ledger.cpu_times()))
    status = os.waitpid(child, 0)[1]
    done.set()
    thread.join()
    assert os.WIFEXITED(status) and os.WEXITSTATUS(status) == 1, status


def test_numbers_of_numpy_in_a_loader_are_plain_in_the_statistics():
    loader = DataLoader(range(8), num_workers=np.int64(1), prefetch_factor=np.int64(3))
    list(loader)
    figures = rustloader.stats(loader).as_dict()
    json.dumps(figures)
    assert (figures["num_workers"], figures["scheduling"]["prefetch_factor"]) == (1, 3)
