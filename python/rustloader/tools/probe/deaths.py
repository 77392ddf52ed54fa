"""Describes dead and stuck workers of a process that ``check`` or ``bench`` watches.

The process registers faulthandler for a signal. On the signal, faulthandler writes the stack without the GIL. Forked
workers inherit the handler; the stacks of other workers are unavailable.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rustloader.system.procfs import exit_code, members, read, state
from rustloader.tools.probe.failure import is_user_code, short_path

# Seconds after which a worker's death is reported if the iterator has not noticed it. torch checks every 5 s.
UNNOTICED_SECONDS = 12.0
# Maximum number of workers whose stacks are read.
_MAX_STACKS = 8
# Maximum seconds for processes to exit, and for multiprocessing's resource tracker to clean up after them.
_CLEAN_UP_SECONDS = 10.0
# Matches the message with which torch and the engine report a worker's death.
_DEATH = re.compile(r"DataLoader worker \(pid")
# The signal that makes a process write its stack. The engine uses SIGRTMIN+13 for its own stall warnings.
_SIGNAL = signal.SIGRTMIN + 12
# Maximum seconds for a process to write its stack.
_STACK_SECONDS = 1.0
_FRAME = re.compile(r'  File "(.+)", line (\d+) in (.+)$')


def exit_text(exitcode: int) -> str:
    """Describes how a process ended, from its exit code, which is negative for a signal."""
    if exitcode >= 0:
        return f"ended with exit code {exitcode}"
    try:
        return f"was killed by {signal.Signals(-exitcode).name}"
    except ValueError:
        return f"was killed by signal {-exitcode}"


def advice(death: str) -> str:
    """Returns the likely cause of a death, and the remedy."""
    if signal.SIGKILL.name in death:
        return "the system may have been out of memory: use fewer workers or smaller batches"
    if signal.SIGBUS.name in death:
        return "/dev/shm may be full: use fewer workers or smaller batches, or enlarge it"
    if "killed by" in death:
        return "run the loader with num_workers=0 under `python -X faulthandler` to see where it crashes"
    return "its code called sys.exit() or os._exit(), or crashed; run the loader with num_workers=0 to see where"


def describe_death(workers: Sequence[Any], error: BaseException) -> str | None:
    """Describes the worker whose death caused an error of ``next``: "worker 1 (pid 7) ended with exit code 3".

    Returns None if no death caused the error. ``workers`` are the iterator's process objects; the iterator must not
    have been shut down. If ``workers`` is empty, the workers in the error's traceback are used.
    """
    names_worker = isinstance(error, RuntimeError) and bool(_DEATH.search(str(error)))
    for number, worker in enumerate(workers or _workers_in_traceback(error)):
        code = _exitcode(worker)
        # A worker with an iterable dataset normally ends with 0, so 0 counts only if the error names the worker.
        if code or (code == 0 and names_worker and str(worker.pid) in re.findall(r"\d+", str(error))):
            return f"worker {number} (pid {worker.pid}) {exit_text(code)}"
    return _death_in_message(str(error)) if names_worker else None


def _workers_in_traceback(error: BaseException) -> list[Any]:
    """Returns the workers that an iterator started before its ``__init__`` failed, from the traceback."""
    trace = error.__traceback__
    while trace is not None:
        workers = getattr(trace.tb_frame.f_locals.get("self"), "_workers", None)
        if isinstance(workers, list) and workers:
            return list(workers)
        trace = trace.tb_next
    return []


def _death_in_message(text: str) -> str:
    """Describes the death that torch's message reports, for a worker that is not in the list of workers."""
    if match := re.search(r"\(pid (\d+)\).* exit code (\d+)", text):
        return f"a worker (pid {match[1]}) {exit_text(int(match[2]))}"
    if match := re.search(r"\(pid (\d+)\) is killed by signal: (.+?)\. ", text):
        number = next((number for number in signal.valid_signals() if signal.strsignal(number) == match[2]), None)
        return f"a worker (pid {match[1]}) " + (f"was killed: {match[2]}" if number is None else exit_text(-number))
    return text.splitlines()[0]


def failed_workers(workers: Mapping[int, int]) -> list[tuple[int, int]]:
    """Returns the number and exit code of each failed worker that has not been reaped.

    ``workers`` are process IDs by worker number.
    """
    return [(number, code) for number, pid in workers.items() if (code := exit_code(pid))]


