"""Runs programs under failpoints, each in a fresh child of a process that has imported torch.

As a script it reads cases from stdin and writes reports to stdout, one JSON document per line.
"""

import functools
import gc
import importlib.machinery
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections import Counter

import pytest

HERE = os.path.dirname(os.path.abspath(__file__))
CORE = os.path.join(HERE, "..", "..", "target", "failpoints", "librustloader.so")


class Runner:
    """Runs this process's cases in a script, which starts with the first case and ends with this process."""

    def __init__(self):
        self.process = self.errors = None

    def start(self):
        if not os.path.exists(CORE):
            reason = "the extension with failpoints is not built: make failpoints"
            (pytest.fail if os.environ.get("RUSTLOADER_REQUIRE_ALL") else pytest.skip)(reason)
        path = os.pathsep.join([HERE, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        self.errors = tempfile.TemporaryFile("r")
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            env=dict(os.environ, PYTHONPATH=path),
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
        )

    def files(self):
        """Returns this process's descriptors for the script."""
        process = self.process
        return {file.fileno() for file in (process.stdin, process.stdout, self.errors)} if process else set()

    def report(self, case):
        if self.process is None:
            self.start()
        self.process.stdin.write(json.dumps(case) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        self.errors.seek(0)
        errors = self.errors.read()
        assert line and not errors, errors
        return json.loads(line)

    def close(self):
        if self.process is not None:
            self.process.communicate()
            self.errors.close()
            self.process = None


RUNNER = Runner()


@functools.cache
def report_of(*case):
    """Returns the report of a case. `case` is the arguments of `run`, with the environment as pairs."""
    return RUNNER.report(case)


def load_core():
    """Makes `rustloader` use the extension with failpoints. Call this before it is used."""
    import rustloader

    loader = importlib.machinery.ExtensionFileLoader("rustloader._core", CORE)
    core = importlib.util.module_from_spec(importlib.util.spec_from_loader("rustloader._core", loader))
    loader.exec_module(core)
    sys.modules["rustloader._core"] = rustloader._core = core


def main():
    load_core()
    import programs  # noqa: F401
    import torch
    from isolation import in_child

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "This DataLoader will create")
    gc.freeze()
    for line in sys.stdin:
        print(json.dumps(in_child(run, *json.loads(line))), flush=True)


def run(program, points="", where="main", environment=()):
    """Runs a program while failpoints are armed in "main" or in each "worker". Returns a report."""
    import programs
    from isolation import watched

    from rustloader import _core

    os.environ.update(environment)
    worker_calls = tempfile.TemporaryFile("r")
    programs.CALLS = f"/proc/{os.getpid()}/fd/{worker_calls.fileno()}"  # also for a spawned worker
    # A process reads its failpoints at the first call.
    if where == "worker":
        _core._failpoint_calls()
    os.environ["RUSTLOADER_FAILPOINT"] = points
    if where == "main":
        _core._failpoint_calls()
        del os.environ["RUSTLOADER_FAILPOINT"]
    report = watched(getattr(programs, program))
    # For each kind, the most calls that one process has made.
    calls = Counter()
    if where == "main":
        calls.update(_core._failpoint_calls())
    else:
        for line in worker_calls:
            calls |= Counter(json.loads(line))
    calls = +calls
    return {**report, "called": sorted(calls), "calls": calls}


if __name__ == "__main__":
    main()
