"""Remote workers whose connections fail: `make stress KIND=connections`, `KIND=ray`.

Connections are closed, reset, half-closed, delayed, fragmented or silenced, during the handshake or at any byte after
it; workers are killed or stopped. With `--ray` the workers are actors of a cluster of two nodes, one of which may be
lost, and main processes are killed as well. Required: the batches of each epoch equal those of undisturbed local
workers, bit for bit; the log has no other message; nothing is left behind.
"""

import collections
import contextlib
import dataclasses
import functools
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import remote_support
from remote_support import LoopbackContext

from . import trials
from .proxy import FATAL, KINDS, Fault, Proxy
from .restart_data import Settings
from .restarts import Log, end_persistent_workers
from .trials import ONLY, arguments, drawn, hash_of, quiet

# Seconds within which a trial must end, and within which workers must be gone.
LIMIT = 200
GONE = 40
STALL = 5.0
# More bytes than any handshake has.
HANDSHAKE = 100_000
# The most deaths in a trial: at the third one, a sample counts as poison.
DEATHS = 2


class Disturbed:
    """A context whose connections go through proxies, which inject `faults` in the order of the launches."""

    def disturb(self, faults):
        self.faults, self.proxies = iter(faults), []
        return self

    def launch(self, blob, call):
        fault = next(self.faults, Fault())
        if fault.kind != "none":
            self.proxies.append(Proxy(call.address, (call.address, call.port), fault))
            call = dataclasses.replace(call, port=self.proxies[-1].port)
        return super().launch(blob, call)

    def close(self):
        for proxy in self.proxies:
            proxy.close()


def serve(path, call):
    """Runs a worker that writes nothing to stderr if its connection is cut during the handshake."""
    try:
        remote_support.serve_file(path, call)
    except ConnectionError:
        sys.exit(1)


class Loopback(Disturbed, LoopbackContext):
    """Workers are processes of this machine."""

    def __init__(self, folder):
        super().__init__(folder, serve)

    def close(self):
        super().close()
        for worker in self.workers:
            worker.process.join(GONE)
            if worker.process.exitcode is None:
                worker.kill()
                raise RuntimeError(f"worker {worker.process.pid} is left behind")


class Trial(NamedTuple):
    """A loader, the faults of its connections in the order of their starts, and what happens to its workers when."""

    settings: Settings
    faults: tuple[Fault, ...]
    # (action, moment as a fraction of the batches of all epochs)
    disruptions: tuple[tuple[str, float], ...]

    @classmethod
    def random(cls, rng, on_ray=False):
        settings = Settings.random(rng, ["map", "map", "stream", "stateful stream"], most_workers=2, epochs=[1, 1, 2])
        faults, disruptions = [], []
        for _ in range(rng.randint(1, 4)):
            fault = Fault(
                rng.choice(KINDS),
                rng.choice([rng.randrange(1000), rng.randrange(20_000), rng.randrange(1_000_000)]),
                rng.choice([0.001, 0.02, 0.5]),
                rng.choice([1, 7, 100]),
            )
            if fault.kind == "silence":
                # Silence during the handshake would run into the time limit of a start, which is an error.
                fault = fault._replace(after=max(fault.after, HANDSHAKE))
            deaths = sum(it.kind in FATAL for it in faults)
            faults.append(fault if fault.kind not in FATAL or deaths < DEATHS else Fault())
        actions = ["kill", "kill", "stop", "kill as it starts"] + ["lose the node"] * 2 * on_ray
        for _ in range(DEATHS - sum(it.kind in FATAL for it in faults)):
            if rng.random() < 0.5:
                disruptions.append((rng.choice(actions), rng.random()))
        return cls(settings, tuple(faults), tuple(sorted(disruptions, key=lambda disruption: disruption[1])))


class Play:
    """A running trial. `make_context(folder)` returns its context, and `lose` loses a node of its cluster."""

    def __init__(self, trial, folder, figures, make_context, lose=None):
        self.trial, self.folder, self.figures, self.lose = trial, folder, figures, lose
        self.make_context = make_context
        self.wrong = []

    def loader(self, context, **options):
        import rustloader

        return self.trial.settings.loader(rustloader.DataLoader, context, **options)

    def run(self):
        loader = self.loader("fork")
        expected = [list(map(hash_of, loader)) for _ in range(self.trial.settings.epochs)]
        end_persistent_workers(loader)
        context = self.make_context(Path(self.folder)).disturb(self.trial.faults)
        self.disturbed(context, expected)
        context.close()
        self.figures.update(f"fault: {proxy.fault.kind}" for proxy in context.proxies if proxy.happened)
        return self.wrong

    def disturbed(self, context, expected):
        import rustloader

        loader = None
        while loader is None:
            loader = self.all_epochs(context, expected)
        faults = rustloader.stats(loader).faults
        self.figures["epochs"] += len(expected)
        self.figures["restarts"] += faults.restarts
        self.figures["stalls"] += faults.stalls
        end_persistent_workers(loader)

    def all_epochs(self, context, expected):
        """Runs all epochs of a loader, and returns it. Returns None if an iterator's workers failed to start: restarts
        do not cover a start, so the caller tries again with a new loader."""
        loader = self.loader(context, max_restarts=20, stall_timeout=STALL)
        total = sum(map(len, expected))
        disruptions = [(action, int(share * total)) for action, share in self.trial.disruptions]
        seen = 0
        for epoch, wanted in enumerate(expected):
            try:
                iterator = iter(loader)
            except RuntimeError as error:
                if "cannot start" not in str(error) or not any(proxy.happened for proxy in context.proxies):
                    raise
                self.figures["failed starts"] += 1
                return None
            delivered = []
            for batch in iterator:
                delivered.append(hash_of(batch))
                seen += 1
                while disruptions and disruptions[0][1] < seen:
                    self.strike(disruptions.pop(0)[0], iterator)
            self.compare(epoch, delivered, wanted)
            del iterator
        return loader

    def strike(self, action, iterator):
        worker = random.Random(self.trial.settings.seed).choice(iterator._workers)
        self.figures[action] += 1
        if action == "lose the node":
            self.lose()
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.pid, signal.SIGSTOP if action == "stop" else signal.SIGKILL)

    def compare(self, epoch, delivered, wanted):
        if not self.trial.settings.in_order:
            delivered, wanted = collections.Counter(delivered), collections.Counter(wanted)
        if delivered != wanted:
            self.wrong.append(f"epoch {epoch}: wrong batches ({len(delivered)}, expected {len(wanted)})")


