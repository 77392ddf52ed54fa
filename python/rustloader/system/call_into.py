"""The function ``call_into`` on every system. The docstring of ``rustloader._core.call_into`` explains its use."""

import sys
from collections.abc import Callable
from typing import Any

if sys.platform.startswith("linux"):
    from rustloader._core import call_into as call_into
else:

    def call_into(into: list[Any], function: Callable[..., Any], /, *args: Any) -> None:
        """Does the same as ``rustloader._core.call_into``, but more slowly, because there is no extension."""
        before = len(into)
        # A single call of C code computes the value and appends it. If `function` raises StopIteration, `map` ends.
        into.extend(map(function, *([argument] for argument in args)))
        if len(into) == before:
            raise StopIteration
