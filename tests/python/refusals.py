"""Loader programs under failpoints, each case in a fresh child of a process that has imported torch: for test_refusals.

A script with this as its main module reads cases from stdin and writes reports to stdout, one JSON document a line.
"""

import contextlib
import faulthandler
import gc
import importlib.machinery
import importlib.util
import json
import logging
import os
import select
import signal
import sys
import tempfile
import time

CORE = os.path.join(os.path.dirname(__file__), "..", "..", "target", "failpoints", "librustloader.so")
# A case that takes longer hangs.
LIMIT = 20.0


def load_core():
    """Has `rustloader` work with the extension that has failpoints. To be called before anything of it is used."""
    import rustloader

    loader = importlib.machinery.ExtensionFileLoader("rustloader._core", CORE)
    core = importlib.util.module_from_spec(importlib.util.spec_from_loader("rustloader._core", loader))
    loader.exec_module(core)
    sys.modules["rustloader._core"] = rustloader._core = core


def main():
    load_core()
    import torch

    torch.set_num_threads(1)
    import programs  # noqa: F401
    gc.freeze()
    for line in sys.stdin:
        print(json.dumps(in_child(json.loads(line))), flush=True)


def in_child(case):
    """Runs one case in a child of its own session, which is ended when it hangs."""
    start = time.monotonic()
    with tempfile.TemporaryFile() as output:
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            os.setsid()
            for stream in (1, 2):
                os.dup2(output.fileno(), stream)
            code = 1
            with contextlib.suppress(BaseException):
                faulthandler.dump_traceback_later(LIMIT - 2)
                text = json.dumps(run(**case)).encode()
                faulthandler.cancel_dump_traceback_later()
                os.write(writer, text)
                code = 0
            os._exit(code)
        os.close(writer)
        report = {"hangs": not select.select([reader], [], [], LIMIT)[0]}
        if not report["hangs"]:
            with open(reader, "rb") as file:
                report.update(json.loads(file.read() or b"{}"))
        else:
            os.close(reader)
        end = time.monotonic() + 5
        while (left := session(pid) - {pid}) and time.monotonic() < end and not report["hangs"]:
            time.sleep(0.01)
        report["processes"] = len(left)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        report["status"] = os.waitpid(pid, 0)[1]
        output.seek(0)
        report["output"] = output.read().decode(errors="replace")
    report["seconds"] = round(time.monotonic() - start, 2)
    return report


def session(sid):
    """The processes of a session that have not ended."""
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
            state, _, _, session = file.read().rpartition(")")[2].split()[:4]
            if int(session) == sid and state not in "ZX":
                found.add(int(pid))
    return found


def run(program, points, where):
    """What a program does while failpoints are armed `where`: in "main" or in each "worker"."""
    import programs
    from conftest import left, state
    from rustloader import _core
    from support import trim_pool
    from torch.utils.data import _utils

    _utils.MP_STATUS_CHECK_INTERVAL = 1.0
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("rustloader").addHandler(handler)
    before = state()
    if where == "worker":
        _core._failpoint_calls()
    os.environ["RUSTLOADER_FAILPOINT"] = points
    if where == "main":
        _core._failpoint_calls()
        del os.environ["RUSTLOADER_FAILPOINT"]
    calls = [_core._failpoint_calls()]
    outcome = getattr(programs, program)()
    calls.append(_core._failpoint_calls())
    trim_pool()
    end = time.monotonic() + 2
    while (over := left(before, state())) and time.monotonic() < end:
        time.sleep(0.02)
        trim_pool()
    called = sorted(kind for kind in calls[1] if calls[1][kind] > calls[0][kind])
    return {"outcome": outcome, "log": lines, "left": over, "called": called, "engine": _core.engine_batches()}


if __name__ == "__main__":
    main()
