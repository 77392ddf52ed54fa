"""rustloader: a drop-in replacement for ``torch.utils.data.DataLoader`` with a Rust engine.

``rustloader.DataLoader`` takes the same arguments as torch's and gives the same batches in the same order. Every
public name of ``torch.utils.data`` is here as well, so that a program needs to change its import alone::

    from rustloader import DataLoader, Dataset, random_split

Nothing of torch is imported before a name is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.utils.data import *  # noqa: F403

    from rustloader._core import engine_batches as engine_batches
    from rustloader.dataloader import DataLoader as DataLoader

# Where the names live that are ours; all others are torch's.
_OURS = {
    "DataLoader": "rustloader.dataloader",
    "engine_batches": "rustloader._core",
    "__version__": "rustloader._core",
}


def __getattr__(name: str) -> Any:
    if name in _OURS:
        value = getattr(importlib.import_module(_OURS[name]), name)
    elif name == "__all__":
        value = sorted({*importlib.import_module("torch.utils.data").__all__, "engine_batches"})
    elif not name.startswith("__") and name in importlib.import_module("torch.utils.data").__all__:
        value = getattr(importlib.import_module("torch.utils.data"), name)
    else:
        raise AttributeError(f"module 'rustloader' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_OURS, *importlib.import_module("torch.utils.data").__all__})
