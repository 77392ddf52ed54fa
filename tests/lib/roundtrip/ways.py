"""The ways a tree travels: through torch's loader, through rustloader's, and through the packer in one process."""

import dataclasses
import io
import pickle
from multiprocessing.reduction import ForkingPickler

import torch
from support import DataLoader, TorchDataLoader, first_line
from torch.multiprocessing import reductions
from torch.utils.data import Dataset, Sampler, default_collate

from roundtrip.build import FOR_TORCH, OPERATIONS, build
from rustloader._core import _roundtrip
from rustloader.workers import serialize

__all__ = ["Error", "Loaders", "collated", "packed", "packed_by_torch"]


@dataclasses.dataclass(frozen=True)
class Error:
    """What came in the place of a value."""

    kind: type
    text: str


def outcome(function, *arguments):
    try:
        return function(*arguments)
    except Exception as e:
        return Error(type(e), first_line(e))


# Through workers


class Trees(Dataset):
    """The index is the description."""

    def __init__(self, operations):
        self.operations = operations

    def __getitem__(self, description):
        return build(description, self.operations)


class Ready:
    """A value that is already pickled; unpickling yields that value, or its error. An error raised while unpickling
    would leave torch's iterator waiting for a batch that has arrived."""

    def __init__(self, payload):
        self.payload = payload

    def __reduce__(self):
        return outcome, (pickle.loads, self.payload)


class Pickled:
    """A collate_fn that also does what torch's queue does in a thread: there an error is a batch that never comes,
    here it is raised."""

    def __init__(self, collate_fn):
        self.collate_fn = collate_fn

    def __call__(self, samples):
        return Ready(bytes(ForkingPickler.dumps(self.collate_fn(samples))))


class Waiting(Sampler):
    """The indices of the next epoch."""

    def __init__(self):
        self.indices = []

    def __iter__(self):
        return iter(self.indices)


def untouched(samples):
    return samples


class Loaders:
    """Both loaders with workers that live as long as this does; an epoch is some trees.

    Args:
        collate: trees are samples, and the batches are what default_collate makes of them.
        workers: of each loader.
    """

    def __init__(self, collate=False, workers=1):
        build((("nested", (), "jagged", (1,), 1),))  # imports much, which each worker would do for itself
        collate_fn = default_collate if collate else untouched
        self.waiting = Waiting()
        sampler = {"batch_sampler": self.waiting} if collate else {"sampler": self.waiting, "batch_size": None}
        options = {"num_workers": workers, "persistent_workers": True, **sampler}
        self.ours = DataLoader(Trees(OPERATIONS), collate_fn=collate_fn, **options)
        self.theirs = TorchDataLoader(Trees(FOR_TORCH), collate_fn=Pickled(collate_fn), timeout=60, **options)

    def send(self, indices):
        """For each index our outcome and torch's."""
        self.waiting.indices = list(indices)
        return list(zip(self._epoch(self.ours), self._epoch(self.theirs), strict=True))

    def _epoch(self, loader):
        iterator = iter(loader)
        outcomes = [outcome(next, iterator) for _ in self.waiting.indices]
        for found in outcomes:
            if isinstance(found, Error) and found.text.startswith(
                "DataLoader "
            ):  # of the loader itself: a death, a timeout
                self.close()
                raise AssertionError(f"{type(loader).__module__}: {found.text}\n{self.waiting.indices!r}")
        return outcomes

    def close(self):
        for loader in (self.ours, self.theirs):
            iterator, loader._iterator = loader._iterator, None
            if iterator is not None:
                iterator._shutdown_workers()


def collated(descriptions):
    """What default_collate makes of samples."""
    return default_collate([build(description) for description in descriptions])


# In one process


def packed(description, **options):
    """A tree through the codec or, where it is not plain, through pickle and the codec beside it."""
    return outcome(_packed, description, options)


def _packed(description, options):
    value = build(description)
    plain, back = _roundtrip(value, **options)
    if plain:
        return back
    for views in (True, False):
        plain, back = _roundtrip(serialize.dumps(value, views=views)[:2], **options)
        if plain:
            return serialize.loads(*back)
    raise RuntimeError("the storages of this batch cannot be sent")


def packed_by_torch(description):
    """What torch's reducers make of a tree. Storages are copied as a whole, as if through shared memory."""
    return outcome(_packed_by_torch, description)


def _packed_by_torch(description):
    value = build(description)
    out = io.BytesIO()
    pickler = ForkingPickler(out)
    pickler.dispatch_table = {**pickler.dispatch_table, torch.UntypedStorage: reduce_to_copy}
    COPIES.clear()
    pickler.dump(value)
    return pickle.loads(out.getvalue())


COPIES = {}


def reduce_to_copy(storage):
    if storage.device.type != "cpu" or storage.nbytes() == 0:
        return reductions.reduce_storage(storage)
    COPIES.setdefault(storage._cdata, storage.clone())
    return take_copy, (storage._cdata,)


def take_copy(key):
    return COPIES[key]
