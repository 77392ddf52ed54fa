"""Test bodies in a forked child of their own: limits, filters and mounts that hold for them alone."""

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

from rules import left_after, state
from support import arena_bytes, engine_batches, trim_pool

# A body that takes longer hangs.
LIMIT = 120.0


def in_child(body, *args, seconds=LIMIT):
    """Runs body(*args) in a child in a session of its own: a report of what it gave back (a dict), wrote and left.

    The child leaves by _exit. What hangs is killed, and its stacks are in the output.
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
    """The number of processes of a session, its leader excluded, that are left after `seconds`."""
    end = time.monotonic() + seconds
    while (found := session(leader) - {leader}) and time.monotonic() < end:
        time.sleep(0.01)
    return len(found)


def session(sid):
    """The processes of a session that have not ended."""
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
            status, _, _, session = file.read().rpartition(")")[2].split()[:4]
            if int(session) == sid and status not in "ZX":
                found.add(int(pid))
    return found


def watched(body, *args):
    """What body(*args) returns, the lines of rustloader's log, the engine's batches, what is left behind, and how much
    shared memory."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(f"{record.levelname} {record.getMessage()}")
    logging.getLogger("rustloader").addHandler(handler)
    trim_pool()
    before, batches = state(), engine_batches()
    value = body(*args)
    batches = engine_batches() - batches
    over = left_after(before, 20)
    return {"value": value, "log": lines, "engine": batches, "left": over, "bytes": arena_bytes()}
