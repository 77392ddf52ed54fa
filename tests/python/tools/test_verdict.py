"""Verdicts on made-up figures: a table of loaders with their verdicts, and what holds for every verdict."""

import dataclasses
import re
from typing import get_args

import pytest
import snapshots
from hypothesis import given as for_all
from hypothesis import settings
from hypothesis import strategies as st
from support import TORCH_MODE

pytestmark = pytest.mark.ours

if TORCH_MODE:
    pytest.skip("rustloader's own guarantee", allow_module_level=True)
else:
    from rustloader import (
        CacheEstimate,
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

    PARTS = {
        "copies": CopyStats,
        "core_users": CoreUsers,
        "pinning": PinningStats,
        "scheduling": SchedulingStats,
        "transfers": TransferStats,
    }

MS = 1e-3


def given(batches=100, step=0.0, waited=0.0, own=0.0, fetch=1.0, collate=0.0, workers=2, **more):
    """A loader's statistics; times are milliseconds per batch. `fetch` may be a list, by worker. `cpu` and `queued` are
    shares of the workers' busy time, `fetch_cpu` is a share of their time in the dataset (default: as `cpu`). Parts
    such as `scheduling` are dicts; slow batches are (index, milliseconds, worker)."""
    of_worker = fetch if isinstance(fetch, list) else [fetch] * workers
    tasks = batches // workers
    pack, start = more.pop("pack", 0.0), more.pop("start", 0.0)
    cpu, queued = more.pop("cpu", None), more.pop("queued", None)
    fetch_cpu = more.pop("fetch_cpu", cpu)
    parts = {name: PARTS[name](**more.pop(name)) for name in PARTS if name in more}
    parts["slowest"] = tuple(SlowBatch(index, of, ms * MS) for index, ms, of in more.pop("slowest", ()))
    parts["fallbacks"] = tuple(Fallback(*fallback) for fallback in more.pop("fallbacks", ()))
    return Stats(
        num_workers=workers,
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
        **{"epochs": 1, "iterators": 1, "cores": 64} | more | parts,
    )


def partly_known(**more):
    """A loader with the CPU time of the first worker, and of half of the second one's work, unknown."""
    stats = given(**more)
    first, second = stats.workers
    first = dataclasses.replace(first, cpu_seconds=None, queued_seconds=None, unmeasured_seconds=first.busy_seconds)
    cpu, queued = second.cpu_seconds / 2, second.queued_seconds / 2
    half = second.busy_seconds / 2
    second = dataclasses.replace(second, cpu_seconds=cpu, queued_seconds=queued, unmeasured_seconds=half)
    return dataclasses.replace(stats, workers=(first, second))


def blocked_by_some(**more):
    """A loader with four workers. Every tenth batch takes 60 ms, the others 4.5 ms."""
    recent = tuple((60 if n % 10 == 5 else 4.5) * MS for n in range(200))
    values = {"workers": 4, "fetch": 10.05, "waited": 5, "own": 0.01, "blocked_seconds": 0.45, "recent_seconds": recent}
    blocking = (SlowBatch("[15]", 3, 60 * MS, blocked_seconds=0.055), SlowBatch("[25]", 1, 61 * MS))
    values |= {"blocking": blocking, "slowest": [("[95]", 62, 0)], "scheduling": {}}
    return given(**values | more)


def without_figures(**more):
    return dataclasses.replace(given(**more), workers=())


def with_fewer_now(**more):
    """A loader whose other workers have ended, and did nothing in this period."""
    return dataclasses.replace(given(**more), num_workers=2)


def cacheable(size, free, **more):
    """A slow dataset of 100,000 samples, of which a cache may hold some."""
    values = {"workers": 1, "cores": 1, "fetch": 100, "waited": 100, "step": 10, "collate": 0.1, "bytes": 100 << 20}
    return given(**values | more, cache_estimate=CacheEstimate(size, free, 10**5))


def plain(**more):
    return Stats(**more | {"fallbacks": tuple(Fallback(*fallback) for fallback in more.pop("fallbacks", ()))})


def halved(first=None, **differing):
    """A loader whose batches of the second half have other times than those of the first."""
    first = TIMES | (first or {})
    second = first | differing
    halves = tuple(given(batches=50, **half) for half in (first, second))
    return dataclasses.replace(given(**{name: (first[name] + second[name]) / 2 for name in first}), halves=halves)


# Figures that several cases share.
HUNDRED = dict(step=9, own=1, waited=40, fetch=100)  # 100 ms of work for 2 workers, and a step of 10 ms
TIMES = HUNDRED | dict(cpu=0.95, queued=0.02)
STEP = dict(step=50, own=0.1, waited=1, fetch=2)
STORAGE = dict(cpu=0.04, queued=0.01)
MANY = dict(workers=16, step=1, waited=40, fetch=640, cores=4, **STORAGE)
REMOTE = dict(scheduling={"remote": True})
SLOW_WORKER = dict(fetch=[50, 1], waited=25, blocked_seconds=2.4, slowest=[("[7]", 55, 0), ("[9]", 52, 0)])
SLOW_BATCHES = dict(fetch=[10, 12], waited=20, blocked_seconds=1.9)
STARTING = dict(batches=5000, fetch=0.02, waited=0.15, blocked_seconds=0.6, start=1.0, slowest=[("[7]", 0.6, 0)])
SHORT_EPOCHS = dict(epochs=20, step=2, fetch=1)
LARGE = f"[{', '.join(map(str, range(16)))}, ... 100 in all]"
GIGABYTE = dict(batches=100, bytes=1_000_000_000)

# The statistics of each case. Their verdicts, with kind and number of workers, are in snapshots/verdicts.txt.
TABLE = {
    "nothing yet": plain(),
    "one batch": given(batches=1, workers=1),
    "a few batches": given(batches=18, waited=50, fetch=100),
    "a short loop": given(batches=40, waited=0.3, fetch=0.6, own=0.05),
    "without workers": plain(batches=0, note="num_workers=0: ..."),
    "on torch's loop": plain(fallbacks=[("its dataset is a DataPipe", 3)]),
    "some epochs on torch's loop": given(**STEP, fallbacks=[("A", 3), ("B", 1)]),
    "one epoch on torch's loop": given(step=50, fallbacks=[("A", 1)]),
    "the step": given(**STEP),
    "the step, with busy workers": given(step=50, own=0.1, waited=4, fetch=90),
    "the workers": given(**HUNDRED),
    "the workers, by little": given(step=9, own=1, waited=2, fetch=24),
    "one worker": given(workers=1, step=2, waited=48, fetch=50),
    "eight workers": given(batches=200, workers=8, fetch=8, step=2, waited=1),
    "the workers, rounded up": given(step=9, waited=41, fetch=100),
    "sixty workers": given(step=10, waited=290, fetch=600),
    "halves that are alike": halved(waited=45, fetch=110),
    "a half with waits for storage": halved(cpu=0.05),
    "a half with waits for cores": halved(queued=0.9),
    "a half without waits": halved(waited=0, fetch=2),
    "waits of one half that are few on the whole": halved(first={"waited": 0, "fetch": 2, "step": 99}, waited=8),
    "workers that compute": given(**HUNDRED, cpu=0.95, queued=0.05),
    "fewer cores than the step wants": given(**HUNDRED, cores=4, cpu=0.95, queued=0.05),
    "a worker on each core": given(**HUNDRED, cores=2, cpu=0.95, queued=0.05),
    "one worker on one core": given(workers=1, step=9, own=1, waited=40, fetch=50, cores=1),
    "more workers than cores": given(workers=8, **HUNDRED | {"fetch": 400}, cores=1, cpu=0.12, queued=0.88),
    # 60 % of both cores' time is work, so what else the workers wait for hardly matters.
    "more workers than cores, which look idle": given(
        workers=8, step=1, waited=49, fetch=400, cores=2, cpu=0.15, queued=0.2
    ),
    "on all cores, and nothing known of CPU time": given(**HUNDRED, cores=2),
    "no step at all": given(waited=50, fetch=100),
    "no step worth the name": given(waited=1000, own=0.02, step=0.3, fetch=2000),
    "no step, and a worker on each core": given(waited=50, fetch=100, cores=2),
    # 150 us between two batches is not a training step.
    "a loop that only counts": given(
        batches=400, waited=1.5, own=0.02, step=0.15, fetch=1.7, cores=2, cpu=1.0, queued=0.0, workers=1
    ),
    "storage": given(**HUNDRED, cores=4, **STORAGE),
    "storage, and enough workers in reach": given(workers=4, **HUNDRED | {"waited": 15}, cores=4, **STORAGE),
    "storage, with as many workers as can help": given(**MANY),
    "storage, without a step": given(waited=40, fetch=80, cores=1, **STORAGE),
    "storage, and one worker killed": partly_known(**HUNDRED, cores=4, **STORAGE),
    "storage, and samples that can be fetched at a time": given(
        **HUNDRED, cores=4, scheduling={"batch_size": 64}, **STORAGE
    ),
    "storage, with as many workers as can help, and threads": given(**MANY, scheduling={"worker_threads": 2}),
    # They compute for a fifth of the time, so five threads would keep a core busy.
    "storage, with threads that share a core": given(step=10, waited=190, fetch=400, cpu=0.2, queued=0, scheduling={}),
    "storage, and batches of two samples": given(**HUNDRED, scheduling={"batch_size": 2}, **STORAGE),
    "storage, and batches that are fetched as a whole": given(**HUNDRED, scheduling={"per_sample": False}, **STORAGE),
    "storage, without a step, and threads": given(waited=40, fetch=80, cores=1, scheduling={}, **STORAGE),
    # The process computes for half of the time, but the dataset hardly does.
    "storage behind a busy collate_fn": given(
        **HUNDRED | {"fetch": 60}, collate=40, cpu=0.45, fetch_cpu=0.05, queued=0.01, cores=4
    ),
    "a dataset that computes beside a collate_fn that waits": given(
        **HUNDRED | {"fetch": 60}, collate=40, cpu=0.4, fetch_cpu=0.95, queued=0.01
    ),
    # The epoch that fills the cache takes a little longer, and later ones a tenth of the time.
    "a dataset whose samples fit into a cache": cacheable(12 * 10**9, 81 * 10**9),
    "a dataset half of whose samples fit into a cache": cacheable(12 * 10**9, 6 * 10**9),
    "a dataset of which too little fits into a cache": cacheable(12 * 10**9, 10**9),
    # Rows of 80 bytes in batches of 64, which take 1 us each: filling the cache takes as long as six epochs save.
    "a dataset that is faster than a cache": cacheable(
        80 * 10**5,
        81 * 10**9,
        fetch=64e-3,
        collate=64e-6,
        waited=64e-3,
        step=6.4e-3,
        batches=10**5,
        bytes=10**5 * 64 * 80,
    ),
    "cores that other work takes": given(**HUNDRED, cpu=0.3, queued=0.7),
    "two busy programs beside two workers on two cores": given(**HUNDRED, cpu=0.5, queued=0.48, cores=2),
    "as many workers as suffice when no other program takes the cores": given(
        workers=1, step=8, waited=10, fetch=18, cpu=0.66, queued=0.33, cores=2
    ),
    "cores that other processes take, and a slow dataset": given(
        **HUNDRED, cpu=0.3, queued=0.7, cores=2, core_users={"main": 0.25, "workers": 0.15, "others": 0.6}
    ),
    "cores that other processes take, and a fast dataset": given(
        **HUNDRED | {"step": 29}, cpu=0.3, queued=0.7, core_users={"main": 0.2, "workers": 0.1, "others": 0.7}
    ),
    "collate": given(**HUNDRED | {"fetch": 20}, collate=80),
    "collate on all cores": given(**HUNDRED | {"fetch": 20}, collate=80, cores=2),
    "collate that waits for a core": given(waited=50, step=5, fetch=1, collate=110, cpu=0.1, queued=0.8, cores=4),
    "packing": given(**HUNDRED | {"fetch": 20}, pack=80),
    "tiny batches": given(batches=20_000, waited=0.02, own=0.01, step=0.001, fetch=0.005),
    "the sampler": given(own=50, step=1, waited=1, sampler_seconds=49 * 100 * MS),
    "opening batches": given(own=50, step=1, waited=1),
    "opening pickles": given(own=50, step=1, waited=1, copies={"pickled": 100}),
    "one slow worker": given(**SLOW_WORKER),
    "one slow worker that a shared queue would relieve": given(
        **SLOW_WORKER, recent_seconds=(0.05, 0.001) * 50, scheduling={}
    ),
    "one slow worker of four": given(
        workers=4, fetch=[1, 1, 50, 2], waited=12, blocked_seconds=1.1, slowest=[("[7]", 55, 2)]
    ),
    "a few slow batches": given(**SLOW_BATCHES, slowest=[("[7, 8]", 300, 0), ("[1, 2]", 250, 1)]),
    "a few slow batches, all one worker's by chance": given(
        fetch=[12, 1], waited=12, blocked_seconds=1.1, slowest=[("[7]", 300, 0), ("[17]", 290, 0)]
    ),
    "a large slow batch": given(**SLOW_BATCHES, slowest=[(LARGE, 300, 0)]),
    "slow batches that a shared queue would pass": blocked_by_some(),
    "slow batches, with a shared queue": blocked_by_some(scheduling={"dispatch": "shared_queue"}),
    # A batch has 1,000 bytes.
    "slow batches, with a shared queue and a window of bytes": blocked_by_some(
        scheduling={"dispatch": "shared_queue", "reorder_window": "12kB"}, bytes=100_000
    ),
    "slow batches, with a shared queue and a wide window": blocked_by_some(
        scheduling={"dispatch": "shared_queue", "reorder_window": 64}
    ),
    "slow batches of an iterable dataset": blocked_by_some(scheduling={"map_style": False}),
    # They compute all the time: with one core no order of the work is faster.
    "slow batches that keep all cores busy": blocked_by_some(cores=1, cpu=1.0, queued=0.0, waited=8),
    "waiting for a worker that is still starting": given(**STARTING),
    "waiting for a worker that is still starting, in each epoch": given(**STARTING, epochs=5, iterators=5),
    "waiting in turn, with all workers busy": given(fetch=100, waited=50, blocked_seconds=4.5),
    "pinning": given(waited=40, step=5, fetch=20, pinning={"running": True, "batches": 100, "seconds": 4.4}),
    "a busy pin thread, and busier workers": given(
        waited=50, step=5, fetch=110, pinning={"running": True, "batches": 100, "seconds": 4.4}
    ),
    "copies to the device": given(
        step=10, fetch=10, transfers={"batches": 100, "bytes": 3_800_000_000, "seconds": 0.8, "waited_seconds": 0.5}
    ),
    "copies to the device from pageable memory": given(
        step=10,
        fetch=10,
        transfers=GIGABYTE | {"seconds": 0.8, "waited_seconds": 0.5, "pageable": "set pin_memory=True"},
    ),
    "copies that run beside the work": given(
        step=10, own=1, transfers=GIGABYTE | {"seconds": 0.9, "waited_seconds": 0.05}
    ),
    "a step, and batches that are not pinned": given(
        step=10, transfers={"batches": 100, "bytes": 10, "seconds": 0.1, "pageable": "a batch of type X is not pinned"}
    ),
    "workers that limit more than copies do": given(
        waited=40, step=10, fetch=100, transfers=GIGABYTE | {"seconds": 1.0, "waited_seconds": 1.0}
    ),
    "remote workers that wait for a network": given(waited=8, step=2, fetch=5, bytes=800_000_000, **REMOTE),
    "remote workers with small batches": given(waited=8, step=2, fetch=5, bytes=100_000, **REMOTE),
    "busy remote workers": given(waited=50, step=5, fetch=100, cores=2, **REMOTE),
    "short epochs": given(**SHORT_EPOCHS, iterators=20, first_seconds=20.0),
    "short epochs, whose workers start in iter()": given(
        **SHORT_EPOCHS, iterators=20, first_seconds=0.1, turnaround_seconds=8.0
    ),
    "short epochs, with persistent workers": given(**SHORT_EPOCHS, first_seconds=20.0),
    "epochs left after two batches": given(epochs=60, iterators=60, first_seconds=0.5, step=2, waited=50, fetch=60),
    "one slow start": given(first_seconds=20.0, step=2, fetch=1),
    "workers without figures": without_figures(waited=50),
    "fewer workers than there were": with_fewer_now(workers=8, fetch=[100] * 2 + [0] * 6, waited=18, step=2),
}


def test_verdicts():
    verdicts = {name: stats.verdict() for name, stats in TABLE.items()}
    texts = {name: f"[{it.kind}, {it.workers_needed or '-'}] {it}" for name, it in verdicts.items()}
    snapshots.check("verdicts", texts)
    assert {it.kind for it in verdicts.values()} == set(get_args(VerdictKind))
    for name, it in verdicts.items():
        assert it.predicted_gain is None or it.kind not in ("too_few", "unknown", "step"), name


def test_the_repr_has_two_lines():
    verdict = Verdict("step", "The step takes longest.", "waits for 1%")
    assert repr(verdict) == "<rustloader.Verdict step: The step takes longest.\n (waits for 1%)>"


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
        copies={"pickled": batches if pickled else 0},
        pinning={
            "running": True,
            "batches": batches,
            "seconds": pinned * (times["waited"] + times["step"]) * batches * MS,
        },
        epochs=epochs,
        first_seconds=first,
        slowest=[("[7]", 300, 0)],
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
    by_hand = given(**figures, scheduling={}).verdict()
    by_itself = given(**figures, scheduling={"auto_workers": workers}).verdict()
    assert dataclasses.replace(by_itself, sentence=by_hand.sentence) == by_hand
    assert not re.search(r"num_workers=\d|more workers, even|use more workers|Ask again", by_itself.sentence)
    could_grow = workers < cores or by_hand.kind == "storage"
    assert ('num_workers="auto" decides' in by_itself.sentence) == could_grow, by_itself.sentence
