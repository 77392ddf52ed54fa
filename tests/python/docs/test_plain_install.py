"""A plain installation: the wheel in an environment with its dependencies alone. The development environment imports
the package from the source tree, among fifty others, and hides what the wheel lacks and some of the output at exit."""

import contextlib
import fcntl
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from script_server import Server
from support import HEAD, HERE, ROOT, finish, gone, wait_until
from test_docs import PAGES, blocks, page_script

pytestmark = [pytest.mark.ours, pytest.mark.long_setup, pytest.mark.timeout(600)]

# Pages whose Python needs an extra, which a plain installation lacks.
WITH_EXTRAS = {"docs/caching.md", "docs/metrics.md"}


def needed(names):
    """The named distributions and their dependencies, as far as they are installed."""
    result, todo = {}, [*names]
    while todo:
        name = re.sub(r"[-_.]+", "-", todo.pop()).lower()
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            if name not in result:
                result[name] = importlib.metadata.distribution(name)
                required = (it for it in result[name].requires or () if "extra ==" not in it)
                todo += [re.match(r"[\w.-]+", it)[0] for it in required]
    return result.values()


def make_plain(folder):
    """Creates an environment with links to the dependencies of this one, and installs rustloader's wheel with pip."""
    environment = dict(os.environ, PYO3_PYTHON=sys.executable)

    def run(*command):
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"

    # `make build` has compiled the extension; this packs it.
    run(sys.executable, "-m", "maturin", "build", "--release", "--out", folder / "wheel")
    run(sys.executable, "-m", "venv", "--without-pip", "--clear", folder / "venv")
    (packages,) = folder.glob("venv/lib/python*/site-packages")
    # Several distributions may install parts of the same package.
    files = [(file.parts[0], it) for it in needed(["torch", "numpy", "cloudpickle"]) for file in it.files]
    for top, distribution in dict(files).items():
        if top not in ("..", "__pycache__") and not top.endswith(".pth"):
            (packages / top).symlink_to(distribution.locate_file(top))
    (wheel,) = folder.glob("wheel/*.whl")
    options = ["--disable-pip-version-check", "--no-index", "--no-deps"]
    run(sys.executable, "-m", "pip", "--python", folder / "venv/bin/python", "install", *options, wheel)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The environment's bin folder. The environment is created once for all processes of a test run."""
    if shutil.which("cargo") is None or importlib.util.find_spec("maturin") is None:
        reason = "cargo or maturin is missing, and packing the wheel needs both"
        (pytest.fail if os.environ.get("RUSTLOADER_REQUIRE_ALL") else pytest.skip)(reason)
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "plain-install"
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "made").exists():
            make_plain(folder)
            (folder / "made").touch()
    return folder / "venv" / "bin"


def clean_environment(**more):
    """The environment variables, without those that the tests set for this process."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("RUSTLOADER_STALL", "PYTHON"))}
    return {**kept, **more}


@pytest.fixture(scope="module")
def start(plain):
    """Starts scripts in children of a process of the plain environment, as ``start_script`` does in this one."""
    server = Server(str(plain / "python"))

    def start(source, **kw):
        return server.start(source, clean_environment(PYTHONPATH=HERE), **kw)

    # Each test checks that no new process is left behind, so the server starts before the first test.
    assert finish(start("")) == (0, "", "")
    yield start
    server.close()


def run_program(plain, *command, folder, **variables):
    """Runs a program of the plain environment: (exit status, stdout, stderr)."""
    done = subprocess.run(
        [plain / command[0], *command[1:]],
        cwd=folder,
        env=clean_environment(**variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout, done.stderr


def test_the_wheel_is_what_is_imported_and_the_development_packages_are_not_there(plain, tmp_path):
    source = """
