"""Compares training runs that are killed in mid-epoch and resumed with an uninterrupted run.

A training is a command with the options `--folder` for its checkpoints and `--step-seconds`, which makes it slow enough
to be killed. It resumes from the last checkpoint in its folder, and prints `rank R step S: ...` for each step.
"""

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

STEP = re.compile(r"rank (\d+) step (\d+): (.*)")
MARK = "RUSTLOADER_TEST_TRAINING"
SECONDS = 600  # after which a training counts as hung


@dataclass
class Run:
    """The output of a training: a text for each (rank, step)."""

    steps: dict[tuple[int, int], str] = field(default_factory=dict)
    output: str = ""

    def read(self, line):
        self.output += line
        if line.endswith("\n") and (found := STEP.search(line)):
            key = int(found[1]), int(found[2])
            assert key not in self.steps, f"a step came twice: {line}"
            self.steps[key] = found[3]

    @property
    def last(self):
        return max((step for _, step in self.steps), default=0)

    @property
    def first(self):
        return min(step for _, step in self.steps)


class Training:
    """A training and all its processes, including those in other sessions. They inherit a mark in their environment."""

    def __init__(self, command):
        self.mark = f"{MARK}={uuid.uuid4().hex}"
        name, _, value = self.mark.partition("=")
        self.process = subprocess.Popen(
            [str(part) for part in command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, name: value},
        )
        self.hung = threading.Timer(SECONDS, self.kill)
        self.hung.start()

    def pids(self):
        pids = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                if self.mark.encode() in path.read_bytes().split(b"\0"):
                    pids.append(int(path.parent.name))
        return pids

    def kill(self):
        """Sends SIGKILL to its process group, then to processes that have left the group, until none are left."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        while pids := self.pids():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def run(self, kill_at=None, ranks=1, status=0):
        """Reads its output to the end, or until each rank has printed step `kill_at`, and then kills it."""
        run, last = Run(), dict.fromkeys(range(ranks), 0)
        try:
            for line in self.process.stdout:
                run.read(line)
                last |= {rank: step for rank, step in run.steps}
                if kill_at is not None and min(last.values()) >= kill_at:
                    self.kill()
            actual, status = self.process.wait(), status if kill_at is None else -signal.SIGKILL
            assert actual == status, f"status {actual} instead of {status}\n{run.output}"
        finally:
            self.hung.cancel()
            self.kill()
            self.process.stdout.close()
        return run


def stop_and_resume(command, folder, *, kill_at, epoch, ranks=1, then=(), mid_epoch=True):
    """Runs a training to its end, and again with a kill after step `kill_at`. An epoch has `epoch` steps.

    Each step of a killed and of a resumed run must print what it prints in the uninterrupted run, and together they
    must do all steps. `then` are the resumed runs, if they differ: their commands, and the steps of further kills.
    """
    whole, done, last = Training([*command, "--folder", folder / "whole"]).run(), set(), None
    steps = whole.last
    assert whole.steps.keys() == {(rank, step + 1) for rank in range(ranks) for step in range(steps)}, whole.output
    for part, end in [(command, kill_at), *(then or [(command, None)])]:
        slowly = [] if end is None else ["--step-seconds", "0.2"]
        run = Training([*part, "--folder", folder / "stopped", *slowly]).run(end, ranks)
        assert end is None or end <= run.last < steps, "it was not killed in time"
        if last is None:
            assert run.first == 1
        else:
            assert 1 < run.first <= last + 1 and bool((run.first - 1) % epoch) == mid_epoch, run.first
        different = sorted(
            (key, text, whole.steps.get(key)) for key, text in run.steps.items() if whole.steps.get(key) != text
        )
        assert not different, f"{len(different)} of {len(run.steps)} steps differ, first {different[0]}"
        done, last = done | run.steps.keys(), run.last
    assert done == whole.steps.keys()
