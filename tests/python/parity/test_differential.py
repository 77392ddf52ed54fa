"""Random programs leave equal records with both loaders; see ``differential/``."""

import copy
import dataclasses

import pytest
from differential import compare, generate, play, processes, shrink
from differential.program import Program, why_invalid
from pairwise import pairs
from support import OLD_TORCH, finish, start_script

# With every version of torch, the attributes of our iterator are those of 2.15, and differ from an old version's.
old = pytest.mark.skipif(OLD_TORCH, reason="torch 2.6's iterator behaves differently, and so its records differ")
pytestmark = [pytest.mark.ours, old]


def run(*args):
    """The exit status and output of the tester, which forks and so runs in a process of its own."""
    process = start_script(f"""
        import runpy
        sys.argv = {["differential", *args]!r}
        runpy.run_module("differential", run_name="__main__", alter_sys=False)
    """)
    return finish(process, 800)


# These take about 20 s on two cores; `make stress KIND=programs` runs different ones.
@pytest.mark.random
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "method, programs, seconds", [("fork", 40, 70), ("forkserver", 2, 20), ("spawn", 1, 20), ("remote", 2, 20)], ids=str
)
def test_programs_give_the_same_records(method, programs, seconds):
    status, out, err = run(
        "--start-method", method, "--programs", f"{programs}", "--seed", "1", "--seconds", f"{seconds}"
    )
    assert status == 0, f"{out}\n{err}"
    assert " programs in " in out and not out.startswith("0 programs")


@pairs(
    sampler=["default", "shuffle", "replacement", "subset", "distributed"],
    pattern=["full epochs", "draws between epochs", "dataset changed", "break"],
    generator=[False, True],
    size=[1, 6, 9],
    error_at=[(), (0, 5)],
)
def test_overlapping_epochs_give_the_same_records(sampler, pattern, generator, size, error_at):
    errors = dict(error_in="dataset", error="KeyError", error_at=error_at) if error_at else {}
    settings = dict(sampler=sampler, pattern=pattern, generator=generator, size=size, **errors)
    program = Program(seed=1, **settings, persistent=True, overlap_epochs=True, epochs=4, take=2)
    assert why_invalid(program) is None
    ((_, *records),) = processes.run_all([program], 2)
    assert compare.differences(program, *records) == []


# The tester itself: it must be able to fail.


@pytest.fixture(scope="module")
def records():
    """A program, and two equal records of it."""
    program = Program(samples=("int", "holes"), structure="tuple", sampler="random", init="draws", collate="list")
    ((_, expected, actual),) = processes.run_all([program], 2)
    return program, expected, actual


def events(record, name):
    return [event for event in record["main"] if event[0] == name]


def one(record, name, number=0):
    return [event for event in record["main"] if event[0] == name][number]


def batches_in_another_order(record):
    first, second = one(record, "next"), one(record, "next", 1)
    first[3], second[3] = second[3], first[3]


def a_sampler_asked_too_early(record):
    k = max(k for k, event in enumerate(record["main"]) if event[0] == "sampler")
    record["main"].insert(k - 3, record["main"].pop(k))


def a_sample_made_twice(record):
    # With a shared queue, a worker that starts late may get no task.
    calls, get = next((calls, e) for calls in record["workers"].values() for e in calls if e[0] == "get")
    calls.append(get)


def another_index(record):
    drawn = [event for event in record["main"] if event[:2] == ["sampler", "next"]]
    drawn[3][2] = {"": {"value": 99}}


def put(value, to, key):
    to[key] = value


def add(value, to, key):
    to[key] += value


