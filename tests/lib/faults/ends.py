"""A main process ends in every way, at every place, whatever its workers are doing: `make stress KIND=ends`.

Required: it ends within its deadline, even if its workers are in samples that take a minute and ignore SIGTERM; its
exit status and output match the way it ends, with at most one traceback; a second later no worker and no file is left.
"""

import contextlib
import itertools
import multiprocessing.util
import os
import random
import signal
import sys
import time
from typing import NamedTuple

import torch
from torch.utils.data import Dataset

from . import mains
from .matrix import covering
from .trials import arguments

# "os._exit", "error" and "sys.exit" happen in a signal handler, wherever the process is; "return" ends the script.
WAYS = ["SIGKILL", "SIGTERM", "os._exit", "error", "sys.exit", "return"]
PLACES = ["next", "user", "shutdown"]
METHODS = ["fork", "forkserver", "spawn"]
IGNORED = "Exception ignored in"
STATUS = {"SIGKILL": -signal.SIGKILL, "SIGTERM": -signal.SIGTERM, "os._exit": 3, "error": 1, "sys.exit": 4, "return": 0}


class Case(NamedTuple):
    way: str
    place: str
    method: str
    # Workers are in samples that take a minute, and ignore SIGTERM.
    stuck: bool
    persistent: bool
    pinned: bool

    def __str__(self):
        flags = [name for name in ("stuck", "persistent", "pinned") if getattr(self, name)]
        return " ".join([self.way, self.place, self.method, *flags])


def all_cases():
    """The full product, without impossible cases: a script cannot return while it is in next()."""
    yes_no = (False, True)
    product = itertools.starmap(Case, itertools.product(WAYS, PLACES, METHODS, yes_no, yes_no, yes_no))
    return [case for case in product if case.way != "return" or case.place == "user"]


class Items(Dataset):
    """Fast samples; if `stuck`, all but the first four take a minute each."""

    def __init__(self, stuck):
        self.stuck = stuck

    def __len__(self):
        return 1_000_000

    def __getitem__(self, i):
        if self.stuck and i >= 4:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            end = time.monotonic() + 60
            while time.monotonic() < end:
                time.sleep(60)
        return torch.full((5000,), i)


class Deliberate(Exception):
    pass


class Program:
    """A script with two workers that goes to a place and stays there until it is ended."""

    def __init__(self, case):
        self.case = case

    def run(self):
        from support import DataLoader

        case = self.case
        signal.signal(signal.SIGUSR1, self.end)
        if case.pinned:
            mains.pin_for_good()
        self.loader = DataLoader(
            Items(case.stuck),
            batch_size=None,
            num_workers=2,
            worker_init_fn=linger if case.place == "shutdown" else None,
            multiprocessing_context=case.method,
            persistent_workers=case.persistent,
            pin_memory=case.pinned,
        )
        iterator = iter(self.loader)
        mains.report("pids", [worker.pid for worker in iterator._workers])
        for _ in range(4):
            next(iterator)
        mains.report("ready")
        getattr(self, case.place)(iterator)

    def end(self, *_):
        match self.case.way:
            case "os._exit":
                os._exit(3)
            case "error":
                raise Deliberate
            case "sys.exit":
                sys.exit(4)

    def next(self, iterator):
        while True:
            next(iterator)

    def user(self, iterator):
        self.kept = iterator
        if self.case.way != "return":
            while True:
                sum(range(1000))

    def shutdown(self, iterator):
        """A slow shutdown, since the workers are slow to exit. No workers start meanwhile: if a signal handler raises
        in Python's own fork hooks, the exception is printed and ignored."""
        iterator._shutdown_workers()
        self.user(iterator)


def linger(_):
    """A worker_init_fn that delays the worker's exit."""
    multiprocessing.util.Finalize(None, time.sleep, (2,), exitpriority=1)


def drive(main, case, figures, limit):
    """Ends the process. Returns the problems found."""
    main.listen(mains.LIMIT * 2, lambda reports: any(kind == "ready" for kind, _ in reports))
    if not main.reported("ready"):
        main.abandon()
        return ["it does not reach the place"]
    # Let the wait or the shutdown begin.
    main.listen(0.1)
    start, sent, status = time.monotonic(), 0, None
    # A shutdown may take 5 s, and an exit 0.7 s more.
    while status is None and time.monotonic() - start < 20 + limit:
        # If the handler raises in a callback, such as a weak reference's, Python prints and ignores the exception.
        # The signal is then sent again.
        if case.way != "return" and sent <= main.output().count(IGNORED):
            with contextlib.suppress(ProcessLookupError):
                os.kill(main.pid, getattr(signal, case.way, signal.SIGUSR1))
            sent += 1
        status = main.wait(0.5)
    figures["took"] = max(figures["took"], time.monotonic() - start)
    wrong = []
    if status is None:
        wrong.append("it does not end")
        main.abandon()
    elif status != STATUS[case.way]:
        wrong.append(f"it ends with status {status}")
    gone = main.none_left(max(5, limit))
    figures["gone"] = max(figures["gone"], gone or 0)
    if gone is None or gone > limit:
        wrong.append(f"workers left, gone after {gone} s")
    return wrong


def check_output(case, output):
    """Returns problems with the output: anything that the way of ending does not explain."""
    tracebacks = output.count("Traceback (most recent call last)") - output.count(IGNORED)
    if case.way == "error":
        return [] if tracebacks == 1 and output.rstrip().endswith("Deliberate") else [f"{tracebacks} tracebacks"]
    return ["unexpected output"] if tracebacks or (output.strip() and IGNORED not in output) else []


def main():
    """Returns a function to call: in the driver it exits, in a new main process it runs the program."""
    args = arguments(
        "ends",
        __doc__,
        all=(False, "run the full product, not only a set that covers each pair"),
        seed=(0, "seed of the covering set"),
        limit=(1.0, "seconds that workers may outlive main"),
        only=([], "run only cases with these words"),
    )
    mains.prepare()
    cases = [case for case in all_cases() if set(args.only) <= set(str(case).split())]
    cases = cases if args.all else covering(args.seed, cases)
    figures, start = dict.fromkeys(["took", "gone"], 0), time.monotonic()
    random.Random(args.seed).shuffle(cases)
    failed, run = mains.run_all(
        [(str(case), case) for case in cases],
        Program,
        drive=lambda process, case: drive(process, case, figures, args.limit),
        check_output=check_output,
    )
    if run is not None:
        return run
    print(
        f"{len(cases)} ends, {failed} wrong, {time.monotonic() - start:.0f} s; longest end of main "
        f"{figures['took']:.2f} s, longest from there to the last worker's end {figures['gone']:.2f} s"
    )
    return lambda: sys.exit(bool(failed))


if __name__ == "__main__":
    main()()
