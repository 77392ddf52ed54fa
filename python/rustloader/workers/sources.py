"""Sends the source lines of functions that workers receive by value, so that tracebacks in workers show them.

Workers read the file of a function themselves. The source of a notebook's cell is in no file.
"""

from __future__ import annotations

import linecache
import os
from collections.abc import Callable
from types import CodeType
from typing import Any

# The name of a file, and its lines if workers cannot read it.
_Source = tuple[str, tuple[str, ...] | None]


def with_sources(reduce: Callable[[CodeType], Any]) -> Callable[[CodeType], Any]:
    """Returns a reducer of code objects for one pickle, which contains each source once.

    Args:
        reduce: A reducer of code objects, whose copies may have another file name.
    """
    sources: dict[str, _Source] = {}

    def reduce_with_source(code: CodeType) -> Any:
        file = code.co_filename
        if file not in sources:
            lines = None if os.path.isfile(file) else tuple(linecache.getlines(file))
            sources[file] = file, lines or None
        return _restore, (*reduce(code), sources[file])

    return reduce_with_source


def _restore(make: Callable[..., CodeType], args: tuple[Any, ...], source: _Source) -> CodeType:
    file, lines = source
    if lines is not None:
        # Without a modification time, `linecache` does not look for the file.
        linecache.cache[file] = sum(map(len, lines)), None, list(lines), file
    return make(*args).replace(co_filename=file)
