"""The ways a tree travels: through torch's loader, through rustloader's, and through the packer in one process."""

import dataclasses
import io
import pickle
from multiprocessing.reduction import ForkingPickler

import torch
from sample_data import untouched
from support import DataLoader, TorchDataLoader
from torch.multiprocessing import reductions
from torch.utils.data import Dataset, Sampler, default_collate

from roundtrip.build import FOR_TORCH, OPERATIONS, build
from rustloader._core import _roundtrip
from rustloader.workers import serialize

__all__ = ["Error", "Loaders", "packed", "packed_by_torch"]


@dataclasses.dataclass(frozen=True)
class Error:
    """The error raised instead of a value."""

    kind: type
    text: str
    last_line: str


def outcome(function, *arguments):
    try:
        return function(*arguments)
    except Exception as e:
        lines = str(e).splitlines() or [""]
        return Error(type(e), lines[0], lines[-1])


# Through workers


class Trees(Dataset):
    """The index is the description."""

    def __init__(self, operations):
        self.operations = operations

    def __getitem__(self, description):
        return build(description, self.operations)


class PickledValue:
    """A value that is already pickled; unpickling yields that value, or its error. An error raised while unpickling
    would leave torch's iterator waiting for a batch that has arrived."""

    def __init__(self, payload):
        self.payload = payload

    def __reduce__(self):
        return outcome, (pickle.loads, self.payload)


class PicklingCollate:
    """A collate_fn that also pickles the batch. torch's queue does that in a thread, where an error means a batch that
    never arrives; here it is raised."""

    def __init__(self, collate_fn):
        self.collate_fn = collate_fn

    def __call__(self, samples):
        return PickledValue(bytes(ForkingPickler.dumps(self.collate_fn(samples))))


class EpochIndices(Sampler):
    """Yields the indices that are set for the next epoch."""

    def __init__(self):
        self.indices = []

    def __iter__(self):
        return iter(self.indices)


class Loaders:
    """Both loaders, with workers that live as long as this object; an epoch sends some trees.

    Args:
        collate_fn: with default_collate, an index is a list of descriptions, one for each sample.
        workers: number of workers of each loader.
    """

    def __init__(self, collate_fn=untouched, workers=1):
        build((("nested", (), "jagged", (1,), 1),))  # for its imports, which each worker would repeat
        self.collate_fn, self.sampler = collate_fn, EpochIndices()
        self.batches = collate_fn is default_collate
        sampler = {"batch_sampler": self.sampler} if self.batches else {"sampler": self.sampler, "batch_size": None}
        options = {"num_workers": workers, "persistent_workers": True, **sampler}
        self.rust_loader = DataLoader(Trees(OPERATIONS), collate_fn=collate_fn, **options)
        self.torch_loader = TorchDataLoader(
            Trees(FOR_TORCH), collate_fn=PicklingCollate(collate_fn), timeout=60, **options
        )

    def make(self, index):
        """The value of an index, in this process."""
        return self.collate_fn(list(map(build, index)) if self.batches else build(index))

    def send(self, indices):
        """The outcomes of rustloader and of torch for each index."""
        self.sampler.indices = list(indices)
        return list(zip(self._epoch(self.rust_loader), self._epoch(self.torch_loader), strict=True))

    def _epoch(self, loader):
        iterator = iter(loader)
        outcomes = [outcome(next, iterator) for _ in self.sampler.indices]
        for result in outcomes:
            # An error of the loader itself: a dead worker, a timeout.
            if isinstance(result, Error) and result.text.startswith("DataLoader "):
                self.close()
                raise AssertionError(f"{type(loader).__module__}: {result.text}\n{self.sampler.indices!r}")
        return outcomes

    def close(self):
        for loader in (self.rust_loader, self.torch_loader):
            iterator, loader._iterator = loader._iterator, None
            if iterator is not None:
                iterator._shutdown_workers()


# In one process


def packed(description, **options):
    """A tree after the codec or, if it is not plain, after pickle and the codec."""
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
    """A tree after torch's reducers. Storages are copied as a whole, as if through shared memory."""
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
