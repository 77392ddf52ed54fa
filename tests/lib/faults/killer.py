"""Sends SIGKILL to workers as a plan says: from a thread of their main process, or from a process beside it."""

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

# Who is killed: a worker, two at once, one and then its replacement as it starts; or a worker, after the program has
# said that it reads a state or shuts down.
HOWS = ("one", "two", "replacement", "state", "shutdown")
# Those that wait for the program's word.
ANNOUNCED = ("state", "shutdown")
# Seconds in which a replacement has to come.
REPLACED = 5.0


class Kill(NamedTuple):
    """One or two kills.

    Attributes:
        how: One of HOWS.
        after: Seconds from the beginning of the epoch; not for those that are announced.
        delay: Seconds from the word, or from the replacement's birth.
    """

    how: str
    after: float = 0.0
    delay: float = 0.0


class Plan(NamedTuple):
    """The kills of an epoch, in their order; no worker gets more than `most` of them."""

    kills: tuple[Kill, ...]
    most: int
    seed: int


def note_birth(folder):
    """What a process of a worker does first."""
    open(os.path.join(folder, f"born-{os.getpid()}"), "w").close()


def note_worker(folder, worker):
    """What a worker does before its first task."""
    path = os.path.join(folder, f"worker-{worker}")
    with open(f"{path}-{os.getpid()}", "w") as file:
        file.write(str(os.getpid()))
    os.rename(f"{path}-{os.getpid()}", path)


class Killer:
    """Has a thread or a process that kills. `parents`: the pids of the processes that start workers, which leave their
    pids in `folder`: nothing else is killed."""

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

    def say(self, word):
        self.channel.send(word)

    def end(self):
        """Ends the plan: [(how, worker, pid)] of what was killed."""
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
    """What a Killer runs."""

    def __init__(self, parents, folder, channel):
        self.parents, self.folder, self.channel = parents, folder, channel

    def serve(self):
        with contextlib.suppress(EOFError):
            while (order := self.channel.recv()) != "quit":
                self.play(order)
        self.channel.close()

    def play(self, plan):
        self.words, self.killed, self.counts = [], [], collections.Counter()
        self.most, self.rng = plan.most, random.Random(plan.seed)
        begun = time.monotonic()
        for kill in plan.kills:
            heard = lambda how=kill.how: how in self.words  # noqa: E731
            if kill.how in ANNOUNCED:
                if not self.listen(float("inf"), heard):
                    break
                time.sleep(kill.delay)
            elif not self.listen(begun + kill.after):
                break
            self.shoot(kill)
        self.listen(float("inf"))
        self.channel.send(self.killed)

    def listen(self, until, heard=None):
        """Listens until that time, or until `heard` says so; False as soon as the plan has ended."""
        while "end" not in self.words and not (heard and heard()):
            left = until - time.monotonic()
            if left <= 0:
                return True
            if self.channel.poll(None if left == float("inf") else left):
                self.words.append(self.channel.recv())
        return "end" not in self.words

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
        """The processes that have begun, those that have ended among them."""
        names = os.listdir(self.folder)
        return {int(name.removeprefix("born-")) for name in names if name.startswith("born-")}

    def alive(self):
        """{worker: pid} of those that have begun and not ended."""
        found = {}
        for name in os.listdir(self.folder):
            if match := re.fullmatch(r"worker-(\d+)", name):
                with open(os.path.join(self.folder, name)) as file:
                    pid = int(file.read())
                if self.is_child(pid):
                    found[int(match[1])] = pid
        return found

    def is_child(self, pid):
        """Whether it still runs. A pid may be given again, to something else."""
        with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{pid}/stat") as file:
            state, parent = file.read().rpartition(")")[2].split()[:2]
            return state not in "ZX" and int(parent) in self.parents
        return False
