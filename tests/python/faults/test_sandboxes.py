"""Small, odd and missing file systems and seccomp filters around the DataLoader.

Each body runs in a forked child with mounts or a filter of its own. If this machine permits neither, the test is
skipped with the reason.
"""

import ctypes
import errno
import os
import re
import shutil
import signal
import struct

import pytest
import torch
from isolation import in_child, watched
from programs import FOR_GOOD, doomed, late, loader, plain, twice, walk
from sample_data import Numbers, Slow
from support import OLD_TORCH

pytestmark = pytest.mark.ours

KILLED = ["RuntimeError: DataLoader worker (pid N) is killed by signal: Killed. ", FOR_GOOD]
LATE = ["RuntimeError: DataLoader timed out after 0.2 seconds"] * 2
libc = ctypes.CDLL(None, use_errno=True)


def check_call(status, what):
    if status != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


# Mounts

CLONE_NEWNS, MS_RDONLY, MS_REMOUNT, MS_BIND, MS_MOVE, MS_REC, MS_PRIVATE = 0x20000, 1, 32, 4096, 8192, 16384, 1 << 18


def own_mounts():
    check_call(libc.unshare(CLONE_NEWNS), "unshare")
    mount(None, "/", None, MS_REC | MS_PRIVATE)


def mount(source, target, kind, flags=0, options=None):
    words = [None if word is None else os.fsencode(word) for word in (source, target, kind, options)]
    check_call(libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3]), f"mount {target}")


def one_megabyte():
    mount("shm", "/dev/shm", "tmpfs", 0, "size=1m")


def read_only():
    mount("shm", "/dev/shm", "tmpfs")
    mount(None, "/dev/shm", None, MS_REMOUNT | MS_RDONLY)


# Used by this run only.
EMPTY = f"/tmp/rustloader-empty-{os.getpid()}"


def no_tmpfs():
    """An ordinary directory."""
    os.mkdir(EMPTY)
    mount(EMPTY, "/dev/shm", None, MS_BIND)


def absent():
    """A /dev without shm."""
    mount("dev", "/mnt", "tmpfs")
    for name in ("null", "zero", "urandom"):
        open(f"/mnt/{name}", "w").close()
        mount(f"/dev/{name}", f"/mnt/{name}", None, MS_BIND)
    mount("/mnt", "/dev", None, MS_MOVE)
    assert not os.path.exists("/dev/shm")


def in_own_mounts(change, body, *args, status=0):
    def inside():
        own_mounts()
        change()
        return {"value": body(*args)}

    trial = in_child(lambda: own_mounts() or {})
    if trial["status"] != 0:
        pytest.skip(f"cannot create a mount namespace: {trial['output'].splitlines()[-1]}")
    try:
        report = in_child(inside)
    finally:
        shutil.rmtree(EMPTY, ignore_errors=True)
    assert not report["hangs"] and report["status"] == status and report["processes"] == 0, report
    return report


class SharesMemory(Numbers):
    """Allocates its samples in torch's own shared memory; sample 2 has 2 MB."""

    def __init__(self, how):
        super().__init__(6)
        self.how = how

    def __getitem__(self, i):
        n = 500_000 if i == 2 else 5000
        if self.how == "share_memory_":
            return torch.full((n,), float(i)).share_memory_()
        return torch.empty(0).set_(torch.UntypedStorage._new_shared(4 * n), 0, (n,)).fill_(i)


def shares_memory(how):
    expected = [torch.full((500_000 if i == 2 else 5000,), float(i)) for i in range(6)]
    errors, batches = walk(loader(SharesMemory(how), batch_size=None), expected)
    return [error.splitlines()[-1] for error in errors], len(batches)


# {change of /dev/shm: (how many of six samples torch's own share_memory_ refuses, the error's text)}
SHM = {
    # Some versions of torch name the error of their own cleanup.
    one_megabyte: (1, "No space left on device|No such file or directory"),
    read_only: (6, "Read-only file system"),
    no_tmpfs: (0, ""),
    absent: (6, "No such file or directory"),
}


