"""Caches on other machines. Each machine that receives a cached dataset has one cache for all of its workers."""

from __future__ import annotations

import os
import secrets
import weakref
from typing import Any, NamedTuple

from rustloader._core import CacheTable
from rustloader.caching import files, limits
from rustloader.remote.packing import is_packing as is_packing
from rustloader.sharing.ranks import meet_on_machine


class Origin(NamedTuple):
    """The arguments of a cache, from which a worker on another machine creates that machine's cache."""

    memory: int | None
    key: str | None
    path: str | None
    version: str


# The names of tables and, on other machines, the open tables by name, so that a process opens each table only once.
_names: weakref.WeakKeyDictionary[CacheTable, str] = weakref.WeakKeyDictionary()
_tables: weakref.WeakValueDictionary[str, CacheTable] = weakref.WeakValueDictionary()


def name_of(table: CacheTable) -> str:
    """Returns the name of a table, which is unique among all caches. The first call for a table creates the name."""
    return _names.setdefault(table, secrets.token_hex(16))


def table_of(name: str, dataset: Any, rows: int, origin: Origin) -> CacheTable:
    """Returns this machine's table with the given name. The first worker that needs the table creates it."""
    table = _tables.get(name)
    if table is None:
        table = _open(name, dataset, rows, origin)
        _tables[name] = table
        _names[table] = name
    return table


def _open(name: str, dataset: Any, rows: int, origin: Origin) -> CacheTable:
    if origin.path is not None:
        os.makedirs(os.path.dirname(origin.path) or ".", exist_ok=True)
        # The name is the same for all workers of this machine, so that they belong to one opening.
        return files.open_table(origin.path, dataset, rows, origin.memory, origin.version, int(name[:16], 16))

    def create() -> CacheTable:
        return CacheTable.create(rows, limits.of_memory(rows, origin.memory, is_shared=True))

    return meet_on_machine(name, create, CacheTable, "cache")
