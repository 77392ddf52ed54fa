"""macOS and Windows, where there is no engine: every name exists, and torch's iterator does the work.

The package is copied without its extension, like the wheel for these systems, and once torch has been imported the
interpreter claims to run there. Modules and calls that are missing there are removed, and workers are spawned, except
on "Windows", whose way to start processes is not available here. Everything else is this system's.
"""

import csv
import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import zipfile
from base64 import urlsafe_b64encode

import pytest
from support import HERE, ROOT, rustloader, start_script
from support import finish as finished

pytestmark = pytest.mark.ours

# The module `sitecustomize`, which every interpreter imports when it starts, spawned workers included.
CUSTOMIZE = """
import multiprocessing.spawn, multiprocessing.popen_spawn_posix, multiprocessing.resource_tracker
import os, runpy, signal, subprocess, sys
import torch.utils.data  # it is this system's
sys.platform = {platform!r}
multiprocessing.set_start_method("fork" if sys.platform == "win32" else "spawn")
for name in ("memfd_create", "pidfd_open", "sched_getaffinity"):
    delattr(os, name)
del signal.SIGRTMIN
if sys.platform == "win32":
    for name in ("register_at_fork", "statvfs", "sysconf"):
        delattr(os, name)
    sys.modules.update(dict.fromkeys(("fcntl", "resource")))
"""
HEAD = "import logging, torch, torch.utils.data\nfrom sample_data import Numbers\n"


