"""Runs a test body in its own forked child, so that limits, filters and mounts apply to it alone."""

import contextlib
import faulthandler
import json
import logging
import os
import select
import signal
import sys
import tempfile
import time

import torch.multiprocessing
from rules import left_after, state
from support import arena_bytes, engine_batches, trim_pool

# Seconds after which a body counts as hung.
LIMIT = 120.0


def in_child(body, *args, seconds=LIMIT):
    """Runs body(*args) in a child with its own session. Returns a report: what the body returned (a dict), what it
    wrote, and the processes left behind.

    The child ends with _exit. If it hangs, it is killed, and its stacks are in the output. Its loaders fork
    their workers: Python cannot use the fork server of a parent.
    """
    start = time.monotonic()
    with tempfile.TemporaryFile() as output:
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            os.setsid()
            sys.unraisablehook = sys.__unraisablehook__
            for stream in (1, 2):
                os.dup2(output.fileno(), stream)
            torch.multiprocessing.set_start_method("fork", force=True)
            try:
                faulthandler.dump_traceback_later(seconds - 2)
                text = json.dumps(body(*args)).encode()
                faulthandler.cancel_dump_traceback_later()
                os.write(writer, text)
            except BaseException:
                import traceback

                os.write(2, traceback.format_exc().encode())
                os._exit(1)
            os._exit(0)
        os.close(writer)
        report = {"hangs": not select.select([reader], [], [], seconds)[0]}
        with open(reader, "rb") as file:
            if not report["hangs"]:
                report.update(json.loads(file.read() or b"{}"))
        report["processes"] = processes_left(pid, 0 if report["hangs"] else 20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        report["status"] = os.waitpid(pid, 0)[1]
        output.seek(0)
        report["output"] = output.read().decode(errors="replace")
    report["seconds"] = round(time.monotonic() - start, 2)
    return report


def processes_left(leader, seconds):
    """Waits up to `seconds` for a session's processes to end, except its leader. Returns how many are left."""
    end = time.monotonic() + seconds
    while (pids := session(leader) - {leader}) and time.monotonic() < end:
        time.sleep(0.01)
    return len(pids)


def session(sid):
    """Returns the pids of a session's processes that have not ended."""
    pids = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
            status, _, _, session = file.read().rpartition(")")[2].split()[:4]
            if int(session) == sid and status not in "ZX":
                pids.add(int(pid))
    return pids


def watched(body, *args):
    """Runs body(*args). Returns its value, the lines of rustloader's log, the number of batches from the engine, what
    is left behind, and the bytes of shared memory held."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(f"{record.levelname} {record.getMessage()}")
    logging.getLogger("rustloader").addHandler(handler)
    trim_pool()
    before, batches = state(), engine_batches()
    value = body(*args)
    batches = engine_batches() - batches
    leftovers = left_after(before, 20)
    return {"value": value, "log": lines, "engine": batches, "left": leftovers, "bytes": arena_bytes()}
