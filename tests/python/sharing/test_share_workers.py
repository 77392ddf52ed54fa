"""Shared objects in workers: every start method, both loaders, batches."""

import copyreg
import os

import numpy as np
import pytest
import torch
from support import BOTH, DataLoader, rustloader

pytestmark = pytest.mark.ours

if rustloader is not None:
    from rustloader.sharing.pickling import data_of

    share = rustloader.share

ORIGINAL = [f"images/{number:05d}.jpg" for number in range(1200)]


def inodes():
    """The inodes of the shared objects that this process has mapped, and the KiB of them that are private and dirty."""
    numbers, private = [], 0
    with open("/proc/self/smaps") as file:
        current = False
        for line in file:
            if "-" in line.split()[0]:
                current = "memfd:rustloader-shared" in line
                if current:
                    numbers.append(int(line.split()[4]))
            elif current and line.startswith("Private_Dirty"):
                private += int(line.split()[1])
    return sorted(set(numbers)), private


class Shared(torch.utils.data.Dataset):
    def __init__(self, paths, labels, array, tensor, pair):
        self.paths, self.labels, self.array, self.tensor, self.pair = paths, labels, array, tensor, pair

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        path = self.paths[index]
        # smaps takes milliseconds to read.
        mapped = inodes() if index % 300 == 299 else None
        return path, self.labels[path], self.array[index], self.tensor[index].tolist(), self.pair[index % 2], mapped


def as_it_is(batch):
    return batch


def dataset():
    labels = {path: number for number, path in enumerate(ORIGINAL)}
    array, tensor = np.arange(2400.0).reshape(1200, 2), torch.arange(2400).reshape(2, 1200).T
    return Shared(*map(share, (ORIGINAL, labels, array, tensor, (1, "b"))))


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
@pytest.mark.parametrize("loader", BOTH)
def test_workers_read_the_same_memory(loader, method):
    data = dataset()
    expected, _ = inodes()
    own = {os.fstat(item.store.fileno()).st_ino for item in (data.paths, data.labels, data.tensor, data.pair)}
    assert own < set(expected)
    settings = dict(num_workers=2, multiprocessing_context=method, collate_fn=as_it_is)
    seen = 0
    for batch in loader(data, batch_size=300, **settings):
        for path, label, row, rows, part, _ in batch:
            assert (path, label) == (ORIGINAL[seen], seen) and part == (1, "b")[seen % 2]
            assert row.tolist() == [2 * seen, 2 * seen + 1] and rows == [seen, seen + 1200]
            seen += 1
        mapped, private = batch[-1][-1]
        assert set(mapped) >= own and len(set(mapped) & set(expected)) == 5 and private == 0
    assert seen == 1200


class Views(torch.utils.data.Dataset):
    """Has one array as a whole and in parts, and one list twice."""

    def __init__(self):
        self.all = share(np.arange(40.0).reshape(10, 4))
        self.features, self.labels = self.all[:, :3], self.all[:, 3]
        self.names = share([str(number) for number in range(10)])
        self.same = type(self.names)(self.names.store)

    def __len__(self):
        return 10

    def __getitem__(self, index):
        objects = self.all[index], self.features[index], self.labels[index], self.names[index], self.same[index]
        return [*map(np.copy, objects[:2]), *objects[2:], inodes()[0]]


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
@pytest.mark.parametrize("loader", BOTH)
def test_several_objects_of_one_memory_reach_a_worker(loader, method):
    data = Views()
    own = {os.fstat(store.fileno()).st_ino for store in (data.names.store, data_of(data.all).store)}
    samples = loader(data, batch_size=None, num_workers=1, multiprocessing_context=method)
    for index, (row, features, label, name, same, mapped) in enumerate(samples):
        assert row.tolist() == [*features, label] == [4 * index + at for at in range(4)]
        # A forked worker also has mappings that other tests left behind.
        assert name == same == str(index) and own <= set(mapped) and (method == "fork" or len(mapped) == 2)


def test_too_many_objects_for_the_fork_server_are_named():
    objects = Whole(*(share([number]) for number in range(250)))
    text = "shared object of a dataset needs one: share one list of many objects .* or use the start method 'fork'"
    for loader in BOTH:
        with pytest.raises(ValueError, match=text):
            iter(loader(objects, num_workers=1, multiprocessing_context="forkserver"))
        (first,) = next(iter(loader(objects, num_workers=1, multiprocessing_context="spawn", collate_fn=as_it_is)))
        assert first == [0]


class Whole(torch.utils.data.Dataset):
    """Its samples are the shared objects themselves."""

    def __init__(self, *objects):
        self.objects = objects

    def __len__(self):
        return len(self.objects)

    def __getitem__(self, index):
        return self.objects[index]


@pytest.mark.parametrize("loader", BOTH)
def test_shared_objects_travel_in_batches(loader):
    objects = [share(ORIGINAL), share({"a": [1]}), share(torch.arange(5)), share((1, 2))]
    items = [batch[0] for batch in loader(Whole(*objects), batch_size=1, num_workers=1, collate_fn=as_it_is)]
    assert [type(item) for item in items] == [type(item) for item in objects]
    assert items[0] == ORIGINAL and items[1] == {"a": [1]} and torch.equal(items[2], objects[2]) and items[3] == (1, 2)


def as_text(array):
    return str, (f"reduced {array.sum()}",)


def test_pickled_batches_with_arrays_are_as_without_sharing():
    from rustloader.workers import serialize

    share(np.ones(3))
    # With 1j the batch is not a plain tree, so it is pickled.
    payload, out_of_band, _ = serialize.dumps([1j, np.ones(50_000)])
    assert len(payload) < 1000 and len(out_of_band) == 1
    copyreg.pickle(np.ndarray, as_text)
    try:
        for loader in (torch.utils.data.DataLoader, DataLoader):
            (batch,) = loader([np.ones(2)], batch_size=None, num_workers=1, collate_fn=as_it_is)
            assert batch == "reduced 2.0", loader
    finally:
        del copyreg.dispatch_table[np.ndarray]


@pytest.mark.parametrize("loader", BOTH)
def test_batches_of_arrays_are_as_without_sharing(loader):
    """Sharing the first array registers a reducer for arrays with ForkingPickler."""
    array = share(np.arange(90_000.0).reshape(3, 30_000))
    data = Whole(array, array[1:], np.ones(3), np.ones(30_000))
    batches = loader(data, batch_size=2, collate_fn=as_it_is, num_workers=2)
    parts = [part for batch in batches for part in batch]
    assert all(type(part) is np.ndarray for part in parts)
    # Shared arrays are read-only. From Python 3.14 on, torch's loader may deliver them as such.
    is_torchs = loader is torch.utils.data.DataLoader
    assert all(part.flags.writeable for part in (parts[2:] if is_torchs else parts))
    kinds = list(loader(Whole({1, 2}, {"x": array[0]}), batch_size=None, num_workers=1, collate_fn=as_it_is))
    assert kinds[0] == {1, 2} and kinds[1]["x"].sum() == array[0].sum()


@pytest.mark.parametrize("loader", BOTH)
def test_default_collate_takes_shared_rows(loader):
    data = torch.utils.data.TensorDataset(share(torch.arange(12.0).reshape(4, 3)))
    (batch,) = next(iter(loader(data, batch_size=4, num_workers=1)))
    assert type(batch) is torch.Tensor and torch.equal(batch, torch.arange(12.0).reshape(4, 3))