@pytest.fixture
def bare(tmp_path):
    """A folder with the package without its extension."""
    package = pathlib.Path(rustloader.__file__).parent
    shutil.copytree(package, tmp_path / "rustloader", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return tmp_path


@pytest.fixture(params=["darwin", "win32"])
def other_system(request, bare):
    """A function that runs a script, or the interpreter with arguments, there: (exit status, stdout, stderr)."""
    (bare / "sitecustomize.py").write_text(CUSTOMIZE.format(platform=request.param))

    def run(source="", *arguments, **variables):
        # From Python 3.14 on, its tracker may call the semaphores of torch's iterator leaked after they were unlinked.
        unleaked = {"PYTHONWARNINGS": "ignore:resource_tracker:UserWarning"} if sys.version_info >= (3, 14) else {}
        variables = {"PYTHONPATH": os.pathsep.join([str(bare), HERE]), **unleaked, **variables}
        if arguments:
            command = [sys.executable, *arguments]
            done = subprocess.run(command, env=os.environ | variables, cwd=bare, capture_output=True, text=True)
            return done.returncode, done.stdout, done.stderr
        return finished(start_script(source, bare / "script.py", HEAD, variables))

    run.line = "rustloader's engine needs Linux, and this is " + request.param
    return run


def test_loaders_run_on_torchs_iterator_with_one_line_in_the_log(other_system):
    status, out, err = other_system("""
        import sys
        import rustloader
        from rustloader import DataLoader
        from rustloader.dataloader import default_collate

        class Summing(Numbers):
            def __call__(self, *numbers):
                return sum(numbers)

        if __name__ == "__main__":
            assert issubclass(DataLoader, torch.utils.data.DataLoader)
            assert len(list(DataLoader(Numbers(10), batch_size=4))) == 3
            print("no line without workers", file=sys.stderr)
            for epoch in range(2):
                loader = DataLoader(Numbers(10), batch_size=4, num_workers=1)
                iterator = iter(loader)
                assert type(iterator) is torch.utils.data.dataloader._MultiProcessingDataLoaderIter
                assert [batch.tolist() for batch in iterator] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
            cached = rustloader.cache(Summing(4), then=float)
            (batch,) = DataLoader(cached, batch_size=4, num_workers=1)
            assert batch.tolist() == list(cached) == [0.0, 1.0, 2.0, 3.0] and cached(1, 2) == 3
            assert all(hasattr(rustloader, name) for name in rustloader.__all__)
            print(rustloader.engine_batches())
    """)
    line = f"DataLoaders run on torch's own iterator: {other_system.line}\n"
    assert (status, out, err) == (0, "0\n", f"no line without workers\n{line}")


def test_install_does_nothing_and_says_so_once(other_system):
    # At the top level, which spawned workers run as well.
    status, out, err = other_system("""
        import rustloader
        rustloader.install(prefetch_factor=4, in_order=True)

        if __name__ == "__main__":
            loader = torch.utils.data.DataLoader(Numbers(10), batch_size=4, num_workers=1)
            assert loader.prefetch_factor == 2
            with rustloader.installed(persistent_workers=True):
                assert type(iter(loader)) is torch.utils.data.dataloader._MultiProcessingDataLoaderIter
                assert not rustloader.is_installed()
            rustloader.uninstall()
            print(len(list(loader)))
    """)
    assert (status, out, err) == (0, "3\n", f"DataLoaders run on torch's own iterator: {other_system.line}\n")


def test_the_environment_variable_does_nothing_either(other_system):
    source = """
        import rustloader
        if __name__ == "__main__":
            print(len(list(torch.utils.data.DataLoader(Numbers(10), batch_size=4, num_workers=1))))
    """
    status, out, err = other_system(source, RUSTLOADER_INSTALL="prefetch_factor=4")
    assert (status, out, err) == (0, "3\n", f"DataLoaders run on torch's own iterator: {other_system.line}\n")


def test_statistics_say_that_there_are_none_and_why(other_system):
    status, out, err = other_system("""
        import rustloader
        logging.getLogger("rustloader").addHandler(logging.NullHandler())

        if __name__ == "__main__":
            loader = rustloader.DataLoader(Numbers(10), batch_size=4, num_workers=1)
            told = []
            with rustloader.report(loader, told.append):
                iterator = iter(loader)
                list(iterator)
            class Wrapper:
                def __init__(self):
                    self.loader = loader
                def __iter__(self):
                    return iter(self.loader)

            for stats in (rustloader.stats(loader), rustloader.stats(iterator), rustloader.stats(Wrapper()), *told):
                assert stats.num_workers == 1 and stats.batches == 0 and isinstance(stats, rustloader.Stats)
                assert str(stats) and stats.as_dict()["note"] == stats.note
                print(stats.verdict().kind, "|", stats.verdict().sentence)
            for call in (lambda: rustloader.stats(3), lambda: rustloader.report(loader, print, every=0).__enter__()):
                try:
                    call()
                except (TypeError, ValueError) as error:
                    print(error)
    """)
    *verdicts, not_a_loader, every = out.splitlines()
    assert (status, err) == (0, "") and verdicts == [f"unknown | No verdict: {other_system.line}."] * 4
    assert not_a_loader == "rustloader.stats() takes a DataLoader or its iterator, not an object of type int"
    assert every == "every must be a positive number of seconds, got 0"


# Runs commands one after the other in one interpreter, and prints the status and the output of each.
COMMANDS = """
import contextlib, io, json, runpy, sys

for command in json.loads(sys.argv[1]):
    sys.argv, out, err, status = ["rustloader", *command], io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            runpy.run_module("rustloader", run_name="__main__", alter_sys=True)
        except SystemExit as end:
            status = end.code
    print(json.dumps([status, out.getvalue(), err.getvalue()]))
"""


def test_the_command_line(other_system, bare):
    (bare / "train.py").write_text(
        "from torch.utils.data import DataLoader\n"
        "def make():\n    return DataLoader(list(range(10)), batch_size=4, num_workers=1)\n"
        "if __name__ == '__main__':\n    print(len(list(make())))\n"
    )
    commands = [["doctor"], ["top"], ["check", "train.py:make"], ["bench", "train.py:make"]]
    status, out, err = other_system("", "-c", COMMANDS, json.dumps(commands))
    assert (status, err) == (0, "")
    doctor, top, *others = map(json.loads, out.splitlines())
    status, out, err = doctor
    assert (status, err) == (1, "") and "-> the engine needs Linux\n" in out
    assert out.endswith("The engine does not work here: loaders run on torch's iterator.\n```\n")
    assert top == [2, "", f"rustloader top: {other_system.line}\n"]
    for command, result in zip(("check", "bench"), others, strict=True):
        text = f"rustloader {command}: the engine runs on Linux only: there is nothing to compare\n"
        assert result == [2, "", text]
    status, out, err = other_system("", "-m", "rustloader", "run", "train.py")
    assert (status, out, err) == (0, "3\n", f"DataLoaders run on torch's own iterator: {other_system.line}\n")


@pytest.mark.parametrize("source", ["import rustloader", "from rustloader.dataloader import DataLoader"])
def test_on_linux_a_missing_extension_is_a_broken_installation(bare, source):
    status, out, err = finished(start_script(source, head="", environment={"PYTHONPATH": str(bare)}))
    assert (status, out) == (1, "")
    assert err.splitlines()[-1] == (
        f"ImportError: rustloader in {bare / 'rustloader'} has no compiled extension (_core.abi3.so): "
        "this installation is broken. Install it again; in a source tree, run `make build`"
    )


# The wheel for these systems


@pytest.fixture
def pure_wheel(tmp_path):
    """The result of scripts/pure_wheel.py for a Linux wheel, whose extension is a dummy that is never loaded."""
    linux = tmp_path / "rustloader-0.1.0-cp311-abi3-manylinux_2_28_x86_64.whl"
    info = "rustloader-0.1.0.dist-info"
    package = pathlib.Path(rustloader.__file__).parent
    with zipfile.ZipFile(linux, "w") as wheel:
        for path in [*package.rglob("*.py"), package / "py.typed"]:
            wheel.write(path, pathlib.Path("rustloader", path.relative_to(package)))
        wheel.writestr("rustloader/_core.abi3.so", b"for Linux")
        wheel.writestr(f"{info}/sboms/rustloader.cyclonedx.json", "{}")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.4\nName: rustloader\nVersion: 0.1.0\n")
        wheel.writestr(
            f"{info}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: maturin\nRoot-Is-Purelib: false\nTag: cp311-abi3-manylinux_2_28_x86_64\n",
        )
        wheel.writestr(f"{info}/RECORD", "")
    script = ROOT / "scripts" / "pure_wheel.py"
    done = subprocess.run([sys.executable, str(script), str(linux)], capture_output=True, text=True, check=True)
    return pathlib.Path(done.stdout.strip())


def test_the_pure_wheel_has_all_but_the_extension(pure_wheel):
    with zipfile.ZipFile(pure_wheel) as wheel:
        names = set(wheel.namelist())
        assert "rustloader/_core.abi3.so" not in names and not any("sboms" in name for name in names)
        assert {"rustloader/__init__.py", "rustloader/iterator/unsupported.py", "rustloader/py.typed"} <= names
        (record,) = (name for name in names if name.endswith("/RECORD"))
        rows = {row[0]: row[1:] for row in csv.reader(wheel.read(record).decode().splitlines())}
        assert rows.keys() == names and rows.pop(record) == ["", ""]
        for name, (digest, size) in rows.items():
            content = wheel.read(name)
            expected = urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            assert (digest, int(size)) == (f"sha256={expected}", len(content))


def test_pip_takes_the_pure_wheel_on_macos_and_windows_and_not_on_linux(pure_wheel, tmp_path):
    def install(*platform):
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--no-index", "--no-deps"]
        where = tmp_path / "-".join(("target", *platform))
        options = ["--only-binary=:all:", "--platform", *platform] if platform else []
        done = subprocess.run([*command, "--target", where, *options, pure_wheel], capture_output=True, text=True)
        return done.returncode, done.stderr, (where / "rustloader" / "iterator" / "unsupported.py").exists()

    for platform in ("macosx_11_0_arm64", "macosx_14_0_arm64", "macosx_10_15_x86_64", "win_amd64", "win_arm64"):
        assert install(platform) == (0, "", True)
    for platform in ((), ("manylinux_2_28_x86_64",), ("musllinux_1_2_x86_64",)):
        status, err, is_installed = install(*platform)
        assert status == 1 and not is_installed and "is not a supported wheel on this platform" in err
