"""Notebooks and the REPL: classes of `__main__`, progress bars, and Ctrl-C."""

import contextlib
import importlib.util
import json
import os
import pty
import re
import select
import signal
import sys
import time

import pytest
from support import ROOT, gone, run_script, wait_until

pytestmark = pytest.mark.ours

DEFINE = """
import logging, os, time
import torch, rustloader
from rustloader import DataLoader

class Squares:
    def __len__(self):
        return 12
    def __getitem__(self, i):
        return torch.tensor(i * i)

class Slow(Squares):
    def __len__(self):
        return 1200  # so that an epoch takes minutes
    def __getitem__(self, i):
        time.sleep(0.2 if i else 0)
        return torch.tensor(i)

def flat(samples):
    return [int(x) for x in samples]

loader = DataLoader(Squares(), batch_size=4, num_workers=2, collate_fn=flat)
"""
SQUARES = [[0, 1, 4, 9], [16, 25, 36, 49], [64, 81, 100, 121]]
# print("step") could write the text and the newline separately, and the interrupt could come in between.
ITERATE = """
iterator = iter(DataLoader(Slow(), batch_size=1, num_workers=2))
pids = [worker.pid for worker in iterator._workers]
for batch in iterator: print("step\\n", end="", flush=True)

"""


# A notebook


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    """A function that runs cells in a new kernel. A cell is a text, or a text and options of `Kernel.run`. Returns the
    [status, stdout, stderr, error names] of each."""
    for name in ("ipykernel", "jupyter_client"):
        if importlib.util.find_spec(name) is None:
            reason = f"{name} is not installed; the extra dev has it"
            (pytest.fail if os.environ.get("RUSTLOADER_REQUIRE_ALL") else pytest.skip)(reason)
    folder = str(tmp_path_factory.mktemp("jupyter"))
    names = ("HOME", "IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR")

    def run(*cells):
        source = f"""
            with kernel() as it:
                print(json.dumps([it.run(*cell) for cell in {[[c] if isinstance(c, str) else c for c in cells]!r}]))
        """
        head = "import json\nfrom notebooks import kernel\n"
        status, out, err = run_script(source, head=head, environment=dict.fromkeys(names, folder))
        assert (status, err) == (0, ""), err
        return json.loads(out)

    return run


LIST = "print(list(loader), rustloader.engine_batches())"
NEGATIVE = """
class Squares(Squares):
    def __getitem__(self, i):
        return torch.tensor(-i)
loader = DataLoader(Squares(), batch_size=4, num_workers=2, collate_fn=flat)
"""
TALK = """
from tqdm import tqdm
class Talks(Squares):
    def __getitem__(self, i):
        print(f"sample {i}\\n", end="", flush=True)
        return i
for batch in tqdm(DataLoader(Talks(), batch_size=4, num_workers=1), ncols=40, mininterval=0, miniters=1):
    time.sleep(0.15)
"""
# The workers receive an interrupt as well, as with torch.
ENDED = "print([worker.join(30) or worker.is_alive() for worker in iterator._workers])"
HELD = "iterator = iter(DataLoader(Slow(), batch_size=1, num_workers=2)); batch = next(iterator)"
PIDS = "print(*(worker.pid for worker in iterator._workers))"


@pytest.fixture(scope="module")
def session(notebook):
    """The results of the cells of several tests. They share a kernel, since its start takes seconds."""
    cells = {"define": DEFINE, "first": LIST, "redefine": NEGATIVE, "second": LIST, "talk": (TALK, None, 12)}
    cells |= {"interrupted": (ITERATE, "step"), "third": LIST, "ended": ENDED, "held": HELD, "pids": PIDS}
    return dict(zip(cells, notebook(*cells.values()), strict=True))


def test_classes_and_functions_of_cells_reach_the_workers(session):
    assert session["define"] == ["ok", "", "", []] and session["first"][1] == f"{SQUARES} 3\n"
    assert session["second"][1] == "[[0, -1, -2, -3], [-4, -5, -6, -7], [-8, -9, -10, -11]] 6\n"


def test_progress_and_prints_of_workers_show_in_the_cell(session):
    status, out, err, errors = session["talk"]
    assert (status, errors) == ("ok", []), err
    bars = err.split("\r")
    assert any("0/3" in bar for bar in bars) and any("2/3" in bar for bar in bars) and "3/3" in bars[-1]
    # A forked process opens a connection of its own for each write. The kernel reads connections in any order, perhaps
    # after the cell has ended.
    assert sorted(line for line in out.splitlines() if line) == sorted(f"sample {i}" for i in range(12))


