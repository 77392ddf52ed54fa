"""Loaders whose position can be saved, under the names of ``torchdata.stateful_dataloader``."""

# First: with RUSTLOADER_INSTALL, the end of torch's import calls `install`, which imports modules of this package.
import torch  # noqa: F401

from rustloader.stateful_dataloader.description import describe
from rustloader.stateful_dataloader.loader import StatefulDataLoader
from rustloader.stateful_dataloader.resharding import reshard
from rustloader.stateful_dataloader.stateful import Stateful

__all__ = ["Stateful", "StatefulDataLoader", "describe", "reshard"]
