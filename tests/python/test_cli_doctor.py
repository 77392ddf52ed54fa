"""`python -m rustloader doctor`: a block to copy, what to do, and the limits of cores and memory."""

import errno
import json
import os
import re
import resource
import types

import pytest
from support import rustloader

pytestmark = pytest.mark.ours

if rustloader is not None:
    from rustloader import _cli
    from rustloader import _limits as limits
    from rustloader._cli import doctor

GIB = 1 << 30


def test_one_block_to_copy(capsys):
    assert _cli.main(["doctor"]) == 0
    first, empty, *block = capsys.readouterr().out.splitlines()
    assert (first, empty) == ("Copy this block into a bug report:", "")
    assert block[:2] == ["```text", "rustloader doctor"]
    assert block[-2:] == ["The engine works here.", "```"]
    assert all(re.match(r"(OK  |note) {2}\S|( {29}-> )", line) for line in block[2:-2]), block
    out = "\n".join(block)
    assert "8 batches by the Rust engine" in out and "Error" not in out
    for subject in (
        "kernel Python torch rustloader numpy environment accelerator memfd_create seals pidfd_open open_files "
        "address_space file_size processes memory /dev/shm huge_pages_for_shmem start_method cores"
    ).split():
        assert subject.replace("_", " ") in out.replace("_", " ")


