"""`rustloader.trace` and its command: the file is valid, has every event, and agrees with a stopwatch."""

import collections
import errno
import gzip
import json
import os
import signal
import threading
import time
from unittest import mock

import pytest
import torch
from pinning_support import pinning
from sample_data import Failing, Held, Numbers, Slow, key_error
from standin import StandIn
from support import STARTED, DataLoader, run_script, rustloader, start_script, wait_until, while_next_waits
from torch.utils.data import Dataset, IterableDataset

pytestmark = [pytest.mark.ours, pytest.mark.timeout(300)]

if rustloader is not None:
    from rustloader._core import TRACE_KINDS, TRACE_MAIN
    from rustloader.tools import cli
    from rustloader.tracing import core, files, slices

PHASES = {"X": {"dur", "name"}, "M": {"name", "args"}, "i": {"s", "name"}, "s": {"id", "cat"}, "f": {"id", "cat", "bp"}}


def slow(length, seconds):
    return Slow(length, dict.fromkeys(range(length), seconds))


class WhenWaitedFor(Held):
    """A sample takes 10 ms. The held one takes another 200 ms once its file exists."""

    def __getitem__(self, index):
        time.sleep(0.01)
        item = super().__getitem__(index)
        if index == self.at:
            time.sleep(0.2)
        return item


class Streamed(IterableDataset):
    def __iter__(self):
        return iter(range(torch.utils.data.get_worker_info().id, 10, 2))


class Dies(Dataset):
    """Kills its process at sample 20, once."""

    def __init__(self, marker, seconds=0.1):
        self.marker, self.seconds = marker, seconds

    def __len__(self):
        return 40

    def __getitem__(self, index):
        if index == 20 and not os.path.exists(self.marker):
            open(self.marker, "w").close()
            time.sleep(self.seconds)
            os.kill(os.getpid(), signal.SIGKILL)
        return index


def load(path):
    with (gzip.open if str(path).endswith(".gz") else open)(path, "rt") as file:
        return json.load(file)


def check(events):
    """Checks the events against the format's description. Returns the slices by the name of their row."""
    rows, threads = collections.defaultdict(list), {}
    for event in events:
        assert {"ph", "pid", "tid", "ts"} | PHASES[event["ph"]] <= set(event), event
        assert isinstance(event["ts"], int) and event["ts"] >= 0
        if event["ph"] == "M" and event["name"] == "thread_name":
            assert (event["pid"], event["tid"]) not in threads
            threads[event["pid"], event["tid"]] = event["args"]["name"]
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0
            rows[threads[event["pid"], event["tid"]]].append(event)
    for row in rows.values():
        check_nesting(row)
    starts, ends = ({e["id"]: e for e in events if e["ph"] == phase} for phase in "sf")
    assert ends.keys() <= starts.keys()
    assert all(starts[key]["ts"] <= end["ts"] for key, end in ends.items())
    return rows


def check_nesting(row):
    """Slices of a row are disjoint, or one contains the other and comes before it in the file."""
    open_until = []
    for event in sorted(row, key=lambda event: event["ts"]):  # stable
        begin, end = event["ts"], event["ts"] + event["dur"]
        while open_until and open_until[-1] <= begin and not (begin == end == open_until[-1]):
            open_until.pop()
        assert not open_until or end <= open_until[-1], event
        open_until.append(end)


def traced(loader, path, **options):
    """Traces an epoch. Returns its batches, the events, and the rows."""
    with rustloader.trace(path, **options):
        batches = list(loader)
    events = load(path)
    return batches, events, check_open(events)


def named(rows, name, row=""):
    return [event for key, events in rows.items() if row in key for event in events if event["name"] == name]


def instants(events, name):
    return [event for event in events if event["ph"] == "i" and event["name"] == name]


def about(events, name="rustloader_trace"):
    (args,) = (event["args"] for event in events if event["name"] == name)
    return args


def batches_of(slices):
    return sorted((event["args"]["epoch"], event["args"]["batch"]) for event in slices)


