"""A worker ends in every way, at every place, under every kind of loader: `make stress KIND=matrix`.

Required: the batches before the lost one are delivered and right; the error follows soon, in any thread, and names pid,
signal and worker; further calls raise the same error; the next epoch works; nothing is left behind. With restarts: all
batches are delivered, and there is no error.
"""

import contextlib
import gc
import itertools
import math
import multiprocessing
import multiprocessing.forkserver
import os
import random
import re
import signal
import sys
import tempfile
import time
from typing import NamedTuple

import torch

from . import scenes
from .scenes import LAST, SIGNALS, VICTIM, WAYS
from .trials import arguments, quiet

PLACES = ["birth", "init", "iter", "item", "packing", "idle", "between", "shutdown"]
METHODS = ["fork", "forkserver", "spawn"]
# Seconds within which a case must end; spawned workers import torch.
LIMIT = {"fork": 40, "forkserver": 60, "spawn": 200}
# The log message of a restart contains this.
RESTARTED = "restarted"
# Output of torch's signal handlers in a worker, and of the C++ library.
EXPECTED_OUTPUT = re.compile(r"ERROR: Unexpected [^\n]*|terminate called without an active exception|[\s\0]+")


class Case(NamedTuple):
    way: str
    place: str
    method: str = "fork"
    persistent: bool = False
    in_order: bool = True
    pinned: bool = False
    restarts: bool = False
    # The fate of the exit status: "" (as usual), "ignored" (SIGCHLD is ignored), "reaped" (by other code).
    status: str = ""

    def __str__(self):
        flags = [name for name in ("persistent", "in_order", "pinned", "restarts") if getattr(self, name)]
        return " ".join(filter(None, [self.way, self.place, self.method, *flags, self.status]))


def all_cases():
    """The full product, without impossible cases."""
    yes_no = (False, True)
    product = itertools.product(WAYS, PLACES, METHODS, yes_no, yes_no, yes_no, yes_no)
    return [case for case in itertools.starmap(Case, product) if case.place != "between" or case.persistent]


def pairs_of(case):
    return set(itertools.combinations(enumerate(case), 2))


def covering(seed=0):
    """Returns few cases that contain each pair of values of two factors at least once; the same ones for the same
    seed. It prefers forked workers, since the others are slow to start."""
    price = {"fork": 0, "forkserver": 0.5, "spawn": 2}
    rng = random.Random(seed)
    cases = all_cases()
    rng.shuffle(cases)
    left = set().union(*map(pairs_of, cases))
    chosen = []
    while left:
        best = max(cases, key=lambda case: len(pairs_of(case) & left) - price[case.method])
        if not pairs_of(best) & left:
            best = max(cases, key=lambda case: len(pairs_of(case) & left))
        chosen.append(best)
        left -= pairs_of(best)
    return chosen


def run(case):
    """Runs a case in a process of its own. Returns (the problems found, or ""; the seconds from the death to its
    error)."""
    from isolation import in_child, watched

    if case.method == "forkserver":
        multiprocessing.forkserver.ensure_running()  # outside the case, so it does not count as left behind
    if case.method == "spawn":
        multiprocessing.resource_tracker.ensure_running()
    report = in_child(watched, play, case, seconds=LIMIT[case.method])
    wrong = []
    if report["hangs"]:
        wrong.append("it hangs")
    elif report["status"] != 0:
        wrong.append(f"it ends with status {report['status']}")
    wrong += [f"left behind: {report[what]}" for what in ("left", "processes") if report.get(what)]
    # A restart logs a line.
    wrong += [f"logged: {line}" for line in report.get("log", ()) if not (case.restarts and RESTARTED in line)]
    output = report["output"]
    # multiprocessing reports a SystemExit that is raised during its own clean-up or unpickling.
    if not (case.way == "sys.exit(0)" and case.place in ("shutdown", "birth")) and EXPECTED_OUTPUT.sub("", output):
        wrong.append("output")
    return "; ".join(wrong) + (f"\n{output}" if wrong else ""), report.get("value")


