"""``doctor``: checks whether a machine has everything that the engine needs, and whether the engine works."""

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

from rustloader.auto.arguments import initial_workers
from rustloader.settings.limits import TORCH_VERSIONS
from rustloader.tools.cli import host_allocator
from rustloader.tools.probe.log import warnings

if sys.platform.startswith("linux"):
    import resource

    import rustloader._core as _core
    from rustloader._core import ARENA_MIN
    from rustloader.system.procfs import read
    from rustloader.tools.cli.cluster import cluster


OK, NOTE, BAD = "ok", "note", "bad"
_MISSING = "not installed"


@dataclass
class Finding:
    """The result of one check. ``advice`` is the remedy if ``state`` is not OK."""

    subject: str
    found: str
    state: str = OK
    advice: str = ""


def _finding(subject: str, found: str, advice: str = "", state: str = NOTE) -> Finding:
    """Returns a finding. Its state is OK without advice, and ``state`` with advice."""
    return Finding(subject, found, state if advice else OK, advice)


def _tried(subject: str, call: Callable[[], object], advice: str, state: str = BAD) -> Finding:
    """Tries a system call. Returns a finding, which has ``state`` and ``advice`` if the call fails."""
    try:
        call()
    except OSError as error:
        return Finding(subject, _reason(error), state, advice)
    return Finding(subject, "available")


