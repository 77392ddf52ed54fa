"""Main processes that end at random moments in many ways: `make stress KIND=ends ARGS='--count 1000 --seed S'`.

SIGINT goes to the main process alone, to its whole process group as from a terminal, or twice. SIGKILL and SIGTERM go
to the main process, and so does a signal whose handler raises, or calls `sys.exit` or `os._exit`; some programs end by
themselves. The signals arrive in next(), in the user's own code, during start, shutdown or exit. The workers are quick,
slow, stuck and deaf to SIGTERM, or die repeatedly and are replaced.
Required: the process ends with the status of its way, prints at most one traceback for each exception and nothing else,
and leaves no worker and no file.
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

# Weighted: fork servers and spawned interpreters are slow to start.
METHODS = ["fork"] * 18 + ["forkserver", "spawn"]
PLACES = ["next", "user", "start", "shutdown", "del", "exit"]
# {way: (the signal, the most tracebacks, the exit status)}
WAYS = {
    "interrupt": (signal.SIGINT, 1, (-signal.SIGINT, 130)),
    "interrupt of the group": (signal.SIGINT, 1, (-signal.SIGINT, 130)),
    "two interrupts": (signal.SIGINT, 2, (-signal.SIGINT, 130)),
    "kill": (signal.SIGKILL, 0, (-signal.SIGKILL,)),
    "terminate": (signal.SIGTERM, 0, (-signal.SIGTERM,)),
    "os._exit": (signal.SIGUSR1, 0, (3,)),
    "sys.exit": (signal.SIGUSR1, 0, (4,)),
    "error": (signal.SIGUSR1, 1, (1,)),
    "by itself": (None, 0, ()),
}
IGNORED = "Exception ignored"


class Trial(NamedTuple):
    """A program, and how it ends."""

    place: str
    method: str
    workers: int
    persistent: bool
    pinned: bool
    # "quick", "slow", "stuck" or "mortal".
    items: str
    # One of WAYS.
    way: str
    moment: float
    # Seconds between two signals.
    apart: float

    @classmethod
    def random(cls, rng):
        return cls(
            place=rng.choice(PLACES),
            method=rng.choice(METHODS),
            workers=rng.randint(1, 3),
            persistent=rng.random() < 0.5,
            pinned=rng.random() < 0.3,
            items=rng.choice(["quick", "quick", "slow", "stuck", "mortal", "mortal"]),
            way=rng.choice([*WAYS, *list(WAYS)[:4]]),
            moment=rng.random(),
            apart=rng.choice([0, 0.001, 0.02, 0.3]) * rng.random(),
        )


class Deliberate(Exception):
    pass


class Items(Dataset):
    """Quick or slow samples. "stuck": from the seventh on they take a minute; "mortal": each fifth ends its worker."""

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
    """A script."""

    def __init__(self, trial):
        self.trial = trial

    def run(self):
        from support import DataLoader

        trial = self.trial
        signal.signal(signal.SIGUSR1, self.end)
        if trial.pinned:
            mains.pin_for_good()
        # Hides the line of each restart.
        logging.getLogger("rustloader").setLevel(logging.ERROR)
        self.loader = DataLoader(
            Items(trial.items),
            batch_size=None,
            num_workers=trial.workers,
            multiprocessing_context=trial.method,
            persistent_workers=trial.persistent,
            pin_memory=trial.pinned,
            max_restarts=1000 if trial.items == "mortal" else None,
        )
        mains.report("begin")
        getattr(self, f"in_{trial.place}")()
        mains.report("exit")

    def end(self, *_):
        match self.trial.way:
            case "os._exit":
                os._exit(3)
            case "sys.exit":
                sys.exit(4)
            case "error":
                raise Deliberate

    def start(self):
        iterator = iter(self.loader)
        mains.report("pids", [worker.pid for worker in iterator._workers])
        return iterator

    def first(self, count=4):
        iterator = self.start()
        for _ in range(count):
            next(iterator)
        return iterator

    def times(self):
        # A shutdown waits 5 s for stuck workers.
        return range(2 if self.trial.items == "stuck" or self.trial.way == "by itself" else 10)

    def in_next(self):
        if self.trial.items == "stuck" and self.trial.way == "by itself":
            return
        for _ in [*self.times()] * 2:
            for batch in self.start():
                del batch

    def in_user(self):
        iterator = self.first()
        mains.report("ready")
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            sum(range(1000))
        del iterator

    def in_start(self):
        for _ in range(10):
            iterator = self.start()
            if self.trial.persistent:
                iterator._shutdown_workers()

    def in_shutdown(self):
        for _ in self.times():
            iterator = self.first()
            mains.report("ready")
            iterator._shutdown_workers()

    def in_del(self):
        for _ in self.times():
            iterator = self.first()
            mains.report("ready")
            self.loader._iterator = None
            del iterator

    def in_exit(self):
        self.kept = self.first()
        mains.report("ready")


def drive(main, trial, figures, limit, outlive):
    """Ends the process. Returns the problems found."""
    mark = "begin" if trial.place in ("next", "start") else "ready"
    main.listen(mains.LIMIT, lambda reports: any(kind == mark for kind, _ in reports))
    main.listen(trial.moment * 0.4)
    number, _, expected = WAYS[trial.way]
    if trial.way == "kill":
        outlive = main.patience(outlive)
    for shot in range({"by itself": 0, "two interrupts": 2}.get(trial.way, 1)):
        main.listen(trial.apart if shot else 0)
        with contextlib.suppress(ProcessLookupError):
            (os.killpg if trial.way in ("interrupt of the group", "two interrupts") else os.kill)(main.pid, number)
    shot_at = time.monotonic()
    status = main.wait(limit)
    took = time.monotonic() - shot_at
    main.listen(0.05)
    if number and main.reported("exit"):
        # Late in its exit, Python restores the default effects of signals.
        expected += (-number,)
    figures["took"] = max(figures["took"], took)
    wrong = []
    if status is None:
        wrong.append("it does not end")
        main.abandon()
    elif status not in (0, *expected):
        wrong.append(f"it ends with status {status}")
    figures["by itself" if status == 0 else "ended"] += 1
    gone = main.none_left(max(outlive, 5))
    if gone is None or gone > outlive:
        wrong.append(f"workers left, gone after {gone} s")
    figures["gone"] = max(figures["gone"], gone or 0)
    return wrong


def check_output(trial, output, figures):
    """Returns problems with the output: each exception of the main process explains one traceback, none of a worker.
    Python prints and ignores an exception that a handler raises in a callback, such as a weak reference's."""
    figures["ignored"] += IGNORED in output
    _, most, _ = WAYS[trial.way]
    wrong = []
    if output.count("Traceback (most recent call last)") - (most == 0 and output.count(IGNORED)) > most:
        wrong.append("too many tracebacks")
    if "Process-" in output or "workers/main.py" in output:
        wrong.append("a worker's traceback")
    if output.strip() and not any(text in output for text in ("KeyboardInterrupt", "Deliberate", IGNORED)):
        wrong.append("unexpected output")
    return wrong


def main():
    """Returns a function to call: in the driver it exits, in a new main process it runs the program."""
    args = arguments(
        "ends",
        __doc__,
        count=(100, "the number of programs"),
        only=ONLY,
        limit=(30.0, "seconds within which the process must end"),
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
        f"{count} programs, {failed} wrong, {spent:.0f} s: {figures['ended']} were ended, {figures['by itself']} ended "
        f"by themselves ({figures['ignored']} with an exception that Python ignored); longest from the signal to the "
        f"end {figures['took']:.2f} s, longest from there to the last worker's end {figures['gone']:.2f} s"
    )
    return lambda: sys.exit(bool(failed))


if __name__ == "__main__":
    main()()
