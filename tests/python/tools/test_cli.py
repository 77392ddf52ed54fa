"""The command line: `python -m rustloader` and its commands, in this process where possible."""

import os
import pkgutil
import signal
import subprocess
import sys
import textwrap
import tomllib

import numpy as np
import pytest
import torch
from support import ROOT, rustloader

pytestmark = pytest.mark.ours

if rustloader is not None:
    from rustloader.tools import cli
    from rustloader.tools.cli import parser
    from rustloader.tools.probe.leaves import difference, summary

# Time limits of a script on a busy machine. A script that imports torch takes longer.
SHORT, LONG = 120.0, 400.0


def rustloader_run(*arguments):
    return "-m", "rustloader", "run", *arguments


def python(*arguments, cwd, seconds=SHORT, **environment):
    """Runs Python. Returns (exit status, stdout, stderr)."""
    process = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    return process.returncode, process.stdout, process.stderr


def write(path, source):
    path.parent.mkdir(exist_ok=True)
    path.write_text(textwrap.dedent(source))


# run: these scripts do not import torch, so `run` must not either


FACTS = """
    import beside, inspect, multiprocessing, os, sys
    class Note:
        pass
    def show(*things):
        print(*things, flush=True)
    def child(note):
        main = sys.modules["__main__"]
        show("child", __name__, main.__name__, type(note).__name__, sys.argv, sys.path[0], main.__file__)
    def fail():
        raise KeyError("on purpose")
    if __name__ == "__main__":
        main = sys.modules["__main__"]
        show(sys.argv, sys.path[0], __name__, __file__, __package__, getattr(__spec__, "name", None))
        show(type(__loader__).__name__, __builtins__ is not None, main.Note is Note, "torch" in sys.modules)
        show(inspect.getsource(fail), sorted(globals()), sys.flags.safe_path)
        for method in ("spawn", "forkserver"):
            process = multiprocessing.get_context(method).Process(target=child, args=(Note(),))
            process.start()
            process.join()
            show(process.exitcode)
        fail()
"""


@pytest.fixture
def scripts(tmp_path):
    write(tmp_path / "package" / "script.py", FACTS)
    write(tmp_path / "package" / "beside.py", "")
    write(tmp_path / "package" / "__init__.py", "")
    return tmp_path


@pytest.mark.timeout(4 * SHORT)
def test_a_script_sees_what_it_sees_without_us(scripts):
    os.symlink(scripts / "package" / "script.py", scripts / "link.py")
    for script in ("package/script.py", "link.py"):
        arguments = (script, "--epochs", "3", "--help", "-m", "")
        plain = python(*arguments, cwd=scripts)
        assert plain[0] == 1 and plain[1].count("child __mp_main__") == 2, plain
        assert plain[2].startswith("Traceback") and "KeyError: 'on purpose'" in plain[2]
        assert python(*rustloader_run(*arguments), cwd=scripts) == plain


@pytest.mark.timeout(4 * SHORT)
def test_a_module_sees_what_it_sees_without_us(scripts):
    arguments = ("-m", "package.script", "--epochs", "3")
    path = {"PYTHONPATH": os.pathsep.join([str(scripts / "package"), os.environ.get("PYTHONPATH", "")])}
    plain = python(*arguments, cwd=scripts, **path)
    assert plain[0] == 1 and "KeyError" in plain[2] and plain[1].count("child __mp_main__") == 2, plain
    status, out, err = python(*rustloader_run(*arguments), cwd=scripts, **path)
    assert (status, out) == plain[:2]
    # Without rustloader the traceback begins with frames of Python's own runner.
    assert err.splitlines() == [line for line in plain[2].splitlines() if "<frozen runpy>" not in line]


@pytest.mark.timeout(6 * SHORT)
@pytest.mark.parametrize(
    "source",
    [
        "import sys; sys.exit(3)",
        "import sys; sys.exit('a text')",
        "raise SystemExit",
        "def broken(:\n    pass",
        "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise ValueError('second') from e",
        "import atexit; kept = [1]; atexit.register(lambda: print('bye', kept, len))",
        "import sys; sys.excepthook = lambda kind, error, trace: print(kind.__name__, 'seen'); 1 / 0",
    ],
)
def test_a_script_ends_as_it_ends_without_us(source, tmp_path):
    write(tmp_path / "script.py", source)
    assert python(*rustloader_run("script.py"), cwd=tmp_path) == python("script.py", cwd=tmp_path)