def play(case):
    from support import wait_until

    from rustloader.supervision import deaths

    torch.set_num_threads(1)
    # On a busy machine the fork server may be slow to report how a worker ended.
    deaths.STATUS_AFTER = LIMIT[case.method]
    multiprocessing.process._process_counter = itertools.count(1)
    scenes.use_the_parents_fork_server()
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        host = None
        if case.pinned:
            from pinning_support import pinning

            host = stack.enter_context(pinning())
        if case.status == "ignored":
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        elif case.status == "reaped":
            stack.enter_context(scenes.Reaper())
        seen = Play(case, os.path.join(folder, "marker")).run_epochs()
        # The error's frames form a cycle.
        assert host is None or wait_until(lambda: gc.collect() is not None and not host.live), "pinned memory leaks"
    return seen


class Play:
    def __init__(self, case, marker):
        from support import DataLoader

        self.case, self.marker = case, marker
        kind = scenes.Streams if case.place == "iter" else scenes.Samples
        dataset = kind(case.place, case.way, marker)
        self.n = dataset.n
        self.loader = DataLoader(
            dataset,
            batch_size=None,
            num_workers=2,
            worker_init_fn=dataset.init,
            multiprocessing_context=case.method,
            persistent_workers=case.persistent,
            in_order=case.in_order,
            pin_memory=case.pinned,
            max_restarts=1 if case.restarts else None,
        )

    def run_epochs(self):
        from support import gone, wait_until, worker_pids

        case = self.case
        delivered = []
        iterator = iter(self.loader)
        pids = worker_pids(iterator)
        if case.place == "between":
            assert self.epoch(iterator) == list(range(self.n))
        elif case.place in ("idle", "shutdown"):
            delivered += [scenes.number(next(iterator)) for _ in range(3)]
        if case.place in ("idle", "between"):
            assert wait_until(lambda: os.path.exists(self.marker + ".ready"), LIMIT[case.method])
            # The default keeps the iterator out of the closure.
            assert wait_until(lambda core=iterator._core: core.worker_status(VICTIM)["state"] == "idle")
            os.kill(pids[VICTIM], signal.SIGUSR1)
        seen = None
        if case.place == "shutdown":
            iterator._shutdown_workers()
        elif case.restarts:
            self.survive(iterator, delivered, pids)
        else:
            error, seen = self.death(iterator, delivered)
            self.check(error, delivered, pids)
        assert wait_until(lambda: all(map(gone, pids))), "a worker has survived"
        del iterator
        for _ in range(2 if case.method == "fork" else 1):
            assert self.epoch(iter(self.loader)) == list(range(self.n)), "the next epoch"
        if case.persistent:
            self.loader._iterator._shutdown_workers()
        return seen

    def epoch(self, iterator):
        numbers = [scenes.number(batch) for batch in iterator]
        return numbers if self.case.in_order else sorted(numbers)

    def death(self, iterator, delivered):
        """Takes batches in another thread until the error. Returns the error and how long it took."""
        from support import gone, in_thread, wait_until, worker_pids

        last = -math.inf
        try:
            if self.case.place == "between":
                victim = worker_pids(iterator)[VICTIM]
                assert wait_until(lambda: gone(victim))
                in_thread(iter, self.loader)
                raise AssertionError("iter() does not raise the death")
            while True:
                batch = in_thread(next, iterator, seconds=LIMIT[self.case.method])
                delivered.append(scenes.number(batch))
                del batch
                last = time.monotonic()
        except RuntimeError as error:
            now, first = time.monotonic(), error
        if self.case.place != "between":
            for _ in range(2):
                try:
                    next(iterator)
                    raise AssertionError("a batch after the death")
                except RuntimeError as repeated:
                    assert str(repeated) == str(first) and repeated.__notes__ == first.__notes__
        return first, now - max(last, self.died()[0])

    def survive(self, iterator, delivered, pids):
        """Takes all batches, and checks that only the victim has been replaced."""
        import rustloader

        if self.case.place == "between":
            iterator = iter(self.loader)
        delivered += map(scenes.number, iterator)
        assert (delivered if self.case.in_order else sorted(delivered)) == list(range(self.n)), delivered
        faults = rustloader.stats(self.loader).faults
        assert faults.restarts == 1 and str(self.died()[1]) in faults.deaths[0], faults
        pids += [worker.pid for worker in iterator._workers]
        if self.case.persistent:
            assert len(set(pids)) == 3, "more than one worker was replaced"
            iterator._shutdown_workers()
            self.loader._iterator = None

    def died(self):
        """Returns when the victim ended, and its pid."""
        with open(self.marker) as file:
            moment, pid = file.read().split()
        return float(moment), int(pid)

    def check(self, error, delivered, pids):
        case = self.case
        pid = self.died()[1]
        if case.in_order or case.place not in ("item", "packing"):
            assert pid == pids[VICTIM]
        text, note = str(error), " ".join(error.__notes__)
        expected = [expected_text(case, pid)]
        if case.status and case.place == "birth":  # it may be reaped before its pidfd is opened
            expected.append(expected_text(case._replace(way="os._exit(0)"), pid))
        assert text.startswith(tuple(expected)), text
        assert ("shared memory" in text) == ("Bus error" in text), text
        assert re.search(rf"orker {pids.index(pid)}\b", note), note
        if case.place in ("item", "packing"):
            assert f" {LAST}." in note, note
        assert len(set(delivered)) == len(delivered) and set(delivered) <= set(range(self.n)), delivered
        if case.in_order:
            before = {"birth": 1, "init": 1, "iter": 1, "item": LAST, "packing": LAST}.get(case.place, len(delivered))
            assert delivered == list(range(before)), delivered
            assert case.place != "idle" or len(delivered) % 2 == VICTIM, "the lost batch is not the victim's"
        elif case.place in ("birth", "init", "iter"):
            assert case.place != "iter" or all(i % 2 != VICTIM for i in delivered)
        elif case.place in ("item", "packing"):
            assert LAST not in delivered


