"""Each system call is refused, in the main process and in the workers: the batches are right or an error names it.

The failpoints of a separate build of the extension refuse the calls (`make failpoints`). Each case is a short program
(programs.py) in a fresh process. It must end in time, with the batches in order and unchanged or with a known error,
and leave no process, descriptor, mapping or output behind.
"""

import os
import re
from typing import NamedTuple

import pytest
import refusals
from programs import FOR_GOOD

pytestmark = pytest.mark.ours

HANDED_OVER = "WARNING a DataLoader runs on torch's own iterator: cannot create the engine: "
KILLED = r"RuntimeError: DataLoader worker \(pid N\) is killed by signal: Killed\. "
EXITED = r"RuntimeError: DataLoader worker \(pid N\) exited unexpectedly with exit code 3\. Details are lost .*"
UNKNOWN = r"RuntimeError: DataLoader worker \(pid N\) exited unexpectedly"
# A connection that ended: torch's text for a worker that exited.
LOST = r"RuntimeError: DataLoader worker \(pid\(s\) \d+\) exited unexpectedly"
LATE = r"RuntimeError: DataLoader timed out after 0\.2 seconds"
NO_MEMORY = r"(iter: )?MemoryError: (Caught MemoryError in DataLoader worker process \d.*)?"
NO_MEMORY += r"cannot get \d+ bytes of shared memory for a batch: .*, \d+ bytes are left; use a smaller batch_size.*"

NO_ARRAY = r"RuntimeError: Caught RuntimeError in DataLoader worker process 0\..*the child has ended with 11\n"
STUCK = r"DataLoader worker 0 \(pid N\) has been working on one batch for [\d.]+ s .*"
NO_STACK = STUCK + "Stack unavailable: "

# How many batches of a program come from the engine.
BATCHES = {
    "plain": 6,
    "twice": 12,
    "shared": 12,
    "warm": 6,
    "pinned_persistent": 12,
    "doomed": 7,
    "late": 0,
    "stubborn": 0,
    "many": 68,
    "burst": 240,
    "forking": 8,
    "growing": 8,
    "parting": 8,
    "stuck": 3,
    "handled": 6,
    "cached_file": 8,
    "shared_list": 8,
    "connected": 6,
}
# The errors of the programs when nothing is refused.
USUAL = {"doomed": KILLED, "late": LATE, "stuck": STUCK + r"Its stack:\n.* in __getitem__\n.*"}


class Refusal(NamedTuple):
    """A kind of system call, and the permitted effects of its refusal."""

    kind: str
    errnos: str
    # "main" or "worker".
    where: str = "main"
    program: str = "plain"
    # A pattern of the errors that may be seen instead of all the batches.
    error: str = ""
    # When torch's iterator takes over: "all", if every call is refused; "any", if one is.
    handover: str = ""
    # Also refused, so that the call is made.
    also: str = ""
    # How the last line of each traceback on stderr begins; "" if nothing may be written.
    says: str = ""
    # Which calls are refused: the first, the third, all.
    calls: str = "1 3 1+"


