"""Workers of a process that ``check`` and ``bench`` watch: which of them has died, and where they are stuck."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rustloader.probe import stacks
from rustloader.procfs import exit_code, members, read, state

__all__ = ["UNNOTICED", "advice", "dead", "death", "how", "kill", "places"]

# Seconds after which a worker that has died is reported although its iterator has not noticed. torch looks every 5 s.
UNNOTICED = 12.0
# Number of workers that are asked where they are.
_ASKED = 8
# Seconds that processes have to end, and multiprocessing's resource tracker to clean up after them.
_CLEANING = 10.0
# torch's text for a worker's death, which is the engine's as well.
_DEATH = re.compile(r"DataLoader worker \(pid")


def how(exitcode: int) -> str:
    """How a process ended, in words."""
    if exitcode >= 0:
        return f"ended with exit code {exitcode}"
    try:
        return f"was killed by {signal.Signals(-exitcode).name}"
    except ValueError:
        return f"was killed by signal {-exitcode}"


def advice(death: str) -> str:
    """The likely reason of a death, and the way out."""
    if signal.SIGKILL.name in death:
        return "the system may have been out of memory: use fewer workers or smaller batches"
    if signal.SIGBUS.name in death:
        return "/dev/shm may be full: use fewer workers or smaller batches, or enlarge it"
    if "killed by" in death:
        return "run the loader with num_workers=0 under `python -X faulthandler` to see where"
    return "its code called sys.exit() or os._exit(), or crashed; run the loader with num_workers=0 to see where"


def death(workers: Sequence[Any], error: BaseException) -> str | None:
    """Which worker has died, and how, as "worker 1 (pid 7) ended with exit code 3"; None if none has.

    Args:
        workers: the process objects of an iterator, which has not been shut down.
        error: what its ``next`` has raised.
    """
    named = isinstance(error, RuntimeError) and bool(_DEATH.search(str(error)))
    for number, worker in enumerate(workers or _of_iterator(error)):
        code = _exitcode(worker)
        # Workers of an iterable dataset end with 0 when they have no more; torch's text says that others must not.
        if code or (code == 0 and named and str(worker.pid) in re.findall(r"\d+", str(error))):
            return f"worker {number} (pid {worker.pid}) {how(code)}"
    return _by_text(str(error)) if named else None


def _of_iterator(error: BaseException) -> list[Any]:
    """The workers of an iterator that has failed in its ``__init__``: it knows those that it has started."""
    trace = error.__traceback__
    while trace is not None:
        workers = getattr(trace.tb_frame.f_locals.get("self"), "_workers", None)
        if isinstance(workers, list) and workers:
            return list(workers)
        trace = trace.tb_next
    return []


def _by_text(text: str) -> str:
    """What torch's text says about a worker that no iterator knows."""
    if found := re.search(r"\(pid (\d+)\).* exit code (\d+)", text):
        return f"a worker (pid {found[1]}) {how(int(found[2]))}"
    if found := re.search(r"\(pid (\d+)\) is killed by signal: (.+?)\. ", text):
        number = next((number for number in signal.valid_signals() if signal.strsignal(number) == found[2]), None)
        return f"a worker (pid {found[1]}) " + (f"was killed: {found[2]}" if number is None else how(-number))
    return text.splitlines()[0]


def dead(workers: Mapping[int, int]) -> list[tuple[int, int]]:
    """Workers that have failed and that nothing has waited for, as number and exit code.

    Args:
        workers: process ids, by number.
    """
    return [(number, code) for number, pid in workers.items() if (code := exit_code(pid))]


def places(group: int, workers: Mapping[int, int], descriptor: int | None) -> Iterator[str]:
    """What is known about a process that hangs: workers that are dead or stopped, and where main and workers are in the
    user's code. Where that is unknown of all, where they are in a library.

    Args:
        group: the process, which called ``stacks.install``.
        workers: process ids, by number.
        descriptor: what ``stacks.install`` returned.
    """
    processes = {f"worker {number}": pid for number, pid in workers.items()}
    odd = [f"{name} (pid {pid}) {state}" for name, pid in processes.items() if (state := _odd(pid))]
    yield from odd[:_ASKED]
    if descriptor is None:
        return
    of_users: list[str] = []
    of_libraries: list[str] = []
    for name, pid in [("the main process", group), *list(processes.items())[:_ASKED]]:
        place, is_users = stacks.place(pid, group, descriptor)
        if place:
            (of_users if is_users else of_libraries).append(f"{name} (pid {pid}) is at {place}")
    yield from of_users if of_users or odd else of_libraries


def kill(group: int) -> None:
    """Ends a process group at once. multiprocessing's resource tracker is left to clean up (semaphores, shared memory)
    and to end by itself, which is waited for."""
    deadline = time.monotonic() + _CLEANING
    while (found := list(members(group))) and time.monotonic() < deadline:
        for pid in found:
            with contextlib.suppress(OSError):
                if "multiprocessing.resource_tracker import" not in (read(f"/proc/{pid}/cmdline") or ""):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _odd(pid: int) -> str:
    """What is wrong with a process that cannot be at any place; "" if nothing is."""
    if code := exit_code(pid):
        return how(code)
    return {"T": "is stopped by a signal", "D": "waits for a disk or a network file system"}.get(state(pid), "")


def _exitcode(worker: Any) -> int | None:
    try:
        code: int | None = worker.exitcode
    except (AttributeError, ValueError):  # no process, or one that the program has closed
        return None
    return code
