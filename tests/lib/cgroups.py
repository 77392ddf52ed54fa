"""Creates memory cgroups and runs test bodies in them."""

import contextlib
import os
import re

import pytest
from isolation import in_child, watched
from support import wait_until


def memory_cgroup():
    """Returns the folder of this process's memory cgroup, and the names of its files for the limit and the kills."""
    with open("/proc/self/cgroup") as file:
        lines = [line.rstrip().split(":", 2) for line in file]
    for _, controllers, path in lines:
        if "memory" in controllers.split(","):
            return f"/sys/fs/cgroup/memory{path}", "memory.limit_in_bytes", "memory.oom_control"
    return f"/sys/fs/cgroup{lines[-1][2]}", "memory.max", "memory.events"


def remove(folder):
    with contextlib.suppress(OSError):
        os.rmdir(folder)
    return not os.path.exists(folder)


@contextlib.contextmanager
def cgroup_of_400_mb():
    """Yields (a function that moves the calling process into a cgroup of 400 MB, a text that names the limit, a
    function that counts its kills)."""
    parent, limit_file, kills_file = memory_cgroup()
    folder = f"{parent}/rustloader-test-{os.getpid()}"
    try:
        os.mkdir(folder)
        os.stat(f"{folder}/cgroup.procs")
        with open(f"{folder}/{limit_file}", "w") as file:
            file.write(str(400 << 20))
        # Memory above the limit must not be swapped out instead.
        with contextlib.suppress(FileNotFoundError), open(f"{folder}/memory.swap.max", "r+") as file:
            file.write("0")
    except OSError as error:
        with contextlib.suppress(OSError):
            os.rmdir(folder)
        pytest.skip(f"cannot create a memory cgroup: {error}")

    def join():
        with open(f"{folder}/cgroup.procs", "w") as file:
            file.write(str(os.getpid()))

    def kills():
        with open(f"{folder}/{kills_file}") as file:
            return int(re.search(r"oom_kill (\d+)", file.read())[1])

    try:
        yield join, f"is limited to {400 << 20} bytes ({limit_file})", kills
    finally:
        gone = wait_until(lambda: remove(folder))
    assert gone, "the cgroup could not be removed"


def in_cgroup(join, body, *args):
    """Returns what the body returns in a child that has joined the cgroup. Nothing must be logged."""
    report = report_in_cgroup(join, body, *args)
    assert report["log"] == [], report
    return report["value"]


def report_in_cgroup(join, body, *args):
    def inside():
        join()
        return body(*args)

    report = in_child(watched, inside, seconds=200)
    assert not report["hangs"] and report["status"] == 0 and report["output"] == "", report
    assert report["left"] == {} and report["processes"] == 0, report
    return report
