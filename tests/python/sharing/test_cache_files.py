"""`rustloader.cache(path=...)`: a file that later runs and other programs reuse."""

import os
import re
import signal

import pytest
import torch
from support import run_script, rustloader, start_script
from torch.utils.data import Dataset, Subset

pytestmark = pytest.mark.ours


class Rows(Dataset):
    def __init__(self, length=200):
        self.length, self.built = length, 0

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.built += 1
        return torch.full((1000,), float(index)), index


# Samples that are built when a file is opened, to compare them with those in it.
COMPARED = 2


class Others(Rows):
    pass


def cached(path, data=None, memory="16MiB", version="1"):
    return rustloader.cache(Rows() if data is None else data, memory, path=path, version=version)


def is_correct(samples):
    return all(samples[n][1] == n and (samples[n][0] == n).all() for n in range(len(samples)))


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "samples.cache")


@pytest.fixture
def filled(path):
    assert is_correct(cached(path))
    return path


def test_a_file_is_reused(filled):
    data = Rows()
    assert is_correct(cached(filled, data)) and data.built == COMPARED
    # It keeps its limit unless another one is requested.
    assert cached(filled, memory=None).usage().limit == 16 << 20


def test_another_run_uses_it(path):
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
    # The file has the counters. Two samples are read, to compare them with the dataset's.
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
    assert os.stat(filled).st_mtime_ns == before.st_mtime_ns and is_correct(cached(filled))


def test_files_that_are_not_caches_are_left_alone(path, tmp_path):
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


def test_other_samples_are_detected_and_a_version_of_many_bytes_is_accepted(tmp_path):
    data = Rows()
    one, other = Subset(data, range(100)), Subset(data, range(100, 200))
    path, version = str(tmp_path / "half"), "\N{SNOWMAN}" * 400
    assert cached(path, one, version=version)[3][1] == 3
    with pytest.raises(ValueError, match="is the cache of another dataset: sample 3 differs there"):
        cached(path, other, version=version)
    assert cached(os.fsencode(path), one, version=version)[3][1] == 3


@pytest.mark.parametrize("character", ["\N{CUNEIFORM SIGN A}", "\0", "\udc80"], ids=["4 bytes", "escaped", "surrogate"])
def test_the_longest_version_fits_into_the_header(path, character):
    data = type("\N{CUNEIFORM SIGN A}" * 900, (Rows,), {})()
    for _ in range(2):
        assert cached(path, data, version=character * 400)[3][1] == 3
    with pytest.raises(ValueError, match="is the cache of another dataset: it has version"):
        cached(path, data, version=character * 399)


class Elsewhere:
    """A sample whose class can be missing, or refuse to be pickled."""

    refuses = True

    def __reduce__(self):
        if Elsewhere.refuses:
            raise TypeError("not now")
        return Elsewhere, ()


@pytest.mark.warns
def test_the_next_program_retries_samples_that_could_not_be_kept(path):
    data = [Elsewhere()] * 5
    samples = cached(path, data)
    samples[0], samples[1]
    assert samples.usage().refused == 2
    Elsewhere.refuses = False
    try:
        samples = cached(path, data)
        assert samples.usage().refused == 0 and type(samples[0]) is type(samples[0]) is Elsewhere
        assert samples.usage().samples_bytes > 0
    finally:
        Elsewhere.refuses = True


def test_the_format_of_another_version_is_named(filled):
    with open(filled, "r+b") as file:
        file.seek(8)
        file.write((99).to_bytes(8, "little"))
    with pytest.raises(ValueError, match="has version 99 of the cache format, but this rustloader reads 1"):
        cached(filled)


def test_a_file_whose_creator_was_killed_at_once_is_created_again(path):
    for content in (b"", bytes(50), bytes(1 << 20), b"RLCACHE1" + bytes(3000)):
        with open(path, "wb") as file:
            file.write(content)
        data = Rows()
        assert is_correct(cached(path, data)) and data.built == 202
        os.unlink(path)


@pytest.mark.parametrize("length", [9000, 100_000, 400_000])
def test_a_truncated_file_is_used_as_far_as_it_is_intact(filled, length):
    with open(filled, "r+b") as file:
        file.truncate(length)
    data = Rows()
    samples = cached(filled, data)
    assert is_correct(samples) and 0 < data.built <= 202
    # Two are built only to compare them with those in the file.
    assert length < 10_000 or data.built < 190, data.built
    samples = cached(filled, data)
    data.built = 0
    assert is_correct(samples) and data.built == 0


def test_damaged_samples_are_built_again(filled):
    size = os.stat(filled).st_blocks * 512
    with open(filled, "r+b") as file:
        for at in range(20_000, size, 50_000):
            file.seek(at)
            file.write(b"\xaa" * 64)
    data = Rows()
    samples = cached(filled, data)
    assert is_correct(samples) and samples.usage().damaged == data.built - COMPARED > 5
    data.built = 0
    assert is_correct(cached(filled, data)) and data.built == COMPARED


def test_a_larger_limit_enlarges_a_file(path):
    data = Rows()
    samples = cached(path, data, "200KiB")
    assert is_correct(samples) and samples.usage().samples_bytes < 200 << 10
    larger = cached(path, data, "16MiB")
    data.built = 0
    assert is_correct(larger) and 100 < data.built < 200
    data.built = 0
    assert is_correct(cached(path, data)) and data.built == COMPARED
    # The first program keeps using what it can see.
    assert is_correct(samples)


def test_more_than_the_disk_has_is_refused(path):
    system = os.statvfs(os.path.dirname(path))
    left = system.f_bavail * system.f_frsize
    with pytest.raises(ValueError, match=r"memory=\d+ bytes is too large: \d+ bytes are available for the file"):
        cached(path, memory=left * 4)


FILL = """
import sys, time, torch, rustloader
class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 200
    def __getitem__(self, index):
        if index == {stop}:
            print("stopped", flush=True)
            time.sleep(600)
        return torch.full((1000,), float(index)), index
print("ready", flush=True)
found = rustloader.cache(Rows(), "16MiB", path={path!r}, version="1")
for n in list(range({start}, 200)) + list(range({start})):
    assert found[n][1] == n and (found[n][0] == n).all()
print("filled", flush=True)
"""


def test_two_programs_fill_one_file(path):
    processes = [start_script(FILL.format(path=path, start=start, stop=None), fresh=False) for start in (0, 0, 100)]
    ends = [process.communicate(timeout=120) for process in processes]
    assert [end[0] for end in ends] == ["ready\nfilled\n"] * 3, ends
    data = Rows()
    assert is_correct(cached(path, data)) and data.built == COMPARED


def test_a_program_that_is_killed_leaves_a_file_for_the_next_one(path):
    for stop in (50, 100, 150):
        process = start_script(FILL.format(path=path, start=0, stop=stop), fresh=False)
        assert [process.stdout.readline() for _ in range(2)] == ["ready\n", "stopped\n"]
        os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)
    data = Rows()
    assert is_correct(cached(path, data)) and 50 <= data.built <= 50 + COMPARED


def test_the_repr_names_its_bytes(filled):
    assert re.search(r"<CachedDataset of .*Rows object at .*>: 804800 of 16777216 bytes>", repr(cached(filled)))
