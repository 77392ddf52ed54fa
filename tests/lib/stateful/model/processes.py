"""A clean process for each program: forked from this one, which has imported torch, and killed at a time limit."""

import contextlib
import faulthandler
import itertools
import os
import select
import signal
import tempfile
import time
import traceback

from . import play


class Run:
    """A program under way in a process and a session of its own."""

    def __init__(self, program, limit):
        self.program = program
        self.end = time.monotonic() + limit
        self.output = tempfile.TemporaryFile()
        self.done, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                os.close(self.done)
                status = self.child(limit)
            finally:
                os._exit(status)
        os.close(writing)

    def child(self, limit):
        os.setsid()
        os.environ.update(RUSTLOADER_STALL_START_SECONDS="0", RUSTLOADER_STALL_ITEM_SECONDS="0")
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.dup2(self.output.fileno(), 1)
        os.dup2(self.output.fileno(), 2)
        faulthandler.dump_traceback_later(0.8 * limit)
        try:
            play.run(self.program)
        except BaseException:
            os.write(2, traceback.format_exc().encode())
            return 1
        return 0

    def failure(self):
        """Ends the run and describes its failure, or returns None."""
        late = time.monotonic() > self.end
        with contextlib.suppress(ProcessLookupError):
            if late:
                os.killpg(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        os.close(self.done)
        with self.output as output:
            output.seek(0)
            text = output.read().decode(errors="replace")
        if status == 0:
            return None
        head = "it is stuck" if late else f"wait status {status}"
        return f"{head}\n{text}"


def run_all(programs, jobs, limit):
    """Runs programs, `jobs` at a time; yields (program, failure or None) as they end."""
    programs, running = iter(programs), {}
    try:
        while True:
            for program in itertools.islice(programs, jobs - len(running)):
                run = Run(program, limit)
                running[run.done] = run
            if not running:
                return
            wait = max(min(run.end for run in running.values()) - time.monotonic(), 0)
            ready, _, _ = select.select(running, [], [], wait)
            late = [done for done, run in running.items() if time.monotonic() > run.end]
            for run in [running.pop(done) for done in {*ready, *late}]:
                yield run.program, run.failure()
    finally:
        for run in running.values():
            run.end = 0.0
            run.failure()
