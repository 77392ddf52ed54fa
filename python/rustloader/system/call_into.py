"""The function ``call_into`` on every system. The docstring of ``rustloader._core.call_into`` explains its rules."""

import sys
from collections.abc import Callable
from typing import Any

if sys.platform.startswith("linux"):
    from rustloader._core import call_into as call_into
else:

    def call_into(into: list[Any], function: Callable[..., Any], /, *args: Any) -> None:
        """Does the same as ``rustloader._core.call_into`` without the extension, but more slowly."""
        before = len(into)
        # One call of C code computes the value and keeps it. A StopIteration of `function` ends the `map`.
        into.extend(map(function, *([argument] for argument in args)))
        if len(into) == before:
            raise StopIteration
