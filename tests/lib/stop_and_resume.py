"""Trainings that are killed in mid-epoch and started again, against the same training without a stop.

A training is a command with the options `--folder` for its checkpoints and `--step-seconds`, which makes it slow enough
to be killed. It goes on from the last checkpoint in its folder, and prints `rank R step S: ...` for each step.
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
SECONDS = 600  # one that takes longer hangs


@dataclass
class Run:
    """What a training printed: a text for each (rank, step)."""

    steps: dict[tuple[int, int], str] = field(default_factory=dict)
    output: str = ""

    def read(self, line):
        self.output += line
        if line.endswith("\n") and (found := STEP.search(line)):
            key = int(found[1]), int(found[2])
            assert key not in self.steps, f"a step twice: {line}"
            self.steps[key] = found[3]

    @property
    def last(self):
        return max((step for _, step in self.steps), default=0)

    @property
    def first(self):
        return min(step for _, step in self.steps)


class Training:
    """A training and all its processes, in sessions of their own as well: they inherit a mark in their environment."""

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
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                if self.mark.encode() in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
        return found

    def kill(self):
        """SIGKILL to its process group, then to those that have left the group, until there are none."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        while pids := self.pids():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def run(self, kill_at=None, ranks=1, status=0):
        """Reads what it prints, to the end or until each rank has done the step `kill_at`: then it is killed."""
        run, last = Run(), dict.fromkeys(range(ranks), 0)
        try:
            for line in self.process.stdout:
                run.read(line)
                last |= {rank: step for rank, step in run.steps}
                if kill_at is not None and min(last.values()) >= kill_at:
                    self.kill()
            found, status = self.process.wait(), status if kill_at is None else -signal.SIGKILL
            assert found == status, f"status {found} in place of {status}\n{run.output}"
        finally:
            self.hung.cancel()
            self.kill()
            self.process.stdout.close()
        return run


def stop_and_resume(command, folder, *, kill_at, epoch, ranks=1, resume=None, mid_epoch=True):
    """Runs a training undisturbed, and again with a kill after the step `kill_at`; `epoch` is the steps of one.

    Each step of the killed and of the resumed run must have printed what it printed in the undisturbed one, and they
    must have done all of them. Returns the three runs. `resume` is the second command, if it is another one.
    """
    whole = Training([*command, "--folder", folder / "whole"]).run()
    stopped = Training([*command, "--folder", folder / "stopped", "--step-seconds", "0.05"]).run(kill_at, ranks)
    resumed = Training([*(resume or command), "--folder", folder / "stopped"]).run()
    steps = whole.last
    assert whole.steps.keys() == {(rank, step + 1) for rank in range(ranks) for step in range(steps)}, whole.output
    assert stopped.first == 1 and kill_at <= stopped.last < steps, "it was not killed in time"
    assert 1 < resumed.first <= stopped.last + 1 and bool((resumed.first - 1) % epoch) == mid_epoch, resumed.first
    for run in (stopped, resumed):
        other = sorted(
            (key, text, whole.steps.get(key)) for key, text in run.steps.items() if whole.steps.get(key) != text
        )
        assert not other, f"{len(other)} of {len(run.steps)} steps are others, first {other[0]}"
    assert stopped.steps.keys() | resumed.steps.keys() == whole.steps.keys()
