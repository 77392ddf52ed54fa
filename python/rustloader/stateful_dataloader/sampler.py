"""torchdata's samplers with a state, for programs that save a sampler's state separately. They need torchdata.

A ``StatefulDataLoader`` resumes torch's own samplers without them.
"""

from __future__ import annotations

try:
    from torchdata.stateful_dataloader.sampler import BatchSampler, RandomSampler, StatefulDistributedSampler
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "torchdata":
        raise
    raise ImportError(
        f"{__name__} has torchdata's samplers, and no torchdata that has them is installed: run `pip install -U "
        "torchdata`, or use the RandomSampler, BatchSampler and DistributedSampler of torch.utils.data, which a "
        "StatefulDataLoader resumes"
    ) from error

__all__ = ["BatchSampler", "RandomSampler", "StatefulDistributedSampler"]
