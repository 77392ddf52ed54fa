"""Process limits: batches come from the engine or from torch's iterator, or an error names the limit.

Each body runs in a forked child, so that its limits affect no other process.
"""

import contextlib
import ctypes
import mmap
import os
import re
import resource
import secrets
import signal

import pytest
import torch
from isolation import in_child, watched
from programs import image_batches, loader, plain, twice, walk
from sample_data import Images, Numbers
from support import DataLoader, same

pytestmark = pytest.mark.ours

HANDED_OVER = "WARNING a DataLoader runs on torch's own iterator: cannot create the engine: "
MCL_FUTURE = 2


def limited(limits, body, *args):
    """The report of body(*args) under the soft limits {RLIMIT_x: number}."""

    def inside():
        for limit, number in limits.items():
            set_limit(limit, number)
        return body(*args)

    report = in_child(watched, inside)
    assert not report["hangs"] and report["status"] == 0, report
    assert report["left"] == {} and report["processes"] == 0 and report["output"] == "", report
    return report


def set_limit(limit, number):
    resource.setrlimit(limit, (number, resource.getrlimit(limit)[1]))


def served_by_engine(report, batches, value=()):
    assert (report["log"], report["engine"], report["value"]) == ([], batches, list(value)), report


def served_by_torch(report):
    assert len(report["log"]) == 1 and all(line.startswith(HANDED_OVER) for line in report["log"]), report
    assert (report["engine"], report["value"]) == (0, []), report


# Open files


def keep_many_tensors():
    """Holds 400 tensors in shared memory while the next epoch's workers are forked."""
    samples = [[torch.full((5000,), float(4 * i + j)) for j in range(4)] for i in range(100)]
    kept = loader(samples, batch_size=None)
    first, batches = walk(kept, samples)
    assert sum(map(len, batches)) == 400
    second, _ = walk(kept, samples)
    if not all(map(same, batches, samples)):
        second.append("a tensor that was kept has changed")
    return first + second


def test_400_tensors_are_kept_with_64_open_files():
    served_by_engine(limited({resource.RLIMIT_NOFILE: 64}, keep_many_tensors), 200)


def use_up_descriptors():
    """Lowers the limit until this process can open no more files."""
    while True:
        try:
            os.close(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            return
        set_limit(resource.RLIMIT_NOFILE, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 1)


def test_descriptors_run_out_in_the_middle_of_an_epoch():
    """A running loader continues, a new one names the limit, and works again once the limit is raised."""

    def body():
        running = DataLoader(Images(24), batch_size=4, num_workers=2, persistent_workers=True)
        first, _ = walk(running, image_batches())
        iterator = iter(running)
        before = [next(iterator)]
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        set_limit(resource.RLIMIT_NOFILE, 64)
        use_up_descriptors()
        before += list(iterator)
        second, _ = walk(running, image_batches())
        refused = plain()
        set_limit(resource.RLIMIT_NOFILE, limit)
        return [first, len(before), second, refused, plain()]

    report = limited({}, body)
    assert report["log"][0].startswith(HANDED_OVER) and "ulimit -n" in report["log"][0], report
    first, before, second, refused, last = report["value"]
    assert (first, before, second, last) == ([], 6, [], [])
    assert refused[0].startswith("iter: OSError: [Errno 24] Too many open files")


# Address space and file sizes


def address_space():
    """The bytes of address space that this process has mapped."""
    with open("/proc/self/statm") as f:
        return int(f.read().split()[0]) * resource.getpagesize()


def shared_memory_in_use():
    """The bytes of shared memory that are resident in this process."""
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) << 10 for line in f if line.startswith("RssShmem"))


def epochs_of_two_loaders():
    """A typical training run: epochs of one loader, each followed by an epoch of another and by an allocation."""
    errors = []
    training = DataLoader(Images(24), batch_size=4, num_workers=2)
    checking = DataLoader(Images(8), batch_size=4, num_workers=1, persistent_workers=True)
    for _ in range(3):
        errors += walk(training, image_batches())[0]
        errors += walk(checking, image_batches()[:2])[0]
        torch.empty(1 << 29, dtype=torch.uint8)
    return errors


def test_half_of_a_small_address_space_is_left_to_others():
    served_by_engine(limited({resource.RLIMIT_AS: address_space() + (6 << 30)}, epochs_of_two_loaders), 24)


def test_an_address_space_too_small_for_an_arena_hands_over():
    report = limited({resource.RLIMIT_AS: address_space() + (1900 << 20)}, plain)
    served_by_torch(report)
    assert "ulimit -v" in report["log"][0]
    served_by_engine(limited({resource.RLIMIT_AS: address_space() + (3 << 30)}, plain), 6)


