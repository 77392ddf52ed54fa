"""SIGKILLs a random worker or main at a random moment: `make stress KIND=kill ARGS='--epochs 500 --seed S'`.

Required in each epoch: the delivered batches are right, in order, and do not change later; a worker's death raises an
error that names its pid, and the next epoch works, or the epoch survives it with restarts; a second after main's own
death no worker and no file is left.
"""

import contextlib
import logging
import os
import signal
import sys
import time
from typing import NamedTuple

from . import mains
from .trials import ONLY, Numbered, arguments, drawn, number

METHODS = ["fork"] * 18 + ["forkserver", "spawn"]


class Trial(NamedTuple):
    """A loader, and which process is killed when."""

    method: str
    workers: int
    prefetch: int
    persistent: bool
    in_order: bool
    pinned: bool
    pickled: bool
    size: int
    delay: float
    kept: bool
    restarts: bool
    dispatch: str
    victim: str
    moment: float

    @classmethod
    def random(cls, rng):
        flip = lambda chance=0.5: rng.random() < chance  # noqa: E731
        return cls(
            method=rng.choice(METHODS),
            workers=rng.randint(1, 4),
            prefetch=rng.randint(1, 3),
            persistent=flip(),
            in_order=flip(0.7),
            pinned=flip(0.3),
            pickled=flip(0.3),
            size=rng.choice([1, 100, 6000, 100_000]),
            delay=rng.choice([0, 0, 0.0005, 0.002]),
            kept=flip(),
            restarts=flip(),
            dispatch=rng.choice(["round_robin", "round_robin", "shared_queue"]),
            victim="main" if flip(0.3) else "worker",
            moment=rng.random(),
        )


class Program:
    """Runs epochs in the main process until two are complete."""

    def __init__(self, trial):
        from support import DataLoader

        self.trial = trial
        # Hides the line of each restart.
        logging.getLogger("rustloader").setLevel(logging.ERROR)
        self.dataset = Numbered(120, trial.size, trial.pickled, trial.delay)
        self.loader = DataLoader(
            self.dataset,
            batch_size=None,
            num_workers=trial.workers,
            prefetch_factor=trial.prefetch,
            multiprocessing_context=trial.method,
            persistent_workers=trial.persistent,
            in_order=trial.in_order,
            pin_memory=trial.pinned,
            max_restarts=1 if trial.restarts else None,
            dispatch=trial.dispatch,
        )

    def run(self):
        from rules import left_after, state
        from support import wait_until

        from rustloader.supervision import deaths

        # On a busy machine the fork server may be slow to report how a worker ended.
        deaths.STATUS_AFTER = mains.LIMIT
        with contextlib.ExitStack() as stack:
            host = None
            if self.trial.pinned:
                from pinning_support import pinning

                host = stack.enter_context(pinning())
            before = state()
            mains.report("begin")
            complete = deaths = 0
            while complete < 2:
                try:
                    self.epoch()
                    complete += 1
                except RuntimeError as error:
                    mains.report("death", [str(error), error.__notes__, time.monotonic()])
                    deaths += 1
                    assert deaths < 2, "more deaths than kills"
            if self.trial.persistent:
                self.loader._iterator._shutdown_workers()
            del self.loader
            leftovers = left_after(before, 5)
            assert not leftovers, f"left behind: {leftovers}"
            assert host is None or wait_until(lambda: not host.live), "pinned memory is not released"
        mains.report("end")

    def epoch(self):
        iterator = iter(self.loader)
        mains.report("pids", [worker.pid for worker in iterator._workers])
        delivered, kept = [], []
        try:
            for batch in iterator:
                delivered.append(number(batch))
                if self.trial.kept:
                    kept.append(batch)
                del batch
            assert sorted(delivered) == list(range(self.dataset.n)), "batches are missing"
        except RuntimeError as error:
            try:
                next(iterator)
                raise AssertionError("a batch after the death")
            except RuntimeError as repeated:
                assert str(repeated) == str(error), "the next call raises a different error"
            raise
        finally:
            assert len(set(delivered)) == len(delivered), "a batch came twice"
            assert not self.trial.in_order or delivered == list(range(len(delivered))), delivered
            assert list(map(number, kept)) == delivered[: len(kept)], "a kept batch has changed"


def drive(main, trial, figures, limit):
    """Kills a process. Returns the problems found."""
    main.listen(mains.LIMIT, lambda reports: reports)
    span = {"fork": 0.35, "forkserver": 1.0, "spawn": 8.0}[trial.method]
    main.listen(trial.moment * span * (0.4 + 0.6 * (trial.delay > 0)))
    victim = main.pid
    if trial.victim == "worker":
        end = time.monotonic() + 5
        while not (workers := sorted(main.workers())) and time.monotonic() < end and not main.reported("end"):
            main.listen(0.001)
        if not workers:
            figures["too late"] += 1
            workers = [None]
        victim = workers[int(trial.moment * 1e6) % len(workers)]
    patience = main.patience(limit) if trial.victim == "main" and trial.method == "spawn" else limit
    killed = time.monotonic()
    if victim is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
    if trial.victim == "main":
        figures["mains killed"] += 1
        if main.wait(mains.LIMIT) is None:
            return ["main does not end"]
        took = main.none_left(max(patience, 5))
        if took is not None and patience == limit:
            figures["gone"] = max(figures["gone"], took)
        main.listen(5)
        return (
            [] if took is not None and took <= patience else [f"workers left after main's death, gone after {took} s"]
        )

    figures["workers killed"] += victim is not None
    status = main.wait(mains.LIMIT)
    main.listen(5)
    wrong = []
    if status is None:
        wrong.append("it hangs")
        main.abandon()
    elif status != 0:
        wrong.append(f"it ends with status {status}")
    if main.none_left(limit) is None:
        wrong.append("processes are left behind")
    if not main.reported("end"):
        wrong.append("the program did not complete")
    if trial.restarts and main.reported("death"):
        wrong.append("the epoch did not survive")
    for text, notes, seen in main.reported("death"):
        figures["deaths raised"] += 1
        if not text.startswith(f"DataLoader worker (pid {victim}) is killed by signal: Killed. "):
            wrong.append(f"the error does not name the worker: {text}")
        if not any("orker " in note for note in notes):
            wrong.append(f"no worker in the notes: {notes}")
        figures["seen"] = max(figures["seen"], seen - killed)
    return wrong


def main():
    """Returns a function to call: in the driver it exits, in a new main process it runs the program."""
    args = arguments(
        "kill",
        __doc__,
        epochs=(100, "the number of kills"),
        only=ONLY,
        limit=(1.0, "seconds that workers may outlive main"),
    )
    mains.prepare()
    figures = dict.fromkeys(["workers killed", "mains killed", "deaths raised", "too late", "gone", "seen"], 0)
    start = time.monotonic()
    failed, run = mains.run_all(
        drawn(Trial, args.epochs, args),
        Program,
        drive=lambda process, trial: drive(process, trial, figures, args.limit),
        check_output=lambda trial, output: ["unexpected output"] if output.strip() else [],
    )
    if run is not None:
        return run
    spent = time.monotonic() - start
    print(
        f"{args.epochs} epochs, {failed} wrong, {spent:.0f} s: {figures['workers killed']} workers and "
        f"{figures['mains killed']} main processes killed, {figures['deaths raised']} deaths raised, "
        f"{figures['too late']} kills too late; longest from a kill to its error {figures['seen'] * 1000:.0f} ms, "
        f"longest from main's death to the last worker's end {figures['gone'] * 1000:.0f} ms"
    )
    return lambda: sys.exit(bool(failed))


if __name__ == "__main__":
    main()()