def main(options: Any) -> int:
    """Runs the checks and prints their findings. Returns 0 if the engine works, and 1 if it does not."""
    if not options.json:
        print("Copy this block into a bug report:\n\n```text\nrustloader doctor", flush=True)
    findings = []
    # The others need Linux.
    for check in _CHECKS if sys.platform.startswith("linux") else _CHECKS[:2]:
        for finding in _findings_of(check):
            findings.append(finding)
            if not options.json:
                _print(finding)
    works = all(finding.state != BAD for finding in findings)
    if options.json:
        print(json.dumps({"works": works, "findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        print("The engine works here." if works else "The engine does not work here: loaders run on torch's iterator.")
        print("```")
    return 0 if works else 1


def _print(finding: Finding) -> None:
    labels = {OK: "OK", NOTE: "note", BAD: "BAD"}
    print(f"{labels[finding.state]:4}  {finding.subject:22} {finding.found}", flush=True)
    if finding.advice:
        print(f"{'':28} -> {finding.advice}", flush=True)


def _findings_of(check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from check()
    except Exception as error:
        # An error in one check must not hide the findings of the others. Only an error in the trial is BAD.
        subject = check.__name__.strip("_").replace("_", " ")
        # The last line of a worker's error is the error itself.
        text = str(error).strip().splitlines()[-1:]
        yield Finding(subject, ": ".join([type(error).__name__, *text]), BAD if check is _trial else NOTE)


def _system() -> Iterator[Finding]:
    found = f"{platform.system()} {platform.release()} {platform.machine()}"
    if not sys.platform.startswith("linux"):
        yield Finding("system", found, BAD, "the engine needs Linux")
        return
    version = tuple(map(int, re.findall(r"\d+", platform.release())[:2]))
    if version < (3, 17):
        yield Finding("kernel", found, BAD, "3.17 or newer is needed, for memfd_create")
    else:
        old = "pidfd_open needs 5.3; the engine polls instead" if version < (5, 3) else ""
        yield _finding("kernel", found, old)


def _versions() -> Iterator[Finding]:
    found = f"{platform.python_implementation()} {platform.python_version()}"
    yield _finding("Python", found, "3.11 or newer is needed" if sys.version_info < (3, 11) else "", BAD)
    torch = _version("torch")
    if torch == _MISSING:
        yield Finding("torch", torch, BAD, "pip install torch")
        return
    version = tuple(map(int, re.findall(r"\d+", torch)[:2]))
    first, last = (f"{major}.{minor}" for major, minor in TORCH_VERSIONS)
    if version < TORCH_VERSIONS[0]:
        yield Finding("torch", torch, BAD, f"{first} or newer is needed")
    else:
        untested = f"tested up to {last}; check your loader with `rustloader check`"
        yield _finding("torch", torch, untested if version > TORCH_VERSIONS[1] else "")
    from rustloader import __version__

    yield Finding("rustloader", __version__)
    yield Finding("numpy", _version("numpy"))
    names = sorted(name for name in os.environ if name.startswith(("RUSTLOADER_", "OMP_", "MKL_", "PYTORCH_")))
    found = ", ".join(f"{name}={os.environ[name]}" for name in names)
    yield Finding("environment", found or "no relevant variables")


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return _MISSING


def _accelerator() -> Iterator[Finding]:
    import torch

    if not torch.accelerator.is_available():
        yield Finding("accelerator", "none: pin_memory=True has no effect")
        return
    device = torch.accelerator.current_accelerator()
    kind = device.type if device is not None else "unknown"
    yield Finding("accelerator", f"{kind} {torch.cuda.get_device_name()}" if kind == "cuda" else kind)


def _host_allocator() -> Iterator[Finding]:
    yield _finding("pinned memory", *host_allocator.allocator(os.environ))


def _memory_files() -> Iterator[Finding]:
    import fcntl
    import mmap

    sandbox = "a sandbox (seccomp, gVisor) refuses it; allow the call, as Docker's default profile does"
    try:
        fd = os.memfd_create("rustloader-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        yield Finding("memfd_create", _reason(error), BAD, sandbox)
        return

    def map_memory() -> None:
        os.ftruncate(fd, 1 << 20)
        mmap.mmap(fd, 1 << 20).close()

    with open(fd, "wb"):
        mapped = _tried("memfd_create, mmap", map_memory, "see the limits below")
        yield mapped
        if mapped.state == OK:
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
            yield _tried("seals", lambda: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals), sandbox)


def _pidfd() -> Iterator[Finding]:
    advice = "the engine polls instead; it notices the death of a worker a little later"
    yield _tried("pidfd_open", lambda: os.close(os.pidfd_open(os.getpid())), advice, NOTE)


def _limits() -> Iterator[Finding]:
    kinds = (resource.RLIMIT_NOFILE, resource.RLIMIT_AS, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC)
    files, space, size, processes = (resource.getrlimit(kind)[0] for kind in kinds)
    too_few = files != resource.RLIM_INFINITY and files < 1024
    yield _finding("open files", _limit(files), "raise `ulimit -n` to 1024 or more" if too_few else "")
    left = _core.address_space_left()
    advice = "raise `ulimit -v`; the engine needs 2 GiB" if left is not None and left < 2 * ARENA_MIN else ""
    found = "unlimited" if left is None else f"{_size(left)} left of {_size(space)}"
    yield _finding("address space", found, advice, BAD)
    unlimited = size == resource.RLIM_INFINITY
    advice = "raise `ulimit -f`; the engine needs 1 GiB" if not unlimited and size < ARENA_MIN else ""
    yield _finding("file size", "unlimited" if unlimited else _size(size), advice, BAD)
    yield Finding("processes", _limit(processes))


def _memory() -> Iterator[Finding]:
    limits, space = _core.memory_limits(), _core.address_space_left()
    parts = [(left, f"{_size(left)} available on the machine") for is_cgroup, _, left in limits if not is_cgroup]
    cgroup, size = min(((left, size) for is_cgroup, size, left in limits if is_cgroup), default=(None, 0))
    if cgroup is not None:
        parts.append((cgroup, f"{_size(cgroup)} left of the cgroup's {_size(size)}"))
    if space is not None:
        parts.append((space, f"{_size(space)} left of the address space"))
    if not parts:
        yield Finding("memory", "unknown: the system does not report it", NOTE)
        return
    available = min(parts)[0]
    advice = "use fewer workers, a smaller prefetch_factor or smaller batches" if available < ARENA_MIN else ""
    if advice and available == cgroup:
        advice += ", or raise the cgroup's limit (docker run --memory, Slurm --mem, Kubernetes resources.limits.memory)"
    yield _finding("memory", "; ".join([f"{_size(available)} left", *(text for _, text in parts)]), advice)


def _shared_memory() -> Iterator[Finding]:
    try:
        status = os.statvfs("/dev/shm")
    except OSError as error:
        yield Finding("/dev/shm", _reason(error), NOTE, "the engine does not use it; torch's iterator does")
        return
    size, left = (status.f_frsize * blocks for blocks in (status.f_blocks, status.f_bavail))
    enlarge = "the engine does not use it, but torch's iterator does: enlarge it (docker run --shm-size=8g)"
    yield _finding("/dev/shm", f"{_size(left)} left of {_size(size)}", enlarge if left < ARENA_MIN else "")


def _huge_pages() -> Iterator[Finding]:
    path = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
    text = read(path)
    if text is None:
        yield Finding("huge pages for shmem", f"{path} cannot be read")
        return
    selected = re.search(r"\[(\w+)\]", text)
    found = selected[1] if selected else text.strip()
    is_wasteful = found in ("always", "force")
    advice = "even a small block may take 2 MiB; with `never` or `advise` it takes less" if is_wasteful else ""
    yield _finding("huge pages for shmem", found, advice)


def _start_method() -> Iterator[Finding]:
    method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    reimport = "workers import the program again; the dataset and the loader's functions must be picklable"
    yield _finding("start method", method, "" if method == "fork" else reimport)


def _cores() -> Iterator[Finding]:
    affinity, quota = len(os.sched_getaffinity(0)), _core.cpu_quota()
    usable = affinity if quota is None else min(affinity, quota)
    limited = "" if quota is None else f", quota {quota:g}"
    text = f"{usable:g} usable (machine {os.cpu_count()}, affinity {affinity}{limited})"
    advice = "workers compete with the training loop: with fewer than 2 cores they gain little" if usable < 2 else ""
    yield _finding("cores", f'{text}; num_workers="auto" starts with {initial_workers()}', advice)


def _ray() -> Iterator[Finding]:
    for line in cluster():
        yield _finding(*line)


class _Squares:
    """A dataset whose sample k is filled with k * k."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, k: int) -> Any:
        import torch

        return torch.full((64, 64), k * k)


def _trial() -> Iterator[Finding]:
    import rustloader

    before = rustloader.engine_batches()
    with warnings() as lines:
        squares: Any = _Squares()
        loader: rustloader.DataLoader[Any] = rustloader.DataLoader(squares, batch_size=8, num_workers=2, timeout=60)
        is_right = all(int(x) == k * k for k, x in enumerate(x[0, 0] for batch in loader for x in batch))
    batches = rustloader.engine_batches() - before
    if not lines and batches == 8 and is_right:
        yield Finding("trial, 2 workers", "8 batches from the Rust engine")
    else:
        found = lines[0] if lines else f"{batches} of 8 batches, correct: {is_right}"
        yield Finding("trial, 2 workers", found, BAD, "see above")


_CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (_system, _versions, _accelerator, _host_allocator)
_CHECKS += (_memory_files, _pidfd, _limits, _memory, _shared_memory, _huge_pages, _start_method, _cores)
_CHECKS += (_ray, _trial)


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
