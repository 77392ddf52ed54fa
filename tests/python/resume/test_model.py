"""Random programs of a StatefulDataLoader, checked against a list of batches: see ``stateful/model``."""

import dataclasses
import os
import subprocess
import sys

import pytest
from pairwise import pairs
from stateful.model import generate, parts, play, shrink
from stateful.model.program import DATASETS, SAMPLERS, Program, Settings, changed, why_invalid
from support import HERE

pytestmark = pytest.mark.ours

# Steps of programs.
ITER, SAVE, RESUME, END = ("iter",), ("save", "now", 0), ("resume", "torch", {}, False), ("end",)


def run(*arguments):
    """Returns the tester's exit status and output. It forks, so it runs in a process of its own."""
    path = os.pathsep.join([HERE, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    result = subprocess.run(
        [sys.executable, "-m", "stateful.model", *map(str, arguments)],
        env=dict(os.environ, PYTHONPATH=path),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=280,
    )
    return result.returncode, result.stdout + result.stderr


# `make stress KIND=resume` runs more programs.
@pytest.mark.random
def test_resumed_loaders_deliver_each_batch_once():
    status, output = run("--programs", 60, "--seed", 1, "--seconds", 150)
    assert status == 0, output
    assert " 0 failed" in output and not output.startswith("0 programs")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("sampler", ["sequential", "shuffle", "shuffle with generator", "subset", "weighted"])
@pytest.mark.parametrize("batch_size", [None, 2, 3])
@pytest.mark.parametrize("before", [(), (ITER, END)])
@pytest.mark.parametrize("dataset", ["drawing map", "drawing stream"])
def test_state_between_epochs_says_what_comes(dataset, before, batch_size, sampler):
    """Samples draw from the program's generator, whose state the dataset has."""
    settings = Settings(dataset, (9, 0, 0, 0), batch_size, sampler=sampler)
    if why_invalid(settings) is None:
        play.run(Program(settings, (*before, SAVE, SAVE, ITER, END)))
        play.run(Program(settings, (*before, SAVE, RESUME, END, ITER, END)))


KINDS = [
    *(("map", sampler) for sampler in SAMPLERS),
    *((dataset, "sequential") for dataset in DATASETS if dataset != "map"),
]


@pytest.mark.filterwarnings("ignore")
@pairs(
    kind=KINDS,
    num_workers=[0, 1, 3],
    batch_size=[None, 1, 3],
    every=[0, 1, 3],
    persistent=[False, True],
    seed_by=["worker", "batch", "sample"],
    errors=[(), (3, 8, 9)],
    begin=[(ITER,), (SAVE, ITER), (SAVE, RESUME)],
)
def test_each_kind_resumes(kind, num_workers, batch_size, every, persistent, seed_by, errors, begin):
    """Once, again after a batch, at the end of the epoch, and after it; a state between epochs changes nothing, and a
    position has one state, however it was reached."""
    dataset, sampler = kind
    settings = Settings(dataset, (9, 5, 0, 4), sampler=sampler, num_workers=num_workers, every=every, seed_by=seed_by)
    settings = changed(settings, {"persistent": persistent and num_workers > 0})
    if not sampler.startswith("batch"):
        settings = changed(settings, {"batch_size": batch_size})
    if settings.is_drawing:
        settings = changed(settings, {"num_workers": 0, "persistent": False, "seed_by": "worker"})
    elif settings.is_map:
        settings = changed(settings, {"errors": errors})
    if why_invalid(settings) is not None:
        return
    if sampler == "torchdata random":
        begin = (ITER,)  # before it, a state does not contain the order
    step = (("next", 1), SAVE)
    again = (*step, ("resume", "json", {}, False), SAVE)
    steps = (*begin, *step * 5, ("save", "now", 2), RESUME, SAVE, *again, *again, END, *again, END, SAVE, ITER, END)
    play.run(Program(settings, steps))


OPTIONS = {
    "round robin": {},
    "shared queue": {"dispatch": "shared_queue"},
    "out of order": {"in_order": False},
    "persistent": {"persistent": True},
    "no snapshots": {"every": 0},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(settings, id=f"{dataset}-{name}")
        for name, options in OPTIONS.items()
        for dataset in ("map", "stateful map", "iterable", "stateful iterable", "generator")
        if why_invalid(settings := Settings(dataset, (25, 15, 0, 0), num_workers=2, **options)) is None
    ],
)
@pytest.mark.parametrize("taken", [0, 3])
def test_state_after_death_of_worker_counts_delivered_batches(settings, taken):
    steps = (ITER, ("next", taken), SAVE, ("kill", 1), SAVE, SAVE, ("save", "now", 1), SAVE, RESUME, END)
    play.run(Program(settings, steps))


@pytest.mark.parametrize("every", [0, 3])
@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_replay_of_dataset_repeats_no_batch(num_workers, every):
    """Between two snapshots, the dataset replays batches without their errors, and the sampler goes to where the replay
    begins."""
    settings = Settings("stateful map", (10, 0, 0, 0), 2, sampler="custom", num_workers=num_workers, every=every)
    for taken in range(5):
        for errors in ((), (4,)):
            steps = (ITER, ("next", taken), SAVE, RESUME, END)
            play.run(Program(changed(settings, {"errors": errors}), steps))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("sampler", ["shuffle", "weighted"])
def test_first_snapshot_follows_draws_of_sampler(sampler):
    settings = Settings("drawing map", (6, 0, 0, 0), sampler=sampler, every=0)
    play.run(Program(settings, (ITER, ("next", 3), ("save", "now", 3), RESUME, END)))


@pytest.mark.filterwarnings("ignore")
def test_state_after_empty_rest_is_that_of_the_end():
    play.run(Program(Settings("drawing map", (2, 0, 0, 0)), (ITER, ("next", 2), SAVE, RESUME, END, SAVE, RESUME, END)))


# The tester itself must be able to fail.

EXAMPLE = Program(
    Settings(sizes=(9, 0, 0, 0), sampler="shuffle", batch_size=2),
    (ITER, ("next", 2), SAVE, ("next", 1), ("resume", "json", {}, False), END),
)


class Faulty(play.Player):
    """A player whose loader delivers wrong batches."""

    def take(self, call=None):
        return super().take(lambda iterator: self.faulty_next(iterator))


class Skips(Faulty):
    def faulty_next(self, iterator):
        next(iterator)
        return next(iterator)


class Repeats(Faulty):
    last = None

    def faulty_next(self, iterator):
        self.last, last = None, self.last
        if last is None:
            last = self.last = next(iterator)
        return last


class Ends(Faulty):
    def faulty_next(self, iterator):
        raise StopIteration


class ForgetsPosition(play.Player):
    def resume(self, way, changes, same_loader):
        super().resume(way, changes, same_loader)
        self.loader.load_state_dict({})
        self.iterator = iter(self.loader)


class WritesIntoStates(play.Player):
    def resume(self, way, changes, same_loader):
        self.saved[0]["_num_yielded"] += 1
        super().resume(way, changes, same_loader)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("player", [Skips, Repeats, Ends, ForgetsPosition, WritesIntoStates])
def test_a_fault_is_found(player, monkeypatch):
    play.run(EXAMPLE)
    monkeypatch.setattr(play, "Player", player)
    with pytest.raises(play.Wrong):
        play.run(EXAMPLE)


@pytest.mark.filterwarnings("ignore")
def test_value_that_torchdata_lacks_is_found(monkeypatch):
    program = dataclasses.replace(EXAMPLE, settings=changed(EXAMPLE.settings, {"sampler": "sequential"}))
    play.run(program)
    state_dict = parts.StatefulDataLoader.state_dict
    monkeypatch.setattr(parts.StatefulDataLoader, "state_dict", lambda loader: state_dict(loader) | {"_num_yielded": 9})
    with pytest.raises(play.Wrong, match=r"_num_yielded.* is 9, and torchdata's is 2"):
        play.run(program)


@pytest.mark.parametrize("sampler", ["sequential", "batch sampler"])
def test_out_of_order_a_batch_may_come_once(sampler):
    settings = Settings(sizes=(9, 0, 0, 0), num_workers=1, in_order=False, sampler=sampler)
    player = play.Player(Program(settings))
    try:
        player.iter()
        batches = [batch for _, batch in player.place.remaining()]
        player.note(batches[2])
        player.note(batches[0])
        for batch in (batches[2], batches[0], []):
            with pytest.raises(play.Wrong):
                player.note(batch)
    finally:
        player.close()


def test_programs_are_valid_and_differ():
    programs = [generate.program(seed) for seed in range(300)]
    assert programs == [generate.program(seed) for seed in range(300)]
    assert len({program.json() for program in programs}) == 300
    for program in programs:
        assert Program.from_json(program.json()) == program
        assert why_invalid(program.settings) is None and shrink.valid(program)
    names = {step[0] for program in programs for step in program.steps}
    assert names == {"iter", "next", "end", "save", "resume", "kill", "interrupt"}
    for field in dataclasses.fields(Settings):
        assert len({getattr(program.settings, field.name) for program in programs}) > 1


def test_a_program_that_fails_is_shrunk_and_printed(monkeypatch):
    """Here a program fails if it saves a state of a shuffled loader."""

    def failure_of(program, limit):
        saves = [step for step in program.steps if step[0] == "save"]
        return "Wrong: found" if saves and program.settings.sampler == "shuffle" else None

    monkeypatch.setattr(shrink, "failure_of", failure_of)
    settings = changed(EXAMPLE.settings, {"num_workers": 3, "seed_by": "batch", "every": 4, "slow": (1, 2)})
    program = dataclasses.replace(EXAMPLE, settings=settings)
    small, failure = shrink.shrink(program, "Wrong: before", 1)
    assert failure == "Wrong: found"
    assert small.steps == (SAVE,)
    assert (small.settings.num_workers, small.settings.slow, small.settings.sampler) == (0, (), "shuffle")
    namespace = {}
    exec(shrink.script(small), namespace)
    assert namespace["player"].saved is not None
