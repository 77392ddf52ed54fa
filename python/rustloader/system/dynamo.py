"""Keeps ``torch.compile`` from tracing this package, as it passes over ``torch.utils.data``.

Dynamo decides by the file of a function. It learns of this package when the program imports Dynamo: that import
takes more than a second, and most programs do without.
"""

from __future__ import annotations

import sys

from rustloader.system.after_import import AfterImport

_RULES = "torch._dynamo.trace_rules"


def _pass_over() -> None:
    """Adds the folder of this package to the ones that Dynamo skips."""
    # Not a public function. Without it the loaders work, and their frames are traced.
    add = getattr(sys.modules.get(_RULES), "add", None)
    if add is not None:
        try:
            add(__name__.partition(".")[0])
        except Exception:
            return


def pass_over() -> None:
    """Makes Dynamo skip the frames of this package: now if it has been imported, else at the end of its import."""
    if _RULES in sys.modules:
        _pass_over()
    else:
        AfterImport(_RULES, _pass_over).wait()
