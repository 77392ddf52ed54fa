"""The verdict, by figures alone: a table of loaders and what is said of each."""

import dataclasses

import pytest
from support import TORCH_MODE

pytestmark = pytest.mark.ours

if not TORCH_MODE:
    from rustloader._figures import Handover, Pinning, SlowTask, Stats, Worker

MS = 1e-3


def given(batches=100, step=0.0, waited=0.0, own=0.0, fetch=1.0, collate=0.0, workers=2, **more):
    """A loader's statistics; times are milliseconds a batch. `fetch` may be a list, by worker."""
    of_worker = fetch if isinstance(fetch, list) else [fetch] * workers
    tasks = batches // workers
    more.setdefault("epochs", 1)
    more.setdefault("cores", 64)
    return Stats(
        num_workers=workers,
        iterators=1,
        batches=batches,
        next_seconds=(waited + own) * batches * MS + more.get("first_seconds", 0.0),
        waited_seconds=waited * batches * MS,
        step_seconds=step * batches * MS,
        workers=tuple(
            Worker(n, pid=100 + n, tasks=tasks, fetch_seconds=ms * tasks * MS, collate_seconds=collate * tasks * MS)
            for n, ms in enumerate(of_worker)
        ),
        **more,
    )


def slow(index, ms, worker=0):
    return SlowTask(index, worker, ms * MS)


TABLE = {
    "nothing yet": (lambda: Stats(), "too_few", []),
    "a few batches": (lambda: given(batches=18, waited=50, fetch=100), "too_few", ["18 batches"]),
    "without workers": (lambda: Stats(batches=0, note="num_workers=0: ..."), "unknown", ["num_workers=0"]),
    "on torch's iterator": (
        lambda: Stats(handovers=(Handover("its dataset is a DataPipe", 3),)),
        "unknown",
        ["DataPipe"],
    ),
    "some epochs on torch's iterator": (
        lambda: given(step=50, own=0.1, waited=1, fetch=2, handovers=(Handover("A", 3), Handover("B", 1))),
        "step",
        ["left out: 4 iterators that were torch's own (A; B)"],
    ),
    "the step": (lambda: given(step=50, own=0.1, waited=1, fetch=2), "step", ["50 ms of training step"]),
    "the step, with busy workers": (lambda: given(step=50, own=0.1, waited=4, fetch=90), "step", []),
    "the workers": (lambda: given(step=9, own=1, waited=40, fetch=100), "workers", ["num_workers=10 would do"]),
    "the workers, by little": (lambda: given(step=9, own=1, waited=2, fetch=24), "workers", ["num_workers=3"]),
    "more workers than cores": (
        lambda: given(step=9, own=1, waited=40, fetch=100, cores=4),
        "workers",
        ["num_workers=10", "as many cores: this process has 4"],
    ),
    "one worker": (lambda: given(workers=1, step=1, waited=49, fetch=50), "workers", ["num_workers=50"]),
    "no step at all": (lambda: given(waited=50, fetch=100), "workers", ["num_workers=3"]),
    "collate": (lambda: given(step=9, own=1, waited=40, fetch=20, collate=80), "collate", ["num_workers=10"]),
    "the sampler": (
        lambda: given(own=50, step=1, waited=1, sampler_seconds=49 * 100 * MS),
        "main",
        ["the sampler", "more workers do not help"],
    ),
    "opening batches": (lambda: given(own=50, step=1, waited=1), "main", ["opening batches", "50 ms"]),
    "one slow worker": (
        lambda: given(fetch=[50, 1], waited=25, blocked_seconds=2.4, slowest=(slow("[7]", 55), slow("[9]", 52))),
        "head_of_line",
        ["worker 0 (pid 100)", "50 ms"],
    ),
    "one slow worker of four": (
        lambda: given(workers=4, fetch=[1, 1, 50, 2], waited=12, blocked_seconds=1.1, slowest=(slow("[7]", 55, 2),)),
        "head_of_line",
        ["worker 2 (pid 102)"],
    ),
    "a few slow batches": (
        lambda: given(
            fetch=[10, 12], waited=20, blocked_seconds=1.9, slowest=(slow("[7, 8]", 300), slow("[1, 2]", 250, 1))
        ),
        "head_of_line",
        ["[7, 8] took 300 ms", "[1, 2] took 250 ms", "in_order=False"],
    ),
    "a few slow batches, all one worker's by chance": (
        lambda: given(fetch=[12, 1], waited=20, blocked_seconds=1.9, slowest=(slow("[7]", 300), slow("[17]", 290))),
        "head_of_line",
        ["[7] took 300 ms", "a few slow batches"],
    ),
    "waiting in turn, with all workers busy": (
        lambda: given(fetch=100, waited=50, blocked_seconds=4.5),
        "workers",
        [],
    ),
    "pinning": (
        lambda: given(waited=40, step=5, fetch=20, pinning=Pinning(True, 100, 4.4)),
        "pinning",
        ["44 ms a batch in one thread"],
    ),
    "a busy pin thread, and busier workers": (
        lambda: given(waited=50, step=5, fetch=110, pinning=Pinning(True, 100, 4.4)),
        "workers",
        [],
    ),
    "tiny batches": (lambda: given(waited=0.02, own=0.01, step=0.001, fetch=0.005), "transport", ["larger batches"]),
    "short epochs": (
        lambda: given(epochs=20, first_seconds=20.0, step=2, fetch=1),
        "starting",
        ["persistent_workers=True", "20 epochs"],
    ),
    "one slow start": (lambda: given(epochs=1, first_seconds=20.0, step=2, fetch=1), "step", []),
    "workers without figures": (
        lambda: dataclasses.replace(given(waited=50), workers=()),
        "unknown",
        ["no figures"],
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_the_verdict_of(name):
    make, kind, words = TABLE[name]
    verdict = make().verdict()
    assert verdict.kind == kind, verdict
    for word in words:
        assert word.lower() in str(verdict).lower(), verdict
    assert verdict.sentence.endswith(".") and verdict.reason


@pytest.mark.parametrize(("fetch", "step", "needed"), [(100, 10, 10), (100, 9, 12), (50, 20, 3), (1000, 1, 1000)])
def test_as_many_workers_as_the_step_wants(fetch, step, needed):
    verdict = given(fetch=fetch, step=step, waited=fetch / 2 - step).verdict()
    assert (verdict.kind, verdict.workers_needed) == ("workers", needed)


def test_only_more_workers_are_ever_advised():
    verdict = given(workers=8, fetch=8, step=2, waited=1).verdict()
    assert verdict.kind == "workers" and verdict.workers_needed == 9
