"""A broken worker writes over shared memory: an error, never a crash, a hang or a batch that is not its own.

tests/garbage.rs does the same to the parts by themselves, with many more bytes.
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

# Bytes of a pickle that are found again, and what they become.
MARK, OTHER = b"RUSTLOADER-TEST-PICKLE", b"SUSTLOADER-TEST-PICKLE"
CHECKSUM = "the checksum of a pickled batch does not match"


def arena_file():
    """The descriptor of the arena that a forked worker has inherited."""
    found = [number for number, target in open_files().items() if "memfd:rustloader" in target]
    return max(found, key=lambda number: os.fstat(number).st_size)


def extents(fd):
    """Where the arena has pages."""
    end = 0
    with contextlib.suppress(OSError):  # after the last one there is no data
        while True:
            start = os.lseek(fd, end, os.SEEK_DATA)
            end = os.lseek(fd, start, os.SEEK_HOLE)
            yield start, end


class Pickled(Numbers):
    """Samples that have to be pickled. At sample AT the worker damages each pickle that it finds in shared memory: of
    those before it nothing has been taken yet."""

    AT = 4

    def __init__(self, size, file):
        super().__init__(8)
        self.size, self.file = size, file

    def __getitem__(self, i):
        if i == self.AT and not os.path.exists(self.file):
            fd = arena_file()
            for start, end in extents(fd):
                for match in re.finditer(MARK, os.pread(fd, end - start, start)):
                    os.pwrite(fd, OTHER, start + match.start())
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
    got = outcomes(iterator, 9)
    errors, values = got[: Pickled.AT], got[Pickled.AT : -1]
    assert all(item[:2] == ("error", RuntimeError) and CHECKSUM in item[2] for item in errors), errors
    assert [next(iter(item[1]["set"])) for item in values] == list(range(Pickled.AT, 8)) and got[-1] == ("end",)
    assert worker_pids(iterator) == pids, "a worker died of it"
    # The file is there: the next epoch is a sound one.
    assert [next(iter(batch["set"])) for batch in loader] == list(range(8))


class Scribbling(Numbers):
    """From its third sample on worker 0 writes `count` random words over what both sides keep in the arena beside the
    data, at each sample."""

    def __init__(self, seed, count):
        super().__init__(60)
        self.rng, self.count = random.Random(seed), count

    def __getitem__(self, i):
        if i >= 4 and i % 2 == 0:
            fd = arena_file()
            start, end = next(extents(fd))
            for _ in range(self.count):
                kinds = [self.rng.randbytes(8), bytes(8), b"\xff" * 8, self.rng.randrange(64).to_bytes(8, "little")]
                os.pwrite(fd, self.rng.choice(kinds), self.rng.randrange(start, end - 8) & ~7)
        return torch.tensor(i)


def scribbled(seed, count):
    torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.5
    loader = DataLoader(Scribbling(seed, count), num_workers=2, batch_size=None, prefetch_factor=4, timeout=1)
    iterator = iter(loader)
    pids = worker_pids(iterator)
    got = outcomes(iterator, 62)
    with within(20):
        iterator._shutdown_workers()
    assert wait_until(lambda: all(map(gone, pids)))
    del iterator
    # The next loader has an arena of its own, or one that is whole again.
    for _ in range(2):
        assert [x.item() for x in DataLoader(Numbers(20), num_workers=2, batch_size=None)] == list(range(20))
    return sorted({f"{item[1].__name__}: {item[2]}" for item in got if item[0] == "error"})


# How the errors begin: of damage that main meets, that a worker meets when it sends, and of that worker's end.
NAMED = (
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
    assert all(text.startswith(NAMED) for text in report["value"]), report
    # Occasionally a word is overwritten, or never read.
    assert report["value"] or count < 50, "nothing was damaged"
