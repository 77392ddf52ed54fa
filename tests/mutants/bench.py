"""The scratch copy into which mutants are put, its builds, and its test runs."""

import ctypes
import functools
import hashlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sources import ROOT

WORK = ROOT / "target" / "mutants"
TREE = WORK / "tree"
LOGS = WORK / "logs"

# The files that mutants change or depend on, and the helpers that all Python tests use.
PRODUCT = ("python/rustloader/", "src/", "Cargo.toml", "Cargo.lock", "pyproject.toml")
LIBRARY = ("rules", "support", "sample_data", "parity_table")
HELPERS = ("tests/python/conftest.py", *(f"tests/lib/{name}.py" for name in LIBRARY))

# Seconds without output after which a run counts as hung: more than any test may take (conftest.py ends most of them
# earlier), more than the imports before the first test take on a busy machine, and more than a build takes.
SLOWEST = 150.0
START = 600.0
BUILD = 1800.0

_PR_SET_CHILD_SUBREAPER = 36
_environment = {
    "CARGO_TARGET_DIR": str(WORK / "build"),
    "CARGO_TERM_COLOR": "never",
    # A build of the extension, which each mutant in Rust needs, takes half the time. Like a release, it has no debug
    # information: a test requires that.
    "CARGO_PROFILE_QUICK_OPT_LEVEL": "1",
    "CARGO_PROFILE_QUICK_DEBUG": "false",
    "CARGO_PROFILE_QUICK_STRIP": "debuginfo",
    "PYO3_PYTHON": sys.executable,
    "PYTHONPATH": os.pathsep.join(str(TREE / folder) for folder in ("python", "tests/mutants")),
    # A mutant of the same length, written in the same second, would use the previous mutant's .pyc file.
    "PYTHONDONTWRITEBYTECODE": "1",
    "VIRTUAL_ENV": sys.prefix,
}


@dataclass
class Outcome:
    """The outcome of a test run."""

    passed: bool
    # The first test that failed, in the form that `run_tests` accepts.
    by: str = ""
    # failed, hung or crashed
    how: str = ""


# --- files ----------------------------------------------------------------------------------------------------------


@functools.cache
def files() -> list[str]:
    """Returns the files of the repository, including untracked files that git does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
    )
    return sorted(f for f in listed.stdout.decode().split("\0") if f and (ROOT / f).is_file())


def sync() -> None:
    """Makes the tree equal to the repository. Unchanged files keep their times, for cargo."""
    for name in files():
        content, copy = (ROOT / name).read_bytes(), TREE / name
        if not copy.exists() or copy.read_bytes() != content:
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(content)
    for folder in ("python", "src", "tests"):
        for copy in (TREE / folder).rglob("*"):
            if copy.suffix in (".py", ".rs") and str(copy.relative_to(TREE)) not in files():
                copy.unlink()


def digest(parts: Iterable[str | bytes]) -> str:
    sum_ = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        sum_.update(len(data).to_bytes(8, "little") + data)
    return sum_.hexdigest()[:16]


def _digest_of_files(names: Iterable[str]) -> str:
    return digest(part for name in names for part in (name, (ROOT / name).read_bytes()))


@functools.cache
def product_digest() -> str:
    return _digest_of_files(f for f in files() if f.startswith(PRODUCT))


@functools.cache
def tests_digest(test: str | None) -> str:
    """Returns a digest of a test's file and the helpers that it uses, or of all tests if `test` is None."""
    if test is None:
        return _digest_of_files(f for f in files() if f.startswith("tests/") and not f.startswith("tests/mutants/"))
    if is_cargo(test):
        return _digest_of_files(f for f in files() if re.fullmatch(r"tests/\w+\.rs", f))
    return _digest_of_files([*HELPERS, file_of(test)])


# --- names of tests -------------------------------------------------------------------------------------------------


def is_cargo(target: str) -> bool:
    return target.split()[0] in ("cargo", "loom")


def file_of(target: str) -> str:
    """Returns the test file of a node id, relative to the root. Returns cargo targets unchanged."""
    if is_cargo(target):
        return target
    name = target.split("::")[0]
    if name.startswith("tests/"):
        return name
    paths = [str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "python").rglob(name)]
    return paths[0] if paths else f"tests/python/{name}"


def exists(target: str) -> bool:
    """Whether the test exists: the file, and the functions named in it."""
    if is_cargo(target):
        return True
    path, names = ROOT / file_of(target), target.split("::")[1:]
    return path.exists() and all(
        re.search(rf"(def|class) {re.escape(n.split('[')[0])}\b", path.read_text()) for n in names
    )


def all_others(targets: list[str], is_rust: bool) -> list[list[str]]:
    """Returns all tests except these, in the order in which to try them."""
    python = [
        f for f in files() if re.fullmatch(r"tests/python/(.*/)?test_\w+\.py", f) and f not in map(_whole_file, targets)
    ]
    return [["cargo"] if is_rust else [], python, ["loom --test loom_*"] if is_rust else []]


def _whole_file(target: str) -> str:
    return "" if "::" in target or is_cargo(target) else file_of(target)