import importlib.util, pathlib, rustloader
folder = pathlib.Path(rustloader.__file__).parent
names = ["pytest", "torchdata", "pandas", "psutil", "rich", "tqdm", "maturin"]
print([name for name in names if importlib.util.find_spec(name)], [folder.parent.name, folder.is_symlink()])
print(sorted(it.name for it in folder.iterdir() if it.is_file() and it.suffix != ".py"))
loader = rustloader.DataLoader(range(4), num_workers=1)
print([int(x) for x in loader], rustloader.engine_batches())
"""
    (tmp_path / "script.py").write_text(source)
    status, out, err = run_program(plain, "python", "script.py", folder=tmp_path)
    lines = ["[] ['site-packages', False]", "['_core.abi3.so', '_core.pyi', 'py.typed']", "[0, 1, 2, 3] 4"]
    assert (status, out.splitlines(), err) == (0, lines, "")


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page not in WITH_EXTRAS and any(b.language == "python" for b in blocks(page))]
)
def test_the_python_of_a_page_runs(start, page, tmp_path):
    """The test of test_docs.py, in the plain environment."""
    script = tmp_path / (page.replace("/", "_").replace(".", "_") + ".py")
    script.write_text(page_script(page))
    status, out, err = finish(start(script.read_text(), file=script, folder=tmp_path), 550)
    assert (status, err) == (0, ""), f"{page}\n{out}{err}"


# Sources that leave objects in variables of the main module.
KEPT = {
    "persistent workers": """
    loader = DataLoader(range(8), num_workers=1, persistent_workers=True)
    list(loader); iterator = iter(loader); next(iterator)""",
    "iterator": "iterator = iter(DataLoader(range(8), num_workers=1)); next(iterator)",
    "iterator without workers": "iterator = iter(DataLoader(range(8), seed_by='sample')); next(iterator)",
    "forkserver": """
    loader = DataLoader(range(8), num_workers=1, multiprocessing_context="forkserver")
    iterator = iter(loader); next(iterator)""",
    "on_error": "iterator = iter(DataLoader(range(8), num_workers=1, on_error='skip')); next(iterator)",
    "StatefulDataLoader": """
    loader = rustloader.StatefulDataLoader(range(8), num_workers=1)
    iterator = iter(loader); next(iterator); state = loader.state_dict()""",
    "StatefulDataLoader without workers": """
    loader = rustloader.StatefulDataLoader(range(8))
    iterator = iter(loader); next(iterator); state = loader.state_dict()""",
    "prefetch_to_device": """
    batches = rustloader.prefetch_to_device(DataLoader(range(8), num_workers=1), "cpu")
    list(batches)""",
    "loop of prefetch_to_device": """
    batches = rustloader.prefetch_to_device(rustloader.StatefulDataLoader(range(8), num_workers=1), "cpu")
    iterator = iter(batches); next(iterator); state = batches.state_dict()""",
    "share": """
    import numpy
    kept = [rustloader.share(it) for it in ([1, "a"], {"a": 1}, torch.ones(3), numpy.ones(3))]""",
    "stats": """
    loader = DataLoader(range(8), num_workers=1)
    list(loader); stats = rustloader.stats(loader); verdict = stats.verdict()""",
    "report": """
    loader = DataLoader(range(8), num_workers=1)
    report = rustloader.report(loader, print, every=600); report.__enter__()
    iterator = iter(loader); next(iterator)""",
    "install": """
    rustloader.install()
    iterator = iter(torch.utils.data.DataLoader(range(8), num_workers=1)); next(iterator)""",
    "installed": """
    installed = rustloader.installed(); installed.__enter__()
    iterator = iter(torch.utils.data.DataLoader(range(8), num_workers=1)); next(iterator)""",
}
# What else keeps the objects. A C extension may keep the main module, whose objects then outlive all module globals.
KEEPERS = {
    "the main module": "",
    "a main module that is kept": """
    import ctypes
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(sys.modules["__main__"]))""",
    "builtins": """
    import builtins
    builtins.kept = dict(globals())""",
}


def run_to_end(start, source, folder):
    """Runs a script: (exit status, stdout, stderr)."""
    lines = source.strip("\n").splitlines()
    return finish(
        start(HEAD + "import rustloader\n" + "\n".join(it.removeprefix("    ") for it in lines), folder=folder)
    )


# A fork server takes seconds to start, so it runs with one keeper only.
CASES = [(kept, keeper) for kept in KEPT for keeper in KEEPERS if kept != "forkserver" or "kept" in keeper]


@pytest.mark.parametrize(("kept", "keeper"), CASES)
def test_what_the_main_module_keeps_ends_without_a_word(start, kept, keeper, tmp_path):
    assert run_to_end(start, f"{KEPT[kept]}\n{KEEPERS[keeper]}", tmp_path) == (0, "", "")


def test_a_forked_child_ends_without_a_word_too(start, tmp_path):
    source = "\n".join([KEPT["loop of prefetch_to_device"], KEPT["iterator"], KEEPERS["a main module that is kept"]])
    source += """
    pid = os.fork()
    if pid:
        print(os.waitpid(pid, 0)[1])"""
    assert run_to_end(start, source, tmp_path) == (0, "0\n", "")


def test_an_iterator_that_an_exit_handler_makes_ends_without_a_word(start, tmp_path):
    """The handler runs after all other workers have ended."""
    source = f"""
    import atexit
    from rustloader.workers import group
    atexit.unregister(group._end_all)
    @atexit.register
    def late():
        global iterator
        iterator = iter(DataLoader(range(8), num_workers=1)); next(iterator)
    atexit.register(group._end_all)
    {KEEPERS["a main module that is kept"]}"""
    assert run_to_end(start, source, tmp_path) == (0, "", "")


# Ways to exit: the source, the exit status, and the end of stderr.
WAYS = {
    "sys.exit": ("sys.exit(3)", 3, None),
    "os._exit": ("os._exit(3)", 3, None),
    "an exception": ("raise ValueError('mine')", 1, "ValueError: mine"),
    "SIGINT": ("signal.raise_signal(signal.SIGINT)", -signal.SIGINT, "KeyboardInterrupt"),
    "SIGTERM": ("signal.raise_signal(signal.SIGTERM)", -signal.SIGTERM, None),
}


@pytest.mark.parametrize("way", WAYS)
def test_each_way_out_says_what_python_says_and_no_more(start, way, tmp_path):
    source, expected, last = WAYS[way]
    holders = "\n".join(KEPT[name] for name in ("persistent workers", "StatefulDataLoader", "prefetch_to_device"))
    more = """
    live = iter(batches); next(live)
    pids = [worker.pid for one in (loader._iterator, iterator, live._inner) for worker in getattr(one, "_workers", ())]
    print(*pids, flush=True)"""
    status, out, err = run_to_end(start, f"{holders}\n{more}\n    {source}", tmp_path)
    assert status == expected, err
    if last is None:
        assert err == ""
    else:
        assert err.count("Traceback (most recent call last)") == 1 and err.rstrip().endswith(last), err
    pids = [int(pid) for pid in out.split()]
    assert len(pids) >= 2 and wait_until(lambda: all(map(gone, pids)))


LOADERS = """
import torch, rustloader
class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 32
    def __getitem__(self, i):
        return torch.full((8,), float(i * i))
