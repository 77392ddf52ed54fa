"""A drop-in replacement for ``torch.utils.data.DataLoader`` with a Rust engine.

The loader:
    DataLoader: Loads batches with worker processes. Takes torch's arguments; delivers torch's batches in torch's order.
    StatefulDataLoader: Does the same, and can save and restore its position in the epoch.

Loaders that a framework builds:
    install, uninstall: Make every DataLoader of torch in this process use the engine, and undo this.
    installed: Installs the engine for the body of a ``with`` statement.
    is_installed: Returns True if torch's loaders currently use the engine.
    Options: The options of ``install``.

Memory:
    share: Copies a list, a dict, an array or a tensor into memory that all workers read without copying it.
    cache: Keeps the samples of a dataset in memory that all workers share, so that each sample is made only once.
    CachedDataset, CacheUsage: The result of ``cache``, and the sizes and counters of a cache.

Devices:
    prefetch_to_device: Copies the batches of a loader to a device while the program computes.
    DeviceLoader: The result of ``prefetch_to_device``.

Sequences:
    TokenBudgetBatchSampler: Yields batches of samples of similar length, with at most a number of tokens.
    PackingBatchSampler: Yields batches of samples that fill packs, which need no padding.
    pack: Concatenates the samples of a batch; a ``collate_fn``.

Random numbers:
    sample_seed: Returns the seed of the sample that is being made, for loaders with ``seed_by``.

Errors:
    WorkerDiedError: Raised when a worker process has died.
    WorkerStalledError: Raised when a worker was killed because it was stuck.
    ErrorLimitExceeded: Raised when more samples have failed than ``max_errors`` allows.
    LoaderTimeoutError: Raised after ``timeout`` seconds without a batch.

Statistics:
    stats: Returns the statistics of a loader as ``Stats``; ``stats(loader).verdict()`` names the bottleneck.
    report: Calls a function with the statistics every few seconds.
    report_ranks: Returns the measurements of all ranks as a ``RankReport``, which names the slowest rank.
    serve_metrics: Serves the metrics of all loaders to Prometheus; returns a ``MetricsServer``.
    engine_batches: Returns the number of batches that the engine has delivered in this process.
    trace: Writes what loaders and workers do, and when, to a file for Perfetto.
    Stats, WorkerStats, SlowBatch, SchedulingStats, LargeAttribute, ArenaStats, CacheEstimate, CopyStats, CoreUsers,
    PinningStats, TransferStats, FaultStats, Failure, Fallback, Verdict, VerdictKind, RankStats: Parts of these results.

This package also has all public names of ``torch.utils.data``, as torch's own objects, so a program needs to change
only its import::

    from rustloader import DataLoader, Dataset, random_split

If a framework builds the program's loaders, there are three ways to use the engine: call ``rustloader.install()``; run
``python -m rustloader run train.py``; or set the environment variable RUSTLOADER_INSTALL=1 and ``import rustloader``.

``import rustloader`` does not import torch; the first use of one of its names does. On systems other than Linux, there
is no engine: all names exist, and loaders use torch's own loop.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # No star import: mypy keeps the first import of a name, and would take torch's loader.
    from torch.utils.data import BatchSampler as BatchSampler
    from torch.utils.data import ChainDataset as ChainDataset
    from torch.utils.data import ConcatDataset as ConcatDataset
    from torch.utils.data import DataChunk as DataChunk
    from torch.utils.data import Dataset as Dataset
    from torch.utils.data import DFIterDataPipe as DFIterDataPipe
    from torch.utils.data import DistributedSampler as DistributedSampler
    from torch.utils.data import IterableDataset as IterableDataset
    from torch.utils.data import IterDataPipe as IterDataPipe
    from torch.utils.data import MapDataPipe as MapDataPipe
    from torch.utils.data import RandomSampler as RandomSampler
    from torch.utils.data import Sampler as Sampler
    from torch.utils.data import SequentialSampler as SequentialSampler
    from torch.utils.data import StackDataset as StackDataset
    from torch.utils.data import Subset as Subset
    from torch.utils.data import SubsetRandomSampler as SubsetRandomSampler
    from torch.utils.data import TensorDataset as TensorDataset
    from torch.utils.data import WeightedRandomSampler as WeightedRandomSampler
    from torch.utils.data import _DatasetKind as _DatasetKind
    from torch.utils.data import _utils as _utils
    from torch.utils.data import argument_validation as argument_validation
    from torch.utils.data import datapipes as datapipes
    from torch.utils.data import dataset as dataset
    from torch.utils.data import default_collate as default_collate
    from torch.utils.data import default_convert as default_convert
    from torch.utils.data import distributed as distributed
    from torch.utils.data import functional_datapipe as functional_datapipe
    from torch.utils.data import get_worker_info as get_worker_info
    from torch.utils.data import graph as graph
    from torch.utils.data import graph_settings as graph_settings
    from torch.utils.data import guaranteed_datapipes_determinism as guaranteed_datapipes_determinism
    from torch.utils.data import non_deterministic as non_deterministic
    from torch.utils.data import random_split as random_split
    from torch.utils.data import runtime_validation as runtime_validation
    from torch.utils.data import runtime_validation_disabled as runtime_validation_disabled
    from torch.utils.data import sampler as sampler

    from rustloader import dataloader as dataloader
    from rustloader._core import __version__ as __version__
    from rustloader._core import engine_batches as engine_batches
    from rustloader.caching.core import cache as cache
    from rustloader.caching.dataset import CachedDataset as CachedDataset
    from rustloader.caching.usage import CacheUsage as CacheUsage
    from rustloader.dataloader import DataLoader as DataLoader
    from rustloader.device.prefetch.loader import DeviceLoader as DeviceLoader
    from rustloader.device.prefetch.loader import prefetch_to_device as prefetch_to_device
    from rustloader.errors import ErrorLimitExceeded as ErrorLimitExceeded
    from rustloader.errors import LoaderTimeoutError as LoaderTimeoutError
    from rustloader.errors import WorkerDiedError as WorkerDiedError
    from rustloader.errors import WorkerStalledError as WorkerStalledError
    from rustloader.fetch.failures import Failure as Failure
    from rustloader.fetch.seeds import sample_seed as sample_seed
    from rustloader.installation.api import install as install
    from rustloader.installation.api import installed as installed
    from rustloader.installation.api import is_installed as is_installed
    from rustloader.installation.api import uninstall as uninstall
    from rustloader.metrics.fields import ArenaStats as ArenaStats
    from rustloader.metrics.fields import CacheEstimate as CacheEstimate
    from rustloader.metrics.fields import CopyStats as CopyStats
    from rustloader.metrics.fields import CoreUsers as CoreUsers
    from rustloader.metrics.fields import Fallback as Fallback
    from rustloader.metrics.fields import FaultStats as FaultStats
    from rustloader.metrics.fields import LargeAttribute as LargeAttribute
    from rustloader.metrics.fields import PinningStats as PinningStats
    from rustloader.metrics.fields import SchedulingStats as SchedulingStats
    from rustloader.metrics.fields import SlowBatch as SlowBatch
    from rustloader.metrics.fields import WorkerStats as WorkerStats
    from rustloader.metrics.finding import VerdictKind as VerdictKind
    from rustloader.metrics.loader_stats import stats as stats
    from rustloader.metrics.ranks import RankReport as RankReport
    from rustloader.metrics.ranks import RankStats as RankStats
    from rustloader.metrics.report import report as report
    from rustloader.metrics.report import report_ranks as report_ranks
    from rustloader.metrics.serving import MetricsServer as MetricsServer
    from rustloader.metrics.serving import serve_metrics as serve_metrics
    from rustloader.metrics.stats import Stats as Stats
    from rustloader.metrics.transfers import TransferStats as TransferStats
    from rustloader.metrics.verdict import Verdict as Verdict
    from rustloader.sequences.budget import TokenBudgetBatchSampler as TokenBudgetBatchSampler
    from rustloader.sequences.packing import PackingBatchSampler as PackingBatchSampler
    from rustloader.sequences.packing import pack as pack
    from rustloader.settings.options import Options as Options
    from rustloader.sharing.core import share as share
    from rustloader.stateful_dataloader.loader import StatefulDataLoader as StatefulDataLoader
    from rustloader.tracing.core import trace as trace

# The modules that define rustloader's own public names, with these names. All other public names are torch's.
_HOMES = {
    "_core": ("engine_batches", "__version__"),
    "caching.core": ("cache",),
    "caching.dataset": ("CachedDataset",),
    "caching.usage": ("CacheUsage",),
    "installation.api": ("install", "installed", "is_installed", "uninstall"),
    "metrics.ranks": ("RankReport", "RankStats"),
    "metrics.report": ("report", "report_ranks"),
    "metrics.serving": ("MetricsServer", "serve_metrics"),
    "metrics.loader_stats": ("stats",),
    "dataloader": ("DataLoader",),
    "fetch.failures": ("Failure",),
    "fetch.seeds": ("sample_seed",),
    "errors": ("ErrorLimitExceeded", "LoaderTimeoutError", "WorkerDiedError", "WorkerStalledError"),
    "metrics.stats": ("Stats",),
    "metrics.fields": (
        "ArenaStats",
        "CacheEstimate",
        "CoreUsers",
        "CopyStats",
        "Fallback",
        "FaultStats",
        "LargeAttribute",
        "PinningStats",
        "SchedulingStats",
        "SlowBatch",
        "WorkerStats",
    ),
    "metrics.transfers": ("TransferStats",),
    "metrics.finding": ("VerdictKind",),
    "metrics.verdict": ("Verdict",),
    "sequences.budget": ("TokenBudgetBatchSampler",),
    "sequences.packing": ("PackingBatchSampler", "pack"),
    "settings.options": ("Options",),
    "device.prefetch.loader": ("DeviceLoader", "prefetch_to_device"),
    "sharing.core": ("share",),
    "stateful_dataloader.loader": ("StatefulDataLoader",),
    "tracing.core": ("trace",),
}
_OURS = {name: f"rustloader.{module}" for module, names in _HOMES.items() for name in names}
if not sys.platform.startswith("linux"):
    _NEED_THE_ENGINE = (
        "_core",
        "caching.core",
        "caching.dataset",
        "fetch.seeds",
        "installation.api",
        "metrics.report",
        "metrics.serving",
        "metrics.loader_stats",
        "sequences.budget",
        "sequences.packing",
        "sharing.core",
        "stateful_dataloader.loader",
        "tracing.core",
    )
    _OURS |= {name: "rustloader.iterator.unsupported" for module in _NEED_THE_ENGINE for name in _HOMES[module]}
elif importlib.util.find_spec("rustloader._core") is None:
    raise ImportError(
        f"rustloader in {os.path.dirname(__file__)} has no compiled extension (_core.abi3.so): this installation is "
        "broken. Install it again; in a source tree, run `make build`",
        name="rustloader._core",
    )

# torch's modules that programs access as attributes, as in `data.distributed.DistributedSampler`.
_TORCH_MODULES = ("_utils", "datapipes", "dataset", "distributed", "graph", "graph_settings", "sampler")
_MODULES = {"dataloader": "rustloader.dataloader"} | {name: f"torch.utils.data.{name}" for name in _TORCH_MODULES}


def _attribute(name: str) -> Any:
    if name in _OURS:
        if "RUSTLOADER_INSTALL" in os.environ and _OURS[name] != "rustloader._core":
            # torch must be imported first, because `install` is called at the end of its import, and imports most of
            # the package. The import of none of these modules must be in progress at that time.
            importlib.import_module("torch")
        value = getattr(importlib.import_module(_OURS[name]), name)
    elif name == "__all__":
        value = sorted({*importlib.import_module("torch.utils.data").__all__, *_OURS} - {"__version__"})
    elif name in _MODULES:
        value = importlib.import_module(_MODULES[name])
    elif not name.startswith("__") and name in importlib.import_module("torch.utils.data").__all__:
        value = getattr(importlib.import_module("torch.utils.data"), name)
    else:
        raise AttributeError(f"module 'rustloader' has no attribute {name!r}")
    globals()[name] = value
    return value


if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = _attribute


def __dir__() -> list[str]:
    return sorted({*_attribute("__all__"), "__all__", "__version__", *(it for it in globals() if it[:2] == "__")})


importlib.import_module("rustloader.system.dynamo").skip_package()
if "RUSTLOADER_INSTALL" in os.environ:
    importlib.import_module("rustloader.installation.environment").follow_variable()
