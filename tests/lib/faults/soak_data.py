"""Data of the endurance run: samples of all kinds, faults at one of them, and hashes of batches."""

import os
import signal
import time
from typing import NamedTuple

import numpy as np
import torch
from sample_data import first_time, worker_id
from torch.utils.data import Dataset, IterableDataset

KINDS = ("numbers", "floats", "tree", "image", "array", "pickled", "ragged", "many")


class Spec(NamedTuple):
    """A dataset and its batching, on which the batches of torch's loader depend."""

    kind: str
    stream: bool
    length: int
    batch_size: int | None
    workers: int  # only the batches of streams depend on it
    bad: int | None = None  # the sample to skip


class Fault(NamedTuple):
    """What a worker does at a sample: "bad" happens each time, everything else once."""

    name: str
    index: int
    marker: str


class Expected(Exception):
    """The dataset's own error."""


def sample(kind, i):
    """A sample that depends on `i` throughout."""
    match kind:
        case "numbers":
            return i
        case "floats":
            return torch.full((8,), float(i))
        case "tree":
            return {"x": torch.full((16, 16), i), "name": f"sample {i}", "more": (float(i), [i, np.int64(i)])}
        case "image":
            return torch.full((3, 96, 96), i % 251, dtype=torch.uint8), i
        case "array":
            return np.full((64, 64), i, np.float32)
        case "pickled":
            return {"set": {i}, "tensor": torch.full((5000,), float(i))}
        case "ragged":
            return torch.arange(1 + (i * 7919) % 200_000)
        case "many":
            return [torch.full((10,), i) for _ in range(40)]
    raise ValueError(kind)


def act(fault, i):
    """Causes the fault, if it is due at sample `i`."""
    if fault is None or i != fault.index:
        return None
    if fault.name == "bad":
        raise Expected(f"sample {i}")
    if not first_time(fault.marker):
        return None
    match fault.name:
        case "error":
            raise Expected(f"sample {i}")
        case "unpicklable":
            return lambda: i
        case "segv":
            signal.raise_signal(signal.SIGSEGV)
        case "exit":
            os._exit(3)
        case "late":
            time.sleep(1.5)
        case "stuck":
            time.sleep(600)
    return None


class Samples(Dataset):
    def __init__(self, spec, fault=None):
        self.spec, self.fault = spec, fault

    def __len__(self):
        return self.spec.length

    def __getitem__(self, i):
        return act(self.fault, i) or sample(self.spec.kind, i)


class Streams(IterableDataset):
    """The iterator survives a bad sample only. Any other error ends it: later batches would have other boundaries than
    torch's."""

    def __init__(self, spec, fault=None):
        self.spec, self.fault = spec, fault

    def __iter__(self):
        workers = max(1, self.spec.workers)
        numbers = range(worker_id() or 0, self.spec.length, workers)
        # The dataset for torch's loader omits the bad sample.
        left_out = self.spec.bad if self.fault is None else None
        samples = map(self.at, (i for i in numbers if i != left_out))
        return samples if self.fault is not None and self.fault.name == "bad" else (it for it in samples)

    def at(self, i):
        return act(self.fault, i) or sample(self.spec.kind, i)


def identity(batch):
    return batch


def loader_of(cls, spec, fault=None, **kw):
    ragged = spec.kind in ("ragged", "pickled")
    return cls(
        (Streams if spec.stream else Samples)(spec, fault),
        collate_fn=identity if ragged or spec.batch_size is None else None,
        **({"batch_size": spec.batch_size} | kw),
    )


def without_bad(cls, spec):
    """Returns a loader whose batches equal those of `on_error="skip"`."""
    workers = {"num_workers": spec.workers if spec.stream else 0}
    if spec.stream or spec.bad is None:
        return loader_of(cls, spec, **workers)
    size = spec.batch_size or 1
    batches = [range(at, min(at + size, spec.length)) for at in range(0, spec.length, size)]
    kept = [[i for i in batch if i != spec.bad] for batch in batches]
    if spec.batch_size is None:
        return loader_of(cls, spec, sampler=[i for batch in kept for i in batch])
    return loader_of(cls, spec, batch_size=1, batch_sampler=list(filter(None, kept)))
