"""`python -m rustloader doctor`: a block to copy, what to do, and the limits of cores and memory."""

import errno
import json
import os
import re
import socket
import sys
import types

import pytest
from support import run_script, rustloader

pytestmark = pytest.mark.ours

if rustloader is not None:
    from rustloader.system import cores
    from rustloader.tools import cli
    from rustloader.tools.cli import doctor

GIB = 1 << 30


def test_one_block_to_copy(capsys):
    assert cli.main(["doctor"]) == 0
    first, empty, *block = capsys.readouterr().out.splitlines()
    assert (first, empty) == ("Copy this block into a bug report:", "")
    assert block[:2] == ["```text", "rustloader doctor"]
    assert block[-2:] == ["The engine works here.", "```"]
    assert all(re.match(r"(OK  |note) {2}\S|( {29}-> )", line) for line in block[2:-2]), block
    out = "\n".join(block)
    assert "8 batches from the Rust engine" in out and "Error" not in out
    for subject in (
        "kernel Python torch rustloader numpy environment accelerator pinned_memory memfd_create seals pidfd_open "
        "open_files address_space file_size processes memory /dev/shm huge_pages_for_shmem start_method cores"
    ).split():
        assert subject.replace("_", " ") in out.replace("_", " ")


def test_json(capsys, monkeypatch):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    assert cli.main(["doctor", "--json"]) == 0
    parsed = json.loads(capsys.readouterr().out)
    assert parsed["works"] is True
    assert {"subject": "rustloader", "found": rustloader.__version__, "state": "ok", "advice": ""} in parsed["findings"]
    (pinned,) = [finding for finding in parsed["findings"] if finding["subject"].startswith("pinned")]
    assert pinned["state"] == "ok" and pinned["found"].startswith("torch's defaults")


def refused(number):
    def call(*args, **kw):
        raise OSError(number, os.strerror(number))

    return call


@pytest.mark.handover
def test_what_is_refused_is_named(monkeypatch, capsys):
    monkeypatch.setattr(os, "memfd_create", refused(errno.EPERM))
    monkeypatch.setattr(os, "pidfd_open", refused(errno.ENOSYS))
    monkeypatch.setattr(rustloader.iterator.fallback, "Engine", refused(errno.EPERM))
    assert cli.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "BAD   memfd_create           Operation not permitted\n" in out and "Docker's default profile" in out
    assert "note  pidfd_open             Function not implemented\n" in out
    assert "BAD   trial, 2 workers" in out
    assert out.endswith("loaders run on torch's iterator.\n```\n")


@pytest.mark.parametrize(
    "look, place, name, value, state, words",
    [
        ("_system", "platform", "release", lambda: "4.18.0-x", "note", "pidfd_open"),
        ("_system", "platform", "release", lambda: "2.6.32", "bad", "memfd_create"),
        ("_system", "sys", "platform", "darwin", "bad", "Linux"),
        ("_versions", "metadata", "version", lambda name: "2.5.1+cu124", "bad", "2.6 or newer"),
        ("_versions", "metadata", "version", lambda name: "3.0.0", "note", "tested up to 2.15"),
        ("_limits", "resource", "getrlimit", lambda what: (512, -1), "note", "ulimit -n"),
        ("_limits", "_core", "address_space_left", lambda: 1 << 29, "bad", "ulimit -v"),
        ("_shared_memory", "os", "statvfs", refused(errno.ENOENT), "note", "does not use it"),
    ],
)
def test_what_to_do(look, place, name, value, state, words, monkeypatch):
    fake = types.SimpleNamespace(**vars(getattr(doctor, place)) | {name: value})
    monkeypatch.setattr(doctor, place, fake)
    findings = list(getattr(doctor, look)())
    assert any(finding.state == state and words in finding.advice for finding in findings), findings


def test_what_cannot_be_looked_at_is_no_reason_to_stop(monkeypatch, capsys):
    def _broken_thing():
        raise LookupError("Original Traceback\n  line 1\nnothing there\n")
        yield

    monkeypatch.setattr(doctor, "_CHECKS", (_broken_thing, doctor._trial))
    assert cli.main(["doctor"]) == 0
    assert "note  broken thing           LookupError: nothing there\n" in capsys.readouterr().out


def test_variables_that_matter(monkeypatch):
    monkeypatch.setenv("RUSTLOADER_INSTALL", "1")
    findings = {finding.subject: finding.found for finding in doctor._versions()}
    assert "RUSTLOADER_INSTALL=1" in findings["environment"]


# Memory and cores


