"""Ctrl-C at random moments: `make stress KIND=interrupts ARGS='--count 1000 --seed S'`.

SIGINT goes to the main process alone, to its whole process group as from a terminal, or twice. It arrives in next(), in
the user's own code, during start or during shutdown. The workers are quick, slow, stuck and deaf to SIGTERM, or die
repeatedly and are replaced.
Required: the process ends, prints at most one traceback for each signal, and leaves no worker.
"""

import contextlib
import logging
import os
import signal
import sys
import time
from collections import Counter
from typing import NamedTuple

import torch
from torch.utils.data import Dataset

from . import mains
from .trials import ONLY, arguments, drawn

PLACES = ["next", "user", "start", "shutdown", "del", "exit"]


class Trial(NamedTuple):
    """A program, and how it is interrupted."""

    place: str
    workers: int
    persistent: bool
    pinned: bool
    # "quick", "slow", "stuck" or "mortal".
    items: str
    # "main", "group" or "twice".
    how: str
    moment: float
    # Seconds between the two signals.
    apart: float

    @classmethod
    def random(cls, rng):
        return cls(
            place=rng.choice(PLACES),
            workers=rng.randint(1, 3),
            persistent=rng.random() < 0.5,
            pinned=rng.random() < 0.3,
            items=rng.choice(["quick", "quick", "slow", "stuck", "mortal", "mortal"]),
            how=rng.choice(["main", "group", "twice"]),
            moment=rng.random(),
            apart=rng.choice([0, 0.001, 0.02, 0.3]) * rng.random(),
        )


class Items(Dataset):
    samples_made = 0  # in this process

    def __init__(self, kind):
        self.kind = kind

    def __len__(self):
        return 60

    def __getitem__(self, i):
        if self.kind == "slow":
            time.sleep(0.005)
        elif self.kind == "mortal":
            self.samples_made += 1
            if self.samples_made % 5 == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        elif self.kind == "stuck" and i >= 6:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            end = time.monotonic() + 60
            while time.monotonic() < end:
                with contextlib.suppress(KeyboardInterrupt):
                    time.sleep(60)
        return torch.full((5000,), i)


class Program:
    """A script that a user interrupts."""

    def __init__(self, trial):
        self.trial = trial

    def run(self):
        from support import DataLoader

        trial = self.trial
        if trial.pinned:
            mains.pin_for_good()
        # Hides the line of each restart.
        logging.getLogger("rustloader").setLevel(logging.ERROR)
        self.loader = DataLoader(
            Items(trial.items),
            batch_size=None,
            num_workers=trial.workers,
            persistent_workers=trial.persistent,
            pin_memory=trial.pinned,
            max_restarts=1000 if trial.items == "mortal" else None,
        )
        mains.report("begin")
        getattr(self, trial.place)()
        mains.report("end")

    def first(self, count=4):
        iterator = iter(self.loader)
        for _ in range(count):
            next(iterator)
        return iterator

    def times(self):
        # A shutdown waits 5 s for stuck workers.
        return range(2 if self.trial.items == "stuck" else 10)

    def next(self):
        for _ in range(20):
            for batch in self.loader:
                del batch

    def user(self):
        iterator = self.first()
        mains.report("ready")
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            sum(range(1000))
        del iterator

    def start(self):
        for _ in range(10):
            iterator = iter(self.loader)
            if self.trial.persistent:
                iterator._shutdown_workers()

    def shutdown(self):
        for _ in self.times():
            iterator = self.first()
            mains.report("ready")
            iterator._shutdown_workers()

    def exit(self):
        self.kept = self.first()
        mains.report("ready")
        sys.exit(0)


# `del` is a keyword.
def _del(self):
    for _ in self.times():
        iterator = self.first()
        mains.report("ready")
        self.loader._iterator = None
        del iterator


setattr(Program, "del", _del)


def drive(main, trial, figures, limit, outlive):
    """Interrupts the process. Returns the problems found."""
    mark = "ready" if trial.place in ("user", "shutdown", "del", "exit") else "begin"
    main.listen(mains.LIMIT, lambda reports: any(kind == mark for kind, _ in reports))
    main.listen(trial.moment * 0.4)
    shots = 2 if trial.how == "twice" else 1
    for shot in range(shots):
        with contextlib.suppress(ProcessLookupError):
            (os.kill if trial.how == "main" else os.killpg)(main.pid, signal.SIGINT)
        main.listen(trial.apart if shot + 1 < shots else 0)
    shot_at = time.monotonic()
    status = main.wait(limit)
    took = time.monotonic() - shot_at
    figures["took"] = max(figures["took"], took)
    wrong = []
    if status is None:
        wrong.append("it does not end")
        main.abandon()
    elif status not in (0, -signal.SIGINT, 130):
        wrong.append(f"it ends with status {status}")
    figures["late or lost" if status == 0 else "interrupted"] += 1
    gone = main.none_left(max(outlive, 5))
    if gone is None or gone > outlive:
        wrong.append(f"workers left, gone after {gone} s")
    figures["gone"] = max(figures["gone"], gone or 0)
    return wrong


def check_output(trial, output, figures):
    """Returns problems with the output: each interrupt explains one traceback, and none of a worker."""
    figures["ignored"] += "Exception ignored" in output
    wrong = []
    if output.count("Traceback (most recent call last)") > (2 if trial.how == "twice" else 1):
        wrong.append("too many tracebacks")
    if "Process-" in output or "workers/main.py" in output:
        wrong.append("a worker's traceback")
    if output.strip() and "KeyboardInterrupt" not in output:
        wrong.append("unexpected output")
    return wrong


def main():
    """Returns a function to call: in the driver it exits, in a new main process it runs the program."""
    args = arguments(
        "interrupts",
        __doc__,
        count=(100, "the number of programs"),
        only=ONLY,
        limit=(20.0, "seconds within which the process must end"),
        outlive=(1.0, "seconds that workers may outlive the process"),
        show=(False, "print the output of each program"),
    )
    mains.prepare()
    figures, start = Counter(), time.monotonic()
    failed, run = mains.run_all(
        drawn(Trial, args.count, args),
        Program,
        drive=lambda process, trial: drive(process, trial, figures, args.limit, args.outlive),
        check_output=lambda trial, output: check_output(trial, output, figures),
        show=args.show,
    )
    if run is not None:
        return run
    spent, count = time.monotonic() - start, args.count if args.only is None else 1
    print(
        f"{count} programs, {failed} wrong, {spent:.0f} s: {figures['interrupted']} interrupted, "
        f"{figures['late or lost']} ended by themselves ({figures['ignored']} with an exception that Python ignored); "
        f"longest from the signal to the end {figures['took']:.2f} s, "
        f"longest from there to the last worker's end {figures['gone']:.2f} s"
    )
    return lambda: sys.exit(bool(failed))


if __name__ == "__main__":
    main()()