R = Refusal
TABLE = [
    R("memfd_create", "EPERM ENOSYS EMFILE", program="twice", handover="all", calls="1 2 1+"),
    # The blocks that a fork marks then stay marked: nothing shows when its children have ended.
    R("memfd_create", "EMFILE", "worker", "forking"),
    R("memfd_create", "EPERM EMFILE", "worker"),
    R("memfd_create", "EPERM", "worker", "stuck", error=NO_STACK + "it could not create a file .*", calls="1"),
    R(
        "peek",
        "ENOENT EACCES EMFILE",
        program="stuck",
        error=NO_STACK + "the file for its stack cannot be read: .*",
        calls="1",
    ),
    R("sigaction", "EINVAL", "worker", calls="1 1+"),
    R("sigaction", "EINVAL", "worker", "stuck", error=NO_STACK + "it (could not create a file|has its own handler) .*"),
    R("sigaction", "EINVAL", "worker", "handled"),
    R("timer", "EAGAIN", "worker", "handled", calls="1"),
    R("getrlimit", "EPERM", calls="1+"),
    R("ftruncate", "EFBIG ENOSPC", handover="all", calls="1 1+"),
    R("ftruncate", "EINTR", calls="1"),
    R("seal", "EPERM", handover="all", calls="1 1+"),
    R("mmap", "ENOMEM EPERM", handover="all", calls="1 1+"),
    R("mprotect", "EACCES ENOMEM", handover="all", calls="1 1+"),
    R("dontdump", "EINVAL", calls="1+"),
    R("populate", "ENOMEM EFAULT", program="twice", handover="all", error=NO_MEMORY),
    # An index for which there was no memory is sent later.
    R("populate", "ENOMEM", program="growing", error=NO_MEMORY, calls="4 5 6"),
    R("populate", "EINVAL EPERM"),
    R("populate", "EINTR", calls="1 3"),
    R("populate", "ENOMEM EAGAIN", "worker", error=NO_MEMORY, calls="1 3"),
    # There is not even a page for the message: the worker can report the error only on its stderr.
    R("populate", "ENOMEM", "worker", error=EXITED.replace("3", "1"), calls="1+", says="MemoryError: cannot get"),
    R("populate", "EINVAL EPERM", "worker"),
    R("populate", "EINTR", "worker", calls="1 3"),
    R("map_in", "ENOMEM EFAULT", "worker", "warm", error=NO_MEMORY, calls="1 3"),
    R("map_in", "EINVAL EPERM", "worker", "warm", calls="1 1+"),
    R("map_in", "EINTR", "worker", "warm", calls="1 3"),
    R("remove", "EINVAL EOPNOTSUPP", program="twice"),
    R("remove", "EINVAL EOPNOTSUPP", "worker", "burst"),
    R("remove", "EINTR", "worker", "burst", calls="1"),
    R("eventfd", "EMFILE ENFILE EPERM", program="twice", handover="any", calls="1 1+"),
    R("eventfd_write", "EPERM EBADF", calls="1+"),
    R("eventfd_write", "EINTR EAGAIN", calls="1"),
    # The pin thread's doorbell, also when a finalizer stops the thread.
    R("eventfd_write", "EPERM EBADF", program="pinned_persistent", calls="1 1+"),
    R("eventfd_write", "EPERM EBADF", "worker"),
    R("eventfd_write", "EINTR EAGAIN", "worker", calls="1 3"),
    R("eventfd_read", "EPERM", error=r"PermissionError: \[Errno 1\] read\(eventfd\) failed: .*closed or replaced.*"),
    R("eventfd_read", "EINTR EAGAIN", calls="1 3"),
    R("pidfd_open", "ENOSYS EPERM EMFILE", program="twice"),
    R("pidfd_open", "ENOSYS EPERM", program="doomed", calls="1 1+"),
    R("pidfd_open", "ENOSYS", program="late", calls="1+"),
    R("pidfd_open", "ENOSYS", program="stubborn", calls="1+"),
    R("pidfd_open", "ENOSYS EMFILE", "worker", calls="1+"),
    R("pidfd_poll", "EPERM ENOMEM"),
    R("pidfd_poll", "EPERM", program="doomed"),
    R("pidfd_poll", "EINTR", calls="1"),
    R("waitid", "ECHILD EPERM", program="doomed", calls="1 1+"),
    R("waitid", "EINTR", program="doomed", calls="1"),
    R("pidfd_get_info", "EINVAL", program="doomed", also="waitid:1+:ECHILD", error=UNKNOWN, calls="1+"),
    R("pidfd_send_signal", "EPERM ENOSYS", program="stubborn", calls="1 1+"),
    R("kill", "EPERM", program="stubborn", also="pidfd_open:1+:ENOSYS", calls="1"),
    R("futex_wait", "EPERM ENOSYS", "worker"),
    R("futex_wait", "EINTR EAGAIN", "worker", calls="1 3"),
    R("futex_wait", "EPERM", "worker", "shared"),
    R(
        "futex_wake",
        "EPERM",
        program="shared",
        error=r"(iter: )?PermissionError: \[Errno 1\] futex\(FUTEX_WAKE\) failed.*",
    ),
    R("futex_wake", "EPERM", error=r"(iter: )?PermissionError: \[Errno 1\] futex\(FUTEX_WAKE\) failed.*"),
    R("ppoll", "EPERM ENOMEM", error=r"(Permission|Memory)Error: .*ppoll failed: .*"),
    R("ppoll", "EINTR", calls="1 3"),
    R("ppoll", "EPERM EINTR", "worker", calls="1 1+"),
    R("epoll_create", "EMFILE", program="many", calls="1+"),
    R("epoll_ctl", "ENOSPC", program="many", calls="3"),
    R("epoll_wait", "EPERM", program="many", calls="1+"),
    R("fstat", "EPERM", handover="all", calls="1 1+"),
    R("fstat", "EPERM EBADF", "worker"),
    R("seal_write", "EPERM", program="twice"),
    R("seal_write", "EPERM", "worker", "forking"),
    R("pwrite", "ENOSPC", program="shared_list", error="MemoryError: cannot share this object: .*", calls="1 2"),
    R("pwrite", "EINTR", program="shared_list", calls="1"),
    R("get_seals", "EBADF", program="shared_list", error=r"OSError: .*F_GET_SEALS\) failed: .*closed by other code"),
    R("get_seals", "EPERM", program="shared_list", error=r"ValueError: .*it is not a sealed file in memory", calls="1"),
    R("fstatfs", "EPERM ENOSYS", program="cached_file", calls="1 1+"),
    R(
        "renameat",
        "EINVAL ENOSYS",
        program="cached_file",
        error="OSError: .*this file system has neither hard links nor a rename that replaces nothing.*",
        calls="1",
    ),
    R("socket_send", "EPERM", program="connected", error=LOST),
    R("socket_send", "EINTR EAGAIN", program="connected", calls="1 3"),
    R("socket_receive", "EPERM", program="connected", error=LOST),
    R("socket_receive", "EINTR EAGAIN", program="connected", calls="1 3"),
    R("atfork", "ENOMEM", handover="all", calls="1 1+"),
    R("thread", "EAGAIN", "worker", calls="1+"),
    R("sysinfo", "EPERM", calls="1+"),
    R("proc", "ENOENT EACCES EMFILE"),
    R("proc", "ENOENT", "worker", calls="1+"),
    R("proc", "ENOENT", program="doomed", also="pidfd_open:1+:ENOSYS", calls="1+"),
    R("proc", "ENOENT", program="stubborn", also="pidfd_open:1+:ENOSYS", calls="1+"),
    # The child ends when it reads an array of which it cannot get a private copy.
    R("private", "ENOMEM", "worker", "parting", error=NO_ARRAY, calls="1 1+"),
    R("pipe", "EMFILE", "worker", "parting", error=NO_ARRAY, calls="1 1+"),
    # Not system calls: these have no errno. `cases` adds the ends of a worker at them.
    R("task_taken", "EPERM", "worker", "shared", calls="1+"),
    R("task_done", "EPERM", "worker", "shared", calls="1+"),
]


