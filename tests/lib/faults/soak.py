"""Endurance: random loaders with random faults, for as long as you like (`make stress KIND=soak`).

One main process creates one loader after another. Each batch is compared by hash with that of an undisturbed loader,
before and after a fault; with restarts, a stall timeout or skipped samples, all batches must come. Some are kept over
many epochs and checked again. Each minute a line shows what the process holds. The exit status is 1 if a batch was
wrong, a fault had the wrong effect, or the figures have grown.
"""

import collections
import contextlib
import itertools
import logging
import os
import random
import signal
import sys
import tempfile
import threading
import time
import warnings

import torch
from support import DataLoader, arena_bytes, trim_pool, within

from .restart_data import Fault, Settings
from .trials import arguments, hash_of, held

METHODS = ["fork"] * 30 + ["forkserver", "spawn"]
# What may happen in an epoch. Half of the loaders run undisturbed.
FAULTS = ("error", "unpicklable", "segv", "exit", "kill", "break", "stop", "fork", "late", "thread", "stuck", "bad")
MORTAL = ("segv", "exit", "kill")  # faults that end a worker
RESTARTS = 10
LIMIT = 120.0  # seconds within which an epoch must end
KEPT = 30  # the most batches that are kept; the oldest is dropped first


class Soak:
    def __init__(self, seed, folder):
        self.rng, self.folder = random.Random(seed), folder
        self.kept = collections.deque()
        self.counts = collections.Counter()
        self.wrong = []

    def any_fault(self, settings):
        if self.rng.random() < 0.5:
            return None
        return Fault(self.rng.choice(FAULTS), self.rng.randrange(settings.n), os.path.join(self.folder, "happened"))

    def epoch(self):
        """Runs one to three epochs of a loader, with or without a fault."""
        rng = self.rng
        settings = Settings.random(rng, ["map", "map", "map", "stream"], most_workers=4, epochs=[1, 2, 3])
        # An epoch that is tried again draws another order.
        settings = settings._replace(shuffle=False, seed_by=None, size=min(settings.size, 6000))
        fault = self.any_fault(settings)
        of_data = {"bad": {fault.index}} if fault is not None and fault.name == "bad" else {}
        undisturbed = settings._replace(persistent=False).loader(DataLoader, "fork", of_data, on_error="skip")
        expected = [hash_of(batch) for batch in undisturbed]
        options = {
            "multiprocessing_context": rng.choice(METHODS),
            "pin_memory": rng.random() < 0.25,
            "worker_threads": None if settings.kind == "stream" else rng.choice([None, None, 3]),
        }
        options |= self.survival(fault, options)
        about = f"{settings} {fault} {options}"
        with contextlib.ExitStack() as stack:
            stack.callback(self.forget, fault)
            if options["pin_memory"]:
                from pinning_support import pinning

                stack.enter_context(pinning())
            context = options.pop("multiprocessing_context")
            loader = settings.loader(DataLoader, context, of_data, fault, **options)
            options["in_order"] = settings.in_order
            for number in range(settings.epochs):
                now, before = (fault, None) if number == 0 else (None, fault)
                self.run_epoch(loader, now, before, expected, options, about)

    def survival(self, fault, options):
        """Returns the options that decide whether an epoch survives its fault."""
        match fault and fault.name:
            case "late":
                return {"timeout": 0.3 if options["multiprocessing_context"] == "fork" else 0}
            case "stuck":
                return {"stall_timeout": 1, "max_restarts": RESTARTS}
            case "bad":
                return {"on_error": "skip", "max_restarts": self.rng.choice([None, RESTARTS])}
        return {"max_restarts": self.rng.choice([None, RESTARTS])}

    @staticmethod
    def forget(fault):
        if fault is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(fault.marker)

    def run_epoch(self, loader, fault, before, expected, options, about):
        body = lambda: self.iterate(loader, fault, before, expected, options)  # noqa: E731
        try:
            with within(LIMIT):
                wrong = in_a_thread(body) if fault is not None and fault.name == "thread" else body()
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"
        self.counts["epochs"] += 1
        self.counts["faults"] += fault is not None
        if wrong:
            self.wrong.append(f"{wrong}\n    {about}")
            print(f"WRONG {self.wrong[-1]}", flush=True)

    def iterate(self, loader, fault, before, expected, options):
        """Runs an epoch. Returns what is wrong with it, or None. `before` is the fault of the previous epoch."""
        name = None if fault is None else fault.name
        if name is None and options.get("timeout"):
            name = "late"  # the machine may be busy, or workers may still be in the previous epoch
        moment = self.rng.randrange(max(1, len(expected)))
        iterator, delivered, errors = start_epoch(loader, before), [], []
        for number in itertools.count():
            if name is not None and number == moment and self.disturb(name, iterator) == "break":
                # The iterator is dropped with tasks outstanding.
                break
            try:
                batch = next(iterator)
            except StopIteration:
                break
            except Exception as error:
                errors.append(error)
                if len(errors) > 1 or is_final(error):
                    if is_final(error) and "timed out" not in str(error):
                        errors += repeated(iterator)
                    break
                continue
            delivered.append(hash_of(batch))
            self.counts["batches"] += 1
            if not options["pin_memory"] and self.rng.random() < 0.02:
                self.keep(batch, delivered[-1])
        del iterator
        return self.judge(name, expected, delivered, errors, options)

    def disturb(self, name, iterator):
        """Injects a fault from the main process, into itself or a worker."""
        pid = self.victim = self.rng.choice([worker.pid for worker in iterator._workers])
        match name:
            case "break":
                return "break"
            case "kill":
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            case "stop":
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
                    threading.Timer(0.05, lambda: send_continue(pid)).start()
            case "fork":
                child = os.fork()
                if child == 0:
                    os._exit(sum(hash_of(batch) != before for batch, before in self.kept))
                if os.waitpid(child, 0)[1]:
                    self.wrong.append("kept batches differ in a forked child")
        return None

    def judge(self, name, expected, delivered, errors, options):
        texts, in_order = [str(error) for error in errors], options["in_order"]
        if name in MORTAL and options["max_restarts"]:
            name = "restart"
        if in_order:
            # Batches may be missing, such as one that an error replaced.
            rest = iter(expected)
            if not all(any(batch == other for other in rest) for batch in delivered):
                return f"the {len(delivered)} batches are no subsequence of the undisturbed ones"
        elif collections.Counter(delivered) - collections.Counter(expected):
            return "batches that an undisturbed loader does not return"
        missing = len(expected) - len(delivered)
        match name:
            case None | "stop" | "fork" | "thread" | "restart" | "stuck" | "bad":
                fine = not errors and missing == 0
            case "break":
                fine = not errors
            case "error":
                fine = missing >= 0 and len(errors) <= 1 and all("sample" in text for text in texts)
            case "unpicklable":
                fine = len(errors) <= 1 and (missing <= 1 or in_order)
            case _ if name in MORTAL:
                fine = all("DataLoader worker" in text and "pid" in text for text in texts) and len(set(texts)) < 2
                if name == "kill":
                    named = f"DataLoader worker (pid {self.victim}) is killed by signal: Killed. "
                    fine = fine and all(text.startswith(named) for text in texts)
                fine = fine and (bool(errors) or missing == 0)
            case "late":
                fine = all("timed out" in text for text in texts) and (bool(errors) or missing == 0)
        return None if fine else f"{name}: {missing} batches missing, errors {texts}"

    def keep(self, batch, before):
        self.kept.append((batch, before))
        if len(self.kept) > KEPT:
            batch, before = self.kept.popleft()
            if hash_of(batch) != before:
                self.wrong.append("a kept batch has changed")
                print(f"WRONG {self.wrong[-1]}", flush=True)