@pytest.mark.parametrize(
    ("method", "persistent"), [("fork", False), ("fork", True), ("spawn", True), ("forkserver", False)]
)
def test_slices_are_counted_against_batches_and_samples(method, persistent, tmp_path):
    options = dict(batch_size=3, num_workers=2, multiprocessing_context=method, persistent_workers=persistent)
    loader = DataLoader(slow(12, 0.001), name="Sleepy", **options)
    with rustloader.trace(tmp_path / "run.json", level="sample"):
        for _ in range(2):
            assert [batch.tolist() for batch in loader] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    events = load(tmp_path / "run.json")
    rows = check(events)
    assert set(rows) <= {f"{row} (Sleepy)" for row in ("main", "worker 0", "worker 1")}
    expected = [(epoch, batch) for epoch in range(2) for batch in range(4)]
    for name in ("batch", "next"):
        assert batches_of([event for event in named(rows, name) if "args" in event]) == expected
    assert batches_of(named(rows, "batch", "worker 1")) == [batch for batch in expected if batch[1] % 2]
    for name in ("fetch", "collate", "send"):
        assert len(named(rows, name)) == 8
    assert sorted(event["args"]["index"] for event in named(rows, "sample")) == sorted([*range(12)] * 2)
    assert len(named(rows, "step")) == 8
    assert [event["args"]["epoch"] for event in instants(events, "epoch")] == [0, 1]
    assert len(instants(events, "started")) == (2 if persistent else 4)
    for phase in "sf":
        assert len([event for event in events if event["ph"] == phase]) == 8
    assert about(events, "rustloader_trace_end") == {"lost": 0, "complete": True}
    assert os.listdir(tmp_path) == ["run.json"]


def test_waits_and_work_are_those_of_a_stopwatch(tmp_path):
    loader = DataLoader(WhenWaitedFor(20, 8, tmp_path / "go"), batch_size=2, num_workers=1)
    calls, steps = [], []
    with rustloader.trace(tmp_path / "run.json"):
        it = iter(loader)
        first = time.perf_counter()
        for batch in range(10):
            if batch == 4:
                thread = while_next_waits((tmp_path / "go").touch)
            before = time.perf_counter()
            next(it)
            after = time.perf_counter()
            time.sleep(0.005)
            calls.append(after - before)
            steps.append(time.perf_counter() - after)
        thread.join()
    rows = check(load(tmp_path / "run.json"))
    seconds = {
        name: sum(event["dur"] for event in named(rows, name, row)) / 1e6
        for name, row in [("next", "main"), ("waiting", "main"), ("step", "main"), ("fetch", "worker")]
    }
    rounding = 30e-6  # of each of up to 20 slices, to a microsecond
    assert 0.2 <= seconds["next"] <= sum(calls) + rounding
    # A call may wake up while it waits, which leaves gaps between its waits.
    assert 0.1 <= seconds["waiting"] <= seconds["next"] + rounding
    # The last step is not between two calls.
    assert sum(steps[:-1]) <= seconds["step"] + rounding
    assert sum(calls[1:-1]) + sum(steps[:-1]) <= seconds["step"] + seconds["next"] + rounding
    assert seconds["step"] + seconds["next"] <= after - first + rounding
    assert seconds["fetch"] >= 0.4


def test_the_last_next_includes_the_end_of_the_workers(tmp_path):
    it = iter(DataLoader(Numbers(8), batch_size=2, num_workers=2))
    with rustloader.trace(tmp_path / "run.json"):
        assert len([next(it) for _ in range(4)]) == 4
        before = time.perf_counter()
        assert next(it, None) is None
        seconds = time.perf_counter() - before
        time.sleep(0.01)
    rows = check_open(load(tmp_path / "run.json"))
    (last,) = [event for event in named(rows, "next", "main") if "args" not in event]
    assert last["dur"] <= seconds * 1e6 + 1
    assert all(last["ts"] < event["ts"] + event["dur"] <= last["ts"] + last["dur"] for event in ends_of_workers(rows))


def ends_of_workers(rows):
    return [events[-1] for row, events in rows.items() if row.startswith("worker")]


def test_it_may_begin_and_end_within_an_epoch(tmp_path):
    """Twice, with workers that run all the time."""
    loader = DataLoader(Numbers(40), batch_size=2, num_workers=2, persistent_workers=True)
    for epoch in range(2):
        it, path = iter(loader), tmp_path / f"{epoch}.json"
        got = [next(it) for _ in range(6)]
        with rustloader.trace(path):
            got += [next(it) for _ in range(6)]
        assert torch.equal(torch.cat([*got, *it]), torch.arange(40))
        delivered = [event for event in named(check_open(load(path)), "next") if "args" in event]
        assert batches_of(delivered) == [(epoch, batch) for batch in range(6, 12)]


def check_open(events):
    """`check` for a trace that begins within an epoch: some arrows begin before it."""
    starts = {event["id"] for event in events if event["ph"] == "s"}
    return check([event for event in events if event["ph"] != "f" or event["id"] in starts])


