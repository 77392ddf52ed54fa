"""A SIGKILL to a random worker or to main at a random moment: `make stress KIND=kill ARGS='--epochs 500 --seed S'`.

Required in each epoch: the batches that came are the right ones, in order, and do not change later; the death
of a worker is named by its pid and followed by an epoch that works, or is survived by one with restarts; after main's
own death no worker is left a second later, and no file.
"""

import argparse
import contextlib
import logging
import os
import signal
import sys
import time
from typing import NamedTuple

from . import mains
from .trials import Numbered, drawn, number

METHODS = ["fork"] * 18 + ["forkserver", "spawn"]


class Trial(NamedTuple):
    """One loader, and who is killed when."""

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
    victim: str
    moment: float

    @classmethod
    def random(cls, rng):
        yes = lambda chance=0.5: rng.random() < chance  # noqa: E731
        return cls(
            method=rng.choice(METHODS),
            workers=rng.randint(1, 4),
            prefetch=rng.randint(1, 3),
            persistent=yes(),
            in_order=yes(0.7),
            pinned=yes(0.3),
            pickled=yes(0.3),
            size=rng.choice([1, 100, 6000, 100_000]),
            delay=rng.choice([0, 0, 0.0005, 0.002]),
            kept=yes(),
            restarts=yes(),
            victim="main" if yes(0.3) else "worker",
            moment=rng.random(),
        )


class Program:
    """What the main process does: epochs until two have come to their end."""

    def __init__(self, trial):
        from support import DataLoader

        self.trial = trial
        # A line for each restart.
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
        )

    def run(self):
        from rules import left_after, state
        from support import wait_until

        with contextlib.ExitStack() as stack:
            host = None
            if self.trial.pinned:
                from pinning_support import pinning

                host = stack.enter_context(pinning())
            before = state()
            mains.tell("begin")
            complete = deaths = 0
            while complete < 2:
                try:
                    self.epoch()
                    complete += 1
                except RuntimeError as error:
                    mains.tell("death", [str(error), error.__notes__, time.monotonic()])
                    deaths += 1
                    assert deaths < 2, "more deaths than kills"
            if self.trial.persistent:
                self.loader._iterator._shutdown_workers()
            del self.loader
            over = left_after(before, 5)
            assert not over, f"left behind: {over}"
            assert host is None or wait_until(lambda: not host.live), "pinned memory was kept back"
        mains.tell("end")

    def epoch(self):
        iterator = iter(self.loader)
        mains.tell("pids", [worker.pid for worker in iterator._workers])
        got, kept = [], []
        try:
            for batch in iterator:
                got.append(number(batch))
                if self.trial.kept:
                    kept.append(batch)
                del batch
            assert sorted(got) == list(range(self.dataset.n)), "batches are missing"
        except RuntimeError as error:
            try:
                next(iterator)
                raise AssertionError("a batch behind the death")
            except RuntimeError as again:
                assert str(again) == str(error), "another error at the next call"
            raise
        finally:
            assert len(set(got)) == len(got), "a batch came twice"
            assert not self.trial.in_order or got == list(range(len(got))), got
            assert list(map(number, kept)) == got[: len(kept)], "a batch that was kept has changed"


def drive(main, trial, figures, limit):
    """Kills; what is wrong, in words."""
    main.listen(mains.LIMIT, lambda told: told)
    span = {"fork": 0.35, "forkserver": 1.0, "spawn": 8.0}[trial.method]
    main.listen(trial.moment * span * (0.4 + 0.6 * (trial.delay > 0)))
    victim = main.pid
    if trial.victim == "worker":
        end = time.monotonic() + 5
        while not (workers := sorted(main.workers())) and time.monotonic() < end and not main.said("end"):
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
        wrong.append("processes are left")
    if not main.said("end"):
        wrong.append("it did not come to its end")
    if trial.restarts and main.said("death"):
        wrong.append("the epoch did not survive")
    for text, notes, seen in main.said("death"):
        figures["deaths raised"] += 1
        if not text.startswith(f"DataLoader worker (pid {victim}) is killed by signal: Killed. "):
            wrong.append(f"not named: {text}")
        if not any("orker " in note for note in notes):
            wrong.append(f"no worker in the notes: {notes}")
        figures["seen"] = max(figures["seen"], seen - killed)
    return wrong


def arguments():
    parser = argparse.ArgumentParser(prog="python -m faults.kill", description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=100, help="how many kills")
    parser.add_argument("--seed", type=int, help="of loaders and moments; by default another one each time")
    parser.add_argument("--only", type=int, help="only the kill of this number")
    parser.add_argument("--limit", type=float, default=1.0, help="seconds that workers have after main's death")
    return parser.parse_args()


def main():
    """In the driver the exit status, in a new main process the program that it is to run."""
    args = arguments()
    mains.prepare()
    figures = dict.fromkeys(["workers killed", "mains killed", "deaths raised", "too late", "gone", "seen"], 0)
    start = time.monotonic()
    failed, run = mains.run_all(
        drawn(Trial, args.epochs, args),
        Program,
        drive=lambda process, trial: drive(process, trial, figures, args.limit),
        words=lambda trial, output: ["it wrote something"] if output.strip() else [],
    )
    if run is not None:
        return run
    spent = time.monotonic() - start
    print(
        f"{args.epochs} epochs, {failed} wrong, {spent:.0f} s: {figures['workers killed']} workers and "
        f"{figures['mains killed']} main processes killed, {figures['deaths raised']} deaths raised, "
        f"{figures['too late']} kills too late; longest from a kill to its error {figures['seen'] * 1000:.0f} ms, "
        f"from main's death to the last worker's end {figures['gone'] * 1000:.0f} ms"
    )
    return lambda: sys.exit(bool(failed))


if __name__ == "__main__":
    main()()
