"""``--version``: prints the versions."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import Any


def main(options: Any) -> int:
    """Prints the versions of rustloader, torch and Python. Returns 0."""
    from rustloader import __version__

    try:
        torch = f"torch {metadata.version('torch')}"
    except metadata.PackageNotFoundError:
        torch = "no torch"
    print(f"rustloader {__version__}, {torch}, Python {platform.python_version()}")
    return 0