def test_loaders_without_workers(tmp_path):
    loaders = (
        DataLoader(slow(6, 0.002), batch_size=2, name="slow"),
        rustloader.StatefulDataLoader(Numbers(6), batch_size=3, name="fast"),
    )
    with rustloader.trace(tmp_path / "run.json"):
        for _ in range(2):
            for loader in loaders:
                list(loader)
    rows = check(load(tmp_path / "run.json"))
    assert batches_of(named(rows, "fetch", "main (slow)")) == [(e, b) for e in range(2) for b in range(3)]
    assert batches_of(named(rows, "fetch", "main (fast)")) == [(e, b) for e in range(2) for b in range(2)]
    assert sum(event["dur"] for event in named(rows, "fetch", "slow")) >= 2 * 6 * 2000
    assert len(named(rows, "step", "slow")) == 4


def test_several_loaders_at_a_time(tmp_path):
    one, two = (DataLoader(Numbers(n), batch_size=2, num_workers=w) for n, w in ((8, 1), (12, 2)))
    with rustloader.trace(tmp_path / "run.json"):
        assert len(list(zip(one, two, strict=False))) == 4
    events = load(tmp_path / "run.json")
    rows = check_open(events)
    assert len(named(rows, "batch", ", 0)")) == 4 and len(named(rows, "batch", ", 1)")) >= 4
    assert len({row.partition("(")[2] for row in rows}) == 2


def test_an_iterable_dataset_ends_without_a_batch(tmp_path):
    loader = DataLoader(Streamed(), batch_size=2, num_workers=2)
    batches, _, rows = traced(loader, tmp_path / "run.json", level="sample")
    assert len(batches) == len(named(rows, "batch")) == len(named(rows, "send")) == 6
    assert len(named(rows, "sample")) == 10
    assert not [event for event in named(rows, "sample") if "args" in event]


def test_an_exception_in_a_sample_and_one_in_the_loop(tmp_path):
    loader = DataLoader(Failing(8, {3: key_error}), batch_size=2, num_workers=1)
    with pytest.raises(KeyError, match="no such key"), rustloader.trace(tmp_path / "run.json", level="sample"):
        list(loader)
    rows = check_open(load(tmp_path / "run.json"))
    assert (0, 1) in batches_of(named(rows, "batch"))
    assert 3 not in [event["args"]["index"] for event in named(rows, "sample")]


@pytest.mark.warns
def test_a_worker_that_is_killed_leaves_whole_events(tmp_path):
    loader = DataLoader(Dies(str(tmp_path / "died")), batch_size=4, num_workers=2, max_restarts=3)
    batches, events, rows = traced(loader, tmp_path / "run.json", level="sample")
    assert torch.equal(torch.cat(batches), torch.arange(40))
    (died,) = instants(events, "died")
    assert died["args"] == {"batch": 5, "epoch": 0}
    assert len(instants(events, "started")) == 2 and len(instants(events, "restarted")) == 1
    # Batch 5 was begun twice, and the cut-off slice lasts until the death.
    attempts = [event for event in named(rows, "batch") if event["args"]["batch"] == 5]
    assert len(attempts) == 2 and attempts[0]["dur"] >= 100_000
    assert {batch[1] for batch in batches_of(named(rows, "batch"))} == set(range(10))
    # A death that ends the loop is in its trace, too.
    (tmp_path / "died").unlink()
    loader = DataLoader(Dies(str(tmp_path / "died")), batch_size=4, num_workers=2)
    with pytest.raises(RuntimeError, match="killed by signal"):
        traced(loader, tmp_path / "final.json")
    events = load(tmp_path / "final.json")
    check_open(events)
    assert len(instants(events, "died")) == 1


@pytest.mark.warns
def test_a_worker_that_is_stuck(tmp_path):
    loader = DataLoader(
        Dies(str(tmp_path / "died"), 3600), batch_size=4, num_workers=1, max_restarts=1, stall_timeout=4
    )
    batches, events, rows = traced(loader, tmp_path / "run.json")
    assert len(batches) == 10
    (stalled,), (died,) = instants(events, "stalled"), instants(events, "died")
    assert stalled["args"] == died["args"] == {"batch": 5, "epoch": 0} and stalled["ts"] <= died["ts"]
    assert max(event["dur"] for event in named(rows, "fetch")) >= 4_000_000


def test_a_saved_state(tmp_path):
    loader = rustloader.StatefulDataLoader(Numbers(8), batch_size=2, num_workers=1)
    with rustloader.trace(tmp_path / "run.json"):
        it = iter(loader)
        next(it), next(it)
        loader.state_dict()
        list(it)
    (saved,) = instants(load(tmp_path / "run.json"), "state saved")
    assert saved["args"] == {"batches": 2}


def test_only_the_last_seconds(tmp_path):
    loader = DataLoader(slow(60, 0.03), batch_size=1, num_workers=1)
    _, _, rows = traced(loader, tmp_path / "run.json", seconds=1.0)
    kept = [event["args"]["batch"] for event in named(rows, "batch")]
    assert kept == list(range(kept[0], 60)) and 1 <= len(kept) <= 40
    ends = [event["ts"] + event["dur"] for row in rows.values() for event in row]
    assert max(ends) - min(ends) <= 1_000_001


