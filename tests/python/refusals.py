"""Runs programs under failpoints, each in a fresh child of a process that has imported torch.

As a script it reads cases from stdin and writes reports to stdout, one JSON document a line.
"""

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


def reports_of(cases, scripts=2):
    """The reports of cases, which are the arguments of `run`, in their order; made by scripts that share the work."""
    if not os.path.exists(CORE):
        reason = "the extension with failpoints is not built: make failpoints"
        (pytest.fail if os.environ.get("RUSTLOADER_REQUIRE_ALL") else pytest.skip)(reason)
    path = os.pathsep.join([HERE, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    started = []
    for at in range(scripts):
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        script = subprocess.Popen([sys.executable, __file__], env=dict(os.environ, PYTHONPATH=path), text=True, **pipes)
        started.append(script)
        script.stdin.write("".join(json.dumps(case) + "\n" for case in cases[at::scripts]))
        script.stdin.close()
        script.stdin = None
    found = [None] * len(cases)
    for at, script in enumerate(started):
        out, err = script.communicate(timeout=3600)
        assert script.returncode == 0 and not err, err
        found[at::scripts] = map(json.loads, out.splitlines())
    return found


def load_core():
    """Has `rustloader` work with the extension that has failpoints. To be called before anything of it is used."""
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
    """What a program does while failpoints are armed in "main" or in each "worker"."""
    import programs
    from isolation import watched

    from rustloader import _core

    os.environ.update(environment)
    told = tempfile.TemporaryFile("r")
    programs.CALLS = f"/proc/{os.getpid()}/fd/{told.fileno()}"  # also for a spawned worker
    # A process arms what it finds at its first call.
    if where == "worker":
        _core._failpoint_calls()
    os.environ["RUSTLOADER_FAILPOINT"] = points
    if where == "main":
        _core._failpoint_calls()
        del os.environ["RUSTLOADER_FAILPOINT"]
    report = watched(getattr(programs, program))
    # The most that one process has made.
    calls = Counter()
    if where == "main":
        calls.update(_core._failpoint_calls())
    else:
        for line in told:
            calls |= Counter(json.loads(line))
    calls = +calls
    return {**report, "called": sorted(calls), "calls": calls}


if __name__ == "__main__":
    main()
