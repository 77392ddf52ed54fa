"""`rustloader.cache(path=...)`: the samples in a file are those of the dataset, or the dataset is refused."""

import logging
import os

import numpy as np
import pytest
import torch
from cached_rows import COMPARED, Rows, cached, is_correct
from support import rustloader
from torch.utils.data import Dataset

pytestmark = pytest.mark.ours

REFUSED = "is the cache of another dataset: sample {} of {} differs there; give another path, or remove the file"


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "samples.cache")


def numbers(data, **options):
    return [number for batch in rustloader.DataLoader(data, batch_size=5, **options) for number in batch[1].tolist()]


def test_a_dataset_that_stores_a_sample_of_another_one_is_refused(path):
    class Slow(Dataset):
        def __len__(self):
            return 9

        def __getitem__(self, index):
            # The other dataset stores the sample while this one makes it.
            first[index]
            return torch.tensor(index)

    class Fast(Slow):
        def __getitem__(self, index):
            return torch.tensor(-index)

    Fast.__qualname__ = Slow.__qualname__
    first, second = cached(path, Fast()), cached(path, Slow())
    assert second[0] == 0
    with pytest.raises(ValueError, match=REFUSED.format(1, "Slow")):
        second[1]


class Same(Dataset):
    """Samples that `change` changes in what equality does not see."""

    def __init__(self, kind, change):
        self.kind, self.change = kind, change

    def __len__(self):
        return 4

    def __getitem__(self, index):
        sample = self.kind(3)
        if self.change is not None:
            self.change(sample)
        return sample


@pytest.mark.parametrize(
    "kind, change",
    [
        (torch.zeros, lambda sample: setattr(sample, "source", "a.jpg")),
        (np.zeros, lambda sample: sample.setflags(write=False)),
    ],
    ids=["attributes", "read-only"],
)
def test_attributes_of_tensors_and_read_only_arrays_count(path, kind, change):
    assert len([cached(path, Same(kind, None))[n] for n in range(4)]) == 4
    with pytest.raises(ValueError, match=REFUSED.format(0, "Same")):
        cached(path, Same(kind, change))[0]


class Batches(Rows):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


@pytest.mark.parametrize("kind", [Rows, Batches])
def test_samples_are_made_again_only_in_workers_and_only_once(path, tmp_path, kind):
    data = kind(200, str(tmp_path / "builders"))
    assert numbers(cached(path, data), num_workers=2) == list(range(200))
    data.builders()
    samples = cached(path, data)
    loader = rustloader.DataLoader(samples, batch_size=5, num_workers=2)
    assert [len(batch) for batch in loader] == [2] * 40
    # Workers that begin at the same time may compare the same sample.
    pids = data.builders()
    assert os.getpid() not in pids and COMPARED <= len(pids) <= 2 * COMPARED
    for _ in range(2):
        list(loader)
    assert is_correct(samples) and data.builders() == []


class Drawing(Rows):
    def __getitem__(self, index):
        return torch.rand(3), index


@pytest.mark.warns
def test_a_random_dataset_is_warned_about_and_not_refused(path, caplog):
    with caplog.at_level(logging.WARNING, "rustloader"):
        cached(path, Drawing())[0]
    assert "sample 0 of Drawing differs when it is made again" in caplog.text
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    assert cached(path, Drawing())[0][1] == 0 and torch.equal(torch.rand(3), expected)


class Missing(Rows):
    def __getitem__(self, index):
        raise FileNotFoundError(index)


def test_a_file_is_enough_if_the_dataset_can_no_longer_make_its_samples(path):
    class Present(Rows):
        __qualname__ = "Missing"

    assert is_correct(cached(path, Present())) and is_correct(cached(path, Missing()))
