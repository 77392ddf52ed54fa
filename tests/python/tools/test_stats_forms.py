"""The forms of statistics: one line, a text, a table in a notebook, pickles; and what they leave out."""

import html
import json
import os
import pickle
import re
import signal
import threading
import time
import types
import typing
import warnings

import numpy as np
import pytest
import snapshots
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
    from rustloader.metrics import ledger as ledger_module
    from rustloader.system.formatting import count_of, duration, short_index, size

MANY = f"[{', '.join(map(str, range(1000, 1016)))}, ... 256 in all]"


def full(**more):
    """Statistics in which nothing is zero."""
    return Stats(
        **{
            "name": "train",
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


def cells_of(text):
    """The tables of a page as text."""
    rows = [re.findall(r"<t[hd]>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", text)]
    assert all(text.count(f"<{tag}>") == text.count(f"</{tag}>") for tag in ("table", "tr", "td", "th"))
    return "\n".join(html.unescape(" | ".join(row).rstrip(" |")) for row in rows)


def test_texts_of_statistics():
    one = Stats(num_workers=1, iterators=1, epochs=1, batches=1)
    some = Stats(num_workers=1, iterators=1, epochs=1, batches=3, workers=(WorkerStats(0, tasks=3),))
    note = Stats(note="with num_workers=0, torch's own loop runs", batches=1)
    workers = tuple(WorkerStats(n, tasks=1) for n in range(40))
    many = Stats(num_workers=40, iterators=1, epochs=1, batches=40, waited_seconds=4.0, workers=workers)
    texts = {
        "repr": repr(full()),
        "repr of one batch": repr(one),
        "repr without statistics": repr(note),
        "text": str(full()),
        "text of few figures": str(some),
        "text of many workers": str(many),
        "table": cells_of(full()._repr_html_()),
        "table of many workers": cells_of(many._repr_html_()),
        "table without statistics": cells_of(note._repr_html_()),
        "table of nothing": cells_of(Stats()._repr_html_()),
    }
    snapshots.check("statistics", texts)
    assert full().verdict().sentence in html.unescape(full()._repr_html_())


def test_the_table_is_escaped_and_sets_no_colours():
    text = full(note="", fallbacks=(Fallback("<script>alert(1)</script>", 1),))._repr_html_()
    assert "<script" not in text and "&lt;script&gt;" in text
    assert "<script" not in Stats(note="<script>")._repr_html_()
    # Fixed colors would be illegible in one of the two themes.
    assert not re.search(r"<\w+\s", text)


# Classes


CLASSES = "Stats WorkerStats SlowBatch SchedulingStats LargeAttribute ArenaStats CopyStats PinningStats TransferStats"


@pytest.mark.parametrize("name", [*CLASSES.split(), "Fallback", "Verdict"])
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


# Texts of figures


def test_formats():
    counts = {(1, "worker"): "1 worker", (0, "worker"): "0 workers", (2, "batch"): "2 batches", (1, "batch"): "1 batch"}
    counts[2500, "copy"] = "2,500 copies"
    assert {given: count_of(*given) for given in counts} == counts
    durations = {
        0: "0 s",
        1e-9: "0.001 us",
        5e-5: "50 us",
        0.0123: "12.3 ms",
        0.9996: "1 s",
        0.9994: "999 ms",
        3: "3 s",
    }
    durations[12345.6] = "12,346 s"
    assert {seconds: duration(seconds) for seconds in durations} == durations
    sizes = {0: "0 B", 999: "999 B", 1000: "1.0 kB", 123456: "123 kB", 1_500_000: "1.5 MB", 99.94e6: "99.9 MB"}
    sizes |= {2e9: "2.0 GB", 2e12: "2000 GB"}
    assert {count: size(count) for count in sizes} == sizes
    indices = {
        "[1, 2]": "[1, 2]",
        MANY: "[1000, 1001, 1002, 1003, 1004, 1005, ... 256 in all]",
        "7" * 60: "7" * 40 + "...",
    }
    indices[f"({', '.join(['12345678'] * 6)})"] = "(12345678, 12345678, 12345678, ...)"
    assert {index: short_index(index) for index in indices} == indices


# CPU time, and cores


def test_the_processor_time_of_this_process_and_of_none():
    time_of = processor.time_of_process(os.getpid())
    assert abs(time_of.cpu - sum(os.times()[:4])) < 1 and time_of.queued is not None
    end = time.process_time() + 0.1
    while time.process_time() < end:
        pass
    assert processor.time_of_process(os.getpid()).cpu >= time_of.cpu + 0.09
    assert processor.time_of_process(2**22 + 1) is None


def test_a_number_that_another_process_has_by_now():
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
    ledger, other = ledger_module.Ledger(), []

    def meanwhile():
        if not other:
            other.append(threading.Thread(target=ledger._watch, args=(Ended(),)))
            other[0].start()
            other[0].join()

    ledger._watch(Ended(meanwhile))
    ledger._watch(Ended())
    assert other and ledger.cpu_times() == [(3.0, 0.0, 0.0)]


def test_a_child_does_not_wait_for_the_ledgers_lock():
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