@pytest.mark.warns
def test_what_a_full_ring_loses_is_in_the_file(tmp_path):
    # One batch has many more samples than the ring has slots, and hardly anything empties it meanwhile.
    loader = DataLoader(Numbers(200_000), batch_size=100_000, num_workers=1, prefetch_factor=2)
    batches, events, _ = traced(loader, tmp_path / "run.json", level="sample")
    assert len(batches) == 2
    samples = [event for event in events if event["ph"] == "X" and event["name"] == "sample"]
    lost = about(events, "rustloader_trace_end")["lost"]
    assert lost > 0 and len(samples) + lost >= 200_000


def test_a_compressed_file_and_the_size_of_events(tmp_path):
    loader = DataLoader(Numbers(2000), batch_size=2, num_workers=2)
    assert len(named(traced(loader, tmp_path / "run.json.gz")[2], "batch")) == 1000
    # 100,000 batches take 30 MB at most when compressed.
    compressed = (tmp_path / "run.json.gz").read_bytes()
    assert len(compressed) <= 300 * 1000 and len(gzip.decompress(compressed)) <= 1100 * 1000


@pytest.mark.warns
def test_wrong_arguments(tmp_path):
    for wrong in ({"level": "fine"}, {"seconds": 0}, {"seconds": float("nan")}, {"seconds": "1"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            rustloader.trace(tmp_path / "run.json", **wrong)
    path = str(tmp_path / "none" / "run.json")
    with pytest.raises(FileNotFoundError) as caught, rustloader.trace(path):
        pass
    assert caught.value.filename == path
    with rustloader.trace(tmp_path / "run.json"):
        with pytest.raises(RuntimeError, match="already"), rustloader.trace(tmp_path / "other.json"):
            pass
    assert core.current() is None and os.listdir(tmp_path) == ["run.json"]


@pytest.mark.forks
def test_a_forked_child_ends_no_trace(tmp_path):
    loader = DataLoader(Numbers(8), batch_size=2, num_workers=1)
    with rustloader.trace(tmp_path / "run.json"):
        it = iter(loader)
        next(it)
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                status = int(core.current() is not None or len(list(DataLoader(Numbers(4), num_workers=1))) != 4)
                core._active.__exit__(None, None, None)
                assert core.sink_and_source(object(), "child") == (None, 0)
            finally:
                os._exit(status)
        assert os.waitpid(pid, 0)[1] == 0
        list(it)
    assert len(named(check(load(tmp_path / "run.json")), "batch")) == 4


@pytest.mark.warns
def test_a_trace_without_a_slice_says_so(tmp_path, caplog):
    loader = DataLoader(Numbers(8), batch_size=2, num_workers=1, persistent_workers=True)
    with rustloader.trace(tmp_path / "run.json"):
        pass
    list(loader)
    events = load(tmp_path / "run.json")
    assert not check(events) and len(events) == 3
    assert "run.json is empty: no rustloader loader of this process made a batch" in caplog.text


def test_a_pin_thread_has_a_row(tmp_path):
    loader = DataLoader(Numbers(8), batch_size=2, num_workers=1, pin_memory=True, name="Numbers")
    with pinning(), rustloader.trace(tmp_path / "run.json"):
        list(loader), list(loader)
    rows = check(load(tmp_path / "run.json"))
    expected = [(epoch, batch) for epoch in range(2) for batch in range(4)]
    assert batches_of(named(rows, "pin", "pin thread (Numbers)")) == expected


def test_copies_to_a_device_have_a_row(tmp_path):
    device = StandIn()
    loader = DataLoader(Numbers(8), batch_size=2, num_workers=1, name="Numbers")
    with mock.patch("rustloader.device.prefetch.loader.streams_of", lambda asked: device):
        batches = rustloader.prefetch_to_device(loader)
        assert len([None for _ in batches]) == 4
        with rustloader.trace(tmp_path / "run.json"):
            assert len([None for _ in batches]) == 4
    device.run_all()
    rows = check(load(tmp_path / "run.json"))
    copies = named(rows, "copy", f"main (to {device.device})")
    assert len(copies) == 4
    # A batch is queued after the call that took it from the loader.
    taken = [event["ts"] + event["dur"] for event in named(rows, "next", "main (Numbers)") if "args" in event]
    assert all(end <= copy["ts"] for end, copy in zip(taken, copies, strict=True))


def written(*records, workers=2):
    """The events of records: (who, name of the kind, begin, length, number, extra), in microseconds."""
    about = {"pid": 1, "script": "x.py", "rank": None, "wallNanoseconds": 0, "monotonicNanoseconds": 0}
    about |= {"baseTimeNanoseconds": 0, "loaders": [{"group": 0, "name": "Numbers", "workers": workers}], "files": []}
    words = (
        (who << 8 | TRACE_KINDS.index(kind), begin * 1000, length * 1000, number, extra)
        for who, kind, begin, length, number, extra in records
    )
    return [json.loads(line) for line in slices.lines(about, words)]


def spans(rows, row):
    return [(event["name"], event["ts"], event["dur"]) for event in rows[f"{row} (Numbers)"]]


def test_records_become_slices():
    rows = check(
        written(
            (TRACE_MAIN, "epoch", 0, 0, 0, 1),
            (0, "start", 0, 10, 0, 0),
            (0, "idle", 10, 5, 0, 0),
            (0, "replay", 15, 30, 0, 0),
            (0, "sample", 46, 2, 0, 7),
            (0, "fetch", 45, 5, 0, 0),
            (0, "collate", 50, 5, 0, 0),
            (0, "fetch", 55, 30, 0, 0),
            (0, "pack", 85, 3, 0, 0),
            (0, "publish", 88, 2, 0, 0),
            # Worker 0 dies during its second batch, and worker 1 sends none.
            (0, "fetch", 90, 10, 2, 0),
            (0, "died", 100, 0, 2, 0),
            (1, "fetch", 20, 9, 1, 0),
            (TRACE_MAIN, "waiting", 5, 60, 0, 0),
            (TRACE_MAIN, "waiting", 70, 21, 0, 0),
            (TRACE_MAIN, "next", 4, 90, 1, 0),
            (TRACE_MAIN, "step", 94, 6, 0, 0),
        )
    )
    parts = [("batch", 45, 45), ("fetch", 45, 5), ("sample", 46, 2), ("collate", 50, 5), ("rest", 55, 30)]
    before = [("start", 0, 10), ("idle", 10, 5), ("replay", 15, 30)]
    cut = [("batch", 90, 10), ("fetch", 90, 10)]
    assert spans(rows, "worker 0") == [*before, *parts, ("send", 85, 5), *cut]
    assert spans(rows, "worker 1") == [("no batch", 20, 9)]
    assert spans(rows, "main") == [("next", 4, 90), ("waiting", 5, 86), ("step", 94, 6)]


# Merging


PROFILED = """
import os, time, torch, rustloader
loader = rustloader.DataLoader(range(10), batch_size=2, num_workers=1)
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile, rustloader.trace("ours.json"):
    for _ in loader:
        with torch.profiler.record_function("the step"):
            time.sleep(0.02)
profile.export_chrome_trace("torchs.json")
print(os.getpid())
"""


def test_the_clock_is_that_of_torchs_profiler(tmp_path):
    # In a process of its own: the profiler leaves a thread behind.
    status, out, err = run_script(PROFILED, cwd=tmp_path)
    assert status == 0, err
    trace, profile = load(tmp_path / "ours.json"), load(tmp_path / "torchs.json")
    assert about(trace)["baseTimeNanoseconds"] == profile["baseTimeNanoseconds"]
    assert files.merge([str(tmp_path / "ours.json"), str(tmp_path / "torchs.json")], str(tmp_path / "all.json"))
    events = load(tmp_path / "all.json")
    steps = [event for event in events if event["ph"] == "X" and event["name"] == "step"]
    profiled_steps = [event for event in events if event["ph"] == "X" and event["name"] == "the step"]
    nexts = [
        event
        for event in events
        if event["ph"] == "X" and "DataLoader" in event["name"] and "__next__" in event["name"]
    ]
    assert len(steps) == len(profiled_steps) == 5 and nexts
    assert {event["pid"] for event in steps} == {event["pid"] for event in profiled_steps} == {int(out)}
    for step, profiled in zip(steps, profiled_steps, strict=True):
        # The profiler's slice lies within the step, to within a millisecond.
        assert step["ts"] - 1000 <= profiled["ts"]
        assert profiled["ts"] + profiled["dur"] <= step["ts"] + step["dur"] + 1000


def test_files_of_ranks_merge_into_one(tmp_path):
    events = {}
    for rank in range(2):
        path = tmp_path / f"{rank}.json"
        with rustloader.trace(path):
            list(DataLoader(Numbers(8), batch_size=2, num_workers=1))
        events[rank] = load(path)
    # The second file's clock counts from another origin.
    clock = next(event for event in events[1] if event["name"] == slices.CLOCK)["args"]
    clock["baseTimeNanoseconds"] -= 5_000_000_000
    later = [event | {"ts": event["ts"] + 5_000_000 * (event["ph"] != "M")} for event in events[1]]
    (tmp_path / "1.json").write_text(json.dumps(later))
    # The third file is truncated.
    (tmp_path / "2.json").write_text((tmp_path / "0.json").read_text().rpartition("\n{")[0][:-30])
    given, result = [str(tmp_path / f"{k}.json") for k in range(3)], tmp_path / "all.json.gz"
    assert cli.main(["trace", "merge", *given, "-o", str(result)]) == 0
    merged = load(result)
    pids = [os.getpid() + k * 100_000_000 for k in range(3)]
    assert {event["pid"] for event in merged} == {*pids}
    times = {pid: [event["ts"] for event in merged if event["pid"] == pid and event["ph"] != "M"] for pid in pids}
    # On the first file's clock, each event has its original time.
    for rank in range(2):
        assert times[pids[rank]] == [event["ts"] for event in events[rank] if event["ph"] != "M"]
    assert 0 < len(times[pids[2]]) < len(times[pids[0]])
    ids = collections.Counter(event["id"] for event in merged if event["ph"] == "s")
    assert set(ids.values()) == {1}


def test_what_is_no_trace(tmp_path, capsys):
    def check_fails(path):
        with pytest.raises(files.NotATrace):
            files.merge([str(path)], str(tmp_path / "all.json"))
        assert cli.main(["trace", "merge", str(path), "-o", str(tmp_path / "all.json")]) == 2
        assert capsys.readouterr().err.startswith(f"rustloader trace merge: {path} is ")

    malformed = ['1, "x", null', '{"ph": "X", "ts": "a", "pid": 1}', '{"ts": null}', '{"pid": []}', '{"ph": {}}']
    texts = ["", "{", "{}", "3", '{"traceEvents": 3}', *(f'{{"traceEvents": [{events}]}}' for events in malformed)]
    clocks = ['{"traceEvents": [], "baseTimeNanoseconds": "x"}', json.dumps([{"name": slices.CLOCK}])]
    for text in (*texts, *clocks):
        (tmp_path / "wrong.json").write_text(text)
        check_fails(tmp_path / "wrong.json")
    for content in (gzip.compress(b"[" * 1000)[:20], b"[]"):
        (tmp_path / "wrong.json.gz").write_bytes(content)
        check_fails(tmp_path / "wrong.json.gz")
    # A last line that ends after a brace is a truncated trace.
    (tmp_path / "run.json").write_text('[\n{"ph":"X","ts":1,"pid":1},\n{"ph":"X","args":{"batch":1}')
    assert files.merge([str(tmp_path / "run.json")], str(tmp_path / "all.json")) == 1
    assert cli.main(["trace", "merge", "none.json", "-o", str(tmp_path / "all.json")]) == 2
    assert capsys.readouterr().err == "rustloader trace merge: cannot read none.json: No such file or directory\n"


def test_a_merge_that_fails_leaves_its_output_unchanged(tmp_path, capsys):
    path, text = tmp_path / "run.json", '[{"ph":"X","ts":1,"pid":1},{"ph":"X","ts":2,"pid":1}]'
    path.write_text(text)
    command = ["trace", "merge", str(path), "-o", str(path)]
    with mock.patch.object(files.json, "dumps", side_effect=["{}", OSError(errno.ENOSPC, "no space")]):
        assert cli.main(command) == 2
    assert capsys.readouterr().err == f"rustloader trace merge: cannot write {path}: no space\n"
    assert path.read_text() == text and os.listdir(tmp_path) == ["run.json"]
    (tmp_path / "link.json").symlink_to("run.json")
    assert cli.main([*command[:-1], str(tmp_path / "link.json")]) == 0
    assert load(path) == json.loads(text) and path.read_text() != text
    assert (tmp_path / "link.json").is_symlink() and len(os.listdir(tmp_path)) == 2


def test_a_merge_into_a_pipe(tmp_path):
    (tmp_path / "run.json").write_text("[]")
    os.mkfifo(tmp_path / "pipe")
    received = []
    reader = threading.Thread(target=lambda: received.append((tmp_path / "pipe").read_text()))
    reader.start()
    assert files.merge([str(tmp_path / "run.json")], str(tmp_path / "pipe")) == 0
    reader.join(60)
    assert received == ["[\n]\n"] and (tmp_path / "pipe").is_fifo()


# The command

SCRIPT = """
import sys, torch
from torch.utils.data import DataLoader
if __name__ == "__main__":
    loader = DataLoader(range(8), batch_size=2, num_workers=1)
    assert sys.argv[1:] == ["--epochs", "1"], sys.argv
    print(sum(int(batch.sum()) for batch in loader))
    sys.exit(3)
"""


def run_trace(folder, *arguments, **options):
    """Runs the command in a folder, in a fork of a process that has imported torch. Returns its status, output and
    errors."""
    source = f"""
        import runpy, sys
        sys.argv[1:] = {["trace", *arguments]!r}
        runpy.run_module("rustloader", run_name="__main__", alter_sys=True)
    """
    return run_script(source, head="", fresh=False, cwd=folder, **options)


@pytest.mark.parametrize("output, file", [("{rank}.json", "3.json"), (None, "trace-rank3.json.gz")])
def test_the_command_runs_a_script(output, file, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    options = [] if output is None else ["-o", output, "--level", "sample", "--seconds", "100"]
    environment = {"RANK": "3", "WORLD_SIZE": "4"}
    status, out, err = run_trace(tmp_path, *options, "train.py", "--epochs", "1", environment=environment)
    assert (status, out) == (3, "28\n") and "wrote /" in err and f"/{file};" in err
    events = load(tmp_path / file)
    rows = check(events)
    assert len(named(rows, "batch")) == 4
    assert about(events)["script"] == "train.py"
    assert about(events, "process_name") == {"name": "train.py rank 3"}


@pytest.mark.parametrize("script", [["none.py"], ["wrong.py"]])
def test_without_a_script_that_runs_nothing_is_written(script, tmp_path):
    (tmp_path / "wrong.py").write_text("def")
    (tmp_path / "run.json").write_text("earlier")
    status, _, err = run_trace(tmp_path, "-o", "run.json", *script)
    assert status == (1 if script == ["wrong.py"] else 2) and "wrote" not in err
    assert (tmp_path / "run.json").read_text() == "earlier"
    assert sorted(os.listdir(tmp_path)) == ["run.json", "wrong.py"]


def test_the_trace_of_a_script_that_fails_is_written(tmp_path):
    (tmp_path / "train.py").write_text("raise OSError('no data')")
    status, _, err = run_trace(tmp_path, "-o", "run.json", "train.py")
    assert status == 1 and "no data" in err and "wrote" in err and "it has no slices" in err
    check(load(tmp_path / "run.json"))


@pytest.mark.parametrize("output", ["none/run.json", "."])
def test_an_output_that_cannot_be_written(output, tmp_path):
    (tmp_path / "train.py").write_text("print('ran')")
    status, out, err = run_trace(tmp_path, "-o", output, "train.py")
    assert (status, out) == (2, "") and len(err.splitlines()) == 1
    assert err.startswith(f"rustloader trace: cannot write {output}: ")


KILLED = """
import time, rustloader
class Held:
    def __len__(self): return 1000
    def __getitem__(self, index):
        if index == 20 and place != "step": time.sleep(1000)
        return index
if __name__ == "__main__":
    loader = rustloader.DataLoader(Held(), batch_size=2, num_workers=2 * (place != "fetch"))
    with rustloader.trace("run.json", seconds=seconds):
        for n, _ in enumerate(loader):
            if n == 6 and place == "step": time.sleep(1000)
"""


@pytest.mark.parametrize(
    ("place", "sent", "seconds"),
    [("step", signal.SIGKILL, 60), ("waiting", signal.SIGTERM, None), ("fetch", signal.SIGKILL, None)],
)
def test_a_killed_program_leaves_its_trace_up_to_the_last_second(place, sent, seconds, tmp_path):
    process = start_script(KILLED, head=f"place, seconds = {place!r}, {seconds}", fresh=False, cwd=tmp_path)
    merge = ["trace", "merge", str(tmp_path / "run.json"), "-o", str(tmp_path / "all.json")]

    def merged():
        return check_open(load(tmp_path / "all.json")) if cli.main(merge) == 0 else {}

    # The loop stays in its 7th step, in a wait for batch 10, or in the fetch of batch 10.
    assert wait_until(lambda: any(event["dur"] > 500_000 for event in named(merged(), place, "main")), STARTED)
    os.kill(process.pid, sent)
    process.wait()
    assert os.listdir(tmp_path / "run.json.spool") and not (tmp_path / "run.json").exists()
    rows = merged()
    end = max(event["ts"] + event["dur"] for row in rows.values() for event in row)
    assert end in [event["ts"] + event["dur"] for event in named(rows, place, "main")]
    delivered = [event["args"]["batch"] for event in named(rows, "next", "main") if "args" in event]
    assert delivered == list(range({"step": 7, "waiting": 10, "fetch": 0}[place]))
    if place == "waiting":
        (stuck,) = [event for event in named(rows, "fetch", "worker") if event["ts"] + event["dur"] == end]
        assert stuck["dur"] >= 500_000 and (0, 10) in batches_of(named(rows, "batch", "worker"))
    assert about(load(tmp_path / "all.json"), "rustloader_trace_end")["complete"] is False


LAUNCHERS = [
    ({}, "run.json.gz", "run.json.gz"),
    ({"RANK": "1", "WORLD_SIZE": "2"}, "run.json.gz", "run-rank1.json.gz"),
    ({"SLURM_PROCID": "3"}, "a.b/run", "a.b/run-rank3"),
    ({"RANK": "0", "WORLD_SIZE": "1"}, "run.json", "run.json"),
    ({"RANK": "2"}, "{rank}.json", "2.json"),
]


@pytest.mark.parametrize(("environment", "path", "expected"), LAUNCHERS)
def test_each_rank_has_its_own_name(environment, path, expected, tmp_path, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert rustloader.trace(tmp_path / path).path == str(tmp_path / expected)
    assert rustloader.trace("/dev/null").path == "/dev/null"


@pytest.mark.warns
def test_another_process_with_the_same_name_gets_its_own(tmp_path, caplog):
    (ready, done), loader = (os.pipe(), os.pipe()), DataLoader(Numbers(8), batch_size=2)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            with rustloader.trace(tmp_path / "run.json"):
                os.write(ready[1], b"x")
                os.read(done[0], 1)
                status = len(list(loader)) - 4
        finally:
            os._exit(status)
    os.read(ready[0], 1)
    with rustloader.trace(tmp_path / "run.json") as trace:
        list(loader)
    os.write(done[1], b"x")
    assert os.waitpid(pid, 0)[1] == 0
    own = f"run-pid{os.getpid()}.json"
    assert f"process {pid} is making the trace {tmp_path}/run.json" in caplog.text and trace.path.endswith(own)
    assert sorted(os.listdir(tmp_path)) == sorted(["run.json", own])
    for name in ("run.json", own):
        assert len(named(check(load(tmp_path / name)), "fetch")) == 4
    for end in (*ready, *done):
        os.close(end)


@pytest.mark.warns
def test_the_next_trace_names_the_records_of_a_killed_program(tmp_path, caplog):
    pid = os.fork()
    if pid == 0:
        rustloader.trace(tmp_path / "run.json").__enter__()
        os._exit(0)
    os.waitpid(pid, 0)
    for _ in range(2):
        caplog.clear()
        with rustloader.trace(tmp_path / "run.json"):
            list(DataLoader(Numbers(8), batch_size=2, num_workers=1))
        assert f"merge {tmp_path}/run.json.spool -o {tmp_path}/run-killed.json" in caplog.text
    assert sorted(os.listdir(tmp_path)) == ["run.json", "run.json.spool"]


def test_a_program_that_changes_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with rustloader.trace("run.json"):
        monkeypatch.chdir("/")
        assert len(list(DataLoader(Numbers(8), batch_size=2))) == 4
    assert len(named(check(load(tmp_path / "run.json")), "fetch")) == 4


def test_a_folder_that_is_there_is_left_alone(tmp_path):
    (tmp_path / "run.json.spool").mkdir()
    (tmp_path / "run.json.spool" / "kept").write_text("of a crash")
    for _ in range(2):
        with rustloader.trace(tmp_path / "run.json"):
            list(DataLoader(Numbers(8), batch_size=2, num_workers=1))
    assert sorted(os.listdir(tmp_path)) == ["run.json", "run.json.spool"]
    assert os.listdir(tmp_path / "run.json.spool") == ["kept"]


@pytest.mark.warns
def test_a_trace_that_cannot_be_written_ends_no_program(tmp_path, caplog, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "no space")

    with pytest.raises(IsADirectoryError), rustloader.trace(tmp_path):
        pass
    with rustloader.trace(tmp_path / "run.json"):
        list(DataLoader(Numbers(8), batch_size=2, num_workers=1))
        monkeypatch.setattr(files, "convert", full)
    assert "rustloader trace merge" in caplog.text and not (tmp_path / "run.json").exists()
    monkeypatch.undo()
    assert files.merge([str(tmp_path / "run.json.spool")], str(tmp_path / "run.json")) > 8
    for name, text in (("a", "[1]"), ("b", "{}")):
        (tmp_path / name).write_text(text)
        with pytest.raises(files.NotATrace):
            files.merge([str(tmp_path / name)], str(tmp_path / "c"))


def test_a_trace_that_another_thread_ends(tmp_path):
    trace = rustloader.trace(tmp_path / "run.json")
    trace.__enter__()
    loader = DataLoader(Numbers(8), batch_size=2)
    iterator = iter(loader)
    next(iterator)
    thread = threading.Thread(target=trace.__exit__)
    thread.start()
    thread.join(60)
    assert len(list(iterator)) == 3 and len(list(loader)) == 4