def hang_details(group: int, workers: Mapping[int, int], descriptor: int | None) -> Iterator[str]:
    """Describes a process that hangs, line by line.

    Names failed, stopped or blocked workers, and the line of user code that each process is executing. If there is
    neither, names lines of library code.

    Args:
        group: process ID of the main process, which is also the ID of its process group.
        workers: process IDs by worker number.
        descriptor: the result of ``write_stacks_on_signal`` in the main process.
    """
    failed = [
        f"worker {number} (pid {pid}) {problem}" for number, pid in workers.items() if (problem := _stuck_reason(pid))
    ]
    yield from failed[:_MAX_STACKS]
    if descriptor is None:
        return
    by_user_code: dict[bool, list[str]] = {True: [], False: []}
    processes = [("the main process", group), *((f"worker {number}", pid) for number, pid in workers.items())]
    for name, pid in processes[: 1 + _MAX_STACKS]:
        place, is_users = _location(pid, group, descriptor)
        if place:
            by_user_code[is_users].append(f"{name} (pid {pid}) is at {place}")
    yield from by_user_code[bool(by_user_code[True] or failed)]


def kill(group: int) -> None:
    """Kills a process group, except multiprocessing's resource tracker.

    Waits, for a limited time, until the tracker has cleaned up semaphores and shared memory, and has exited.
    """
    deadline = time.monotonic() + _CLEAN_UP_SECONDS
    while (alive := list(members(group))) and time.monotonic() < deadline:
        for pid in alive:
            with contextlib.suppress(OSError):
                if "multiprocessing.resource_tracker import" not in (read(f"/proc/{pid}/cmdline") or ""):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _stuck_reason(pid: int) -> str:
    """Returns the reason why a process makes no progress; "" if its state does not reveal one."""
    if code := exit_code(pid):
        return exit_text(code)
    return {"T": "is stopped by a signal", "D": "is waiting for a disk or a network file system"}.get(state(pid), "")


def _exitcode(worker: Any) -> int | None:
    with contextlib.suppress(AttributeError, ValueError):  # not a process object, or a closed one
        code: int | None = worker.exitcode
        return code
    return None


def write_stacks_on_signal() -> int | None:
    """Makes this process, and those that it forks, write their stacks on a signal.

    Returns the descriptor of the file that receives the stacks; None if the system does not allow this.
    """
    try:
        fd = os.memfd_create("rustloader-stacks", os.MFD_CLOEXEC)
        faulthandler.register(_SIGNAL, file=fd, all_threads=False)
    except (OSError, RuntimeError):
        return None
    return fd


def _location(pid: int, owner: int, descriptor: int) -> tuple[str, bool]:
    """Returns a frame of a process, and True if it is in user code.

    The frame is the innermost one in user code or, if there is none, the innermost of all. It has the form
    "file.py:12 in function", and is "" if unavailable. ``descriptor`` is the result of ``write_stacks_on_signal``
    in the process ``owner``.
    """
    try:
        with open(f"/proc/{owner}/fd/{descriptor}", "rb") as file:
            before = file.seek(0, os.SEEK_END)
            if not _handles_signal(pid):
                return "", False
            os.kill(pid, _SIGNAL)
            return _innermost(_read(file.fileno(), before))
    except OSError:
        return "", False


def _handles_signal(pid: int) -> bool:
    """Returns True if a process handles the signal. A process that does not would be killed by it."""
    lines = (read(f"/proc/{pid}/status") or "").splitlines()
    caught = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)
    return bool(caught >> (_SIGNAL - 1) & 1)


def _read(descriptor: int, offset: int) -> str:
    """Waits until a file stops growing, then returns its contents after ``offset``."""
    text = b""
    deadline = time.monotonic() + _STACK_SECONDS
    while time.monotonic() < deadline:
        time.sleep(0.05)
        content = os.pread(descriptor, 1 << 16, offset)
        if content and content == text:
            break
        text = content
    return text.decode(errors="replace")


def _innermost(text: str) -> tuple[str, bool]:
    frames = [match.groups() for line in text.splitlines() if (match := _FRAME.match(line))]
    chosen = next((frame for frame in frames if is_user_code(frame[0])), None)
    if not frames:
        return "", False
    file, number, name = chosen or frames[0]
    return f"{short_path(file)}:{number} in {name}", chosen is not None
