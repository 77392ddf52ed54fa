"""What the tests of caches in files share: a dataset, calls that cache it, and a file system."""

import errno
import os

import torch
from support import rustloader
from torch.utils.data import Dataset


class Rows(Dataset):
    """Sample n is a tensor of 1,000 times n, and n. `built` counts the samples built in this process; with a `file`,
    each process notes there its ID for each sample that it builds."""

    def __init__(self, length=200, file=None):
        self.length, self.file, self.built = length, file, 0

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.built += 1
        if self.file is not None:
            with open(self.file, "a") as file:
                print(os.getpid(), file=file)
        return torch.full((1000,), float(index)), index

    def builders(self):
        """Returns the IDs of the processes that built samples, one per sample, and forgets them."""
        with open(self.file) as file:
            pids = [int(line) for line in file]
        os.truncate(self.file, 0)
        return pids


# Number of records of another opening that an opening compares in a small table.
COMPARED = 2


def cached(path, data=None, memory="16MiB", version="1", **options):
    return rustloader.cache(Rows() if data is None else data, memory, path=path, version=version, **options)


def is_correct(samples):
    return all(samples[n][1] == n and (samples[n][0] == n).all() for n in range(len(samples)))


class FileSystem:
    """os, on a file system that lacks files without names, and maybe hard links."""

    def __init__(self, has_links):
        self.has_links = has_links

    def __getattr__(self, name):
        return getattr(os, name)

    def open(self, path, flags, *args, **kw):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return os.open(path, flags, *args, **kw)

    def link(self, *args, **kw):
        if not self.has_links:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        os.link(*args, **kw)