@pytest.mark.parametrize("change", SHM, ids=lambda change: change.__name__)
def test_dev_shm_does_not_matter(change):
    """Batches, including what default_collate lets torch allocate, are in the arena. If a dataset's own use of /dev/shm
    is refused, the sample raises the error."""
    assert in_own_mounts(change, twice)["value"] == []
    assert in_own_mounts(change, shares_memory, "_new_shared")["value"] == [[], 6]
    refused, words = SHM[change]
    errors, batches = in_own_mounts(change, shares_memory, "share_memory_")["value"]
    if OLD_TORCH and change is one_megabyte:
        # This torch does not reserve the file's pages, and the write to them kills the worker.
        assert any("killed by signal: Bus error" in error for error in errors)
        return
    assert (len(errors), batches) == (refused, 6 - refused)
    assert all(error.startswith("RuntimeError: unable to ") and re.search(words, error) for error in errors)


def no_proc():
    mount("proc", "/proc", "tmpfs")
    assert not os.listdir("/proc")


@pytest.mark.parametrize("program, errors", [(twice, []), (doomed, KILLED), (late, LATE)])
def test_without_proc(program, errors):
    assert in_own_mounts(no_proc, program)["value"] == errors


# seccomp


def refuse(**calls):
    """Makes the kernel refuse these calls of this process and its future children: {call: errno}."""
    machine = os.uname().machine
    numbers = {
        "x86_64": dict(memfd_create=319, pidfd_open=434, pidfd_send_signal=424, madvise=28),
        "aarch64": dict(memfd_create=279, pidfd_open=434, pidfd_send_signal=424, madvise=233),
    }[machine]
    allow, fail = 0x7FFF0000, 0x00050000
    load, equal, ret = 0x20, 0x15, 0x06
    program = [(load, 0, 0, 0)]
    for call, number in calls.items():
        program += [(equal, 0, 1, numbers[call]), (ret, 0, 0, fail | number)]
    program.append((ret, 0, 0, allow))
    code = b"".join(struct.pack("HBBI", *line) for line in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    filter_ = struct.pack("HxxxxxxP", len(program), ctypes.addressof(buffer))
    check_call(libc.prctl(38, 1, 0, 0, 0), "PR_SET_NO_NEW_PRIVS")
    check_call(libc.prctl(22, 2, filter_, 0, 0), "PR_SET_SECCOMP")


def under_seccomp(body, **calls):
    def inside():
        refuse(**calls)
        return body()

    if os.uname().machine not in ("x86_64", "aarch64"):
        pytest.skip("system call numbers are known only for x86_64 and aarch64")
    trial = in_child(lambda: refuse(memfd_create=errno.EPERM) or {})
    if trial["status"] != 0:
        pytest.skip(f"cannot install a seccomp filter: {trial['output'].splitlines()[-1]}")
    report = in_child(watched, inside)
    assert not report["hangs"] and report["status"] == 0 and report["output"] == "", report
    assert report["left"] == {} and report["processes"] == 0, report
    return report


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS])
def test_a_refused_memfd_hands_over_with_one_line(number):
    report = under_seccomp(plain, memfd_create=number)
    (line,) = report["log"]
    assert line.startswith("WARNING a DataLoader runs on torch's own iterator: cannot create the engine: ")
    assert "memfd_create failed" in line and "seccomp" in line and "\n" not in line
    assert (report["engine"], report["value"]) == (0, [])


def test_workers_exit_when_main_is_killed_although_nothing_reports_its_end():
    """No pidfds, no /proc, and the main process stays a zombie."""

    def body():
        refuse(pidfd_open=errno.ENOSYS)
        it = iter(loader(Slow(9, {4: 30, 5: 30}), batch_size=None))
        assert [int(next(it)) for _ in range(4)] == [0, 1, 2, 3]
        os.kill(os.getpid(), signal.SIGKILL)

    in_own_mounts(no_proc, body, status=signal.SIGKILL)