# Ray

MAIN = """
import sys
from faults import connections, restart_data
import ray, rustloader, rustloader.ray

ray.init(address=sys.argv[1], log_to_driver=False)
data = restart_data.Samples(1_000_000, 100, 0.001, False)
context = rustloader.ray.RayContext(num_cpus=0.5)
loader = rustloader.DataLoader(data, batch_size=4, num_workers=2, multiprocessing_context=context)
print("starts", flush=True)
for batch in loader:
    print("batch", flush=True)
"""


def actors(folder):
    """Returns a context whose workers are Ray actors."""
    import rustloader.ray

    class Actors(Disturbed, rustloader.ray.RayContext):
        pass

    return Actors(num_cpus=1)


def kill_main(address, rng, figures):
    """Kills a main process at a random moment, while its workers start or later."""
    command = [sys.executable, "-c", MAIN, address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        process.stdout.readline()
        if rng.random() < 0.5:
            time.sleep(rng.random() * 3)
        else:
            [process.stdout.readline() for _ in range(rng.randrange(1, 50))]
        process.kill()
    figures["kill main"] += 1


def actors_left():
    """Waits for the actors of this network namespace to end, and returns the pids of those that do not."""
    from ray_cluster import actors

    deadline = time.monotonic() + GONE
    while (pids := actors()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return pids


def run_on_ray(args, log):
    """Runs trials on a cluster. Returns (the number of failed trials, figures)."""
    import ray
    import ray_cluster

    rng = random.Random(args.seed)
    with ray_cluster.folder():
        nodes = ray_cluster.Nodes()
        ray.init(address=nodes.address, log_to_driver=False)

        def between(figures):
            nodes.complete()
            if rng.random() < 0.2 and args.only is None:
                kill_main(nodes.address, rng, figures)
            pids = actors_left()
            return [f"left behind: {pids}"] if pids else []

        play = functools.partial(Play, make_context=actors, lose=nodes.lose)
        try:
            return run_all(args, log, play, functools.partial(Trial.random, on_ray=True), between)
        finally:
            ray.shutdown()
            nodes.cluster.shutdown()


# Drivers


def run_all(args, log, play, make, between):
    """Runs trials for the required number of epochs or minutes. Returns (the number of failed trials, figures)."""
    figures, start = collections.Counter(), time.monotonic()
    trial_class = type("RandomTrial", (), {"random": staticmethod(make)})

    def run(trial, done):
        if figures["epochs"] >= args.epochs or (args.minutes and time.monotonic() - start > 60 * args.minutes):
            return None
        figures["trials"] = done
        with tempfile.TemporaryDirectory(prefix="connections-") as folder:
            return play(trial, folder, figures).run()

    def after():
        return log.take() + between(figures)

    def progress(done, failed):
        if done % 20 == 0:
            print(f"{done} trials, {failed} wrong, {dict(figures)}", flush=True)

    _, failed = trials.run_all(drawn(trial_class, args.epochs, args), run, LIMIT, progress, after=after)
    return failed, figures


def main():
    args = arguments(
        "connections",
        __doc__,
        epochs=(100, "the least number of epochs"),
        minutes=(float, "stop after this time"),
        only=ONLY,
        ray=(False, "run the workers as actors of a Ray cluster"),
    )
    quiet()
    logger, log = logging.getLogger("rustloader"), Log()
    import rustloader  # noqa: F401

    logger.addHandler(log)
    logger.propagate = False
    start = time.monotonic()
    if args.ray:
        failed, figures = run_on_ray(args, log)
    else:
        failed, figures = run_all(args, log, functools.partial(Play, make_context=Loopback), Trial.random, lambda _: [])
    print(f"{figures['trials']} trials, {failed} wrong, {time.monotonic() - start:.0f} s: {dict(figures)}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
