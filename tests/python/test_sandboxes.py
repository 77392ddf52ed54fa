"""Small, odd and missing file systems, memory cgroups and seccomp filters around the DataLoader.

Each body runs in a forked child with mounts, a cgroup or a filter of its own. Where this machine does not let a test
make them it is skipped and says why.
"""

import contextlib
import ctypes
import errno
import os
import re
import shutil
import struct

import pytest
import refusals
import torch
from isolation import in_child, watched
from programs import FOR_GOOD, doomed, late, loader, plain, stubborn, twice, walk, wide
from sample_data import Numbers
from support import wait_until

pytestmark = pytest.mark.ours

KILLED = ["RuntimeError: DataLoader worker (pid N) is killed by signal: Killed. ", FOR_GOOD]
LATE = ["RuntimeError: DataLoader timed out after 0.2 seconds"] * 2
libc = ctypes.CDLL(None, use_errno=True)


def checked(answer, what):
    if answer != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


# Mounts

CLONE_NEWNS, MS_RDONLY, MS_REMOUNT, MS_BIND, MS_MOVE, MS_REC, MS_PRIVATE = 0x20000, 1, 32, 4096, 8192, 16384, 1 << 18


def own_mounts():
    checked(libc.unshare(CLONE_NEWNS), "unshare")
    mount(None, "/", None, MS_REC | MS_PRIVATE)


def mount(source, target, kind, flags=0, options=None):
    words = [None if word is None else os.fsencode(word) for word in (source, target, kind, options)]
    checked(libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3]), f"mount {target}")


def one_megabyte():
    mount("shm", "/dev/shm", "tmpfs", 0, "size=1m")


def read_only():
    mount("shm", "/dev/shm", "tmpfs")
    mount(None, "/dev/shm", None, MS_REMOUNT | MS_RDONLY)


def no_tmpfs():
    """An ordinary directory."""
    os.mkdir("/tmp/rustloader-empty")
    mount("/tmp/rustloader-empty", "/dev/shm", None, MS_BIND)


def absent():
    """A /dev without shm."""
    mount("dev", "/mnt", "tmpfs")
    for name in ("null", "zero", "urandom"):
        open(f"/mnt/{name}", "w").close()
        mount(f"/dev/{name}", f"/mnt/{name}", None, MS_BIND)
    mount("/mnt", "/dev", None, MS_MOVE)
    assert not os.path.exists("/dev/shm")


def in_own_mounts(change, body, *args):
    def inside():
        own_mounts()
        change()
        return {"value": body(*args)}

    try_out = in_child(lambda: own_mounts() or {})
    if try_out["status"] != 0:
        pytest.skip(f"no mount namespace can be had: {try_out['output'].splitlines()[-1]}")
    try:
        report = in_child(inside)
    finally:
        shutil.rmtree("/tmp/rustloader-empty", ignore_errors=True)
    assert not report["hangs"] and report["status"] == 0 and report["processes"] == 0, report
    return report


class SharesMemory(Numbers):
    """The dataset calls torch's own shared memory; sample 2 has 2 MB."""

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


# {how /dev/shm is: what of six samples torch's own share_memory_ refuses, and its words}
SHM = {
    one_megabyte: (1, "No space left on device"),
    read_only: (6, "Read-only file system"),
    no_tmpfs: (0, ""),
    absent: (6, "No such file or directory"),
}


@pytest.mark.parametrize("change", SHM, ids=lambda change: change.__name__)
def test_dev_shm_does_not_matter(change):
    """Batches, default_collate and what torch allocates for it lie in the arena. Where a dataset uses /dev/shm itself
    and is refused, that is the sample's error."""
    assert in_own_mounts(change, twice)["value"] == []
    assert in_own_mounts(change, shares_memory, "_new_shared")["value"] == [[], 6]
    refused, words = SHM[change]
    errors, batches = in_own_mounts(change, shares_memory, "share_memory_")["value"]
    assert (len(errors), batches) == (refused, 6 - refused)
    assert all(error.startswith("RuntimeError: unable to ") and words in error for error in errors)


def no_proc():
    mount("proc", "/proc", "tmpfs")
    assert not os.listdir("/proc")


@pytest.mark.parametrize("program, errors", [(twice, []), (doomed, KILLED), (late, LATE)])
def test_without_proc(program, errors):
    assert in_own_mounts(no_proc, program)["value"] == errors


# seccomp


