"""``doctor``: what the engine needs of a machine, and whether it works here."""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

from rustloader._cli.log import warnings

if sys.platform != "win32":
    import resource

__all__ = ["main"]

OK, NOTE, BAD = "ok", "note", "bad"
_TORCH = ((2, 6), (2, 15))
# The smallest arena that the engine works with; it takes half of the address space that is left.
_SMALLEST = 1 << 30


@dataclass
class Finding:
    """One thing that was looked at. ``advice`` says what to do where it is not OK."""

    subject: str
    found: str
    state: str = OK
    advice: str = ""


def main(options: Any) -> int:
    """Prints the findings: 0 if the engine works, else 1."""
    findings = []
    for look in _LOOKS if sys.platform.startswith("linux") else _LOOKS[:2]:
        for finding in _safely(look):
            findings.append(finding)
            if not options.json:
                _print(finding)
    works = all(finding.state != BAD for finding in findings)
    if options.json:
        print(json.dumps({"works": works, "findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        print("The engine works here." if works else "The engine does not work here: loaders run on torch's iterator.")
    return 0 if works else 1


def _print(finding: Finding) -> None:
    words = {OK: "OK", NOTE: "note", BAD: "BAD"}
    print(f"{words[finding.state]:4}  {finding.subject:22} {finding.found}", flush=True)
    if finding.advice:
        print(f"{'':28} -> {finding.advice}", flush=True)


def _safely(look: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from look()
    except Exception as error:
        # What hides one thing from us is no reason to say nothing of the others: the trial decides.
        subject = look.__name__.strip("_").replace("_", " ")
        yield Finding(subject, f"{type(error).__name__}: {error}", BAD if look is _trial else NOTE, "see above")


def _system() -> Iterator[Finding]:
    found = f"{platform.system()} {platform.release()} {platform.machine()}"
    if not sys.platform.startswith("linux"):
        yield Finding("system", found, BAD, "the engine needs Linux")
        return
    version = tuple(map(int, re.findall(r"\d+", platform.release())[:2]))
    if version < (3, 17):
        yield Finding("kernel", found, BAD, "3.17 is the oldest that has memfd_create")
    elif version < (5, 3):
        yield Finding("kernel", found, NOTE, "before 5.3 there are no pidfds; the engine does without, and polls")
    else:
        yield Finding("kernel", found)


def _versions() -> Iterator[Finding]:
    found = f"{platform.python_implementation()} {platform.python_version()}"
    old = sys.version_info < (3, 11)
    yield Finding("Python", found, BAD if old else OK, "3.11 or newer is needed" if old else "")
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        yield Finding("torch", "not installed", BAD, "pip install torch")
        return
    version = tuple(map(int, re.findall(r"\d+", torch)[:2]))
    first, last = (f"{major}.{minor}" for major, minor in _TORCH)
    if version < _TORCH[0]:
        yield Finding("torch", torch, BAD, f"{first} or newer is needed")
    elif version > _TORCH[1]:
        yield Finding("torch", torch, NOTE, f"tested up to {last}; compare your loader by `rustloader check`")
    else:
        yield Finding("torch", torch)
    from rustloader import __version__

    yield Finding("rustloader", __version__)


def _memory_files() -> Iterator[Finding]:
    import fcntl
    import mmap

    sandbox = "a sandbox (seccomp, gVisor) refuses it; allow the call, as Docker's default profile does"
    try:
        fd = os.memfd_create("rustloader-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        yield Finding("memfd_create", _reason(error), BAD, sandbox)
        return
    try:
        try:
            os.ftruncate(fd, 1 << 20)
            mmap.mmap(fd, 1 << 20).close()
            yield Finding("memfd_create, mmap", "can be had")
        except OSError as error:
            yield Finding("memfd_create, mmap", _reason(error), BAD, "see the limits below")
            return
        try:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            yield Finding("seals", "can be had")
        except OSError as error:
            yield Finding("seals", _reason(error), BAD, sandbox)
    finally:
        os.close(fd)


def _pidfd() -> Iterator[Finding]:
    try:
        os.close(os.pidfd_open(os.getpid()))
        yield Finding("pidfd_open", "can be had")
    except OSError as error:
        yield Finding("pidfd_open", _reason(error), NOTE, "the engine does without; deaths are seen a little later")


def _limits() -> Iterator[Finding]:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    few = files != resource.RLIM_INFINITY and files < 1024
    yield Finding("open files", _limit(files), NOTE if few else OK, "raise `ulimit -n` to 1024 or more" if few else "")

    space = resource.getrlimit(resource.RLIMIT_AS)[0]
    left = space if space == resource.RLIM_INFINITY else space - _kilobytes("/proc/self/status", "VmSize:")
    short = left != resource.RLIM_INFINITY and left < 2 * _SMALLEST
    found = "unlimited" if left == resource.RLIM_INFINITY else f"{_size(left)} left of {_size(space)}"
    yield Finding("address space", found, BAD if short else OK, "raise `ulimit -v`; 2 GiB are needed" if short else "")

    size = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    short = size != resource.RLIM_INFINITY and size < _SMALLEST
    found = "unlimited" if size == resource.RLIM_INFINITY else _size(size)
    yield Finding("file size", found, BAD if short else OK, "raise `ulimit -f`; 1 GiB is needed" if short else "")

    yield Finding("processes", _limit(resource.getrlimit(resource.RLIMIT_NPROC)[0]))


def _memory() -> Iterator[Finding]:
    available = _kilobytes("/proc/meminfo", "MemAvailable:")
    found = f"{_size(available)} available"
    limit = _cgroup("memory.max", "memory/memory.limit_in_bytes")
    if limit is not None and limit.isdecimal() and int(limit) < 1 << 60:
        found += f", the cgroup's limit is {_size(int(limit))}"
    short = available < _SMALLEST
    advice = "use fewer workers, a smaller prefetch_factor or smaller batches" if short else ""
    yield Finding("memory", found, NOTE if short else OK, advice)


def _shared_memory() -> Iterator[Finding]:
    try:
        status = os.statvfs("/dev/shm")
    except OSError as error:
        yield Finding(
            "/dev/shm", _reason(error), NOTE, "the engine does not use it; what torch's iterator serves needs it"
        )
        return
    size = status.f_frsize * status.f_blocks
    small = size < _SMALLEST
    advice = "the engine does not use it; for what torch's iterator serves: docker run --shm-size=8g" if small else ""
    yield Finding("/dev/shm", _size(size), NOTE if small else OK, advice)


def _huge_pages() -> Iterator[Finding]:
    path = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
    try:
        with open(path) as file:
            text = file.read()
    except OSError as error:
        yield Finding("huge pages for shmem", f"{path}: {_reason(error)}")
        return
    chosen = re.search(r"\[(\w+)\]", text)
    found = chosen[1] if chosen else text.strip()
    wasteful = found in ("always", "force")
    advice = "a block of any size may take 2 MiB; `never` or `advise` take less memory" if wasteful else ""
    yield Finding("huge pages for shmem", found, NOTE if wasteful else OK, advice)


def _start_method() -> Iterator[Finding]:
    method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    slow = method != "fork"
    advice = "workers import the program anew; dataset and functions have to be picklable" if slow else ""
    yield Finding("start method", method, NOTE if slow else OK, advice)


def _cores() -> Iterator[Finding]:
    machine, affinity = os.cpu_count() or 1, len(os.sched_getaffinity(0))
    found, cores = f"{affinity} of the machine's {machine}", float(affinity)
    quota = _cgroup_cores()
    if quota is not None:
        found += f", the cgroup allows {quota:g}"
        cores = min(cores, quota)
    advice = "with one core workers take time from the training loop" if cores < 2 else ""
    yield Finding("cores", found, NOTE if cores < 2 else OK, advice)


class _Squares:
    """A dataset for the trial."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, k: int) -> Any:
        import torch

        return torch.full((64, 64), k * k)


def _trial() -> Iterator[Finding]:
    import rustloader

    before = rustloader.engine_batches()
    with warnings() as lines:
        loader: Any = rustloader.DataLoader(_Squares(), batch_size=8, num_workers=2, timeout=60)  # type: ignore[arg-type]
        right = all(int(x) == k * k for k, x in enumerate(x[0, 0] for batch in loader for x in batch))
    batches = rustloader.engine_batches() - before
    if lines or batches != 8 or not right:
        yield Finding(
            "trial, 2 workers", lines[0] if lines else f"{batches} of 8 batches, right: {right}", BAD, "see above"
        )
    else:
        yield Finding("trial, 2 workers", "8 batches by the Rust engine")


_LOOKS = (
    _system,
    _versions,
    _memory_files,
    _pidfd,
    _limits,
    _memory,
    _shared_memory,
    _huge_pages,
    _start_method,
    _cores,
    _trial,
)


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value:,}"


def _size(count: int) -> str:
    value, unit = float(count), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.4g} {unit}"


def _kilobytes(path: str, name: str) -> int:
    """A figure that a file of the kernel's has in kB, in bytes."""
    with open(path) as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(name))


def _cgroup(second: str, first: str) -> str | None:
    """A file of this process's cgroup: the second version's by one name, the first's by another."""
    group = ""
    with open("/proc/self/cgroup") as file:
        for line in file:
            if line.startswith("0::"):
                group = line[3:].strip()
    for path in (f"/sys/fs/cgroup{group}/{second}", f"/sys/fs/cgroup/{second}", f"/sys/fs/cgroup/{first}"):
        try:
            with open(path) as file:
                return file.read().strip()
        except OSError:
            continue
    return None


def _cgroup_cores() -> float | None:
    text = _cgroup("cpu.max", "cpu/cpu.cfs_quota_us")
    if text is None or text.startswith(("max", "-1")):
        return None
    quota, _, period = text.partition(" ")
    period = period or _cgroup("cpu.max", "cpu/cpu.cfs_period_us") or "100000"
    return int(quota) / int(period)
