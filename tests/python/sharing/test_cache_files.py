"""`rustloader.cache(path=...)`: a file that later runs and other programs reuse."""

import os
import re
import signal

import pytest
from cached_rows import COMPARED, Rows, cached, is_correct
from support import start_script

pytestmark = pytest.mark.ours


class Others(Rows):
    pass


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


@pytest.mark.parametrize(
    ("place", "damage", "text"),
    [
        (b"version", b'"', r"^the header of .* is damaged: give another path, or remove the file$"),
        (8, (99).to_bytes(8, "little"), "has version 99 of the cache format, but this rustloader reads 2"),
    ],
    ids=["damaged", "another format"],
)
def test_a_header_that_cannot_be_read_is_named(filled, place, damage, text):
    with open(filled, "r+b") as file:
        file.seek(place if isinstance(place, int) else file.read(4096).index(place))
        file.write(damage)
    with pytest.raises(ValueError, match=text):
        cached(filled)


def test_a_version_that_is_too_long_is_refused(path):
    with pytest.raises(ValueError, match="version must have at most 400 characters, got 900"):
        cached(path, version="x" * 900)


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


def test_more_than_the_disk_has_is_refused(path):
    system = os.statvfs(os.path.dirname(path))
    left = system.f_bavail * system.f_frsize
    text = r"memory=\d+ bytes is too large: \d+ bytes of space for the file are available; give a smaller number"
    with pytest.raises(ValueError, match=text):
        cached(path, memory=left * 4)
    assert not os.path.exists(path)


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


def test_a_program_that_is_killed_leaves_a_file_for_the_next_one(path):
    for stop in (50, 100, 150):
        process = start_script(FILL.format(path=path, start=0, stop=stop), fresh=False)
        assert [process.stdout.readline() for _ in range(2)] == ["ready\n", "stopped\n"]
        os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)
    data = Rows()
    assert is_correct(cached(path, data)) and 50 <= data.built <= 50 + 3 * COMPARED


def test_the_repr_names_its_bytes(filled):
    assert re.search(r"<CachedDataset of .*Rows object at .*>: 806400 of 16777216 bytes>", repr(cached(filled)))