def refuse(**calls):
    """Has the kernel refuse system calls of this process and its children from here on: {call: errno}."""
    machine = os.uname().machine
    numbers = {
        "x86_64": dict(memfd_create=319, pidfd_open=434, pidfd_send_signal=424, madvise=28),
        "aarch64": dict(memfd_create=279, pidfd_open=434, pidfd_send_signal=424, madvise=233),
    }[machine]
    allow, fail = 0x7FFF0000, 0x00050000
    load, equal, answer = 0x20, 0x15, 0x06
    program = [(load, 0, 0, 0)]
    for call, number in calls.items():
        program += [(equal, 0, 1, numbers[call]), (answer, 0, 0, fail | number)]
    program.append((answer, 0, 0, allow))
    code = b"".join(struct.pack("HBBI", *line) for line in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    filter_ = struct.pack("HxxxxxxP", len(program), ctypes.addressof(buffer))
    checked(libc.prctl(38, 1, 0, 0, 0), "PR_SET_NO_NEW_PRIVS")
    checked(libc.prctl(22, 2, filter_, 0, 0), "PR_SET_SECCOMP")


def under_seccomp(body, **calls):
    def inside():
        refuse(**calls)
        return body()

    if os.uname().machine not in ("x86_64", "aarch64"):
        pytest.skip("numbers of system calls are known for x86_64 and aarch64 alone")
    try_out = in_child(lambda: refuse(memfd_create=errno.EPERM) or {})
    if try_out["status"] != 0:
        pytest.skip(f"no seccomp filter can be had: {try_out['output'].splitlines()[-1]}")
    report = in_child(watched, inside)
    assert not report["hangs"] and report["status"] == 0 and report["output"] == "", report
    assert report["left"] == {} and report["processes"] == 0, report
    return report


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS])
def test_a_refused_memfd_hands_over_with_one_line(number):
    report = under_seccomp(plain, memfd_create=number)
    (line,) = report["log"]
    assert line.startswith("WARNING a DataLoader runs on torch's own iterator: no shared memory can be had: ")
    assert "memfd_create failed" in line and "seccomp" in line and "\n" not in line
    assert (report["engine"], report["value"]) == (0, [])


@pytest.mark.parametrize(
    "program, errors, number",
    [
        (twice, [], errno.EPERM),
        (doomed, KILLED, errno.EPERM),
        (doomed, KILLED, errno.ENOSYS),
        (late, LATE, errno.ENOSYS),
        (stubborn, [], errno.EPERM),
    ],
)
def test_without_pidfds_deaths_and_timeouts_are_seen_still(program, errors, number):
    report = under_seccomp(program, pidfd_open=number, pidfd_send_signal=number)
    assert (report["log"], report["value"]) == ([], errors)


def test_without_madvise_pages_are_touched():
    report = under_seccomp(twice, madvise=errno.EPERM)
    assert (report["log"], report["engine"], report["value"]) == ([], 12, [])


# Memory cgroups

WAY_OUT = "; use a smaller batch_size, num_workers or prefetch_factor, or keep fewer batches"
NO_MEMORY = re.compile(
    r"MemoryError: cannot get (\d+) bytes of shared memory for a batch: (.*), (\d+) bytes are left" + WAY_OUT
)


def memory_cgroup():
    """The folder of this process's memory cgroup, and the names of the files: limit, kills."""
    with open("/proc/self/cgroup") as file:
        lines = [line.rstrip().split(":", 2) for line in file]
    for _, controllers, path in lines:
        if "memory" in controllers.split(","):
            return f"/sys/fs/cgroup/memory{path}", "memory.limit_in_bytes", "memory.oom_control"
    return f"/sys/fs/cgroup{lines[-1][2]}", "memory.max", "memory.events"


def removed(folder):
    with contextlib.suppress(OSError):
        os.rmdir(folder)
    return not os.path.exists(folder)


@pytest.fixture
def small_cgroup():
    """(function that moves the calling process into a cgroup of 400 MB, its limit, function that counts the kills)."""
    parent, limit_file, kills_file = memory_cgroup()
    folder = f"{parent}/rustloader-test-{os.getpid()}"
    try:
        os.mkdir(folder)
        with open(f"{folder}/{limit_file}", "w") as file:
            file.write(str(400 << 20))
    except OSError as error:
        with contextlib.suppress(OSError):
            os.rmdir(folder)
        pytest.skip(f"no memory cgroup can be made: {error}")

    def join():
        with open(f"{folder}/cgroup.procs", "w") as file:
            file.write(str(os.getpid()))

    def kills():
        with open(f"{folder}/{kills_file}") as file:
            return int(re.search(r"oom_kill (\d+)", file.read())[1])

    yield join, f"is limited to {400 << 20} bytes ({limit_file})", kills
    assert wait_until(lambda: removed(folder)), "the cgroup could not be removed"


