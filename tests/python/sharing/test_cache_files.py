"""`rustloader.cache(path=...)`: a file that later runs, and other programs, use again."""

import os
import re
import signal

import pytest
import torch
from support import run_script, rustloader, start_script, wait_until
from torch.utils.data import Dataset, Subset

pytestmark = pytest.mark.ours


class Rows(Dataset):
    def __init__(self, length=200):
        self.length, self.made = length, 0

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.made += 1
        return torch.full((1000,), float(index)), index


# Samples that are made when a file is opened, to compare them.
COMPARED = 2


class Others(Rows):
    pass


def cached(path, data=None, memory="16MiB", version="1"):
    return rustloader.cache(Rows() if data is None else data, memory, path=path, version=version)


def all_right(found):
    return all(found[n][1] == n and (found[n][0] == n).all() for n in range(len(found)))


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "samples.cache")


@pytest.fixture
def filled(path):
    assert all_right(cached(path))
    return path


def test_a_file_is_used_again(filled):
    data = Rows()
    assert all_right(cached(filled, data)) and data.made == COMPARED
    # Its limit stays where nothing else is asked for.
    assert cached(filled, memory=None).usage().limit == 16 << 20


def test_a_run_of_its_own_uses_it(path):
    source = f"""
    import torch, rustloader
    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 200
        def __getitem__(self, index):
            return torch.full((1000,), float(index)), index
    found = rustloader.cache(Rows(), "16MiB", path={path!r})
    loader = rustloader.DataLoader(found, batch_size=10, num_workers=2)
    assert [n for batch in loader for n in batch[1].tolist()] == list(range(200))
    print(found.usage().hits, found.usage().misses)
    """
    # Counters are the file's. Two samples are read to compare them with the dataset's.
    assert [run_script(source)[1] for _ in range(2)] == ["0 200\n", "202 200\n"]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"data": Rows(201)}, r"another dataset: it has length 200 instead of 201"),
        ({"data": Others()}, r"it has dataset 'Rows' instead of 'Others'"),
        ({"version": "2"}, r"it has version '1' instead of '2'"),
        (
            {"data": Others(3), "version": "2"},
            r"length 200 instead of 3, and dataset 'Rows' instead of 'Others', and version '1'",
        ),
    ],
)
def test_the_file_of_another_dataset_is_refused(filled, given, text):
    before = os.stat(filled)
    with pytest.raises(ValueError, match=text + r".*give another path, or remove the file"):
        cached(filled, **given)
    assert os.stat(filled).st_mtime_ns == before.st_mtime_ns and all_right(cached(filled))


def test_files_that_are_no_caches_are_left_alone(path, tmp_path):
    with open(path, "w") as file:
        file.write("precious " * 2000)
    with pytest.raises(ValueError, match="is not a cache of rustloader: give another path, or remove the file"):
        cached(path)
    with open(path) as file:
        assert file.read() == "precious " * 2000
    with open(path, "wb") as file:
        file.write(bytes(1000) + b"my data" * 100)
    with pytest.raises(ValueError, match="is not a cache of rustloader"):
        cached(path)
    assert os.path.getsize(path) == 1700
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ValueError, match="is not a regular file"):
        cached(str(tmp_path / "fifo"))
    with pytest.raises(IsADirectoryError):
        cached(str(tmp_path))
    with pytest.raises(FileNotFoundError):
        cached(str(tmp_path / "none" / "file"))
    with pytest.raises(ValueError, match="version must have at most 400 characters, got 900"):
        cached(path, version="x" * 900)


def test_other_samples_are_noticed_and_a_text_in_many_bytes_is_none(tmp_path):
    data = Rows()
    one, other = Subset(data, range(100)), Subset(data, range(100, 200))
    path, version = str(tmp_path / "half"), "\N{SNOWMAN}" * 400
    assert cached(path, one, version=version)[3][1] == 3
    with pytest.raises(ValueError, match="is the cache of another dataset: sample 3 differs there"):
        cached(path, other, version=version)
    assert cached(os.fsencode(path), one, version=version)[3][1] == 3


class Elsewhere:
    """A sample whose class can be missing, or refuse to be pickled."""

    refuses = True

    def __reduce__(self):
        if Elsewhere.refuses:
            raise TypeError("not now")
        return Elsewhere, ()