DAMAGE = {
    "another batch": lambda record: one(record, "next", 3)[3]["[0][0]"].update(value=99),
    "another dtype": lambda record: one(record, "next")[3]["[0][1]"].update(dtype="torch.float64"),
    "another order": batches_in_another_order,
    "strides of another order": lambda record: one(record, "next")[3]["[0][1]"].update(stride=[7]),
    "a moved generator": lambda record: add(1, one(record, "rng", 2), 2),
    "a sampler asked too early": a_sampler_asked_too_early,
    "a warning more": lambda record: record["main"].insert(9, ["warning", "UserWarning", "text", "user"]),
    "a worker alive": lambda record: put(True, one(record, "alive")[1], 0),
    "an attribute": lambda record: put("1", one(record, "the iterator has")[3][0], 1),
    "a worker with another seed": lambda record: add(1, record["workers"]["1-1"][0][1], 2),
    "a call left out": lambda record: record["workers"]["2-0"].pop(),
    "a batch of torch's iterator": lambda record: record.update(missing=1),
    "a handover": lambda record: record.update({"handed over": ["a DataLoader runs on torch's own iterator"]}),
    "text on stderr": lambda record: record.update(stderr="Exception ignored in"),
}
# Only in programs with options.
WITH_OPTIONS = DAMAGE | {
    "a sample made twice": a_sample_made_twice,
    "another index": another_index,
    "a window too full": lambda record: add(9, one(record, "counters", 2), 1),
    "another generator at the end": lambda record: add(1, one(record, "rng", -1), 1),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_difference_is_found(records, damage):
    program, expected, actual = records
    assert compare.differences(program, expected, actual) == []
    actual = copy.deepcopy(actual)
    DAMAGE[damage](actual)
    assert compare.differences(program, expected, actual)


def test_out_of_order_the_number_of_kept_batches_is_timing_but_not_their_content():
    # Which items an aborted pass has received depends on timing, and an error leaves one batch fewer to keep.
    program = Program(in_order=False, error_in="dataset", error="KeyError", error_at=(3,), pattern="shut down")
    one, two, overwritten = ([[play.KEPT, kept]] for kept in ([True], [True, True], [True, False]))
    assert compare.main(program, two, one) == []
    assert compare.main(program, two, overwritten)


def test_a_run_that_dies_is_a_difference(records, monkeypatch):
    program, expected, _ = records
    monkeypatch.setattr(processes.play, "play", lambda *_: processes.os._exit(3))
    ((_, _, actual),) = processes.run_all([program], 2)
    assert compare.differences(program, expected, actual)[0].startswith("our run: it died")


def test_the_same_seed_makes_the_same_programs():
    first, second = ([next(generator) for _ in range(20)] for generator in map(generate.Generator, "aa"))
    assert first == second
    assert all(why_invalid(program) is None and Program.from_json(program.json()) == program for program in first)


def test_a_difference_is_shrunk_to_what_it_needs(monkeypatch):
    def differs(program):
        return ["here"] if "f32" in program.samples and program.num_workers >= 2 and program.persistent else []

    monkeypatch.setattr(shrink, "differs", differs)
    start = Program(
        samples=("int", "f32"), structure="dict", num_workers=4, persistent=True, size=50, batch_size=7, init="plain"
    )
    smaller, differences = shrink.shrink(start)
    assert differences == ["here"]
    assert smaller == Program(samples=("f32",), num_workers=2, persistent=True, size=1, epochs=1, take=1)


# With options, everything that they must not change is compared.

SHARED = Program(
    samples=("int", "f32"), structure="tuple", sampler="random", size=20, collate="list", dispatch="shared_queue"
)
AHEAD = dataclasses.replace(SHARED, dispatch=None, reorder_window=3)
SEEDED = dataclasses.replace(SHARED, samples=("int", "sample seed"), seed_by="sample")


@pytest.mark.parametrize(
    "program, damages",
    [
        (SHARED, ["another batch", "another order", "a sampler asked too early", "a sample made twice"]),
        (
            AHEAD,
            ["another batch", "another index", "a window too full", "another generator at the end", "a call left out"],
        ),
        (SEEDED, ["another batch", "another order"]),
    ],
    ids=["shared queue", "window", "seeds"],
)
def test_a_difference_is_found_with_options(program, damages):
    ((_, *records),) = processes.run_all([program], 2)
    assert compare.differences(program, *records) == []
    for damage in damages:
        changed = copy.deepcopy(records)
        WITH_OPTIONS[damage](changed[-1])
        assert compare.differences(program, *changed), damage