def in_cgroup(join, body, *args):
    def inside():
        join()
        return body(*args)

    report = in_child(watched, inside, seconds=60)
    assert not report["hangs"] and report["status"] == 0 and report["output"] == "", report
    assert report["left"] == {} and report["processes"] == 0 and report["log"] == [], report
    return report["value"]


@pytest.mark.parametrize("expanded", [False, True], ids=["our collate", "torch's collate"])
def test_a_batch_beyond_the_cgroup_is_an_error_and_the_next_one_comes(small_cgroup, expanded):
    join, limit, kills = small_cgroup
    errors, sizes = in_cgroup(join, wide, (10, 500, 20, 600, 30), expanded)
    assert sizes == [10, 20, 30] and kills() == 0
    for text, megabytes in zip(errors, (500, 600), strict=True):
        wanted, what, left = NO_MEMORY.fullmatch(text).groups()
        assert int(wanted) == megabytes << 20 and limit in what and int(left) < 400 << 20


def test_many_workers_together_do_not_exceed_the_cgroup(small_cgroup):
    """Each looks before the pages of the others are there."""
    join, limit, kills = small_cgroup
    errors, sizes = in_cgroup(join, wide, [60] * 24, False, 6)
    assert kills() == 0 and len(errors) + len(sizes) == 24 and set(sizes) == {60}
    assert errors and all(limit in NO_MEMORY.fullmatch(text)[2] for text in errors)


# Cgroups that a test makes up: (files, the limit in words, bytes that are left). The margin of 32 MB is not.
MEMINFO = f"MemTotal: {1 << 20} kB\nMemAvailable: {1 << 20} kB\nSwapTotal: 0 kB\nSwapFree: 0 kB\n"
TREES = {
    "version 2": (
        {
            "proc/self/cgroup": "0::/a/b\n",
            "cgroup/cgroup.controllers": "memory\n",
            "cgroup/a/memory.max": f"{100 << 20}\n",
            "cgroup/a/memory.current": f"{40 << 20}\n",
            "cgroup/a/b/memory.max": "max\n",
            "cgroup/a/b/memory.current": "0\n",
        },
        f"the memory cgroup /a is limited to {100 << 20} bytes (memory.max)",
        28 << 20,
    ),
    "version 1": (
        {
            "proc/self/cgroup": "4:memory:/a\n",
            "cgroup/memory/a/memory.limit_in_bytes": f"{90 << 20}\n",
            "cgroup/memory/a/memory.usage_in_bytes": f"{50 << 20}\n",
            "cgroup/memory/a/memory.stat": f"total_inactive_file {5 << 20}\n",
        },
        f"the memory cgroup /a is limited to {90 << 20} bytes (memory.limit_in_bytes)",
        13 << 20,
    ),
    "the machine": (
        {"proc/meminfo": MEMINFO.replace(f"MemAvailable: {1 << 20}", f"MemAvailable: {70 << 10}")},
        f"the machine has {1 << 30} bytes of memory and 0 bytes of swap",
        38 << 20,
    ),
}


def test_made_up_limits_are_named_to_the_byte(tmp_path):
    cases, expected = [], []
    for name, (files, limit, left) in TREES.items():
        for path, text in {"proc/meminfo": MEMINFO, **files}.items():
            file = tmp_path / name / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        for program in ("wide", "wide_by_torchs_collate"):
            cases.append((program, "", "main", {"RUSTLOADER_MEMORY_ROOT": str(tmp_path / name)}))
            text = (
                f"MemoryError: cannot get {50 << 20} bytes of shared memory for a batch: {limit}, {left} bytes are left"
            )
            expected.append([text + WAY_OUT] * 2)
    full = tmp_path / "full"
    shutil.copytree(tmp_path / "version 2", full)
    (full / "cgroup/a/memory.current").write_text(f"{100 << 20}\n")
    environment = {"RUSTLOADER_MEMORY_ROOT": str(full)}
    # Nothing is left at all: small batches come still, and no arena is kept for later.
    cases += [("pooled", "", "main", environment), ("pooled", "", "main", {})]
    reports = refusals.reports_of(cases)
    for report, errors in zip(reports, expected, strict=False):
        assert report["value"] == [errors, [1, 2, 3]], report
    assert [report["value"] for report in reports[-2:]] == [[[], 0], [[], 1]]
    assert all(report["left"] == {} and report["output"] == "" and not report["hangs"] for report in reports)
