"""``call_into`` on every system. Its rules are in the text of ``rustloader._core.call_into``."""

import sys
from collections.abc import Callable
from typing import Any

if sys.platform.startswith("linux"):
    from rustloader._core import call_into as call_into
else:

    def call_into(into: list[Any], function: Callable[..., Any], /, *args: Any) -> None:
        """Does the same without the extension, slower."""
        before = len(into)
        # One call of C code makes the value and keeps it. It takes StopIteration as the end of `map`.
        into.extend(map(function, *([argument] for argument in args)))
        if len(into) == before:
            raise StopIteration
