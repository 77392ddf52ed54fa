"""A broken worker overwrites shared memory: the result is an error, never a crash, a hang or a wrong batch.

tests/garbage.rs does the same to single components, with many more bytes.
"""

import contextlib
import os
import random
import re

import pytest
import torch
from isolation import in_child, watched
from sample_data import Numbers
from support import DataLoader, gone, open_files, outcomes, wait_until, within, worker_pids

pytestmark = [pytest.mark.ours, pytest.mark.timeout(180)]

# Bytes that can be found in a pickle, and the bytes that replace them.
MARK, DAMAGED = b"RUSTLOADER-TEST-PICKLE", b"SUSTLOADER-TEST-PICKLE"
CHECKSUM = "the checksum of a pickled batch does not match"


def arena_file():
    """The descriptor of the arena that a forked worker inherited."""
    descriptors = [number for number, target in open_files().items() if "memfd:rustloader" in target]
    return max(descriptors, key=lambda number: os.fstat(number).st_size)


def extents(fd):
    """The ranges of the arena that have pages."""
    end = 0
    with contextlib.suppress(OSError):  # there is no data after the last range
        while True:
            start = os.lseek(fd, end, os.SEEK_DATA)
            end = os.lseek(fd, start, os.SEEK_HOLE)
            yield start, end


class Pickled(Numbers):
    """Samples that must be pickled. At sample AT, the worker damages each pickle that it finds in shared memory; the
    main process has not read any of the earlier samples yet."""

    AT = 4

    def __init__(self, size, file):
        super().__init__(8)
        self.size, self.file = size, file

    def __getitem__(self, i):
        if i == self.AT and not os.path.exists(self.file):
            fd = arena_file()
            for start, end in extents(fd):
                for match in re.finditer(MARK, os.pread(fd, end - start, start)):
                    os.pwrite(fd, DAMAGED, start + match.start())
            open(self.file, "w").close()
        return {"set": {i}, "mark": MARK + b"." * self.size}


@pytest.mark.parametrize("persistent", [False, True], ids=["once", "persistent"])
@pytest.mark.parametrize("size", [0, 200_000], ids=["small", "large"])
def test_a_pickle_that_was_written_over_is_an_error_in_its_place(size, persistent, tmp_path):
    dataset = Pickled(size, str(tmp_path / "damaged"))
    loader = DataLoader(dataset, num_workers=1, batch_size=None, prefetch_factor=6, persistent_workers=persistent)
    iterator = iter(loader)
    pids = worker_pids(iterator)
    assert wait_until(lambda: os.path.exists(dataset.file), 60)
    results = outcomes(iterator, 9)
    errors, values = results[: Pickled.AT], results[Pickled.AT : -1]
    assert all(item[:2] == ("error", RuntimeError) and CHECKSUM in item[2] for item in errors), errors
    assert [next(iter(item[1]["set"])) for item in values] == list(range(Pickled.AT, 8)) and results[-1] == ("end",)
    assert worker_pids(iterator) == pids, "a worker died"
    # The file exists, so the next epoch damages nothing.
    assert [next(iter(batch["set"])) for batch in loader] == list(range(8))


class Scribbling(Numbers):
    """From its third sample on, worker 0 overwrites `count` random words at each sample, in what both sides keep in the
    arena besides the data."""

    def __init__(self, seed, count):
        super().__init__(60)
        self.rng, self.count = random.Random(seed), count

    def __getitem__(self, i):
        if i >= 4 and i % 2 == 0:
            fd = arena_file()
            start, end = next(extents(fd))
            for _ in range(self.count):
                words = [self.rng.randbytes(8), bytes(8), b"\xff" * 8, self.rng.randrange(64).to_bytes(8, "little")]
                os.pwrite(fd, self.rng.choice(words), self.rng.randrange(start, end - 8) & ~7)
        return torch.tensor(i)


def scribbled(seed, count):
    torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.5
    loader = DataLoader(Scribbling(seed, count), num_workers=2, batch_size=None, prefetch_factor=4, timeout=1)
    iterator = iter(loader)
    pids = worker_pids(iterator)
    results = outcomes(iterator, 62)
    with within(20):
        iterator._shutdown_workers()
    assert wait_until(lambda: all(map(gone, pids)))
    del iterator
    # The next loader has a new arena, or an intact one.
    for _ in range(2):
        assert [x.item() for x in DataLoader(Numbers(20), num_workers=2, batch_size=None)] == list(range(20))
    return sorted({f"{item[1].__name__}: {item[2]}" for item in results if item[0] == "error"})


# The beginnings of the errors: damage that the main process finds, damage that a worker finds when it sends, and the
# death or silence of a worker.
ERRORS = (
    "RuntimeError: shared memory of the DataLoader is damaged: ",
    "RuntimeError: Caught RuntimeError in DataLoader worker process ",
    "RuntimeError: DataLoader worker (pid",
    "RuntimeError: DataLoader timed out ",
)


@pytest.mark.parametrize("count", [1, 5, 50, 2000])
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.forks
def test_words_that_were_written_over_at_random_are_no_crash_and_no_hang(seed, count):
    report = in_child(watched, scribbled, seed, count, seconds=150)
    assert not report["hangs"] and report["status"] == 0, report
    assert report["processes"] == 0 and not report["left"] and report["bytes"] == 0, report
    assert all(text.startswith(ERRORS) for text in report["value"]), report
    # A damaged word may be overwritten, or never read.
    assert report["value"] or count < 50, "nothing was damaged"
