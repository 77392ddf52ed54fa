"""Workers that are killed at random moments and restarted: `make stress KIND=restarts ARGS='--epochs 500 --seed S'`.

SIGKILL goes to one worker, to two at the same time, to one and then to its replacement as it starts, to one while
`state_dict()` reads a snapshot, and to one during shutdown. Other workers are stuck, or have bad samples. Required: the
batches of each epoch equal those of an undisturbed run, bit for bit; kept batches do not change; the iterator keeps its
list of workers; the log has no other message; nothing is left behind.
`--leaks 1000` instead restarts the workers of one iterator 1000 times, and compares what the process holds.
"""

import collections
import contextlib
import gc
import logging
import multiprocessing.forkserver
import os
import re
import sys
import tempfile
import time
import warnings
from typing import NamedTuple

import torch

from . import restart_data, restart_leaks, trials
from .killer import Kill, Killer, Plan
from .restart_data import Settings
from .trials import ONLY, arguments, drawn, hash_of, quiet

# Seconds within which a trial must end.
LIMIT = 120
STALL = 0.7
METHODS = ["fork"] * 25 + ["forkserver"]
# Log messages about restarts, forks in a multi-threaded process, stalls and bad samples, and about omitted messages.
EXPLAINED = re.compile(
    "was restarted as pid|restarts a dead worker by forking|It was killed: stall_timeout is|"
    "sample.* failed and was skipped|more messages about faults were omitted"
)


class Trial(NamedTuple):
    """A loader, and which workers are killed when."""

    settings: Settings
    stateful: bool
    method: str
    pinned: bool
    bad: int
    stuck: str
    kept: bool
    by_thread: bool
    # The kills of each epoch; moments are fractions of an undisturbed epoch.
    kills: tuple

    @classmethod
    def random(cls, rng):
        flip = lambda chance=0.5: rng.random() < chance  # noqa: E731
        kinds = ["map", "map", "map", "counting map", "stream", "stateful stream"]
        settings = Settings.random(rng, kinds, most_workers=4, epochs=[1, 1, 2, 3])
        stateful = settings.kind not in ("map", "stream") or flip(0.3)
        epochs = range(settings.epochs)
        return cls(
            settings=settings,
            stateful=stateful,
            method=rng.choice(METHODS),
            pinned=flip(0.2),
            bad=rng.choice([0, 0, 1, 5]),
            stuck=rng.choice([""] * 12 + ["asleep", "with the GIL"]),
            kept=flip(0.3),
            by_thread=flip(),
            kills=tuple(kills(rng, stateful, last=epoch == epochs[-1]) for epoch in epochs),
        )


def kills(rng, stateful, last):
    """Draws the kills of an epoch."""
    hows = rng.choices(["one", "two", "replacement"], [4, 2, 2], k=rng.choice([0, 1, 1, 2]))
    drawn_kills = [Kill(how, rng.random() * 1.1, rng.choice([0, 0.002, 0.02]) * rng.random()) for how in hows]
    drawn_kills.sort(key=lambda kill: kill.after)
    if stateful and rng.random() < 0.4:
        drawn_kills.append(Kill("state", delay=rng.choice([0, 0.0002, 0.001]) * rng.random()))
    if last and rng.random() < 0.3:
        drawn_kills.append(Kill("shutdown", delay=rng.choice([0, 0.001, 0.01]) * rng.random()))
    return tuple(drawn_kills)


