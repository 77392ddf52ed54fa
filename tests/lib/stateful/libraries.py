"""The two libraries that have a StatefulDataLoader, under equal names."""

import importlib
import types

NAMES = ["torchdata", "rustloader"]


def library(name):
    """A namespace: name, StatefulDataLoader, Stateful, RandomSampler, BatchSampler, StatefulDistributedSampler."""
    package = importlib.import_module(f"{name}.stateful_dataloader")
    sampler = importlib.import_module(f"{name}.stateful_dataloader.sampler")
    return types.SimpleNamespace(
        name=name,
        StatefulDataLoader=package.StatefulDataLoader,
        Stateful=package.Stateful,
        RandomSampler=sampler.RandomSampler,
        BatchSampler=sampler.BatchSampler,
        StatefulDistributedSampler=sampler.StatefulDistributedSampler,
    )