@pytest.mark.timeout(4 * SHORT)
def test_a_script_that_is_not_there(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for arguments, text in [
        (["gone.py"], "cannot open gone.py: No such file or directory"),
        (["."], ". is a directory; pass a script, or -m and a module"),
        (["-m", "no_such_module"], "cannot run module no_such_module: No module named no_such_module"),
    ]:
        monkeypatch.setattr(sys, "path", list(sys.path))
        assert cli.main(["run", *arguments, "--help"]) == 2
        assert capsys.readouterr().err == f"rustloader run: {text}\n"
    assert cli.main(["trace", "gone.py"]) == 2
    assert capsys.readouterr().err == "rustloader trace: cannot open gone.py: No such file or directory\n"


TRAINING = """
    import torch
    from torch.utils.data import DataLoader, Dataset
    class Numbers(Dataset):
        def __len__(self): return 6
        def __getitem__(self, i): return torch.tensor(i)
    if __name__ == "__main__":
        import rustloader, sys
        for method in ("fork", "spawn"):
            before = rustloader.engine_batches()
            loader = DataLoader(Numbers(), batch_size=None, num_workers=1, multiprocessing_context=method)
            iterator = iter(loader)
            got = [x.item() for x in iterator]
            print(method, got, rustloader.engine_batches() - before, iterator._prefetch_factor)
        print(sys.argv)
"""


@pytest.mark.timeout(LONG + 60)
def test_a_training_script_gets_the_engine(tmp_path):
    write(tmp_path / "train.py", TRAINING)
    arguments = rustloader_run("--prefetch-factor", "4", "train.py", "--prefetch-factor", "9")
    # The package has already obeyed the variable when `run` adds its options.
    status, out, err = python(*arguments, cwd=tmp_path, seconds=LONG, RUSTLOADER_INSTALL="in_order=1")
    got = "[0, 1, 2, 3, 4, 5] 6 4"
    assert (status, out) == (0, f"fork {got}\nspawn {got}\n['train.py', '--prefetch-factor', '9']\n"), err


RANK = """
    import os, sys
    import torch
    from torch.utils.data import DataLoader
    import rustloader
    loader = DataLoader(torch.arange(3), batch_size=None, num_workers=1, multiprocessing_context="fork")
    got = [x.item() for x in loader]
    with open(f"rank-{os.environ['RANK']}", "w") as file:
        print(got, rustloader.engine_batches(), sys.argv, file=file)
"""


@pytest.mark.timeout(LONG + 60)
def test_torchrun_gives_every_rank_the_engine(tmp_path):
    write(tmp_path / "train.py", RANK)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    status, _, err = python(*torchrun, *rustloader_run("train.py", "--epochs", "3"), cwd=tmp_path, seconds=LONG)
    assert status == 0, err
    for rank in "01":
        assert (tmp_path / f"rank-{rank}").read_text() == "[0, 1, 2] 3 ['train.py', '--epochs', '3']\n"


def test_what_is_ours_and_what_is_the_scripts():
    for given, own in [
        (["run", "train.py", "--x", "-m"], 2),
        (["run", "-m", "pkg.train", "--prefetch-factor", "3"], 3),
        (["run", "--prefetch-factor", "3", "--out-of-order", "train.py", "-h"], 5),
        (["run", "--prefetch-factor=3", "train.py", "train.py"], 3),
        (["run", "--help"], 2),
        (["run"], 1),
    ]:
        assert parser.script_arguments(given) == (given[:own], given[own:])


def test_options_of_run_become_the_variable(monkeypatch):
    from rustloader.installation.environment import parse_install
    from rustloader.tools.cli.run import _setting

    def setting(*arguments):
        return _setting(parser.make_parser().parse_args(["run", *arguments, "train.py"]))

    monkeypatch.delenv("RUSTLOADER_INSTALL", raising=False)
    assert setting() == "1"
    text = setting(
        "--out-of-order", "--persistent-workers", "--prefetch-factor", "3", "--multiprocessing-context", "spawn"
    )
    assert parse_install(text) == {
        "in_order": False,
        "persistent_workers": True,
        "prefetch_factor": 3,
        "multiprocessing_context": "spawn",
    }
    monkeypatch.setenv("RUSTLOADER_INSTALL", "prefetch_factor=7")
    assert (setting(), setting("--out-of-order")) == ("prefetch_factor=7", "prefetch_factor=7,in_order=0")
    monkeypatch.setenv("RUSTLOADER_INSTALL", "0")
    assert setting() == "1"


# How a command ends


@pytest.mark.parametrize(
    ("number", "status", "text"),
    [
        (signal.SIGINT, 130, "\nrustloader doctor: interrupted\n"),
        (signal.SIGTERM, 143, "rustloader doctor: terminated\n"),
        (signal.SIGHUP, 129, "rustloader doctor: terminated\n"),
    ],
)
def test_a_signal_ends_a_command_with_one_line(number, status, text, monkeypatch, capsys):
    from rustloader.tools.cli import doctor

    before = signal.getsignal(number)
    monkeypatch.setattr(doctor, "main", lambda options: os.kill(os.getpid(), number))
    assert cli.main(["doctor"]) == status and capsys.readouterr() == ("", text)
    assert signal.getsignal(number) is before


def test_other_errors_of_the_system_are_not_hidden(monkeypatch):
    from rustloader.tools.cli import version

    def fails(options):
        raise FileNotFoundError(2, "No such file or directory", "gone")

    monkeypatch.setattr(version, "main", fails)
    with pytest.raises(FileNotFoundError):
        cli.main(["--version"])


def test_version_without_a_command(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith(f"rustloader {rustloader.__version__}, torch ")
    assert cli.main([]) == 2
    assert "run a script on the Rust engine" in capsys.readouterr().out
    with open(ROOT / "pyproject.toml", "rb") as file:
        entry = tomllib.load(file)["project"]["scripts"]["rustloader"]
    assert pkgutil.resolve_name(entry) is cli.main


def test_an_output_that_cannot_be_written_is_no_traceback():
    """It is closed, a pipe without a reader, or a full disk."""

    def end(shell, *command):
        command = ["sh", "-c", shell, "sh", sys.executable, "-m", "rustloader", *command]
        ended = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, timeout=300, text=True)
        return ended.returncode, ended.stderr

    read, write = os.pipe()
    os.close(read)
    status, err = end('exec "$@" >&-', "top", "1")
    assert status == 2 and err.startswith("rustloader top: ")
    assert end('exec "$@"', "--version") == (141, "")
    os.close(write)
    write = None
    for command in ("--version", "doctor"):
        status, err = end('exec "$@" >/dev/full', command)
        assert status == 1 and err.endswith(": the output cannot be written: No space left on device\n")
        assert err.count("\n") == 1


def test_without_torch_what_is_missing_is_named(tmp_path):
    """In a Python without its site-packages."""
    (tmp_path / "rustloader").symlink_to(os.path.dirname(rustloader.__file__))

    def run(*arguments):
        path = {"PYTHONPATH": str(tmp_path)}
        command = [sys.executable, "-S", *arguments]
        return subprocess.run(command, env=os.environ | path, capture_output=True, text=True)

    version = run("-m", "rustloader", "--version")
    assert (version.returncode, version.stderr) == (0, "") and ", no torch, Python " in version.stdout
    doctor = run("-m", "rustloader", "doctor")
    assert (doctor.returncode, doctor.stderr) == (1, "") and "-> pip install torch\n" in doctor.stdout
    name = run("-c", "import rustloader; rustloader.DataLoader")
    assert name.returncode == 1 and "\nModuleNotFoundError: No module named 'torch'" in name.stderr


# The leaves of batches


class Held:
    def __init__(self, x):
        self.x = x


def strided():
    return torch.arange(6.0).reshape(2, 3).t()


@pytest.mark.parametrize(
    "theirs, other, where",
    [
        (torch.zeros(2), torch.zeros(3), "batch: torch torch.Tensor float32 [2], rustloader torch.Tensor float32 [3]"),
        (torch.zeros(2), torch.zeros(2).double(), "float64"),
        (strided(), strided().contiguous(), "strides [1, 3]"),
        (
            torch.tensor([0.0]),
            torch.tensor([-0.0]),
            "1 of 1 elements differ, the first at [0]: torch 0.0, rustloader -0.0",
        ),
        ({"a": [1, torch.tensor([1, 2])]}, {"a": [1, torch.tensor([1, 3])]}, "batch['a'][1] (torch.Tensor int64 [2])"),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, "torch has batch['a'] where rustloader has batch['b']"),
        ([1, 2], (1, 2), "batch: torch list of 2, rustloader tuple of 2"),
        ([1], [True], "batch[0]: torch int, rustloader bool"),
        (1.0, 1.5, "batch (float): torch 1.0, rustloader 1.5"),
        ("a" * 200, "b" * 200, "..."),
        (np.zeros(2), np.ones(2), "batch (numpy.ndarray float64 [2], C order)"),
        (np.zeros((2, 3)), np.asfortranarray(np.zeros((2, 3))), "Fortran order"),
        (Held(1), Held(2), "batch.__dict__['x']"),
        (torch.eye(3).to_sparse(), (2 * torch.eye(3)).to_sparse(), "sparse_coo"),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_batches_that_differ(theirs, other, where):
    assert summary(theirs) == summary(theirs) and summary(theirs) != summary(other)
    assert where in difference(theirs, other)


def test_a_batch_that_holds_itself_has_an_end():
    batch = [1]
    batch.append(batch)
    assert [path for path, _, _ in summary(batch)] == ["batch", "batch[0]", "batch[1]"]
