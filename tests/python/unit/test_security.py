"""What other programs and other users can get at: nothing (docs/reliability.md, Security)."""

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
    """What our descriptors in the worker show, and whether they are close-on-exec."""

    def __getitem__(self, i):
        return {target: closing(number) for number, target in open_files().items() if is_ours(target)}


def is_ours(target):
    return "rustloader" in target or target.startswith("anon_inode:")


def closing(number):
    return bool(fcntl.fcntl(number, fcntl.F_GETFD) & fcntl.FD_CLOEXEC)


def arenas():
    return [number for number, target in open_files().items() if "memfd:rustloader" in target]


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_descriptors_do_not_go_to_other_programs(method):
    before = open_files()
    loader = DataLoader(Descriptors(2), num_workers=1, batch_size=None, multiprocessing_context=method)
    iterator = iter(loader)
    theirs = next(iterator)
    assert any("memfd:rustloader" in target for target in theirs) and all(theirs.values()), theirs
    mine = {number: target for number, target in open_files().items() if number not in before and is_ours(target)}
    assert any("memfd:rustloader" in target for target in mine.values())
    assert all(map(closing, mine)), mine
    code = "import os; print([os.readlink(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd') if int(n) > 2])"
    done = subprocess.run([sys.executable, "-c", code], close_fds=False, capture_output=True, text=True)
    assert "rustloader" not in done.stdout, done


@pytest.mark.forks
def test_the_arena_is_sealed_and_has_no_name():
    before = set(open_files())
    iterator = iter(DataLoader(Numbers(4), num_workers=2, batch_size=None))
    next(iterator)
    found = [number for number in arenas() if number not in before]
    assert found
    for number in found:
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
    places = [f"/proc/{os.getpid()}/fd/{number}" for number in arenas()]
    places += [f"/proc/{pid}/fd/{number}" for pid in worker_pids(iterator) for number in arenas()]
    places += [f"/proc/{pid}/mem" for pid in [os.getpid(), *worker_pids(iterator)]]
    for place in places:
        os.close(os.open(place, os.O_RDWR))  # root can
    pid = os.fork()
    if pid == 0:
        opened = len(places)
        try:
            os.setgroups([]), os.setgid(NOBODY), os.setuid(NOBODY)
            for place in places:
                try:
                    os.open(place, os.O_RDONLY)
                except PermissionError:
                    opened -= 1
        finally:
            os._exit(opened)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, "another user has opened some of it"
    assert torch.equal(next(iterator), torch.tensor(1))
