"""Runs measurements in separate processes."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rustloader.tools.harness.rounds import Failure

_CODE = """\
import importlib, json, sys
sys.path[0] = sys.argv[1]
function = getattr(importlib.import_module(sys.argv[2]), sys.argv[3])
print(json.dumps(function(*json.loads(sys.argv[4]))))
"""


def fresh(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function in a new interpreter, which imports the function's file, and returns the result.

    The arguments and the result are passed as JSON. Raises ``Failure`` if the process fails.
    """
    file = Path(inspect.getfile(function)).resolve()
    call = [str(file.parent), file.stem, function.__name__, json.dumps(arguments)]
    completed = subprocess.run([sys.executable, "-W", "ignore", "-c", _CODE, *call], stdout=subprocess.PIPE, text=True)
    if completed.returncode:
        raise Failure(f"the process of {function.__name__}{arguments} exited with status {completed.returncode}")
    return json.loads(completed.stdout.splitlines()[-1])


def forked(body: Callable[[], Any]) -> Any:
    """Calls a function in a forked process, and returns the result, which is passed as JSON.

    Raises ``Failure`` if the process fails.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.write(writer, json.dumps(body()).encode())
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(writer)
    with open(reader) as file:
        output = file.read()
    if os.waitpid(pid, 0)[1]:
        raise Failure("a forked process failed")
    return json.loads(output)


def at_once(processes: int, prepare: Callable[[int], Callable[[], object]]) -> float:
    """Forks processes that start to work at the same time. Returns the seconds until the last of them has finished.

    Timing starts when all processes are prepared. Raises ``Failure`` if a process fails.

    Args:
        processes: number of processes.
        prepare: called in each process with its index; returns the function that does the work.
    """
    (waits, begin), (reader, done) = os.pipe(), os.pipe()
    children = []
    for number in range(processes):
        if (pid := os.fork()) == 0:
            try:
                work = prepare(number)
                os.write(done, b"r")
                os.read(waits, 1)
                work()
                os.write(done, b"d")
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        children.append(pid)
    os.close(done)  # so that the pipe reaches its end when all children have exited
    try:
        _read_all(reader, processes)
        start = time.perf_counter()
        os.write(begin, b"b" * processes)
        _read_all(reader, processes)
        return time.perf_counter() - start
    finally:
        os.write(begin, b"b" * processes)
        for pid in children:
            os.waitpid(pid, 0)
        for descriptor in (waits, begin, reader):
            os.close(descriptor)


def _read_all(descriptor: int, count: int) -> None:
    """Reads ``count`` bytes. Raises ``Failure`` if the pipe ends before that."""
    while count:
        data = os.read(descriptor, count)
        if not data:
            raise Failure("one of the processes failed")
        count -= len(data)
