"""The fork server of a program: who starts it, which modules it has imported, and what its workers see."""

import importlib
import os
import sys

import pytest
from support import run_script

from rustloader.settings.limits import FORKSERVER_PRELOAD
from rustloader.system import forks
from rustloader.workers import fork_server, preloaded

pytestmark = [pytest.mark.ours, pytest.mark.timeout(400)]

# A sample: whether the server had imported our module, the pid of the worker's parent, a number that was drawn while
# the dataset was unpickled, and the result of the sample's order.
HEAD = """
import multiprocessing, os, signal, sys, threading, time
from multiprocessing import forkserver

class Seen:
    def __init__(self, n=8, orders=None):
        self.n, self.orders = n, orders or {}
    def __len__(self):
        return self.n
    def __getstate__(self):
        return self.__dict__
    def __setstate__(self, state):
        import numpy
        self.__dict__.update(state, drawn=numpy.random.rand())
    def __getitem__(self, i):
        order = self.orders.get(i)
        if order is not None:
            order = order()
        return "rustloader.workers.preloaded" in sys.modules, os.getppid(), self.drawn, order

def loader(dataset=None, workers=2, **kw):
    from rustloader import DataLoader
    dataset = Seen() if dataset is None else dataset
    return DataLoader(
        dataset, num_workers=workers, batch_size=None, collate_fn=list, multiprocessing_context="forkserver", **kw
    )

def is_preloaded():
    (answer,) = {sample[0] for sample in loader()}
    return answer

def server():
    return forkserver._forkserver._forkserver_pid

class Dies:
    '''Kills the first worker that calls it.'''
    def __init__(self, path):
        self.path = path
    def __call__(self):
        if not os.path.exists(self.path):
            open(self.path, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)

def modules():
    return sorted(sys.modules)

def forked_draw():
    import numpy
    expected = numpy.random.RandomState()
    expected.set_state(numpy.random.get_state())
    read, write = os.pipe()
    if os.fork() == 0:
        os.write(write, str(numpy.random.rand() == expected.rand()).encode())
        os._exit(0)
    os.wait()
    return os.read(read, 9).decode()

def bare(connection):
    connection.send(modules())
"""


def script(source, tmp_path, **kw):
    """The lines that a program prints. Its main module imports neither torch nor rustloader."""
    folder = tmp_path / "program"
    folder.mkdir()
    body = "\n".join("    " + line for line in source.strip("\n").splitlines())
    text = f"{HEAD}\ndef main():\n{body}\n\nif __name__ == '__main__':\n    main()\n"
    status, out, err = run_script(text, head="", seconds=300, file=folder / "script.py", **kw)
    assert (status, err) == (0, "")
    return out.splitlines()


def test_t29_workers_find_everything_imported(tmp_path):
    lines = script(
        """
import logging
logging.disable(logging.WARNING)
context = multiprocessing.get_context("forkserver")
orders = {1: modules, 2: Dies(os.environ["DIED"]), 4: forked_draw}
samples = list(loader(Seen(orders=orders), max_restarts=1))
print(all(sample[0] for sample in samples), {sample[1] for sample in samples} == {server()})
# Two workers and the replacement of worker 0: each has drawn its own number.
print(len({sample[2] for sample in samples}))
print(samples[4][3])
with open(f"/proc/{server()}/status") as file:
    print([line.split() for line in file if line.startswith("Threads")])
print(forkserver._forkserver._preload_modules)
ours, theirs = context.Pipe()
process = context.Process(target=bare, args=(theirs,))
process.start()
print(sorted(set(samples[1][3]) - set(ours.recv())))
process.join()
""",
        tmp_path,
        environment={"DIED": str(tmp_path / "died")},
    )
    assert lines == ["True True", "3", "True", "[['Threads:', '1']]", "['__main__']", "[]"]


def test_running_servers_the_programs_list_and_the_environment_count(tmp_path):
    lines = script(
        """
forkserver.ensure_running()
print(is_preloaded())
forkserver._forkserver._stop()
multiprocessing.set_forkserver_preload(["__main__", "json"])
print(is_preloaded(), forkserver._forkserver._preload_modules)
forkserver._forkserver._stop()
multiprocessing.set_forkserver_preload(["__main__"])
print(is_preloaded())
multiprocessing.set_forkserver_preload([])
print(is_preloaded())
forkserver._forkserver._stop()
print(is_preloaded())
forkserver._forkserver._stop()
multiprocessing.set_forkserver_preload(["__main__"])
os.environ["RUSTLOADER_FORKSERVER_PRELOAD"] = "0"
print(is_preloaded(), forkserver._forkserver._preload_modules)
""",
        tmp_path,
    )
    assert lines == ["False", "False ['__main__', 'json']", "True", "True", "False", "False ['__main__']"]