class Play:
    """A running trial."""

    def __init__(self, trial, folder, figures):
        self.trial, self.folder, self.figures = trial, folder, figures
        self.kept, self.wrong, self.states = [], [], []
        n = trial.settings.n
        bad = range(3, n, max(1, n // trial.bad)) if trial.bad else ()
        self.bad = frozenset(list(bad)[: trial.bad])

    def loader(self, disturbed):
        import rustloader

        trial = self.trial
        options = {"max_restarts": 20} if disturbed else {}
        if disturbed and trial.stuck:
            options["stall_timeout"] = STALL
        return trial.settings.loader(
            rustloader.StatefulDataLoader if trial.stateful else rustloader.DataLoader,
            trial.method,
            dict(
                bad=self.bad,
                stuck=trial.settings.n // 2 if trial.stuck else None,
                held=trial.stuck == "with the GIL",
                folder=self.folder if disturbed else None,
            ),
            pin_memory=trial.pinned,
            on_error="skip" if trial.bad else None,
            **options,
        )

    def run(self):
        loader, self.expected, spans = self.loader(disturbed=False), [], []
        for _ in range(self.trial.settings.epochs):
            start = time.monotonic()
            self.expected.append([(restart_data.numbers(batch), hash_of(batch)) for batch in loader])
            spans.append(time.monotonic() - start)
            seen = sorted(i for batch, _ in self.expected[-1] for i in batch)
            assert seen == loader.dataset.good, "the undisturbed run is wrong"
        end_persistent_workers(loader)
        parents = {os.getpid(), multiprocessing.forkserver._forkserver._forkserver_pid}
        killer = Killer(parents, self.folder, self.trial.by_thread)
        try:
            self.disturbed(killer, spans)
        finally:
            killer.close()
        if any(hash_of(batch) != before for batch, before in self.kept):
            self.wrong.append("a kept batch has changed")
        return self.wrong

    def disturbed(self, killer, spans):
        import rustloader

        loader = self.loader(disturbed=True)
        for epoch, kills in enumerate(self.trial.kills):
            shots = [kill._replace(after=kill.after * spans[epoch]) for kill in kills]
            # The third death that a sample is part of makes it poison, and being stuck causes one of them.
            killer.begin(Plan(tuple(shots), 1 if self.trial.stuck else 2, self.trial.settings.seed + epoch))
            try:
                self.epoch(loader, epoch, killer, {kill.how for kill in kills})
            finally:
                killed = killer.end()
            self.figures["epochs"] += 1
            self.figures.update(f"killed: {how}" for how, _, _ in killed)
        faults = rustloader.stats(loader).faults
        self.figures["restarts"] += faults.restarts
        self.figures["stalls"] += faults.stalls
        end_persistent_workers(loader)
        # Not earlier: resuming seeds the generators.
        for state in self.states:
            self.resume(*state)

    def epoch(self, loader, epoch, killer, hows):
        rng = torch.Generator().manual_seed(self.trial.settings.seed + epoch)
        expected = self.expected[epoch]
        at = int(torch.randint(max(1, len(expected)), (), generator=rng))
        iterator = iter(loader)
        workers, delivered, state = iterator._workers, [], None
        for batch in iterator:
            delivered.append((restart_data.numbers(batch), hash_of(batch)))
            if self.trial.kept and not self.trial.pinned and len(self.kept) < 10:
                self.kept.append((batch, delivered[-1][1]))
            del batch
            if len(delivered) == at + 1 and "state" in hows:
                killer.announce("state")
                until = time.monotonic() + 0.003
                while state is None or time.monotonic() < until:
                    state = loader.state_dict()
            if len(delivered) == at + 1 and "shutdown" in hows:
                killer.announce("shutdown")
                iterator._shutdown_workers()
                self.compare(epoch, delivered, expected, whole=False)
                break
        else:
            self.compare(epoch, delivered, expected)
        if iterator._workers is not workers or len(workers) != self.trial.settings.workers:
            self.wrong.append("the iterator's list of workers was replaced, or has changed its length")
        if state is not None:
            self.states.append((state, epoch, delivered[: at + 1]))

    def resume(self, state, epoch, before):
        """Resumes an undisturbed loader from the state."""
        loader = self.loader(disturbed=False)
        loader.load_state_dict(state)
        rest = [(restart_data.numbers(batch), hash_of(batch)) for batch in loader]
        end_persistent_workers(loader)
        self.compare(f"{epoch}, resumed after {len(before)} batches", before + rest, self.expected[epoch])
        self.figures["resumed"] += 1

    def compare(self, name, delivered, expected, whole=True):
        if self.trial.settings.in_order:
            right = delivered == (expected if whole else expected[: len(delivered)])
        else:
            more, fewer = map(collections.Counter, (delivered, expected))
            right = not more - fewer and (not whole or not fewer - more)
        if not right:
            numbers = [[batch for batch, _ in batches] for batches in (delivered, expected)]
            text = (
                f"got {numbers[0]}, expected {numbers[1]}"
                if numbers[0] != numbers[1]
                else f"wrong contents, {numbers[0]}"
            )
            self.wrong.append(f"epoch {name}: {text}")


def end_persistent_workers(loader):
    """Ends the persistent workers of a loader."""
    iterator, loader._iterator = loader._iterator, None
    if iterator is not None:
        iterator._shutdown_workers()


class Log(logging.Handler):
    """Collects unexpected log messages."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines = []

    def emit(self, record):
        if not EXPLAINED.search(record.getMessage()):
            self.lines.append(f"logged: {record.getMessage()}")

    def take(self):
        lines, self.lines = self.lines, []
        return lines


def run_all(args, log):
    """Runs trials for the required number of epochs. Returns (the number of failed trials, figures)."""
    from pinning_support import pinning
    from rules import left_after, state

    figures, before = collections.Counter(), state()

    def play(trial, done):
        nonlocal before
        if figures["epochs"] >= args.epochs:
            return None
        figures["trials"] = done
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="restarts-"))
            if trial.pinned:
                stack.enter_context(pinning())
            wrong = Play(trial, folder, figures).run()
        if (done % 20 == 0 or wrong) and (leftovers := left_after(before, 5)):
            wrong.append(f"left behind: {leftovers}")
            before = state()
        return wrong

    def progress(done, failed):
        if done % 50 == 0:
            print(f"{done} trials, {failed} wrong, {dict(figures)}", flush=True)

    _, failed = trials.run_all(drawn(Trial, args.epochs, args), play, LIMIT, progress, after=log.take)
    if leftovers := left_after(before, 10):
        print(f"WRONG at the end\nleft behind: {leftovers}")
        failed += 1
    return failed, figures


def main():
    args = arguments(
        "restarts",
        __doc__,
        epochs=(100, "the least number of epochs"),
        only=ONLY,
        leaks=(int, "instead restart the workers of one iterator this many times"),
        kind=(str, f"with --leaks: test only this kind of loader, one of {', '.join(restart_leaks.KINDS)}"),
    )
    quiet()
    # A state read after the last batch leads to this warning.
    warnings.filterwarnings("ignore", "an epoch of 0 batches")
    import rustloader  # noqa: F401

    multiprocessing.set_forkserver_preload(["torch", "numpy", "rustloader"])
    multiprocessing.forkserver.ensure_running()
    multiprocessing.resource_tracker.ensure_running()
    gc.freeze()
    logger, log = logging.getLogger("rustloader"), Log()
    logger.addHandler(log)
    logger.propagate = False
    if args.leaks:
        sys.exit(bool(restart_leaks.run(args.leaks, args.kind)))
    start = time.monotonic()
    failed, figures = run_all(args, log)
    shots = sum(count for name, count in figures.items() if name.startswith("killed"))
    print(f"{figures['trials']} trials, {failed} wrong, {time.monotonic() - start:.0f} s: {dict(figures)}")
    # Kills at the end of an epoch need no restart. If most kills came too late, the driver would prove nothing.
    if args.only is None and shots >= 20 and figures["restarts"] < shots / 4:
        print(f"WRONG {shots} kills, but only {figures['restarts']} restarts")
        failed += 1
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
