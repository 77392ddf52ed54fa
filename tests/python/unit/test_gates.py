"""Spawned workers import in turn if there are more of them than cores."""

import os
import pickle
from multiprocessing.context import get_spawning_popen, set_spawning_popen

import pytest
from support import open_files, run_script

from rustloader.workers import gates
from rustloader.workers.preparation import calling_first

pytestmark = [pytest.mark.ours, pytest.mark.timeout(600)]


class Popen:
    """The methods that multiprocessing calls while it pickles a process to spawn it."""

    def __init__(self):
        self.inherited = []

    def duplicate_for_child(self, fd):
        assert fd not in self.inherited, "each descriptor must be passed once per start"
        self.inherited.append(fd)
        return fd


class Process:
    _name = "SpawnProcess-1"


@pytest.fixture
def popen():
    assert get_spawning_popen() is None
    popen = Popen()
    set_spawning_popen(popen)
    yield popen
    set_spawning_popen(None)


def open_gates(count, cores, monkeypatch):
    """The gates of `count` workers, while the pipes that they hold are still open."""
    monkeypatch.setattr(gates, "own_cores", lambda: cores)
    group = gates.Gates(count)
    contexts = [group.next() for _ in range(count)]
    return group, contexts, [context.__enter__() for context in contexts]


def close_gates(group, contexts):
    for context in contexts:
        context.__exit__(None, None, None)
    group.close()


def test_a_worker_waits_for_the_one_before_it_on_the_same_core(monkeypatch):
    before = open_files()
    group, contexts, entered = open_gates(5, 2, monkeypatch)
    assert [gate._waits_for for gate in entered] == [None, None, *group._ends[:3]]
    close_gates(group, contexts)
    assert open_files() == before


@pytest.mark.parametrize(("bound", "waiting"), [(False, 2), (True, 0)])
def test_ranks_that_share_cores_have_a_part_each(bound, waiting, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr("rustloader.system.cores.usable_cores", lambda: 8)
    monkeypatch.setattr("rustloader.system.cores.cpu_quota", lambda: None)
    monkeypatch.setattr("rustloader.system.local_ranks.are_bound", lambda cores: bound)
    group, contexts, entered = open_gates(4, gates.own_cores(), monkeypatch)
    assert sum(gate is not None and gate._waits_for is not None for gate in entered) == waiting
    close_gates(group, contexts)


def too_many_files(flags):
    raise OSError(24, "Too many open files")


@pytest.mark.parametrize(
    ("cores", "owner", "name", "value"),
    [
        (3, gates, "_SELECTABLE", gates._SELECTABLE),
        (4, gates, "_SELECTABLE", gates._SELECTABLE),
        (1, gates, "_SELECTABLE", 3),
        (1, os, "pipe2", too_many_files),
    ],
    ids=["as many cores", "more cores", "descriptors that select refuses", "no descriptors"],
)
def test_no_worker_waits(cores, owner, name, value, monkeypatch):
    before = open_files()
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, value)
        assert open_gates(3, cores, patch)[2] == [None] * 3
    assert open_files() == before


def test_the_name_waits_once_and_arrives_as_it_was(popen, monkeypatch):
    group, contexts, entered = open_gates(2, 1, monkeypatch)
    process = Process()
    with calling_first(process, entered[1].calls):
        assert process._name == "SpawnProcess-1"
        first, second = pickle.dumps({"name": process._name}), pickle.dumps(process._name)
        held = entered[1].for_child()
    assert process._name == "SpawnProcess-1" and type(process._name) is str
    assert popen.inherited == [group._ends[0], held[0]] and held[1] == group._ends[0]
    assert b"select" in first and b"select" not in second
    # Its predecessor has ended.
    contexts[0].__exit__(None, None, None)
    for name in (pickle.loads(first)["name"], pickle.loads(second)):
        assert type(name) is str and name == "SpawnProcess-1"
    close_gates(group, contexts[1:])


def test_the_wait_for_a_worker_that_holds_on_is_bounded(popen, monkeypatch):
    monkeypatch.setattr(gates, "GATE_SECONDS", 0.1)
    group, contexts, entered = open_gates(2, 1, monkeypatch)
    with calling_first(process := Process(), entered[1].calls):
        assert pickle.loads(pickle.dumps(process._name)) == "SpawnProcess-1"
    close_gates(group, contexts)


SCRIPT = """
import os, signal, sys, time
LOG, FIRST = os.environ["LOG"], os.environ["FIRST"]

def note(text):
    with open(LOG, "a") as file:
        file.write(f"{text} {os.getpid()}\\n")

def is_first():
    try:
        os.close(os.open(FIRST, os.O_CREAT | os.O_EXCL))
        return True
    except FileExistsError:
        return False

if __name__ != "__main__":
    note("begin")
    exec(os.environ["THEN"])
    import torch
    note("end")

class Pipes:
    def __len__(self):
        return 6
    def __getitem__(self, i):
        return sorted(link for link in map(readlink, os.listdir("/proc/self/fd")) if link.startswith("pipe:"))

def readlink(number):
    try:
        return os.readlink(f"/proc/self/fd/{number}")
    except OSError:
        return ""

def main():
    import warnings
    warnings.simplefilter("ignore")  # more workers than cores
    from rustloader import DataLoader
    from rustloader.workers import gates
    gates.own_cores = lambda: 1
    gates.GATE_SECONDS = float(os.environ["SECONDS"])
    loader = DataLoader(Pipes(), num_workers=3, batch_size=None, collate_fn=list, multiprocessing_context="spawn")
    iterator = iter(loader)
    try:
        print([len(pipes) for pipes in iterator])
    except RuntimeError as error:
        print("killed" if "killed" in str(error) else error, flush=True)
        while open(LOG).read().count("begin") < 3:
            time.sleep(0.05)

if __name__ == "__main__":
    main()
"""


def steps(tmp_path, then="", seconds="300"):
    """What the workers noted, in order, and the output of the program."""
    environment = {"LOG": str(tmp_path / "log"), "FIRST": str(tmp_path / "first"), "THEN": then, "SECONDS": seconds}
    status, out, err = run_script(SCRIPT, head="", file=tmp_path / "script.py", environment=environment, seconds=500)
    assert (status, err) == (0, "")
    return [line.split()[0] for line in (tmp_path / "log").read_text().splitlines()], out.strip()


def test_main_modules_are_imported_one_after_the_other(tmp_path):
    noted, out = steps(tmp_path)
    assert noted == ["begin", "end"] * 3
    # Worker 0 had no pipe to wait for. The others have as many pipes as it has, so none is left in them.
    assert len(set(out.strip("[]").split(", "))) == 1


def test_a_worker_that_dies_lets_the_next_one_in(tmp_path):
    noted, out = steps(tmp_path, "is_first() and os.kill(os.getpid(), signal.SIGKILL)")
    assert noted[:2] == ["begin"] * 2 and out == "killed"


def test_a_main_module_that_waits_for_the_next_worker(tmp_path):
    wait = "first = is_first()\nwhile first and open(LOG).read().count('begin') < 2: time.sleep(0.05)"
    noted, out = steps(tmp_path, wait, seconds="0.5")
    assert noted[:2] == ["begin"] * 2 and noted.count("end") == 3 and out.startswith("[")