@pytest.mark.parametrize(
    "limits, space, state, found, advice",
    [
        ([(False, 20 * GIB, 16 * GIB)], None, "ok", "16 GiB left; 16 GiB available on the machine", ""),
        ([(False, GIB, GIB // 2)], None, "note", "512 MiB left", "fewer workers"),
        (
            [(False, 20 * GIB, 16 * GIB), (True, 8 * GIB, 4 * GIB), (True, GIB // 2, GIB // 4)],
            None,
            "note",
            "256 MiB left; 16 GiB available on the machine; 256 MiB left of the cgroup's 512 MiB",
            "docker run --memory",
        ),
        ([(False, 20 * GIB, 16 * GIB), (True, GIB // 2, 0)], None, "note", "0 bytes left", "docker run --memory"),
        (
            [(False, 20 * GIB, 16 * GIB), (True, 8 * GIB, 4 * GIB)],
            2 * GIB,
            "ok",
            "2 GiB left; 16 GiB available on the machine; 4 GiB left of the cgroup's 8 GiB; 2 GiB left of the address",
            "",
        ),
        ([], None, "note", "unknown: the system does not report it", ""),
    ],
)
def test_the_memory_that_is_left(limits, space, state, found, advice, monkeypatch):
    monkeypatch.setattr(doctor._core, "memory_limits", lambda: limits)
    monkeypatch.setattr(doctor._core, "address_space_left", lambda: space)
    [finding] = doctor._memory()
    assert finding.state == state and finding.found.startswith(found) and advice in finding.advice


def test_the_limits_of_this_process():
    """The limits of the machine and of cgroups. Simulated ones are in tests/sys_memory.rs."""
    machine, *cgroups = doctor._core.memory_limits()
    assert not machine[0] and all(is_cgroup for is_cgroup, _, _ in cgroups)
    assert 0 < machine[2] <= machine[1] and all(0 <= left <= size for _, size, left in cgroups)


def test_the_address_space_that_is_left():
    source = """
    import resource
    from rustloader import _core
    print(_core.address_space_left())
    resource.setrlimit(resource.RLIMIT_AS, (1 << 50, 1 << 50))
    print(0 < _core.address_space_left() < 1 << 50)
    """
    assert run_script(source)[1] == "None\nTrue\n"


@pytest.mark.parametrize(
    "machine, affinity, quota, state, found",
    [
        (8, 4, None, "ok", "4 usable (machine 8, affinity 4)"),
        (8, 4, 1.5, "note", "1.5 usable (machine 8, affinity 4, quota 1.5)"),
        (1, 1, None, "note", "1 usable"),
    ],
)
def test_the_cores(machine, affinity, quota, state, found, monkeypatch):
    monkeypatch.setattr(doctor.os, "cpu_count", lambda: machine)
    monkeypatch.setattr(doctor.os, "sched_getaffinity", lambda pid: set(range(affinity)))
    monkeypatch.setattr(doctor._core, "cpu_quota", lambda: quota)
    [finding] = doctor._cores()
    assert finding.state == state and finding.found.startswith(found)


def test_statistics_count_the_cores_of_the_quota(monkeypatch):
    monkeypatch.setattr(cores, "cpu_quota", lambda: 0.5)
    assert cores.effective_cores() == 0.5 and cores.usable_cores() == 1
    assert rustloader.stats(rustloader.DataLoader([0])).cores == 1
    monkeypatch.setattr(cores, "cpu_quota", lambda: None)
    assert cores.usable_cores(7) == 7


def test_a_cluster_is_asked_only_where_it_is_named(monkeypatch):
    from rustloader.tools.cli import cluster

    def missing(name):
        raise cluster.metadata.PackageNotFoundError(name)

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(cluster.metadata, "version", missing)
    assert list(cluster.cluster()) == []
    monkeypatch.setattr(cluster.metadata, "version", lambda name: "2.99.0")
    assert list(cluster.cluster()) == [("Ray", "2.99.0; RAY_ADDRESS is not set", "")]


class FakeRay:
    """A connected cluster: one node has other versions, one does not answer, and one has ended."""

    def is_initialized(self):
        return True

    def cluster_resources(self):
        own = {"decoding": 32.0, "node:10.0.0.1": 1.0, "accelerator_type:H100": 1.0, "object_store_memory": 1e9}
        return {"CPU": 8.0, "GPU": 2.0, "memory": 16e9, **own}

    def available_resources(self):
        return {"CPU": 3.0, "memory": 4e9, "decoding": 30.0}

    def nodes(self):
        names = ("skewed", "silent", "ended")
        return [
            {"Alive": name != "ended", "NodeID": name * 8, "NodeManagerAddress": f"{name}.example"} for name in names
        ]

    def remote(self, scheduling_strategy, **options):
        return lambda function: types.SimpleNamespace(remote=lambda: scheduling_strategy)

    def wait(self, answers, **options):
        return [], answers

    def get(self, answer, timeout):
        if answer == "silent" * 8:
            raise TimeoutError("no answer")
        return {"rustloader": "9.9.9"}


def test_what_is_free_and_which_nodes_cannot_serve(monkeypatch):
    from rustloader.tools.cli import cluster

    strategies = types.SimpleNamespace(NodeAffinitySchedulingStrategy=lambda node, soft: node)
    modules = {"ray": FakeRay(), "ray.util": types.SimpleNamespace(), "ray.util.scheduling_strategies": strategies}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(cluster.metadata, "version", lambda name: "2.99.0")
    first, skewed, silent = cluster.cluster()
    memory = "4.0 GB of 16.0 GB memory"
    assert first == ("Ray", f"2.99.0; 3 of 8 CPUs free, 0 of 2 GPUs, {memory}, 30 of 32 decoding", "")
    assert skewed[1] == "skewed.example (skewedsk): rustloader 9.9.9"
    assert "the versions differ: rustloader 9.9.9 there and" in skewed[2]
    assert silent[1:] == (
        "silent.example (silentsi): no answer",
        "install rustloader there, with the same versions as here",
    )


def test_an_address_that_nobody_serves_is_not_left_to_ray():
    from rustloader.tools.cli import cluster

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        cluster.reach(f"127.0.0.1:{port}")
    for address in (f"127.0.0.1:{port}", f"[::ffff:127.0.0.1]:{port}"):
        with pytest.raises(OSError):
            cluster.reach(address)
    for address in ("auto", "local", "ray://127.0.0.1:1"):
        cluster.reach(address)