def make():
    return rustloader.DataLoader(Squares(), batch_size=4, num_workers=1)
if __name__ == "__main__":
    print(sum(len(batch) for batch in torch.utils.data.DataLoader(Squares(), num_workers=1)), rustloader.is_installed())
"""
# Commands, and a part of their output.
COMMANDS = {
    "--help": "doctor",
    "--version": "rustloader",
    "bench --help": "usage:",
    "doctor": "The engine works here.",
    "check loaders.py:make": "8 batches",
    "bench loaders.py:make --epochs 1 --batches 2 --json": '"results"',
    "run loaders.py": "32 True",
}


def test_each_command_works_and_writes_to_stdout_alone(plain, tmp_path):
    (tmp_path / "loaders.py").write_text(LOADERS)
    # The script and the module are the same program, so the commands alternate between them.
    ways = [("rustloader",), ("python", "-m", "rustloader")]

    def run_command(number, command):
        return command, *run_program(plain, *ways[number % 2], *command.split(), folder=tmp_path)

    with ThreadPoolExecutor(2) as pool:
        results = [*pool.map(run_command, range(len(COMMANDS)), COMMANDS)]
    for command, status, out, err in results:
        assert (status, err) == (0, "") and COMMANDS[command] in out, f"{command}: {status}\n{out}{err}"
        if "--json" in command:
            assert json.loads(out)
    # Without the packages of the extra `cli`, top prints plain text.
    status, out, err = run_program(plain, "rustloader", "top", "--once", folder=tmp_path)
    assert status in (0, 2) and "Traceback" not in err, err


def test_a_wrong_variable_is_a_one_line_error_of_each_command(plain, tmp_path):
    for command in (["rustloader", "doctor"], ["python", "-m", "rustloader", "--version"]):
        status, out, err = run_program(plain, *command, folder=tmp_path, RUSTLOADER_INSTALL="nonsense")
        assert (status, out, err.count("\n")) == (2, "", 1), err
        assert err.startswith("rustloader: RUSTLOADER_INSTALL must be 1, 0, or options"), err
        assert err.endswith(". Change RUSTLOADER_INSTALL, or unset it.\n"), err
    status, _, err = run_program(
        plain, "python", "-c", "import rustloader", folder=tmp_path, RUSTLOADER_INSTALL="nonsense"
    )
    assert status == 1 and "\nValueError: RUSTLOADER_INSTALL must be 1, 0, or options" in err
