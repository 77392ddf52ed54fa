"""Verdicts on made-up figures: a table of loaders with their verdicts, and what holds for every verdict."""

import dataclasses
import re
from typing import get_args

import pytest
from hypothesis import given as for_all
from hypothesis import settings
from hypothesis import strategies as st
from support import TORCH_MODE

pytestmark = pytest.mark.ours

if not TORCH_MODE:
    from rustloader import (
        CopyStats,
        CoreUsers,
        Fallback,
        PinningStats,
        SchedulingStats,
        SlowBatch,
        Stats,
        TransferStats,
        Verdict,
        VerdictKind,
        WorkerStats,
    )

MS = 1e-3


def given(batches=100, step=0.0, waited=0.0, own=0.0, fetch=1.0, collate=0.0, workers=2, **more):
    """A loader's statistics; times are milliseconds per batch. `fetch` may be a list, by worker. `cpu` and `queued` are
    shares of the workers' busy time, `fetch_cpu` is a share of their time in the dataset (default: as `cpu`)."""
    of_worker = fetch if isinstance(fetch, list) else [fetch] * workers
    tasks = batches // workers
    pack, start = more.pop("pack", 0.0), more.pop("start", 0.0)
    cpu, queued = more.pop("cpu", None), more.pop("queued", None)
    fetch_cpu = more.pop("fetch_cpu", cpu)
    more.setdefault("epochs", 1)
    more.setdefault("cores", 64)
    return Stats(
        num_workers=workers,
        iterators=more.pop("iterators", 1),
        batches=batches,
        next_seconds=(waited + own) * batches * MS + more.get("first_seconds", 0.0),
        waited_seconds=waited * batches * MS,
        step_seconds=step * batches * MS,
        workers=tuple(
            WorkerStats(
                n,
                pid=100 + n,
                tasks=tasks,
                starting_seconds=start,
                fetch_seconds=ms * tasks * MS,
                collate_seconds=collate * tasks * MS,
                pack_seconds=pack * tasks * MS,
                cpu_seconds=None if cpu is None else cpu * (ms + collate + pack) * tasks * MS,
                queued_seconds=None if queued is None else queued * (ms + collate + pack) * tasks * MS,
                fetch_cpu_seconds=0.0 if fetch_cpu is None else fetch_cpu * ms * tasks * MS,
                fetch_measured_seconds=0.0 if fetch_cpu is None else ms * tasks * MS,
            )
            for n, ms in enumerate(of_worker)
        ),
        **more,
    )


def slow(index, ms, worker=0):
    return SlowBatch(index, worker, ms * MS)


def partly_known(stats):
    """The same statistics, but without the CPU time of the first worker and of half of the second one's work."""
    first, second = stats.workers
    first = dataclasses.replace(first, cpu_seconds=None, queued_seconds=None, unmeasured_seconds=first.busy_seconds)
    cpu, queued = second.cpu_seconds / 2, second.queued_seconds / 2
    half = second.busy_seconds / 2
    second = dataclasses.replace(second, cpu_seconds=cpu, queued_seconds=queued, unmeasured_seconds=half)
    return dataclasses.replace(stats, workers=(first, second))


def blocked_by_some(**more):
    """A loader with four workers. Every tenth batch takes 60 ms, the others 4.5 ms."""
    scheduling = more.pop("scheduling", {})
    recent = tuple((60 if n % 10 == 5 else 4.5) * MS for n in range(200))
    values = {"workers": 4, "fetch": 10.05, "waited": 5, "own": 0.01, "blocked_seconds": 0.45, "recent_seconds": recent}
    blocking = (SlowBatch("[15]", 3, 60 * MS, blocked_seconds=0.055), SlowBatch("[25]", 1, 61 * MS))
    values |= {"blocking": blocking, "slowest": (slow("[95]", 62),), "scheduling": SchedulingStats(**scheduling)}
    return given(**values | more)


STORAGE = {"cpu": 0.04, "queued": 0.01}

