"""Main processes to kill and interrupt: forked from a process that has imported torch, and ended as a script ends.

A driver calls `run_all`. In each new process it returns the program to run. The driver returns the program out of its
`main`, and runs it at the end of its module, so that the interpreter exits as it would from a script.
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

from . import trials as trials_module
from .scenes import use_the_parents_fork_server
from .trials import quiet

# Seconds after which a process counts as hung.
LIMIT = 60.0


def prepare():
    """Call this once, before the first fork."""
    from support import DataLoader  # noqa: F401

    import rustloader  # noqa: F401

    quiet()
    multiprocessing.set_forkserver_preload(["torch", "numpy", "rustloader"])
    # Started here, the helpers of multiprocessing do not count as left behind by a trial.
    multiprocessing.forkserver.ensure_running()
    multiprocessing.resource_tracker.ensure_running()
    # The fork server answers once it has imported what it preloads.
    process = multiprocessing.get_context("forkserver").Process(target=int)
    process.start()
    process.join()
    # At exit, the garbage collector traverses all objects twice.
    gc.freeze()


class Main:
    """A running main process, as seen by its driver."""

    def __init__(self, pid, pipe, folder):
        self.pid, self.pipe, self.folder = pid, pipe, folder
        self.reports, self.partial, self.closed = [], b"", False

    def listen(self, seconds, until=lambda reports: False):
        """Reads the process's reports for `seconds`, until `until` accepts them, or until it closes the pipe."""
        end = time.monotonic() + seconds
        while not self.closed and not until(self.reports) and (left := end - time.monotonic()) >= 0:
            if select.select([self.pipe], [], [], left)[0]:
                data = os.read(self.pipe, 1 << 16)
                *lines, self.partial = (self.partial + data).split(b"\n")
                self.reports += map(json.loads, lines)
                self.closed = not data

    def reported(self, kind):
        """Returns the values reported under this name."""
        return [value for name, value in self.reports if name == kind]

    def workers(self):
        """Returns its live descendants: those in its session, and those that the fork server has started."""
        from isolation import session
        from support import children_of, gone

        server = multiprocessing.forkserver._forkserver._forkserver_pid
        found = {pid for pid in session(self.pid) | children_of(server) if not gone(pid)} - {self.pid}
        return {pid for pid in found if not is_tracker(pid)}

    def patience(self, seconds):
        """Returns how long its workers may outlive it: `seconds`, or more if one of them is a fresh interpreter that
        still imports what its dataset needs. No rustloader code runs in a worker before that."""
        for pid in self.workers():
            with contextlib.suppress(OSError), open(f"/proc/{pid}/maps") as file:
                if "memfd:rustloader" not in file.read():
                    return max(seconds, LIMIT / 2)
        return seconds

    def wait(self, seconds):
        """Returns its exit status as `subprocess` reports it, or None if it does not end within `seconds`."""
        end = time.monotonic() + seconds
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() > end:
                return None
            self.listen(0.002)

    def none_left(self, seconds):
        """Returns how long it took until no worker was left, or None. A check is slow, so it counts from its start."""
        start = time.monotonic()
        while True:
            checked = time.monotonic()
            if not self.workers():
                return checked - start
            if checked - start > seconds:
                return None
            time.sleep(0.002)

    def output(self):
        """Returns what it has written so far."""
        with open(os.path.join(self.folder, "output"), errors="replace") as file:
            return file.read()

    def abandon(self):
        """Ends a process that hangs, after it has dumped its stacks to its output."""
        os.kill(self.pid, signal.SIGUSR2)
        time.sleep(1)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)

    def close(self):
        """Kills its remaining workers. Returns its output and the files that it has left behind."""
        for pid in self.workers():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        os.close(self.pipe)
        output = self.output()
        files = sorted(set(os.listdir(self.folder)) - {"output"})
        shutil.rmtree(self.folder)
        files += shared_memory_of([self.pid, *(pid for pids in self.reported("pids") for pid in pids)])
        return output, files


def is_tracker(pid):
    """Whether a process is multiprocessing's resource tracker. From Python 3.14 on, a forked process starts its own."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline") as file:
        return "multiprocessing.resource_tracker" in file.read()
    return False


def run_all(trials, program, drive, check_output, show=False):
    """Runs each of `trials`, (name, trial), in a main process of its own: `program(trial)` there, `drive(process,
    trial)` here. Both `drive` and `check_output(trial, output)` return lists of problems.

    Returns (the number of failed trials, None), but (0, the function to run) in a new main process.
    """
    programs, start = [], time.monotonic()

    def play(trial, _):
        process = fork()
        if process is None:
            programs.append(program(trial).run)
            return None
        wrong = drive(process, trial)
        output, files = process.close()
        wrong += check_output(trial, output)
        if files:
            wrong.append(f"files left behind: {files}")
        if show and not wrong:
            print(trial, output, sep="\n", flush=True)
        return [*wrong, output] if wrong else []

    def progress(done, failed):
        if done % 100 == 0:
            print(f"{done} done, {failed} wrong, {time.monotonic() - start:.0f} s", flush=True)

    _, failed = trials_module.run_all(trials, play, progress=progress)
    return (0, programs[0]) if programs else (failed, None)


REPORT_PIPE = None
PINNING = None


def fork():
    """Forks a new main process in a session of its own. Returns None in that process."""
    global REPORT_PIPE
    folder = tempfile.mkdtemp(prefix="faults-")
    reader, writer = os.pipe()
    sys.stdout.flush(), sys.stderr.flush()
    pid = os.fork()
    if pid:
        os.close(writer)
        return Main(pid, reader, folder)
    os.close(reader)
    REPORT_PIPE = writer
    os.setsid()
    tempfile.tempdir = os.environ["TMPDIR"] = folder
    output = os.open(os.path.join(folder, "output"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1), os.dup2(output, 2), os.close(output)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.register(signal.SIGUSR2)
    use_the_parents_fork_server()
    return None


def report(kind, value=None):
    """Sends a line to the driver, if it still reads."""
    with contextlib.suppress(BrokenPipeError):
        os.write(REPORT_PIPE, json.dumps([kind, value]).encode() + b"\n")


def pin_for_good():
    """Enables pinned memory until the process ends, as with a real accelerator: leaving the context would run test code
    during that end."""
    global PINNING
    from pinning_support import pinning

    PINNING = pinning()
    PINNING.__enter__()
