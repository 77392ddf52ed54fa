"""Workers of a process that ``check`` and ``bench`` watch: which of them has died, and where they are stuck."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rustloader._cli import stacks
from rustloader._cli.memory import members

__all__ = ["UNNOTICED", "advice", "dead", "death", "how", "kill", "places"]

# Seconds after which a worker that has died is reported although its iterator has not noticed. torch looks every 5 s.
UNNOTICED = 12.0
# Number of workers that are asked where they are.
_ASKED = 8
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
        return "native code in the worker may have crashed; `python -X faulthandler` shows where"
    return "code in the worker ended it; with num_workers=0 the error may show"


def death(workers: Sequence[Any], error: BaseException) -> str | None:
    """Which worker has died, and how, as "worker 1 (pid 7) ended with exit code 3"; None if none has.

    Args:
        workers: the process objects of an iterator, which has not been shut down.
        error: what its ``next`` has raised.
    """
    named = isinstance(error, RuntimeError) and bool(_DEATH.search(str(error)))
    for number, worker in enumerate(workers):
        code = _exitcode(worker)
        # Workers of an iterable dataset end with 0 when they have no more; torch's text says that others must not.
        if code or (code == 0 and named and str(worker.pid) in re.findall(r"\d+", str(error))):
            return f"worker {number} (pid {worker.pid}) {how(code)}"
    return str(error).splitlines()[0] if named else None


def dead(workers: Mapping[int, int]) -> list[tuple[int, int]]:
    """Workers that have failed and that nothing has waited for, as number and exit code.

    Args:
        workers: process ids, by number.
    """
    found = []
    for number, pid in workers.items():
        with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
            if fields[0] == "Z" and (code := os.waitstatus_to_exitcode(int(fields[-1]))):
                found.append((number, code))
    return found


def places(group: int, workers: Mapping[int, int], descriptor: int | None) -> Iterator[str]:
    """What is known about a process that hangs: dead workers, and where main and workers are in the user's code.

    Args:
        group: the process, which called ``stacks.install``.
        workers: process ids, by number.
        descriptor: what ``stacks.install`` returned.
    """
    for number, code in dead(workers):
        yield f"worker {number} (pid {workers[number]}) {how(code)}"
    if descriptor is None:
        return
    processes = {"the main process": group}
    processes |= {f"worker {number}": pid for number, pid in list(workers.items())[:_ASKED]}
    for name, pid in processes.items():
        if place := stacks.place(pid, group, descriptor):
            yield f"{name} (pid {pid}) is at {place}"


def kill(group: int) -> None:
    """Ends a process group at once. multiprocessing's resource tracker is left: it cleans up, and ends by itself."""
    for pid in list(members(group)):
        with contextlib.suppress(OSError):
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                if b"resource_tracker" in file.read():
                    continue
            os.kill(pid, signal.SIGKILL)


def _exitcode(worker: Any) -> int | None:
    try:
        code: int | None = worker.exitcode
    except (AttributeError, ValueError):  # no process, or one that the program has closed
        return None
    return code
