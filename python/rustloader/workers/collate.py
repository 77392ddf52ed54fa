"""Replaces parts of torch in a worker process, so that default_collate writes into the arena."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data._utils import collate

from rustloader._core import Port, heap_storage
from rustloader.fetch import tables
from rustloader.system.patches import Patch


def use_arena(port: Port) -> Callable[[], None]:
    """Makes default_collate in this process allocate in ``port``'s region. Returns a function that undoes this.

    torch's function, users of a copy of ``default_collate_fn_map``, and PyG's collater all allocate with
    ``UntypedStorage._new_shared``. Where the map still has torch's functions for tensors, floats and ints, Rust
    collates plain values of these types. All other values go to torch's functions, with their errors and quirks.
    """
    torch_new_shared = torch.UntypedStorage._new_shared
    patch = Patch("torch.UntypedStorage._new_shared", torch.UntypedStorage)

    def new_shared(cls: type[torch.UntypedStorage], size: int, *, device: Any = "cpu") -> torch.UntypedStorage:
        if torch.device(device).type != "cpu":
            return torch_new_shared(size, device=device)
        # Like torch's shared storages, neither of these storages can be resized.
        return port.storage(size) or heap_storage(size)

    patch.put_in(classmethod(new_shared))

    def tensors(batch: Any, *, collate_fn_map: Any = None) -> Any:
        stacked = port.stack(batch)
        return torch_functions[torch.Tensor](batch, collate_fn_map=collate_fn_map) if stacked is None else stacked

    def floats(batch: Any, *, collate_fn_map: Any = None) -> Any:
        numbers = port.numbers(batch)
        return torch_functions[float](batch, collate_fn_map=collate_fn_map) if numbers is None else numbers

    def ints(batch: Any, *, collate_fn_map: Any = None) -> Any:
        numbers = port.numbers(batch)
        return torch_functions[int](batch, collate_fn_map=collate_fn_map) if numbers is None else numbers

    torch_functions: dict[type, Any] = {
        torch.Tensor: collate.collate_tensor_fn,
        float: collate.collate_float_fn,
        int: collate.collate_int_fn,
    }
    fast: dict[type, Any] = {torch.Tensor: tensors, float: floats, int: ints}
    table: dict[Any, Any] = collate.default_collate_fn_map
    replaced = {kind: fast[kind] for kind, function in torch_functions.items() if table.get(kind) is function}
    table.update(replaced)
    tables.standard_functions.extend(fast.values())

    def restore() -> None:
        for function in fast.values():
            tables.standard_functions.remove(function)
        patch.take_out(anyway=True)
        for kind, function in replaced.items():
            if table.get(kind) is function:
                table[kind] = torch_functions[kind]

    return restore
