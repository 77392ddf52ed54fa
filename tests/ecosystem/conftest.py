"""Programs of other libraries, in an environment of their own: `make ecosystem`."""

import importlib.metadata
import platform
from pathlib import Path

REQUIREMENTS = Path(__file__).parent / "requirements.txt"


def pytest_report_header(config):
    """The versions under test, as docs/compatibility.md names them."""
    names = [line.strip() for line in REQUIREMENTS.read_text().splitlines() if line and not line.startswith("#")]
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ["torch", *names]]
    return f"Python {platform.python_version()}, " + ", ".join(versions)
