"""Ends a command while it works, and checks that it leaves no process behind."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from support import in_session, wait_until

# By signal: the exit status and the last word. The rest leaves no time for either.
ENDS = {signal.SIGINT: (130, "interrupted"), signal.SIGTERM: (143, "terminated"), signal.SIGKILL: (-9, "")}


def end(arguments, number, seconds=380.0):
    """Runs `python -m rustloader` with arguments, the first of which is the command, in this folder. Sends a signal
    once the file `working` exists."""
    kw = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "-m", "rustloader", *arguments]
    with subprocess.Popen(command, start_new_session=True, **kw) as process:
        try:
            assert wait_until(lambda: Path("working").exists() or process.poll() is not None, seconds)
            os.kill(process.pid, number)
            _, err = process.communicate(timeout=200)
            status, word = ENDS[number]
            assert process.returncode == status, err
            assert wait_until(lambda: not in_session(process.pid), 60.0), in_session(process.pid)
        finally:
            for pid in in_session(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    if word:
        assert err.endswith(f"rustloader {arguments[0]}: {word}\n") and "Traceback" not in err