def test_files_in_the_working_directory_are_not_taken_for_modules(tmp_path):
    """The server looks there first if its Python does not pass it the program's path."""
    for name in ("torch", "numpy", "queue"):
        (tmp_path / f"{name}.py").write_text("print('a file of the user', flush=True)\n")
    assert script("print(is_preloaded())", tmp_path, cwd=tmp_path) == ["True"]


def test_a_package_of_our_name_in_the_working_directory_stays_unused(tmp_path):
    (tmp_path / "rustloader").mkdir()
    (tmp_path / "rustloader" / "__init__.py").write_text("print('a package of the user', flush=True)\n")
    assert script("print(is_preloaded())", tmp_path, cwd=tmp_path) == ["False"]


@pytest.mark.parametrize("how", ["raise SystemExit(3)", "raise ImportError", "raise OSError"])
def test_what_fails_in_the_server_fails_no_start(tmp_path, how):
    (tmp_path / "failing.py").write_text(how)
    lines = script(
        """
from rustloader.workers import fork_server
fork_server._PRELOADED = "failing"
sys.stderr = open(os.devnull, "w")
os.dup2(sys.stderr.fileno(), 2)
print(is_preloaded(), forkserver._forkserver._preload_modules)
""",
        tmp_path,
        cwd=tmp_path,
    )
    assert lines == ["False ['__main__']"]


def test_a_script_without_a_guard_gets_the_remedy(tmp_path):
    """The server of Python 3.14 imports the script, as each worker of earlier ones does."""
    source = """
    print(list(DataLoader(range(4), num_workers=2, multiprocessing_context="forkserver")))
    """
    status, out, err = run_script(source, 300, file=tmp_path / "script.py")
    assert (status, out) == (1, "")
    if sys.version_info < (3, 14):
        assert "must guard its top-level code with" in err
    else:
        assert "UnguardedScript: Put the top-level code of the main script under `if" in err.splitlines()[-1]
        assert err.count("Traceback") == 1 and "/multiprocessing/" not in err


def test_ctrl_c_ends_the_wait_for_the_server(tmp_path):
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(300)")
    lines = script(
        """
from rustloader.workers import fork_server
ours, fork_server._PRELOADED = fork_server._PRELOADED, "slow"
signal.signal(signal.SIGALRM, signal.default_int_handler)
def interrupt():
    main = threading.main_thread().ident
    # Until main waits for the server to send the worker's pid. The server is still importing `slow`.
    while sys._current_frames()[main].f_code.co_name != "read_signed":
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGALRM)
threading.Thread(target=interrupt).start()
try:
    iter(loader())
except KeyboardInterrupt:
    print("interrupted")
os.kill(server(), signal.SIGKILL)
os.waitid(os.P_PID, server(), os.WEXITED | os.WNOWAIT)
fork_server._PRELOADED = ours
print(is_preloaded())
""",
        tmp_path,
        cwd=tmp_path,
    )
    assert lines == ["interrupted", "True"]


@pytest.mark.parametrize("error", ["ImportError", "OSError"])
def test_an_import_that_fails_is_left_to_the_workers(error, tmp_path, monkeypatch):
    (tmp_path / "bad_module.py").write_text(f"raise {error}")
    monkeypatch.setattr(preloaded, "_MODULES", ("bad_module", "colorsys"))
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    before = list(sys.path)
    preloaded._import_all([str(tmp_path), *before])
    assert sys.path == before and "colorsys" not in sys.modules


def test_in_another_process_the_module_does_nothing(monkeypatch):
    monkeypatch.setattr(forks, "at_fork", lambda *_, **kw: pytest.fail("a hook in a process that is no fork server"))
    importlib.reload(preloaded)


def test_a_list_that_another_thread_sets_meanwhile_stays(monkeypatch):
    monkeypatch.setattr(fork_server._server, "_preload_modules", ["__main__"])
    with fork_server._preload():
        assert fork_server._server._preload_modules == ["__main__", "rustloader.workers.preloaded"]
        fork_server._server._preload_modules = ["json"]
    assert fork_server._server._preload_modules == ["json"]


@pytest.mark.parametrize(
    ("text", "value"), [("", True), ("0", False), ("off", False), ("1", True), ("perhaps", ValueError)]
)
def test_the_switch(text, value, monkeypatch):
    monkeypatch.setenv(FORKSERVER_PRELOAD.name, text)
    if value is ValueError:
        with pytest.raises(ValueError, match=r"^RUSTLOADER_FORKSERVER_PRELOAD must be 1 or 0, got 'perhaps'; correct"):
            FORKSERVER_PRELOAD.get()
    else:
        assert FORKSERVER_PRELOAD.get() is value


def test_a_working_directory_that_was_deleted_shadows_nothing(tmp_path):
    """A fork server that already runs serves such a program."""
    (gone := tmp_path / "gone").mkdir()
    before = os.getcwd()
    try:
        os.chdir(gone)
        gone.rmdir()
        assert not fork_server._is_shadowed()
    finally:
        os.chdir(before)
