"""The runs of the random testers: each in a clean process, forked from one that has imported torch and has no threads,
and killed at a time limit."""

import contextlib
import dataclasses
import faulthandler
import itertools
import os
import pickle
import select
import signal
import sys
import tempfile
import time
import traceback


@dataclasses.dataclass(frozen=True)
class Broken:
    """Takes the place of a result: why there is none."""

    text: str


class Run:
    """A function under way in a process and a session of its own. The result is pickled."""

    def __init__(self, key, function, seconds):
        self.key, self.end = key, time.monotonic() + seconds
        self.stderr = tempfile.TemporaryFile()
        self.result, writing = os.pipe()
        self.received = bytearray()
        sys.stdout.flush(), sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                os.close(self.result)
                self._run(function, seconds, writing)
                status = 0
            finally:
                os._exit(status)
        os.close(writing)

    def _run(self, function, seconds, writing):
        os.setsid()
        # Slow starts on a busy machine are not stuck workers, and any log line counts as a fallback.
        os.environ.update(RUSTLOADER_STALL_START_SECONDS="0", RUSTLOADER_STALL_ITEM_SECONDS="0")
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.dup2(self.stderr.fileno(), 2)
        faulthandler.dump_traceback_later(0.9 * seconds)
        try:
            result = function()
        except BaseException:
            result = Broken(traceback.format_exc())
        with open(writing, "wb") as pipe:
            pickle.dump(result, pipe)

    def has_ended(self):
        """Reads what is there of the result; true at its end."""
        data = os.read(self.result, 1 << 20)
        self.received += data
        return not data

    def finish(self):
        """Ends the run. Returns its result, or a Broken, and what was written to stderr."""
        late = time.monotonic() > self.end
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        os.close(self.result)
        os.waitpid(self.pid, 0)
        with self.stderr as file:
            file.seek(0)
            stderr = file.read().decode(errors="replace")
        try:
            return pickle.loads(self.received), stderr
        except Exception:
            return Broken(f"{'it took too long' if late else 'it died'}\n{stderr}"), stderr


def results(runs, jobs):
    """Yields the (key, result, stderr) of runs as they end, `jobs` of which are under way at the same time. `runs`
    yields the key of each, the function, and its time limit in seconds."""
    runs, under_way = iter(runs), {}
    try:
        while True:
            for arguments in itertools.islice(runs, jobs - len(under_way)):
                run = Run(*arguments)
                under_way[run.result] = run
            if not under_way:
                return
            earliest = min(run.end for run in under_way.values())
            ready, _, _ = select.select(under_way, [], [], max(0.0, earliest - time.monotonic()))
            late = [pipe for pipe, run in under_way.items() if time.monotonic() > run.end]
            for pipe in {pipe for pipe in ready if under_way[pipe].has_ended()} | {*late}:
                run = under_way.pop(pipe)
                yield run.key, *run.finish()
    finally:
        for run in under_way.values():
            run.finish()


def shrink(program, finding, simpler, check):
    """A program that shows what `check` finds, which none of the `simpler` programs shows, and its finding."""
    progress = True
    while progress:
        progress = False
        for candidate in simpler(program):
            if found := check(candidate):
                program, finding, progress = candidate, found, True
                break
    return program, finding


def report(findings, seconds=None):
    """Prints the findings of programs as they come, each a text or None; ends after some seconds. Returns an exit
    status."""
    start, done, failed = time.monotonic(), 0, 0
    for text in findings:
        done += 1
        if text:
            failed += 1
            print(text, flush=True)
        if done % 100 == 0:
            print(f"... {done} programs, {failed} failed", file=sys.stderr, flush=True)
        if seconds and time.monotonic() - start > seconds:
            findings.close()
    print(f"{done} programs in {time.monotonic() - start:.0f} s, {failed} failed")
    return 1 if failed else 0
