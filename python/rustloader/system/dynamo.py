"""Makes ``torch.compile`` skip this package, just as it skips ``torch.utils.data``.

Dynamo decides by a function's file whether to trace the function. This module adds the package's folder to the skipped
folders only once the program has imported Dynamo: this import takes more than a second, and most programs do not need
it.
"""

from __future__ import annotations

import sys

from rustloader.system.after_import import AfterImport

_RULES = "torch._dynamo.trace_rules"


def _add_folder() -> None:
    """Adds the folder of this package to the folders that Dynamo skips."""
    # `add` is not a public function. If it is missing, the loaders still work, but Dynamo traces their frames.
    add = getattr(sys.modules.get(_RULES), "add", None)
    if add is not None:
        try:
            add(__name__.partition(".")[0])
        except Exception:
            return


def skip_package() -> None:
    """Makes Dynamo skip the frames of this package: at once if Dynamo is imported, otherwise after its import."""
    if _RULES in sys.modules:
        _add_folder()
    else:
        AfterImport(_RULES, _add_folder).register()