def kernel_reports_status():
    """Whether the kernel reports the exit status of a process that other code has reaped (PIDFD_INFO_EXIT)."""
    return tuple(map(int, re.findall(r"\d+", os.uname().release)[:2])) >= (6, 15)


def expected_text(case, pid):
    """Returns how the error's text begins."""
    way = "SIGABRT" if case.way == scenes.TERMINATE else case.way
    if case.status and not kernel_reports_status():
        return f"DataLoader worker (pid(s) {pid}) exited unexpectedly"
    code = {"os._exit(3)": 3}.get(way, 0)
    if case.method == "forkserver" and case.place == "birth" and way == "sys.exit(0)":
        code = 1  # the fork server ends a process with this code if its start fails
    if way in SIGNALS:
        return f"DataLoader worker (pid {pid}) is killed by signal: {signal.strsignal(SIGNALS[way])}. "
    if code:
        return f"DataLoader worker (pid {pid}) exited unexpectedly with exit code {code}. "
    return f"DataLoader worker (pid(s) {pid}) exited unexpectedly"


def main():
    args = arguments(
        "matrix",
        __doc__,
        all=(False, "run the full product, not only a set that covers each pair"),
        seed=(0, "seed of the order, and of the covering set"),
        only=([], "run only cases with these words in their name"),
    )
    quiet()
    cases = all_cases() if args.all else covering(args.seed)
    # An aborted run has then covered some of everything.
    random.Random(args.seed).shuffle(cases)
    cases = [case for case in cases if set(args.only) <= set(str(case).split())]
    failed, worst, start = 0, {}, time.monotonic()
    for at, case in enumerate(cases):
        began = time.monotonic()
        wrong, seen = run(case)
        failed += bool(wrong)
        if seen is not None:
            worst[case.method] = max(worst.get(case.method, (0, None)), (seen, str(case)))
        verdict = f"WRONG {wrong}" if wrong else "right"
        shown = "" if seen is None else f", seen after {seen * 1000:.1f} ms"
        print(f"{at + 1}/{len(cases)} {case}: {verdict}{shown}, {time.monotonic() - began:.1f} s", flush=True)
    print(f"{len(cases)} cases, {failed} wrong, seed {args.seed}, {time.monotonic() - start:.0f} s")
    for method, (seen, name) in worst.items():
        print(f"longest until seen, {method}: {seen * 1000:.1f} ms ({name})")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