# --- processes ------------------------------------------------------------------------------------------------------


def prepare(jobs: str | None) -> None:
    """Call this first. Orphaned processes become this process's children, so that none is overlooked."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.environ.pop("RUSTLOADER_TEST_LOADER", None)
    os.environ.update(_environment)
    if jobs:
        os.environ["CARGO_BUILD_JOBS"] = jobs
    LOGS.mkdir(parents=True, exist_ok=True)


def _descendants() -> list[int]:
    """Returns the pids of all descendants of this process."""
    parents = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            parents[int(pid)] = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ProcessLookupError):
            continue
    pids, layer = [], {os.getpid()}
    while layer:
        layer = {pid for pid, parent in parents.items() if parent in layer}
        pids += layer
    return pids


def kill_descendants() -> None:
    """Kills all processes that tests have left running."""
    while remaining := _descendants():
        for pid in remaining:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass
        time.sleep(0.02)


def _log(name: str) -> Path:
    return LOGS / (re.sub(r"[^\w.-]+", "-", name) + ".txt")


def forget_log(name: str) -> None:
    _log(name).unlink(missing_ok=True)


def _run(command: list[str], log: str, quiet: float, **environment: str) -> tuple[int | None, str]:
    """Runs a command in the tree, and kills everything that it has started. Returns its exit status and its output. The
    status is None if it was silent for ``quiet`` seconds, or for longer before its first output."""
    path = _log(log)
    with path.open("ab") as out:
        begin = out.tell()
        process = subprocess.Popen(
            command,
            cwd=TREE,
            env={**os.environ, **environment},
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
        size, since = begin, time.monotonic()
        try:
            while (status := process.poll()) is None:
                time.sleep(0.05)
                now, length = time.monotonic(), path.stat().st_size
                if length != size:
                    size, since = length, now
                elif now - since > (quiet if size > begin else max(quiet, START)):
                    break
        finally:
            process.kill()
            process.wait()
            kill_descendants()
    return status, path.read_bytes()[begin:].decode(errors="replace")


# --- builds and tests -----------------------------------------------------------------------------------------------


def build(log: str, targets: list[str]) -> bool:
    """Builds what these tests need from the current tree. Returns False if that fails."""
    if all(map(is_cargo, targets)):
        return all(_run([*_cargo(t), "--no-run"], log, BUILD, **_loom(t))[0] == 0 for t in targets)
    source = _digest_of_tree("src/", "Cargo.toml", "Cargo.lock", "pyproject.toml")
    stamp = WORK / "built"
    if stamp.exists() and stamp.read_text() == source and any((TREE / "python").rglob("*.so")):
        return True
    stamp.unlink(missing_ok=True)
    maturin = str(Path(sys.executable).parent / "maturin")
    if _run([maturin, "develop", "--profile", "quick", "--skip-install"], log, BUILD)[0] != 0:
        return False
    stamp.write_text(source)
    return True


def _digest_of_tree(*begins: str) -> str:
    return digest(part for f in files() if f.startswith(begins) for part in (f, (TREE / f).read_bytes()))


def _cargo(target: str) -> list[str]:
    kind, *arguments = target.split()
    common = ["--release", "--target-dir", str(WORK / "build-loom")] if kind == "loom" else ["--features", "failpoints"]
    return ["cargo", "test", *common, *arguments]


def _loom(target: str) -> dict[str, str]:
    return {"RUSTFLAGS": f"{os.environ.get('RUSTFLAGS', '')} --cfg loom"} if target.startswith("loom") else {}


def run_tests(targets: list[str], log: str) -> Outcome:
    """Runs tests on the tree, up to the first failure."""
    for target in filter(is_cargo, targets):
        outcome = _run_cargo(target, log)
        if not outcome.passed:
            return outcome
    python = [f"{file_of(t)}{t[t.find('::') :] if '::' in t else ''}" for t in targets if not is_cargo(t)]
    return _run_pytest(python, log) if python else Outcome(True)


def _run_cargo(target: str, log: str) -> Outcome:
    status, output = _run(_cargo(target), log, SLOWEST, **_loom(target))
    failed = re.findall(r"^test (\S+) \.\.\. FAILED", output, re.MULTILINE)
    return Outcome(status == 0, " ".join([target, *failed[:1]]), _how(status, failed))


def _run_pytest(targets: list[str], log: str) -> Outcome:
    plugins = ["-p", "no:cacheprovider", "-p", "again"]
    command = [sys.executable, "-m", "pytest", "-x", "-v", "--tb=short", "--no-header", *plugins, *targets]
    status, output = _run(command, log, SLOWEST)
    failed = re.findall(r"^(?:FAILED|ERROR) (tests/.*?)(?: - .*)?$", output, re.MULTILINE)
    started = re.findall(r"^(tests/\S+?\.py::[^\s\[]+(?:\[.*?\])?)(?= |$)", output, re.MULTILINE)
    return Outcome(status == 0, (failed or started[-1:] or [""])[0], _how(status, failed))


def _how(status: int | None, failed: list[str]) -> str:
    return "hung" if status is None else "failed" if failed else "crashed"