def test_an_address_space_that_shrinks_between_epochs():
    """Running workers continue; a new loader runs on torch's iterator."""

    def body():
        running = DataLoader(Images(24), batch_size=4, num_workers=2, persistent_workers=True)
        first, _ = walk(running, image_batches())
        set_limit(resource.RLIMIT_AS, address_space() + (200 << 20))
        second, _ = walk(running, image_batches())
        return first + second + plain()

    report = limited({}, body)
    assert report["value"] == [] and report["engine"] == 12, report
    assert len(report["log"]) == 1 and report["log"][0].startswith(HANDED_OVER)


def test_a_program_that_locks_its_memory_locks_no_arena():
    """After mlockall(MCL_FUTURE), which real-time programs call, the kernel populates every new mapping. An arena is
    many times as large as the machine's memory."""

    def body():
        # Caps an arena that is populated at a few GiB.
        set_limit(resource.RLIMIT_AS, address_space() + (6 << 30))
        if ctypes.CDLL(None).mlockall(MCL_FUTURE) != 0:
            return ["mlockall was refused"]
        try:
            mmap.mmap(-1, 64 << 20).close()
        except OSError as error:
            return [str(error)]
        errors = twice()
        return [None, errors, shared_memory_in_use() >> 20]

    report = limited({}, body)
    refusal, *rest = report["value"]
    if refusal is not None:
        pytest.skip(f"memory cannot be locked without limit: {refusal}")
    errors, megabytes = rest
    assert (report["log"], report["engine"], errors) == ([], 12, [])
    assert megabytes < 256


@pytest.mark.parametrize("action", [signal.SIG_DFL, signal.SIG_IGN])
def test_a_file_size_limit_causes_no_signal(action):
    """SIGXFSZ would end the process. An arena fits under limits from 1 GiB on."""

    def body(size):
        signal.signal(signal.SIGXFSZ, action)
        set_limit(resource.RLIMIT_FSIZE, size)
        return twice()

    served_by_engine(limited({}, body, 4 << 30), 12)
    served_by_torch(limited({}, body, 1 << 20))


# Processes and threads


def users_with_processes():
    """The IDs of the users that have processes."""
    uids = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            uids.add(os.stat(f"/proc/{pid}").st_uid)
    return uids


def become_unused_user():
    """Becomes a user that has no other process: root is not limited, and the user's other processes would count. The
    user is random, because the kernel also counts processes of other containers and of other runs of these tests."""
    # Afterwards, modules that the first epoch imports may be unreadable.
    assert plain() == []
    number = secrets.choice(sorted(set(range(20_000, 60_000)) - users_with_processes()))
    os.setresgid(number, number, number)
    os.setresuid(number, number, number)


needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become a user that has no other process")


@needs_root
def test_no_process_for_a_worker():
    """The error names the limit, the workers that were started are ended, and the loader works under a higher limit."""

    def body():
        become_unused_user()
        files = len(os.listdir("/proc/self/fd"))
        set_limit(resource.RLIMIT_NPROC, 4)
        error = walk(DataLoader(Images(24), batch_size=4, num_workers=4), image_batches())[0]
        set_limit(resource.RLIMIT_NPROC, 64)
        # Python's multiprocessing leaks the two pipes of a process that cannot be forked.
        return [*error, len(os.listdir("/proc/self/fd")) - files - 4, *twice()]

    report = in_child(watched, body)
    assert not report["hangs"] and report["status"] == 0 and report["output"] == "", report
    assert report["left"].keys() <= {"descriptors"} and report["processes"] == 0, report
    assert (report["log"], report["engine"]) == ([], 6 + 12)
    error, more_files = report["value"]
    assert more_files <= 2, "the arena and its doorbell, which the pool keeps"
    text = r"iter: BlockingIOError: \[Errno 11\] Resource temporarily unavailable: DataLoader worker [123] \("
    assert re.match(text, error)
    assert "ulimit -u" in error


@needs_root
def test_no_thread_for_a_watchdog():
    """A worker that cannot start a thread works, and exits when the main process is killed."""

    def without_threads():
        become_unused_user()
        os.register_at_fork(after_in_child=lambda: set_limit(resource.RLIMIT_NPROC, 1))

    def body():
        without_threads()
        return twice()

    served_by_engine(limited({}, body), 6 + 12)

    def killed():
        without_threads()
        iterator = iter(DataLoader(Numbers(100), num_workers=2, batch_size=None))
        next(iterator)
        pid = iterator._workers[0].pid
        assert os.listdir(f"/proc/{pid}/task") == [str(pid)]
        os.kill(os.getpid(), signal.SIGKILL)

    report = in_child(killed)
    assert report["status"] == signal.SIGKILL and report["processes"] == 0 and report["output"] == "", report