def test_json(capsys):
    assert _cli.main(["doctor", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["works"] is True
    assert {"subject": "rustloader", "found": rustloader.__version__, "state": "ok", "advice": ""} in said["findings"]


def refused(number):
    def call(*args, **kw):
        raise OSError(number, os.strerror(number))

    return call


@pytest.mark.handover
def test_what_is_refused_is_named(monkeypatch, capsys):
    monkeypatch.setattr(os, "memfd_create", refused(errno.EPERM))
    monkeypatch.setattr(os, "pidfd_open", refused(errno.ENOSYS))
    monkeypatch.setattr(rustloader._handover, "Engine", refused(errno.EPERM))
    assert _cli.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "BAD   memfd_create           Operation not permitted\n" in out and "Docker's default profile" in out
    assert "note  pidfd_open             Function not implemented\n" in out
    assert "BAD   trial, 2 workers" in out
    assert out.endswith("loaders run on torch's iterator.\n```\n")


@pytest.mark.parametrize(
    "look, place, name, value, state, words",
    [
        ("_system", "platform", "release", lambda: "4.18.0-x", "note", "pidfds"),
        ("_system", "platform", "release", lambda: "2.6.32", "bad", "memfd_create"),
        ("_system", "sys", "platform", "darwin", "bad", "Linux"),
        ("_versions", "metadata", "version", lambda name: "2.5.1+cu124", "bad", "2.6 or newer"),
        ("_versions", "metadata", "version", lambda name: "3.0.0", "note", "tested up to 2.15"),
        ("_limits", "resource", "getrlimit", lambda what: (512, -1), "note", "ulimit -n"),
        ("_limits", "resource", "getrlimit", lambda what: (1 << 29, -1), "bad", "ulimit -v"),
        ("_shared_memory", "os", "statvfs", refused(errno.ENOENT), "note", "does not use it"),
    ],
)
def test_what_to_do(look, place, name, value, state, words, monkeypatch):
    fake = types.SimpleNamespace(**vars(getattr(doctor, place)) | {name: value})
    monkeypatch.setattr(doctor, place, fake)
    found = list(getattr(doctor, look)())
    assert any(finding.state == state and words in finding.advice for finding in found), found


def test_what_cannot_be_looked_at_is_no_reason_to_stop(monkeypatch, capsys):
    def _broken_thing():
        raise LookupError("nothing there")
        yield

    monkeypatch.setattr(doctor, "_LOOKS", (_broken_thing, doctor._trial))
    assert _cli.main(["doctor"]) == 0
    assert "note  broken thing           LookupError: nothing there\n" in capsys.readouterr().out


def test_variables_that_matter(monkeypatch):
    monkeypatch.setenv("RUSTLOADER_INSTALL", "1")
    found = {finding.subject: finding.found for finding in doctor._versions()}
    assert "RUSTLOADER_INSTALL=1" in found["environment"]


# Memory and cores


@pytest.mark.parametrize(
    "memory, state, found, advice",
    [
        ((16 * GIB, None, None, None), "ok", "16 GiB left; 16 GiB available on the machine", ""),
        ((GIB // 2, None, None, None), "note", "512 MiB left", "fewer workers"),
        (
            (16 * GIB, GIB // 2, GIB // 4, None),
            "note",
            "256 MiB left; 16 GiB available on the machine; 256 MiB left of the cgroup's 512 MiB",
            "docker run --memory",
        ),
        ((16 * GIB, 8 * GIB, 4 * GIB, 2 * GIB), "ok", "2 GiB left of the address space", ""),
    ],
)
def test_the_memory_that_is_left(memory, state, found, advice, monkeypatch):
    monkeypatch.setattr(doctor, "memory", lambda: limits.Memory(*memory))
    [finding] = doctor._memory()
    assert finding.state == state and found in finding.found and advice in finding.advice
    assert bool(finding.advice) == (state == "note")


@pytest.mark.parametrize(
    "cores, state, found",
    [
        ((8, 4, None), "ok", "4 usable (machine 8, affinity 4)"),
        ((8, 4, 1.5), "note", "1.5 usable (machine 8, affinity 4, quota 1.5)"),
        ((1, 1, None), "note", "1 usable"),
    ],
)
def test_the_cores(cores, state, found, monkeypatch):
    monkeypatch.setattr(doctor, "cores", lambda: limits.Cores(*cores))
    [finding] = doctor._cores()
    assert finding.state == state and finding.found.startswith(found)


@pytest.fixture
def system(tmp_path, monkeypatch):
    """A function that writes files of /proc and /sys/fs/cgroup for `limits` to read."""
    monkeypatch.setattr(limits, "_PROC", str(tmp_path / "proc"))
    monkeypatch.setattr(limits, "_CGROUPS", str(tmp_path / "cgroup"))

    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    write("proc/meminfo", "MemTotal:  9000000 kB\nMemAvailable:  8388608 kB\n")
    write("proc/self/status", "Name: python\nVmSize:  1048576 kB\n")
    return write


def test_without_limits(system):
    system("proc/self/cgroup", "0::/\n")
    system("cgroup/cpu.max", "max 100000\n")
    assert limits.cores() == (os.cpu_count(), len(os.sched_getaffinity(0)), None)
    if resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
        assert limits.memory() == (8 * GIB, None, None, None) and limits.memory().left == 8 * GIB


def test_limits_of_every_level_of_version_2(system):
    system("proc/self/cgroup", "0::/pod/container\n")
    system("cgroup/pod/cpu.max", "150000 100000\n")
    system("cgroup/pod/container/cpu.max", "max 100000\n")
    system("cgroup/pod/memory.max", f"{GIB}\n")
    system("cgroup/pod/memory.current", f"{GIB // 2}\n")
    system("cgroup/pod/memory.stat", f"anon 5\ninactive_file {GIB // 4}\n")
    system("cgroup/pod/container/memory.max", "max\n")
    assert limits.cores().quota == 1.5
    assert limits.memory()[:3] == (8 * GIB, GIB, 3 * GIB // 4)


def test_statistics_count_the_cores_of_the_quota(system):
    system(
        "proc/self/cgroup", "0::/docker/x\n"
    )  # in a container: the path is the host's, the container's own level the root
    system("cgroup/cpu.max", "50000 100000\n")
    limits._known_quota.cache_clear()
    try:
        assert limits.effective_cores() == 0.5
        assert rustloader.stats(rustloader.DataLoader([0])).cores == 1
    finally:
        limits._known_quota.cache_clear()


def test_limits_of_version_1(system):
    system("proc/self/cgroup", "5:memory:/\n4:cpu,cpuacct:/job\n0::/\n")
    system("cgroup/unified/cgroup.controllers", "")
    system("cgroup/cpu/cpu.cfs_quota_us", "-1\n")
    system("cgroup/cpu/cpu.cfs_period_us", "100000\n")
    system("cgroup/cpu/job/cpu.cfs_quota_us", "50000\n")
    system("cgroup/cpu/job/cpu.cfs_period_us", "100000\n")
    system("cgroup/memory/memory.limit_in_bytes", f"{GIB // 2}\n")
    system("cgroup/memory/memory.usage_in_bytes", f"{GIB}\n")
    assert limits.cores().quota == 0.5 and limits.cores().effective == 0.5
    assert limits.memory()[:3] == (8 * GIB, GIB // 2, 0) and limits.memory().left == 0


def test_the_address_space_counts(system, monkeypatch):
    monkeypatch.setattr(limits.resource, "getrlimit", lambda what: (3 * GIB, 3 * GIB))
    system("proc/self/cgroup", "0::/\n")
    assert limits.memory() == (8 * GIB, None, None, 2 * GIB) and limits.memory().left == 2 * GIB
