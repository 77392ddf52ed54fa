"""Main processes to be killed and interrupted: forked from one that has torch imported, and ended as a script ends.

A driver calls `run_all`. In each new process that answers a program, and the driver has to return all the way out of
its module, with the program run on that way: so the interpreter's exit is the real one.
"""

import contextlib
import faulthandler
import gc
import json
import multiprocessing
import multiprocessing.forkserver
import os
import select
import shutil
import signal
import sys
import tempfile
import time

from support import shared_memory_of

from .scenes import use_the_parents_fork_server
from .trials import quiet

# Seconds after which a process counts as one that hangs.
LIMIT = 60.0


def prepare():
    """To be called once, before the first fork."""
    from support import DataLoader  # noqa: F401

    import rustloader  # noqa: F401

    quiet()
    multiprocessing.set_forkserver_preload(["torch", "numpy", "rustloader"])
    # Helpers of multiprocessing are nothing that a trial leaves behind.
    multiprocessing.forkserver.ensure_running()
    multiprocessing.resource_tracker.ensure_running()
    # An exit walks all that is there, twice.
    gc.freeze()


class Main:
    """A main process under way, seen by its driver."""

    def __init__(self, pid, words, folder):
        self.pid, self.words, self.folder = pid, words, folder
        self.told, self.rest, self.over = [], b"", False

    def listen(self, seconds, until=lambda told: False):
        """Reads the process's output for `seconds`, until `until` accepts it, or until the process closes its end."""
        end = time.monotonic() + seconds
        while not self.over and not until(self.told) and (left := end - time.monotonic()) >= 0:
            if select.select([self.words], [], [], left)[0]:
                data = os.read(self.words, 1 << 16)
                *lines, self.rest = (self.rest + data).split(b"\n")
                self.told += map(json.loads, lines)
                self.over = not data

    def said(self, kind):
        """What was reported under this name."""
        return [value for name, value in self.told if name == kind]

    def workers(self):
        """The processes that belong to it and have not ended: its session, and what the fork server has started."""
        from isolation import session
        from support import children_of, gone

        server = multiprocessing.forkserver._forkserver._forkserver_pid
        return {pid for pid in session(self.pid) | children_of(server) if not gone(pid)} - {self.pid}

    def patience(self, seconds):
        """How long its workers may outlive it: `seconds`, or longer while one of them is a fresh interpreter that still
        imports what its dataset needs. No rustloader code runs there before that is done."""
        for pid in self.workers():
            with contextlib.suppress(OSError), open(f"/proc/{pid}/maps") as file:
                if "memfd:rustloader" not in file.read():
                    return max(seconds, LIMIT / 2)
        return seconds

    def wait(self, seconds):
        """Its exit status as subprocess has it; None where it has not ended by then."""
        end = time.monotonic() + seconds
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() > end:
                return None
            self.listen(0.002)

    def none_left(self, seconds):
        """How long there was still a worker, or None. A look takes its time: it counts from its beginning."""
        start = time.monotonic()
        while True:
            looked = time.monotonic()
            if not self.workers():
                return looked - start
            if looked - start > seconds:
                return None
            time.sleep(0.002)

    def output(self):
        """What it has written so far."""
        with open(os.path.join(self.folder, "output"), errors="replace") as file:
            return file.read()

    def abandon(self):
        """Ends a process that hangs, with its stacks in its output."""
        os.kill(self.pid, signal.SIGUSR2)
        time.sleep(1)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)

    def close(self):
        """Ends what is left; gives what it wrote, and the files that it has left."""
        for pid in self.workers():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        os.close(self.words)
        output = self.output()
        files = sorted(set(os.listdir(self.folder)) - {"output"})
        shutil.rmtree(self.folder)
        files += shared_memory_of([self.pid, *(pid for pids in self.said("pids") for pid in pids)])
        return output, files


def run_all(trials, program, drive, words, show=False):
    """Runs each of `trials`, (name, trial), in a main process of its own: `program(trial)` there, `drive(process,
    trial)` here. Both `drive` and `words(trial, output)` answer what is wrong, in words.

    Answers (how many were, None); in a new main process instead (0, what it is to run).
    """
    failed, start = 0, time.monotonic()
    for done, (name, trial) in enumerate(trials, 1):
        process = fork()
        if process is None:
            return 0, program(trial).run
        wrong = drive(process, trial)
        output, files = process.close()
        wrong += words(trial, output)
        if files:
            wrong.append(f"files left: {files}")
        failed += bool(wrong)
        if wrong or show:
            print("WRONG " * bool(wrong) + name, *wrong, output, sep="\n", flush=True)
        if done % 100 == 0:
            print(f"{done} done, {failed} wrong, {time.monotonic() - start:.0f} s", flush=True)
    return failed, None


WORDS = None
PINNING = None


def fork():
    """A new main process in a session of its own; in that process None."""
    global WORDS
    folder = tempfile.mkdtemp(prefix="faults-")
    reader, writer = os.pipe()
    sys.stdout.flush(), sys.stderr.flush()
    pid = os.fork()
    if pid:
        os.close(writer)
        return Main(pid, reader, folder)
    os.close(reader)
    WORDS = writer
    os.setsid()
    tempfile.tempdir = os.environ["TMPDIR"] = folder
    output = os.open(os.path.join(folder, "output"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1), os.dup2(output, 2), os.close(output)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.register(signal.SIGUSR2)
    use_the_parents_fork_server()
    return None


def tell(kind, value=None):
    """A line for the driver, if it still listens."""
    with contextlib.suppress(BrokenPipeError):
        os.write(WORDS, json.dumps([kind, value]).encode() + b"\n")


def pin_for_good():
    """Pinned memory until the process has ended, as with a real accelerator: an exit from it would be code of the test
    in the midst of that end."""
    global PINNING
    from pinning_support import pinning

    PINNING = pinning()
    PINNING.__enter__()