# By the name of the case: its statistics, the kind of the verdict, words in it, among them the remedy, and the number
# of workers to try.
TABLE = {
    "nothing yet": (lambda: Stats(), "too_few", ["0 batches", "ask again after 20"], None),
    "one batch": (lambda: given(batches=1, workers=1), "too_few", ["(1 batch so far)", "ask again after 20"], None),
    "a few batches": (
        lambda: given(batches=18, waited=50, fetch=100),
        "too_few",
        ["18 batches", "ask again after 20"],
        None,
    ),
    "without workers": (lambda: Stats(batches=0, note="num_workers=0: ..."), "unknown", ["num_workers=0"], None),
    "on torch's loop": (
        lambda: Stats(fallbacks=(Fallback("its dataset is a DataPipe", 3),)),
        "unknown",
        ["torch's own loop made the batches: its dataset is a DataPipe"],
        None,
    ),
    "some epochs on torch's loop": (
        lambda: given(step=50, own=0.1, waited=1, fetch=2, fallbacks=(Fallback("A", 3), Fallback("B", 1))),
        "step",
        ["not counted: 4 iterators on torch's own loop (A; B)", "only a faster step helps"],
        None,
    ),
    "one epoch on torch's loop": (
        lambda: given(step=50, fallbacks=(Fallback("A", 1),)),
        "step",
        ["not counted: 1 iterator on", "only a faster step helps"],
        None,
    ),
    "the step": (
        lambda: given(step=50, own=0.1, waited=1, fetch=2),
        "step",
        ["50 ms of training step", "only a faster step helps"],
        None,
    ),
    "the step, with busy workers": (
        lambda: given(step=50, own=0.1, waited=4, fetch=90),
        "step",
        ["only a faster step helps"],
        None,
    ),
    "the workers": (lambda: given(step=9, own=1, waited=40, fetch=100), "workers", ["Use num_workers=10."], 10),
    "the workers, by little": (lambda: given(step=9, own=1, waited=2, fetch=24), "workers", ["Use num_workers=3."], 3),
    "one worker": (lambda: given(workers=1, step=2, waited=48, fetch=50), "workers", ["Use num_workers=25."], 25),
    "workers that compute": (
        lambda: given(step=9, own=1, waited=40, fetch=100, cpu=0.95, queued=0.05),
        "workers",
        ["the workers compute for 95% of the time, wait for a core for 5%", "Use num_workers=10."],
        10,
    ),
    "fewer cores than the step wants": (
        lambda: given(step=9, own=1, waited=40, fetch=100, cores=4, cpu=0.95, queued=0.05),
        "dataset",
        [
            "no loader can speed it up: cache its results, decode faster, or add cores.",
            "num_workers=4: that uses all 4 cores and is still not enough",
        ],
        4,
    ),
    "a worker on each core": (
        lambda: given(step=9, own=1, waited=40, fetch=100, cores=2, cpu=0.95, queued=0.05),
        "dataset",
        ["no loader can speed it up: cache its results, decode faster, or add cores.", "More workers do not help"],
        None,
    ),
    "more workers than cores": (
        lambda: given(workers=8, step=9, own=1, waited=40, fetch=400, cores=1, cpu=0.12, queued=0.88),
        "dataset",
        ["there is 1 core.", "cache its results, decode faster, or add cores"],
        None,
    ),
    "more workers than cores, which look idle": (
        # 60 % of both cores' time is work, so what else the workers wait for hardly matters.
        lambda: given(workers=8, step=1, waited=49, fetch=400, cores=2, cpu=0.15, queued=0.2),
        "dataset",
        ["cache its results, decode faster, or add cores"],
        None,
    ),
    "on all cores, and nothing known of CPU time": (
        lambda: given(step=9, own=1, waited=40, fetch=100, cores=2),
        "dataset",
        ["whether the workers wait for storage is unknown", "cache its results, decode faster, or add cores"],
        None,
    ),
    "no step at all": (
        lambda: given(waited=50, fetch=100),
        "workers",
        ["this loop has no training step", "cache its results, decode faster, or use more workers"],
        None,
    ),
    "no step worth the name": (
        lambda: given(waited=1000, own=0.02, step=0.3, fetch=2000),
        "workers",
        ["this loop has no training step", "cache its results, decode faster, or use more workers"],
        None,
    ),
    "no step, and a worker on each core": (
        lambda: given(waited=50, fetch=100, cores=2),
        "dataset",
        ["More workers do not help: there are 2 cores", "cache its results, decode faster, or add cores"],
        None,
    ),
    "storage": (
        lambda: given(step=9, own=1, waited=40, fetch=100, cores=4, **STORAGE),
        "storage",
        ["use num_workers=8 and measure again, or faster storage", "for something else for 95%"],
        8,
    ),
    "storage, and enough workers in reach": (
        lambda: given(workers=4, step=9, own=1, waited=15, fetch=100, cores=4, **STORAGE),
        "storage",
        ["use num_workers=10, or faster storage"],
        10,
    ),
    "storage, with as many workers as can help": (
        lambda: given(workers=16, step=1, waited=40, fetch=640, cores=4, **STORAGE),
        "storage",
        ["use faster storage", "more workers will hardly help"],
        None,
    ),
    "storage, without a step": (
        lambda: given(waited=40, fetch=80, cores=1, **STORAGE),
        "storage",
        ["no training step", "use more workers, even more than cores, or faster storage"],
        None,
    ),
    "storage, and one worker killed": (
        lambda: partly_known(given(step=9, own=1, waited=40, fetch=100, cores=4, **STORAGE)),
        "storage",
        ["for something else for 95%", "use num_workers=8 and measure again, or faster storage"],
        8,
    ),
    "storage, and batches whose samples can be fetched at a time": (
        lambda: given(
            step=9, own=1, waited=40, fetch=100, cores=4, scheduling=SchedulingStats(batch_size=64), **STORAGE
        ),
        "storage",
        ["use worker_threads=5 or num_workers=8 and measure again, or faster storage"],
        8,
    ),
    "storage, with as many workers as can help, and threads": (
        lambda: given(
            workers=16, step=1, waited=40, fetch=640, cores=4, scheduling=SchedulingStats(worker_threads=2), **STORAGE
        ),
        "storage",
        ["use worker_threads=50 or faster storage", "more workers will hardly help"],
        None,
    ),
    "storage, with threads that share a core": (
        # They compute for a fifth of the time, so five threads would keep a core busy.
        lambda: given(workers=2, step=10, waited=190, fetch=400, cpu=0.2, queued=0, scheduling=SchedulingStats()),
        "storage",
        ["use worker_threads=5 or num_workers=8 and measure again"],
        8,
    ),
    "storage, and batches of two samples": (
        lambda: given(step=9, own=1, waited=40, fetch=100, scheduling=SchedulingStats(batch_size=2), **STORAGE),
        "storage",
        ["use worker_threads=2 or num_workers=8 and measure again"],
        8,
    ),
    "storage, and batches that are fetched as a whole": (
        lambda: given(step=9, own=1, waited=40, fetch=100, scheduling=SchedulingStats(per_sample=False), **STORAGE),
        "storage",
        ["most of their time: use num_workers=8 and measure again, or faster storage (a local disk, larger files"],
        8,
    ),
    "storage, without a step, and threads": (
        lambda: given(waited=40, fetch=80, cores=1, scheduling=SchedulingStats(), **STORAGE),
        "storage",
        ["use worker_threads=16, more workers, even more than cores, or faster storage"],
        None,
    ),
    "storage behind a busy collate_fn": (
        # The process computes for half of the time, but the dataset hardly does.
        lambda: given(step=9, own=1, waited=40, fetch=60, collate=40, cpu=0.45, fetch_cpu=0.05, queued=0.01, cores=4),
        "storage",
        ["for something else for 94%", "use num_workers=8 and measure again"],
        8,
    ),
    "a dataset that computes beside a collate_fn that waits": (
        lambda: given(step=9, own=1, waited=40, fetch=60, collate=40, cpu=0.4, fetch_cpu=0.95, queued=0.01),
        "workers",
        ["the workers compute for 95%", "Use num_workers=10."],
        10,
    ),
    "cores that other work takes": (
        lambda: given(step=9, own=1, waited=40, fetch=100, cpu=0.3, queued=0.7),
        "cores",
        [
            "other work uses them",
            "torch.set_num_threads",
            "wait for a core for 70%",
            "End other programs, use fewer threads in the training process",
        ],
        None,
    ),
    "two busy programs beside two workers on two cores": (
        lambda: given(step=9, own=1, waited=40, fetch=100, cpu=0.5, queued=0.48, cores=2),
        "cores",
        ["End other programs"],
        None,
    ),
    "as many workers as suffice when no other program takes the cores": (
        lambda: given(workers=1, step=8, waited=10, fetch=18, cpu=0.66, queued=0.33, cores=2),
        "workers",
        ["Use num_workers=2. Predicted gain: 2.0 times as fast."],
        2,
    ),
    "cores that other processes take, and a dataset that limits without them": (
        lambda: given(
            step=9, own=1, waited=40, fetch=100, cpu=0.3, queued=0.7, cores=2, core_users=CoreUsers(0.25, 0.15, 0.6)
        ),
        "cores",
        [
            "The cores are the bottleneck: other processes used 60% of the cores, the main process 25% and the workers "
            "15%, while workers were ready to run. End other programs",
            "Even then the dataset is a limit: its own work takes a worker 30 ms per batch.",
        ],
        None,
    ),
    "cores that other processes take, and a dataset that is fast enough": (
        lambda: given(step=29, own=1, waited=40, fetch=100, cpu=0.3, queued=0.7, core_users=CoreUsers(0.2, 0.1, 0.7)),
        "cores",
        ["other processes used 70% of the cores", "End other programs"],
        None,
    ),
    "a loop that only counts": (
        # 150 us between two batches is not a training step.
        lambda: given(400, waited=1.5, own=0.02, step=0.15, fetch=1.7, cores=2, cpu=1.0, queued=0.0, workers=1),
        "workers",
        ["this loop has no training step", "cache its results, decode faster, or use more workers"],
        None,
    ),
    "collate": (
        lambda: given(step=9, own=1, waited=40, fetch=20, collate=80),
        "collate",
        ["Make it faster", "let default_collate build the batches. Use num_workers=10."],
        10,
    ),
    "collate on all cores": (
        lambda: given(step=9, own=1, waited=40, fetch=20, collate=80, cores=2),
        "collate",
        ["More workers do not help", "Make it faster, use smaller samples, or let default_collate build the batches."],
        None,
    ),
    "packing": (
        lambda: given(step=9, own=1, waited=40, fetch=20, pack=80),
        "transport",
        ["Inter-process transport is the bottleneck", "Let default_collate build the batches"],
        None,
    ),
    "the sampler": (
        lambda: given(own=50, step=1, waited=1, sampler_seconds=49 * 100 * MS),
        "main",
        ["Use a faster sampler", "more workers do not help"],
        None,
    ),
    "opening batches": (lambda: given(own=50, step=1, waited=1), "main", ["50 ms", "Use fewer, larger batches"], None),
    "opening pickles": (
        lambda: given(own=50, step=1, waited=1, copies=CopyStats(pickled=100)),
        "main",
        ["they are pickled", "Return tensors and arrays in dicts, lists or tuples"],
        None,
    ),
    "one slow worker": (
        lambda: given(fetch=[50, 1], waited=25, blocked_seconds=2.4, slowest=(slow("[7]", 55), slow("[9]", 52))),
        "head_of_line",
        ["worker 0 (pid 100)", "50 ms", "check what only this worker reads, or set in_order=False"],
        None,
    ),
    "one slow worker of four": (
        lambda: given(workers=4, fetch=[1, 1, 50, 2], waited=12, blocked_seconds=1.1, slowest=(slow("[7]", 55, 2),)),
        "head_of_line",
        ["worker 2 (pid 102)", "check what only this worker reads, or set in_order=False"],
        None,
    ),
    "a few slow batches": (
        lambda: given(
            fetch=[10, 12], waited=20, blocked_seconds=1.9, slowest=(slow("[7, 8]", 300), slow("[1, 2]", 250, 1))
        ),
        "head_of_line",
        ["[7, 8] took 300 ms", "[1, 2] took 250 ms", "Use in_order=False, a larger prefetch_factor or faster samples"],
        None,
    ),
    "a few slow batches, all one worker's by chance": (
        lambda: given(fetch=[12, 1], waited=12, blocked_seconds=1.1, slowest=(slow("[7]", 300), slow("[17]", 290))),
        "head_of_line",
        ["[7] took 300 ms", "a few slow batches", "Use in_order=False, a larger prefetch_factor or faster samples"],
        None,
    ),
    "slow batches that a shared queue would pass": (
        blocked_by_some,
        "head_of_line",
        [
            'Use dispatch="shared_queue" and reorder_window=32, in_order=False or',
            "Predicted gain: 2.3 times as fast.",
            "the slowest: [15] took 60 ms on worker 3; [25] took 61 ms on worker 1.",
        ],
        None,
    ),
    "slow batches, with a shared queue": (
        lambda: blocked_by_some(scheduling={"dispatch": "shared_queue"}),
        "head_of_line",
        ["Use reorder_window=32, in_order"],
        None,
    ),
    "slow batches, with a shared queue and a window of bytes": (
        # A batch has 1,000 bytes.
        lambda: blocked_by_some(scheduling={"dispatch": "shared_queue", "reorder_window": "12kB"}, bytes=100_000),
        "head_of_line",
        ["Use reorder_window=32, in_order"],
        None,
    ),
    "slow batches, with a shared queue and a wide window": (
        lambda: blocked_by_some(scheduling={"dispatch": "shared_queue", "reorder_window": 64}),
        "head_of_line",
        ["all later ones wait for them. Use in_order=False or faster samples"],
        None,
    ),
    "slow batches of an iterable dataset": (
        lambda: blocked_by_some(scheduling={"map_style": False}),
        "head_of_line",
        ["Use in_order=False, a larger prefetch_factor or faster samples"],
        None,
    ),
    "slow batches that keep all cores busy": (
        # They compute all the time: with one core no order of the work is faster.
        lambda: blocked_by_some(cores=1, cpu=1.0, queued=0.0, waited=8),
        "head_of_line",
        ["Use in_order=False, a larger prefetch_factor or faster samples"],
        None,
    ),
    "one slow worker that a shared queue would relieve": (
        lambda: given(
            fetch=[50, 1],
            waited=25,
            blocked_seconds=2.4,
            slowest=(slow("[7]", 55), slow("[9]", 52)),
            recent_seconds=(0.05, 0.001) * 50,
            scheduling=SchedulingStats(),
        ),
        "head_of_line",
        ["worker 0 (pid 100)", 'or set dispatch="shared_queue"', "or in_order=False."],
        None,
    ),
    "a large slow batch": (
        lambda: given(
            fetch=[10, 12],
            waited=20,
            blocked_seconds=1.9,
            slowest=(slow(f"[{', '.join(map(str, range(16)))}, ... 100 in all]", 300),),
        ),
        "head_of_line",
        [
            "the slowest: [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, ... 100 in all] took",
            "Use in_order=False, a larger prefetch_factor or faster samples",
        ],
        None,
    ),
    "waiting for a worker that is still starting": (
        lambda: given(5000, fetch=0.02, waited=0.15, blocked_seconds=0.6, start=1.0, slowest=(slow("[7]", 0.6),)),
        "too_few",
        ["Too short to tell", "Ask again after a longer run"],
        None,
    ),
    "waiting for a worker that is still starting, in each epoch": (
        lambda: given(
            5000,
            fetch=0.02,
            waited=0.15,
            blocked_seconds=0.6,
            start=1.0,
            slowest=(slow("[7]", 0.6),),
            epochs=5,
            iterators=5,
        ),
        "starting",
        ["set persistent_workers=True"],
        None,
    ),
    "waiting in turn, with all workers busy": (
        lambda: given(fetch=100, waited=50, blocked_seconds=4.5),
        "workers",
        ["cache its results, decode faster, or use more workers"],
        None,
    ),
    "pinning": (
        lambda: given(waited=40, step=5, fetch=20, pinning=PinningStats(True, 100, 4.4)),
        "pinning",
        ["44 ms per batch in one thread", "use smaller batches, or plain ones"],
        None,
    ),
    "copies to the device": (
        lambda: given(step=10, fetch=10, transfers=TransferStats(100, 3_800_000_000, 0.8, 0.5)),
        "device",
        [
            "50% of the loop's time",
            "38.0 MB takes 8 ms to copy, at 4.8 GB per second",
            "send fewer bytes, such as uint8 images",
        ],
        None,
    ),
    "copies to the device from pageable memory": (
        lambda: given(step=10, fetch=10, transfers=TransferStats(100, 1_000_000_000, 0.8, 0.5, "set pin_memory=True")),
        "device",
        ["The copy to the device is the bottleneck: set pin_memory=True."],
        None,
    ),
    "copies that run beside the work": (
        lambda: given(step=10, own=1, transfers=TransferStats(100, 1_000_000_000, 0.9, 0.05)),
        "step",
        ["only a faster step helps"],
        None,
    ),
    "a step, and batches that are not pinned": (
        lambda: given(step=10, transfers=TransferStats(100, 10, 0.1, 0.0, "a batch of type X is not pinned")),
        "step",
        ["; a batch of type X is not pinned", "only a faster step helps"],
        None,
    ),
    "workers that limit more than copies do": (
        lambda: given(waited=40, step=10, fetch=100, transfers=TransferStats(100, 1_000_000_000, 1.0, 1.0)),
        "workers",
        ["Use num_workers=10."],
        10,
    ),
    "a busy pin thread, and busier workers": (
        lambda: given(waited=50, step=5, fetch=110, pinning=PinningStats(True, 100, 4.4)),
        "workers",
        ["Use num_workers=22."],
        22,
    ),
    "tiny batches": (
        lambda: given(20_000, waited=0.02, own=0.01, step=0.001, fetch=0.005),
        "transport",
        ["Inter-process transport is the bottleneck; use fewer, larger batches."],
        None,
    ),
    "remote workers that wait for a network": (
        lambda: given(waited=8, step=2, fetch=5, bytes=800_000_000, scheduling=SchedulingStats(remote=True)),
        "network",
        ["The network is the bottleneck: 800 of 3.2e+03 MB/s", "uint8", "a batch is 8 MB", "Send fewer bytes"],
        None,
    ),
    "remote workers with small batches": (
        lambda: given(waited=8, step=2, fetch=5, bytes=100_000, scheduling=SchedulingStats(remote=True)),
        "network",
        ["The network is the bottleneck: 0.1 of 0.4 MB/s", "larger prefetch_factor", "use larger batches"],
        None,
    ),
    "busy remote workers": (
        lambda: given(waited=50, step=5, fetch=100, cores=2, scheduling=SchedulingStats(remote=True)),
        "workers",
        ["Use num_workers=20."],
        20,
    ),
    "short epochs": (
        lambda: given(epochs=20, iterators=20, first_seconds=20.0, step=2, fetch=1),
        "starting",
        ["set persistent_workers=True", "20 epochs"],
        None,
    ),
    "short epochs, whose workers start in iter()": (
        lambda: given(epochs=20, iterators=20, first_seconds=0.1, turnaround_seconds=8.0, step=2, fetch=1),
        "starting",
        [
            "8.1 s in iter(), waiting for the first batches and ending the workers, in 20 epochs; 200 ms for the rest",
            "set persistent_workers=True",
        ],
        None,
    ),
    "short epochs, with persistent workers": (
        lambda: given(epochs=20, iterators=1, first_seconds=20.0, step=2, fetch=1),
        "starting",
        ["the workers are already kept", "Use longer epochs, or no workers for epochs this short."],
        None,
    ),
    "epochs left after two batches": (
        lambda: given(epochs=60, iterators=60, workers=2, first_seconds=0.5, step=2, waited=50, fetch=60),
        "starting",
        ["set persistent_workers=True", "60 epochs"],
        None,
    ),
    "collate that waits for a core": (
        lambda: given(waited=50, step=5, fetch=1, collate=110, cpu=0.1, queued=0.8, cores=4, workers=2),
        "cores",
        ["other work uses them", "End other programs"],
        None,
    ),
    "one slow start": (
        lambda: given(epochs=1, first_seconds=20.0, step=2, fetch=1),
        "step",
        ["only a faster step helps"],
        None,
    ),
    "workers without figures": (
        lambda: dataclasses.replace(given(waited=50), workers=()),
        "unknown",
        ["no statistics", "Ask again after more batches"],
        None,
    ),
    "fewer workers than there were": (
        # The six workers that have ended did nothing in this period.
        lambda: dataclasses.replace(given(workers=8, fetch=[100] * 2 + [0] * 6, waited=18, step=2), num_workers=2),
        "workers",
        ["2 workers", "Use num_workers=13."],
        13,
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_the_verdict_of(name):
    make, kind, words, needed = TABLE[name]
    verdict = make().verdict()
    assert (verdict.kind, verdict.workers_needed) == (kind, needed), verdict
    for word in words:
        assert word.lower() in str(verdict).lower(), verdict
    assert verdict.sentence.endswith(".") and verdict.reason


def test_each_kind_stands_in_the_table():
    assert {kind for _, kind, _, _ in TABLE.values()} == set(get_args(VerdictKind))


def halved(first, second, **both):
    """The statistics of a loader with the times of the two halves of its batches."""
    mean = {name: (first[name] + second[name]) / 2 for name in first}
    halves = tuple(given(batches=50, **both, **half) for half in (first, second))
    return dataclasses.replace(given(batches=100, **both, **mean), halves=halves)


TIMES = {"step": 9, "own": 1, "waited": 40, "fetch": 100, "cpu": 0.95, "queued": 0.02}

# By the name of the case: the times that differ in the second half, the kind of the verdict, and words in it.
HALVES = {
    "alike": ({"waited": 45, "fetch": 110}, "workers", ["Use num_workers=11. Predicted gain: 5.2 times as fast."]),
    "with waits for storage": ({"cpu": 0.05}, "too_few", ["ask again after 5 s more", "verdicts workers and storage"]),
    "with waits for cores": ({"queued": 0.9}, "too_few", ["Too short to tell", "verdicts workers and cores"]),
    "without waits": ({"waited": 0, "fetch": 2}, "too_few", ["the loop waits for 67% of its time", "workers and step"]),
}


@pytest.mark.parametrize("name", HALVES)
def test_a_second_half(name):
    differing, kind, words = HALVES[name]
    verdict = halved(TIMES, TIMES | differing).verdict()
    assert verdict.kind == kind, verdict
    assert all(word in str(verdict) for word in words), verdict
    assert (verdict.predicted_gain is None) == (kind == "too_few")


def test_waits_of_one_half_that_are_few_on_the_whole():
    first = TIMES | {"waited": 0, "fetch": 2, "step": 99}
    verdict = halved(first, first | {"waited": 8}).verdict()
    assert verdict.kind == "step" and "Nothing to gain here: the loop waits for 3.8% of its time." in verdict.sentence


def test_a_short_loop_gets_no_verdict():
    verdict = given(batches=40, waited=0.3, fetch=0.6, own=0.05).verdict()
    assert (verdict.kind, verdict.sentence) == (
        "too_few",
        "Too short to tell: ask again after 486 ms more of this loop.",
    )


def test_the_repr_has_two_lines():
    verdict = Verdict("step", "The step takes longest.", "waits for 1%")
    assert repr(verdict) == "<rustloader.Verdict step: The step takes longest.\n (waits for 1%)>"


def test_plurals_of_a_single_core_and_worker():
    verdict = given(workers=1, step=9, own=1, waited=40, fetch=50, cores=1).verdict()
    assert "there is 1 core." in verdict.sentence and "1 worker, 1 core;" in verdict.reason


@pytest.mark.parametrize(("fetch", "step", "needed"), [(100, 10, 10), (100, 9, 12), (50, 20, 3), (600, 10, 60)])
def test_as_many_workers_as_the_step_wants(fetch, step, needed):
    verdict = given(fetch=fetch, step=step, waited=fetch / 2 - step).verdict()
    assert (verdict.kind, verdict.workers_needed) == ("workers", needed)


def test_only_more_workers_are_ever_advised():
    verdict = given(200, workers=8, fetch=8, step=2, waited=1).verdict()
    assert verdict.kind == "workers" and verdict.workers_needed == 9


def test_no_loader_gets_a_number_in_the_thousands():
    """A new user's first benchmark reported that num_workers=1736 would do, on a machine with 2 cores."""
    for shares in ({}, {"cpu": 0.99, "queued": 0.01}, STORAGE):
        for step in (0, 0.02, 1, 5):
            verdict = given(workers=1, step=step, own=0.03, waited=50, fetch=52, cores=2, **shares).verdict()
            assert verdict.workers_needed is None or verdict.workers_needed <= 8, verdict


milliseconds = st.sampled_from([0, 0.001, 0.02, 0.3, 1, 7, 50, 400, 3000]) | st.floats(0, 5000)
shares = st.none() | st.floats(0, 1.2)


@settings(deadline=None, max_examples=1500)
@for_all(
    times=st.fixed_dictionaries(dict.fromkeys(("step", "waited", "own", "fetch", "collate", "pack"), milliseconds)),
    counts=st.fixed_dictionaries(
        {"workers": st.integers(1, 64), "cores": st.integers(1, 128), "batches": st.integers(0, 5000)}
    ),
    cpu=shares,
    queued=shares,
    blocked=st.floats(0, 1),
    pickled=st.booleans(),
    epochs=st.integers(1, 30),
    first=st.floats(0, 100),
    pinned=st.floats(0, 1),
)
def test_what_holds_for_every_verdict(times, counts, cpu, queued, blocked, pickled, epochs, first, pinned):
    batches = counts["batches"]
    stats = given(
        **times,
        **counts,
        cpu=cpu,
        queued=queued,
        blocked_seconds=blocked * times["waited"] * batches * MS,
        copies=CopyStats(pickled=batches if pickled else 0),
        pinning=PinningStats(True, batches, pinned * (times["waited"] + times["step"]) * batches * MS),
        epochs=epochs,
        first_seconds=first,
        slowest=(slow("[7]", 300),),
    )
    verdict = stats.verdict()
    assert verdict.kind in get_args(VerdictKind) and verdict.sentence.endswith(".") and verdict.reason
    assert not re.search(r"[( ]-\d", str(verdict))
    number, cores, workers = verdict.workers_needed, counts["cores"], counts["workers"]
    assert re.findall(r"num_workers=(\d+)", verdict.sentence) == ([] if number is None else [str(number)])
    if number is None:
        return
    assert verdict.kind in ("workers", "dataset", "storage", "collate")
    assert number > workers and times["step"] > 0
    if verdict.kind == "storage":
        assert cpu is not None and queued is not None and cpu + queued < 0.5
        assert number <= 4 * cores and number <= 4 * workers
    else:
        assert number <= cores


@pytest.mark.parametrize("step", [0.0, 5.0])
@pytest.mark.parametrize("work", [{"cpu": 1.0}, {"cpu": 0.01}, {"fetch": 20.0, "collate": 70.0, "cpu": 1.0}], ids=str)
@pytest.mark.parametrize("workers, cores", [(2, 64), (2, 2)])
def test_a_loader_with_auto_is_not_told_to_set_a_number(step, work, workers, cores):
    figures = {"step": step, "waited": 40.0, "fetch": 90.0, "workers": workers, "cores": cores, **work}
    by_hand = given(**figures, scheduling=SchedulingStats()).verdict()
    by_itself = given(**figures, scheduling=SchedulingStats(auto_workers=workers)).verdict()
    assert dataclasses.replace(by_itself, sentence=by_hand.sentence) == by_hand
    assert not re.search(r"num_workers=\d|more workers, even|use more workers|Ask again", by_itself.sentence)
    could_grow = workers < cores or by_hand.kind == "storage"
    assert ('num_workers="auto" decides' in by_itself.sentence) == could_grow, by_itself.sentence
