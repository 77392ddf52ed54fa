"""Workers that start from a state given by a test, and the snapshots that they send."""

import copy
import dataclasses
import pickle
import types

import torch
from support import DataLoader
from torch.utils.data import IterableDataset, get_worker_info

from rustloader.iterator import session
from rustloader.stateful_dataloader.sampling import sampling
from rustloader.stateful_dataloader.schema import SamplerState
from rustloader.workers import main
from rustloader.workers.bootstrap import Job
from rustloader.workers.snapshots import Publisher, SnapshotPolicy, read, read_error

BASE = 7


def typed(saved):
    """A sampler's part of a state, as a loader passes it on; None for None."""
    return saved and SamplerState.of(saved, saved)


def merged(state):
    """A sampler's part of a state, as a loader passes it back."""
    saved = dict(state.own)
    saved |= {"_index_sampler_state": state.index_sampler_state, "_sampler_iter_state": state.sampler_iter_state}
    return copy.deepcopy({name: value for name, value in saved.items() if value is not None or name == "start"})


def plain(value):
    """A state with its tensors as bytes, to compare."""
    if isinstance(value, torch.Tensor):
        return value.numpy().tobytes()
    if isinstance(value, SamplerState):
        value = vars(value)
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


class Holder:
    """A loader, as `check` reads it."""

    def __init__(self, index_sampler):
        self._index_sampler = index_sampler


def begin(index_sampler, saved=None, position=0, ahead=(), every=1):
    """The sampling of an epoch of a map-style dataset, from a saved state and position on."""
    return sampling(index_sampler, iter(index_sampler), typed(saved), position, ahead, every, map_style=True)


class Workers:
    """Gives workers a state and a snapshot policy, and keeps the snapshots that they send."""

    def __init__(self, folder, monkeypatch):
        folder.mkdir()
        self.folder = folder
        self.set()
        monkeypatch.setattr(session, "Job", self.job)
        # Workers are forked, so they inherit this patch.
        monkeypatch.setattr(main, "Publisher", self.publisher)

    def set(self, *starts, every=1, first_ordinal=0):
        self.starts, self.policy = list(starts) or None, SnapshotPolicy(every, first_ordinal)
        for file in self.folder.iterdir():
            file.unlink()

    def job(self, *, seeding, **kw):
        if seeding is not None:
            seeding = dataclasses.replace(seeding, first_ordinal=self.policy.first_ordinal)
        return Job(seeding=seeding, snapshots=self.policy, starts=self.starts, **kw)

    def publisher(self, port, *args):
        return Publisher(types.SimpleNamespace(send_snapshot=self.keep), *args)

    def keep(self, count, payload, is_error):
        with open(self.folder / str(get_worker_info().id), "ab") as file:
            pickle.dump((count, payload, is_error), file)
        return True

    def sent(self, worker=0):
        """Returns (count, state or error, is_error) of each snapshot of a worker."""
        snapshots = []
        if (path := self.folder / str(worker)).exists():
            with open(path, "rb") as file:
                while file.peek(1):
                    count, payload, is_error = pickle.load(file)
                    snapshots.append((count, read_error(payload)[0] if is_error else read(payload), is_error))
        return snapshots


def make(dataset, count=1, **kw):
    torch.manual_seed(BASE)
    return DataLoader(dataset, num_workers=count, **dict(collate_fn=logged, batch_size=2) | kw)


def log():
    return get_worker_info().dataset.log


def logged(samples):
    """A collate_fn that returns the samples, and the log of the worker so far."""
    before = list(log())
    log().append("collate")
    return samples, before


def log_init(worker_id):
    log().append("init")


class Logged:
    """Has a state, and logs the calls that read or set it."""

    def __init__(self, *args):
        super().__init__(*args)
        self.log = []
        self.mark = None

    def state_dict(self):
        self.log.append("state")
        return {"mark": self.mark}

    def load_state_dict(self, state):
        self.log.append(f"load {state}")
        self.mark = state["mark"]


class Tail(Logged, IterableDataset):
    """Yields the numbers below n. Its iterator has a state, too."""

    def __init__(self, n):
        super().__init__()
        self.n = n

    def __iter__(self):
        self.log.append("iter")
        return TailIterator(self)

    def __getitem__(self, i):
        raise AssertionError


class TailIterator:
    def __init__(self, dataset):
        self.dataset, self.i = dataset, 0

    def __iter__(self):
        return self

    def __next__(self):
        self.dataset.log.append(self.i)
        if self.i >= self.dataset.n:
            raise StopIteration
        self.i += 1
        return self.i - 1

    def state_dict(self):
        return {"i": self.i}

    def load_state_dict(self, state):
        self.dataset.log.append(f"load iterator {state}")
        self.i = state["i"]
