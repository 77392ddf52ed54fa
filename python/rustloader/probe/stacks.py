"""Reads the stack of a process that hangs.

The process installs faulthandler for a signal, which writes the stack without the GIL. Forked workers inherit it; the
stacks of other workers are unavailable.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import time

from rustloader.probe.failure import short_path, users
from rustloader.procfs import read

__all__ = ["install", "place"]

# The engine uses SIGRTMIN+13 for its own stall warnings.
_SIGNAL = signal.SIGRTMIN + 12
# Seconds for a process to write its stack.
_WAIT = 1.0
_FRAME = re.compile(r'  File "(.+)", line (\d+) in (.+)$')


def install() -> int | None:
    """Prepares this process and those that it forks. Returns the descriptor of the file that receives the stacks; None
    if the system does not allow it."""
    try:
        fd = os.memfd_create("rustloader-stacks", os.MFD_CLOEXEC)
        faulthandler.register(_SIGNAL, file=fd, all_threads=False)
    except (OSError, RuntimeError):
        return None
    return fd


def place(pid: int, owner: int, descriptor: int) -> tuple[str, bool]:
    """The innermost frame of a process in user code, as "file.py:12 in function", and True; or its innermost frame in a
    library, or "", and False. ``install`` returned ``descriptor`` in the process ``owner``."""
    try:
        with open(f"/proc/{owner}/fd/{descriptor}", "rb") as file:
            before = file.seek(0, os.SEEK_END)
            if not _catches(pid):
                return "", False
            os.kill(pid, _SIGNAL)
            return _innermost(_read(file.fileno(), before))
    except OSError:
        return "", False


def _catches(pid: int) -> bool:
    """Whether a process handles the signal. It would be killed otherwise."""
    lines = (read(f"/proc/{pid}/status") or "").splitlines()
    caught = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)
    return bool(caught >> (_SIGNAL - 1) & 1)


def _read(descriptor: int, offset: int) -> str:
    """The content of a file from an offset on, once it has stopped growing."""
    text = b""
    deadline = time.monotonic() + _WAIT
    while time.monotonic() < deadline:
        time.sleep(0.05)
        found = os.pread(descriptor, 1 << 16, offset)
        if found and found == text:
            break
        text = found
    return text.decode(errors="replace")


def _innermost(text: str) -> tuple[str, bool]:
    frames = [found.groups() for line in text.splitlines() if (found := _FRAME.match(line))]
    chosen = next((frame for frame in frames if users(frame[0])), None)
    if not frames:
        return "", False
    file, number, name = chosen or frames[0]
    return f"{short_path(file)}:{number} in {name}", chosen is not None
