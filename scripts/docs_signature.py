"""Gives ``DataLoader`` a signature on the documentation's site. mkdocs.yml names it; griffe runs it.

The class inherits its constructor from torch, which the environment of the site does not have. A test compares this
signature with that of the installed torch.
"""

from pathlib import Path
from typing import Any

import griffe

SIGNATURE = """
def __init__(
    self,
    dataset: Dataset,
    batch_size: int | None = 1,
    shuffle: bool | None = None,
    sampler: Sampler | Iterable | None = None,
    batch_sampler: Sampler[list] | Iterable[list] | None = None,
    num_workers: int = 0,
    collate_fn: Callable | None = None,
    pin_memory: bool = False,
    drop_last: bool = False,
    timeout: float = 0,
    worker_init_fn: Callable | None = None,
    multiprocessing_context: str | BaseContext | None = None,
    generator: Generator | None = None,
    *,
    prefetch_factor: int | None = None,
    persistent_workers: bool = False,
    pin_memory_device: str = "",
    in_order: bool = True,
): ...
"""


class Inherited(griffe.Extension):
    """Adds the constructor before the class's docstring is parsed."""

    def on_class_instance(self, *, cls: griffe.Class, **_: Any) -> None:
        if cls.path == "rustloader.dataloader.DataLoader":
            made = griffe.visit("torch", Path(__file__), SIGNATURE)
            cls.set_member("__init__", made["__init__"])
