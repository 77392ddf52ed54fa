"""rustloader: a drop-in replacement for ``torch.utils.data.DataLoader`` with a Rust engine.

``rustloader.DataLoader`` takes the same arguments as torch's and gives the same batches in the same order. Every
public name of ``torch.utils.data`` is here as well, so that a program needs to change its import alone::

    from rustloader import DataLoader, Dataset, random_split

Programs whose loaders are built by a framework need one line, or none: ``rustloader.install()``,
``python -m rustloader run train.py``, or the environment variable RUSTLOADER_INSTALL=1 and ``import rustloader``.

Nothing of torch is imported before a name is used. On systems other than Linux there is no engine: all names are
there, and loaders run on torch's own iterator.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.utils.data import *  # noqa: F403

    from rustloader._core import engine_batches as engine_batches
    from rustloader._figures import Stats as Stats
    from rustloader._install import install as install
    from rustloader._install import installed as installed
    from rustloader._install import uninstall as uninstall
    from rustloader._report import report as report
    from rustloader._stats import stats as stats
    from rustloader._verdict import Verdict as Verdict
    from rustloader.dataloader import DataLoader as DataLoader

# Where the names live that are ours; all others are torch's.
_OURS = {
    "DataLoader": "rustloader.dataloader",
    "Stats": "rustloader._figures",
    "Verdict": "rustloader._verdict",
    "engine_batches": "rustloader._core",
    "install": "rustloader._install",
    "installed": "rustloader._install",
    "report": "rustloader._report",
    "stats": "rustloader._stats",
    "uninstall": "rustloader._install",
    "__version__": "rustloader._core",
}
if not sys.platform.startswith("linux"):
    _OURS |= dict.fromkeys(_OURS.keys() - {"DataLoader", "Stats", "Verdict"}, "rustloader._elsewhere")
elif importlib.util.find_spec("rustloader._core") is None:
    raise ImportError(
        f"rustloader in {os.path.dirname(__file__)} has no compiled extension (_core.abi3.so): this installation is "
        "broken. Install it again; in a source tree, build it: make build",
        name="rustloader._core",
    )

# Modules that a program reaches as attributes: `data.distributed.DistributedSampler`.
_TORCHS_MODULES = ("_utils", "datapipes", "dataset", "distributed", "graph", "graph_settings", "sampler")
_MODULES = {"dataloader": "rustloader.dataloader"} | {name: f"torch.utils.data.{name}" for name in _TORCHS_MODULES}


def __getattr__(name: str) -> Any:
    if name in _OURS:
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


def __dir__() -> list[str]:
    return sorted({*globals(), *_OURS, *importlib.import_module("torch.utils.data").__all__})


if "RUSTLOADER_INSTALL" in os.environ:
    importlib.import_module("rustloader._environment").follow(os.environ["RUSTLOADER_INSTALL"])