def cases():
    """{name: (refusal, points)}, including the end of a worker at each call that it makes."""
    by_name = {}
    for row in TABLE:
        for errno in row.errnos.split():
            for call in row.calls.split():
                points = f"{row.kind}:{call}:{errno}" + (f",{row.also}" if row.also else "")
                by_name[f"{row.where}-{row.program}-{points}"] = row, points
    for kind in sorted({row.kind for row in TABLE if row.where == "worker"} - {"private"}):
        programs = {"remove": "burst", "memfd_create": "forking", "seal_write": "forking", "timer": "handled"}
        programs |= {"pipe": "parting"}
        programs |= {"task_taken": "shared", "task_done": "shared"}
        program = programs.get(kind, "plain")
        for effect, error in (("exit=3", EXITED), ("kill", KILLED)):
            row = Refusal(kind, "", "worker", program, error)
            by_name[f"worker-{program}-{kind}:1:{effect}"] = row, f"{kind}:1:{effect}"
    return by_name


CASES = cases()


def report_of(name):
    row, points = CASES[name]
    return refusals.report_of(row.program, points, row.where)


@pytest.mark.parametrize("name", CASES)
def test_a_refused_call_is_tolerated_or_named(name):
    row, points = CASES[name]
    report = report_of(name)
    assert not report["hangs"] and report["status"] == 0, report
    assert report["processes"] == 0, report
    if row.says:
        assert re.findall(r"^\w*Error: .*", report["output"], re.M), report
        assert all(line.startswith(row.says) for line in re.findall(r"^\w*Error: .*", report["output"], re.M)), report
    else:
        assert report["output"] == "", report
    kept = {"descriptors"} if points.startswith("seal_write:1+") else set()
    assert set(report["left"]) <= kept, report
    # A worker that always finds work never sleeps.
    if row in TABLE and row.kind != "futex_wait":
        names = [name, *(other for other, case in CASES.items() if case[0] is row)]
        assert any(row.kind in report_of(n)["called"] for n in names), "never called"

    usual = USUAL.get(row.program, "")
    errors = [text for text in report["value"] if text != FOR_GOOD]
    assert all(any(re.fullmatch(p, text, re.DOTALL) for p in (row.error, usual) if p) for text in errors), report
    if row.handover == "any" or (row.handover == "all" and ":1+:" in points):
        lines = report["log"]
        assert lines and all(line.startswith(HANDED_OVER) and "\n" not in line for line in lines), report
        # A loader that falls back in each epoch logs it once.
        assert len(lines) == 1, report
        assert errors == [] and report["engine"] == (0 if ":1+:" in points else BATCHES[row.program] - 6), report
        return
    assert report["log"] == [], report
    if not row.error or not errors:
        assert report["engine"] == BATCHES[row.program] and bool(errors) == bool(usual), report


def test_each_kind_of_call_is_refused():
    with open(os.path.join(refusals.HERE, "..", "..", "src", "sys", "failpoint.rs")) as file:
        kinds = set(re.findall(r"\w+", file.read().split("names! {")[1].split("}")[0]))
    assert {row.kind for row in TABLE} == kinds
