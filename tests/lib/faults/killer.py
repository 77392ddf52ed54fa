"""Sends SIGKILL to workers according to a plan, from a thread of their main process or from a separate process."""

import collections
import contextlib
import multiprocessing
import os
import random
import re
import signal
import threading
import time
from typing import NamedTuple

# Who is killed: one worker; two at the same time; one, and then its replacement as it starts; or one after the program
# has announced that it reads a state or shuts down.
HOWS = ("one", "two", "replacement", "state", "shutdown")
# Kills that wait for the program's announcement.
ANNOUNCED = ("state", "shutdown")
# Seconds within which a replacement must start.
REPLACED = 5.0


class Kill(NamedTuple):
    """One or two kills.

    Attributes:
        how: One of HOWS.
        after: Seconds from the beginning of the epoch; unused if announced.
        delay: Seconds from the announcement, or from the replacement's birth.
    """

    how: str
    after: float = 0.0
    delay: float = 0.0


class Plan(NamedTuple):
    """The kills of an epoch, in order; no worker is killed more than `most` times."""

    kills: tuple[Kill, ...]
    most: int
    seed: int


def note_birth(folder):
    """A worker process calls this first."""
    open(os.path.join(folder, f"born-{os.getpid()}"), "w").close()


def note_worker(folder, worker):
    """A worker calls this before its first task."""
    path = os.path.join(folder, f"worker-{worker}")
    with open(f"{path}-{os.getpid()}", "w") as file:
        file.write(str(os.getpid()))
    os.rename(f"{path}-{os.getpid()}", path)


class Killer:
    """Controls a thread or process that kills. Its only victims are children of `parents` (pids) whose pids are in
    `folder`."""

    def __init__(self, parents, folder, as_thread):
        self.channel, other = multiprocessing.Pipe()
        self.pid = self.thread = None
        if as_thread:
            self.thread = threading.Thread(target=Shooter(parents, folder, other).serve, daemon=True)
            self.thread.start()
            return
        self.pid = os.fork()
        if self.pid == 0:
            self.channel.close()
            try:
                Shooter(parents, folder, other).serve()
            finally:
                os._exit(0)
        other.close()

    def begin(self, plan):
        self.channel.send(plan)

    def announce(self, announcement):
        self.channel.send(announcement)

    def end(self):
        """Ends the plan. Returns [(how, worker, pid)] of the killed processes."""
        self.channel.send("end")
        return self.channel.recv()

    def close(self):
        self.channel.send("quit")
        if self.thread is not None:
            self.thread.join()
        else:
            os.waitpid(self.pid, 0)
        self.channel.close()


class Shooter:
    """Runs the plans of a Killer."""

    def __init__(self, parents, folder, channel):
        self.parents, self.folder, self.channel = parents, folder, channel

    def serve(self):
        with contextlib.suppress(EOFError):
            while (order := self.channel.recv()) != "quit":
                self.play(order)
        self.channel.close()

    def play(self, plan):
        self.announced, self.killed, self.counts = [], [], collections.Counter()
        self.most, self.rng = plan.most, random.Random(plan.seed)
        began = time.monotonic()
        for kill in plan.kills:
            heard = lambda how=kill.how: how in self.announced  # noqa: E731
            if kill.how in ANNOUNCED:
                if not self.listen(float("inf"), heard):
                    break
                time.sleep(kill.delay)
            elif not self.listen(began + kill.after):
                break
            self.shoot(kill)
        self.listen(float("inf"))
        self.channel.send(self.killed)

    def listen(self, until, heard=None):
        """Reads announcements until time `until`, or until `heard` is true. Returns False if the plan has ended."""
        while "end" not in self.announced and not (heard and heard()):
            left = until - time.monotonic()
            if left <= 0:
                return True
            if self.channel.poll(None if left == float("inf") else left):
                self.announced.append(self.channel.recv())
        return "end" not in self.announced

    def shoot(self, kill):
        before = self.born()
        victims = sorted((worker, pid) for worker, pid in self.alive().items() if self.counts[worker] < self.most)
        self.rng.shuffle(victims)
        victims = victims[: 2 if kill.how == "two" else 1]
        for victim in victims:
            self.end(kill.how, *victim)
        if kill.how != "replacement" or not victims or self.counts[victims[0][0]] >= self.most:
            return
        until = time.monotonic() + REPLACED
        while not (new := self.born() - before):
            if not self.listen(min(until, time.monotonic() + 0.0002)) or time.monotonic() > until:
                return
        time.sleep(kill.delay)
        if self.is_child(pid := new.pop()):
            self.end(kill.how, victims[0][0], pid)

    def end(self, how, worker, pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            self.counts[worker] += 1
            self.killed.append((how, worker, pid))

    def born(self):
        """Returns the pids of all processes that have started, even if they have ended."""
        names = os.listdir(self.folder)
        return {int(name.removeprefix("born-")) for name in names if name.startswith("born-")}

    def alive(self):
        """Returns {worker: pid} of the workers that have started and not ended."""
        pids = {}
        for name in os.listdir(self.folder):
            if match := re.fullmatch(r"worker-(\d+)", name):
                with open(os.path.join(self.folder, name)) as file:
                    pid = int(file.read())
                if self.is_child(pid):
                    pids[int(match[1])] = pid
        return pids

    def is_child(self, pid):
        """Whether the process still runs. The pid may have been reused by an unrelated process."""
        with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{pid}/stat") as file:
            state, parent = file.read().rpartition(")")[2].split()[:2]
            return state not in "ZX" and int(parent) in self.parents
        return False
