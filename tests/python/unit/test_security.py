"""Other programs and other users have no access (docs/faults.md, Security)."""

import fcntl
import os
import subprocess
import sys

import pytest
import torch
from sample_data import Numbers
from support import DataLoader, open_files, worker_pids

pytestmark = pytest.mark.ours

NOBODY = 65534
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Descriptors(Numbers):
    """The targets of rustloader's descriptors in the worker, and whether each is close-on-exec."""

    def __getitem__(self, i):
        return {target: is_close_on_exec(number) for number, target in open_files().items() if is_own(target)}


def is_own(target):
    return "rustloader" in target or target.startswith("anon_inode:")


def is_close_on_exec(number):
    return bool(fcntl.fcntl(number, fcntl.F_GETFD) & fcntl.FD_CLOEXEC)


def arenas():
    return [number for number, target in open_files().items() if "memfd:rustloader" in target]


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_descriptors_do_not_go_to_other_programs(method):
    before = open_files()
    loader = DataLoader(Descriptors(2), num_workers=1, batch_size=None, multiprocessing_context=method)
    iterator = iter(loader)
    in_worker = next(iterator)
    assert any("memfd:rustloader" in target for target in in_worker) and all(in_worker.values()), in_worker
    in_main = {number: target for number, target in open_files().items() if number not in before and is_own(target)}
    assert any("memfd:rustloader" in target for target in in_main.values())
    assert all(map(is_close_on_exec, in_main)), in_main
    code = "import os; print([os.readlink(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd') if int(n) > 2])"
    done = subprocess.run([sys.executable, "-c", code], close_fds=False, capture_output=True, text=True)
    assert "rustloader" not in done.stdout, done


@pytest.mark.forks
def test_the_arena_is_sealed_and_has_no_name():
    before = set(open_files())
    iterator = iter(DataLoader(Numbers(4), num_workers=2, batch_size=None))
    next(iterator)
    descriptors = [number for number in arenas() if number not in before]
    assert descriptors
    for number in descriptors:
        assert fcntl.fcntl(number, fcntl.F_GET_SEALS) & SEALS == SEALS
        with pytest.raises(PermissionError):
            os.ftruncate(number, 4096)
        assert os.fstat(number).st_nlink == 0 or os.readlink(f"/proc/self/fd/{number}").endswith("(deleted)")
    # Memory, events and processes: no file with a path, no socket that another process could connect to.
    new = {target for number, target in open_files().items() if number not in before}
    assert all(target.startswith(("/memfd:", "anon_inode:", "pipe:")) for target in new), new


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.forks
def test_another_user_cannot_open_it():
    iterator = iter(DataLoader(Numbers(4), num_workers=2, batch_size=None))
    next(iterator)
    paths = [f"/proc/{os.getpid()}/fd/{number}" for number in arenas()]
    paths += [f"/proc/{pid}/fd/{number}" for pid in worker_pids(iterator) for number in arenas()]
    paths += [f"/proc/{pid}/mem" for pid in [os.getpid(), *worker_pids(iterator)]]
    for path in paths:
        os.close(os.open(path, os.O_RDWR))  # root can
    pid = os.fork()
    if pid == 0:
        opened = len(paths)
        try:
            os.setgroups([]), os.setgid(NOBODY), os.setuid(NOBODY)
            for path in paths:
                try:
                    os.open(path, os.O_RDONLY)
                except PermissionError:
                    opened -= 1
        finally:
            os._exit(opened)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, "another user has opened some of them"
    assert torch.equal(next(iterator), torch.tensor(1))