def test_interrupting_a_kernel_is_one_keyboard_interrupt_and_loaders_work_on(session):
    status, out, err, errors = session["interrupted"]
    assert (status, out.replace("step\n", ""), err, errors) == ("error", "", "", ["KeyboardInterrupt"])
    assert session["third"][0] == "ok" and session["third"][1].startswith("[[0, -1, -2, -3], ")
    assert session["ended"] == ["ok", "[False, False]\n", "", []]


def test_the_workers_end_with_the_kernel(session):
    pids = [int(pid) for pid in session["pids"][1].split()]
    assert len(pids) == 2 and all(wait_until(lambda pid=pid: gone(pid)) for pid in pids)


SAMPLES = """
class Sample:
    def __init__(self, i):
        self.i = i
class Samples(Squares):
    def __getitem__(self, i):
        return Sample(-i) if i < 12 else 1 / 0  # past the end
given = dict(num_workers=2, collate_fn=lambda samples: samples)
loader = DataLoader(Samples(), batch_size=4, **given)
print([sample.i for batch in loader for sample in batch if type(sample) is Sample])
try:
    list(DataLoader(Samples(), sampler=[12], **given))
except ZeroDivisionError as error:
    print("1 / 0  # past the end" in str(error))
"""


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_t32_classes_of_cells_reach_workers_that_are_not_forked(notebook, method):
    """By value. Samples are instances of the cells' classes, also of one that is defined again. Tracebacks of workers
    show the cells' lines."""
    choose = f"torch.multiprocessing.set_start_method('{method}', force=True)"
    _, _, squares, *negatives = notebook(DEFINE, choose, LIST, SAMPLES, SAMPLES)
    assert squares[1] == f"{SQUARES} 3\n"
    assert negatives == [["ok", f"{[-i for i in range(12)]}\nTrue\n", "", []]] * 2


def test_the_quick_start_runs_twice_in_a_notebook(notebook):
    """Every Python block of the page as a cell; then all of them again, in the same kernel."""
    page = (ROOT / "docs" / "index.md").read_text()
    cells = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(cells) > 1
    for cell, (status, _, _, errors) in zip(cells * 2, notebook(*cells * 2), strict=True):
        assert status == "ok", (cell, errors)


# The REPL


class Repl:
    """`python -i` at a terminal of its own, whose Ctrl-C reaches all processes that it has started."""

    def __init__(self, terminal):
        self.terminal = terminal
        self.read("\n>>> ", first=True)

    def read(self, until, first=False):
        """What the terminal shows, up to a text; typed input is part of it."""
        shown, end = "\n" if first else "", time.monotonic() + 120
        while until not in shown:
            assert select.select([self.terminal], [], [], max(0, end - time.monotonic()))[0], shown
            shown += os.read(self.terminal, 4096).decode().replace("\r\n", "\n")
        return shown

    def type(self, text):
        os.write(self.terminal, text.encode())

    def run(self, line):
        """The output of a line."""
        self.type(line + "\n")
        shown = self.read("\n>>> ")
        return shown.removesuffix(">>> ").removeprefix(line + "\n").removesuffix("\n")


@pytest.fixture
def repl(tmp_path):
    """A REPL in which DEFINE has been run."""
    (tmp_path / "define.py").write_text(DEFINE)
    # The REPL of Python 3.13 redraws and colors its lines.
    environment = os.environ | {"PYTHON_BASIC_REPL": "1", "TERM": "dumb", "PYTHONSTARTUP": ""}
    pid, terminal = pty.fork()
    if pid == 0:
        try:
            os.execvpe(sys.executable, [sys.executable, "-i", str(tmp_path / "define.py")], environment)
        finally:
            os._exit(127)
    yield Repl(terminal)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(terminal)


def test_the_repl_has_classes_of_main_and_ctrl_c(repl):
    assert repl.run("list(loader)") == repr(SQUARES)
    assert repl.run("rustloader.engine_batches()") == "3"

    start, note, walk = ITERATE.split("\n")[1:4]
    assert repl.run(start) == "" and repl.run(note) == ""
    pids = [int(pid) for pid in re.findall(r"\d+", repl.run("pids"))]
    repl.type(walk + "\n\n")
    repl.read("step\nstep\n")
    assert len(pids) == 2 and not any(map(gone, pids))
    repl.type("\x03")
    shown = repl.read("\n>>> ")
    assert shown.count("Traceback") == 1 and shown.endswith("KeyboardInterrupt\n>>> "), shown
    assert repl.run("list(loader)") == repr(SQUARES)

    repl.run("iterator = iter(DataLoader(Slow(), batch_size=1, num_workers=2))")
    pids = [int(pid) for pid in re.findall(r"\d+", repl.run("[worker.pid for worker in iterator._workers]"))]
    assert len(pids) == 2
    repl.type("exit()\n")
    assert all(wait_until(lambda pid=pid: gone(pid)) for pid in pids)
