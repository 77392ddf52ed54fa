"""A clean process for each run: forked from this one (torch imported, no threads), and killed at a time limit."""

import contextlib
import faulthandler
import os
import pickle
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings

import torch
import torch.utils.data

from . import play, seeded

# The time limit of a run in seconds. torch's loader takes 0.1 to 2 s, or a hundred times that on a very busy machine.
LIMIT = {"fork": 240, "spawn": 400, "forkserver": 400, "remote": 400, "ray": 400}


class Run:
    """A run of one program with one loader, in a process of its own."""

    def __init__(self, program, which):
        self.program, self.which = program, which
        self.folder = tempfile.mkdtemp(prefix="differential-")
        self.limit = time.monotonic() + LIMIT[program.start_method]
        self.result, writing = os.pipe()
        sys.stdout.flush(), sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                os.close(self.result)
                self.child(writing)
                status = 0
            finally:
                os._exit(status)
        os.close(writing)
        self.received = bytearray()

    def child(self, writing):
        os.setsid()
        # Slow starts on a busy machine are not stuck workers, and any log line counts as a fallback.
        os.environ.update(RUSTLOADER_STALL_START_SECONDS="0", RUSTLOADER_STALL_ITEM_SECONDS="0")
        if self.program.start_method != "fork":
            # A worker that is asked to exit before it has imported torch gets enough time for that.
            torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 60.0
        signal.signal(signal.SIGINT, signal.default_int_handler)
        stderr = os.open(os.path.join(self.folder, "stderr"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(stderr, 2)
        faulthandler.dump_traceback_later(self.limit - time.monotonic() - 2, file=stderr)
        calls = os.path.join(self.folder, "calls")
        os.mkdir(calls)
        try:
            record = play.play(self.program, self.which, calls)
        except BaseException:
            record = {"broken": traceback.format_exc()}
        with open(writing, "wb") as f:
            pickle.dump(record, f)

    def read(self):
        """Reads the available data; returns True at its end."""
        data = os.read(self.result, 1 << 20)
        self.received += data
        return not data

    def finish(self):
        """Ends the run and returns its record, or one that says why there is none."""
        late = time.monotonic() > self.limit
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        os.close(self.result)
        os.waitpid(self.pid, 0)
        with contextlib.suppress(OSError), open(os.path.join(self.folder, "stderr")) as f:
            stderr = f.read()
        shutil.rmtree(self.folder, ignore_errors=True)
        try:
            record = pickle.loads(self.received)
        except Exception:
            record = {"broken": f"{'it took too long' if late else 'it died'}\n{stderr}"}
        record["stderr"] = stderr
        return record


def run_all(programs, jobs):
    """Runs programs, `jobs` processes at the same time; yields (program, record, ...), usually torch's record and
    rustloader's.

    ``seeded.runs`` lists the runs of a program.
    """
    warn_once()
    waiting = ((p, k, *run) for p in programs for k, run in enumerate(seeded.runs(p)))
    under_way, records = {}, {}
    try:
        while True:
            while len(under_way) < jobs and (item := next(waiting, None)):
                program, number, which, variant = item
                run = Run(variant, which)
                run.of = program, number
                under_way[run.result] = run
            if not under_way:
                return
            for run in wait(under_way):
                del under_way[run.result]
                program, number = run.of
                finished = records.setdefault(id(program), {})
                finished[number] = run.finish()
                if len(finished) == len(seeded.runs(program)):
                    del records[id(program)]
                    yield program, *(record for _, record in sorted(finished.items()))
    finally:
        for run in under_way.values():
            run.finish()


def warn_once():
    """Makes torch emit its once-per-process warnings now. torch's loader unpickles the stale batches of a reset, and
    rustloader skips them, so the warnings would come at different steps."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.sparse_coo_tensor([[0]], [1.0], (2,))
        torch.sparse_csr_tensor([0, 1], [0], [1.0])
        torch.nested.nested_tensor([])


def wait(under_way):
    """Waits, and returns the runs that have ended; if there are none, those past their limit."""
    earliest = min(run.limit for run in under_way.values())
    ready = select.select(list(under_way), [], [], max(0.0, earliest - time.monotonic()))[0]
    ended = [under_way[fd] for fd in ready if under_way[fd].read()]
    return ended or [run for run in under_way.values() if time.monotonic() > run.limit]