def start_epoch(loader, before):
    """Starts an epoch. With a timeout, persistent workers may still be in the previous epoch. A death after the last
    batch, which no next() has raised, is raised here once."""
    mortal = before is not None and before.name in MORTAL
    while True:
        try:
            return iter(loader)
        except RuntimeError as error:
            died = mortal and is_final(error)
            if not died and "timed out" not in str(error):
                raise
            mortal = mortal and not died


def repeated(iterator):
    """Returns the error of the call after the death of a worker: it must be that of the death."""
    try:
        next(iterator)
        return [AssertionError("a batch after the death")]
    except Exception as error:
        return [error]


def is_final(error):
    text = str(error)
    return "exited unexpectedly" in text or "is killed by signal" in text or "timed out" in text


def send_continue(pid):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def in_a_thread(body):
    result = []
    thread = threading.Thread(target=lambda: result.append(body()))
    thread.start()
    thread.join()
    return result[0] if result else "the thread has ended with an error"


def measure():
    """Measures what this process holds."""
    trim_pool()
    return {**held(), "arena_kib": arena_bytes() >> 10}


def growth_of(lines):
    """Describes the figures that are larger in the last third of the minutes than in the second third."""
    third = len(lines) // 3
    if third < 2:
        return []
    middle, last = lines[third : 2 * third], lines[-third:]
    allowed = {"anonymous_kib": 64 << 10, "arena_kib": 64 << 10, "descriptors": 8, "arena_mappings": 8, "threads": 2}
    growth = []
    for name, slack in allowed.items():
        before, after = (sorted(line[name] for line in part)[len(part) // 2] for part in (middle, last))
        if after > before + slack:
            growth.append(f"{name} has grown from {before} to {after}")
    return growth


def main():
    args = arguments(
        "soak",
        __doc__,
        minutes=(20.0, "how long to run (default: 20)"),
        seed=(int(time.time()), "seed of loaders and faults (default: the time)"),
    )
    from rustloader.supervision import deaths

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # On a busy machine the fork server may be slow to report how a worker ended.
    deaths.STATUS_AFTER = LIMIT
    logging.getLogger("rustloader").setLevel(logging.ERROR)  # hides the lines of restarts and bad samples
    print(f"seed {args.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        soak, lines, start = Soak(args.seed, folder), [], time.monotonic()
        while (spent := time.monotonic() - start) < args.minutes * 60:
            soak.epoch()
            if time.monotonic() - start >= 60 * (len(lines) + 1):
                lines.append(measure())
                counts = ", ".join(f"{n} {name}" for name, n in soak.counts.items())
                print(f"{spent / 60:4.1f} min: {counts}, {len(soak.wrong)} wrong; {lines[-1]}", flush=True)
        soak.kept.clear()
    last = measure()
    print(f"at the end: {dict(soak.counts)}, {len(soak.wrong)} wrong; {last}")
    problems = soak.wrong + growth_of(lines)
    for problem in problems:
        print(problem)
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