@pytest.mark.warns
def test_what_could_not_be_kept_is_tried_again_by_the_next_program(path):
    data = [Elsewhere()] * 5
    found = cached(path, data)
    found[0], found[1]
    assert found.usage().refused == 2
    Elsewhere.refuses = False
    try:
        found = cached(path, data)
        assert found.usage().refused == 0 and type(found[0]) is type(found[0]) is Elsewhere
        assert found.usage().samples_bytes > 0
    finally:
        Elsewhere.refuses = True


def test_the_format_of_another_version_is_named(filled):
    with open(filled, "r+b") as file:
        file.seek(8)
        file.write((99).to_bytes(8, "little"))
    with pytest.raises(ValueError, match="has version 99 of the cache format, but this rustloader reads 1"):
        cached(filled)


def test_a_file_whose_maker_was_killed_at_once_begins_anew(path):
    for content in (b"", bytes(50), bytes(1 << 20), b"RLCACHE1" + bytes(3000)):
        with open(path, "wb") as file:
            file.write(content)
        data = Rows()
        assert all_right(cached(path, data)) and data.made == 202
        os.unlink(path)


@pytest.mark.parametrize("length", [9000, 100_000, 400_000])
def test_a_file_that_was_cut_off_is_used_as_far_as_it_is_whole(filled, length):
    with open(filled, "r+b") as file:
        file.truncate(length)
    data = Rows()
    found = cached(filled, data)
    assert all_right(found) and 0 < data.made <= 202
    # Two are compared with those in the file.
    assert length < 10_000 or data.made < 190, data.made
    found = cached(filled, data)
    data.made = 0
    assert all_right(found) and data.made == 0


def test_damaged_bytes_are_made_again(filled):
    size = os.stat(filled).st_blocks * 512
    with open(filled, "r+b") as file:
        for at in range(20_000, size, 50_000):
            file.seek(at)
            file.write(b"\xaa" * 64)
    data = Rows()
    found = cached(filled, data)
    assert all_right(found) and found.usage().damaged == data.made - COMPARED > 5
    data.made = 0
    assert all_right(cached(filled, data)) and data.made == COMPARED


def test_a_larger_limit_enlarges_a_file(path):
    data = Rows()
    found = cached(path, data, "200KiB")
    assert all_right(found) and found.usage().samples_bytes < 200 << 10
    larger = cached(path, data, "16MiB")
    data.made = 0
    assert all_right(larger) and 100 < data.made < 200
    data.made = 0
    assert all_right(cached(path, data)) and data.made == COMPARED
    # The first program goes on with what it can see.
    assert all_right(found)


def test_more_than_the_disk_has_is_refused(path):
    system = os.statvfs(os.path.dirname(path))
    left = system.f_bavail * system.f_frsize
    with pytest.raises(ValueError, match=r"memory=\d+ bytes is too large: \d+ bytes are available for the file"):
        cached(path, memory=left * 4)


FILL = """
import sys, torch, rustloader
class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 200
    def __getitem__(self, index):
        return torch.full((1000,), float(index)), index
print("ready", flush=True)
found = rustloader.cache(Rows(), "16MiB", path={path!r}, version="1")
for n in list(range({start}, 200)) + list(range({start})):
    assert found[n][1] == n and (found[n][0] == n).all()
print("filled", flush=True)
"""


def test_two_programs_fill_one_file(path):
    processes = [start_script(FILL.format(path=path, start=start), fresh=False) for start in (0, 0, 100)]
    ends = [process.communicate(timeout=120) for process in processes]
    assert [end[0] for end in ends] == ["ready\nfilled\n"] * 3, ends
    data = Rows()
    assert all_right(cached(path, data)) and data.made == COMPARED


def test_a_program_that_is_killed_leaves_a_file_for_the_next_one(path):
    for _ in range(5):
        process = start_script(FILL.format(path=path, start=0), fresh=False)
        assert process.stdout.readline() == "ready\n"
        wait_until(lambda: os.path.exists(path) and os.path.getsize(path) > 0, 60)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)
        assert all_right(cached(path))


def test_the_repr_names_its_bytes(filled):
    assert re.search(r"<CachedDataset of .*Rows object at .*>: 804800 of 16777216 bytes>", repr(cached(filled)))
