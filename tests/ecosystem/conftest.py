"""Programs of other libraries, in an environment of their own: `make ecosystem`."""

import importlib.metadata
import os
import platform
import sys
from pathlib import Path

import pytest

REQUIREMENTS = Path(__file__).parent / "requirements.txt"

# For stop_and_resume.py, which tests/python uses too.
sys.path.append(str(Path(__file__).parents[1] / "lib"))


def pytest_report_header(config):
    """The versions under test, as docs/compatibility.md names them."""
    names = [line.strip() for line in REQUIREMENTS.read_text().splitlines() if line and not line.startswith("#")]
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ["torch", *names]]
    return f"Python {platform.python_version()}, " + ", ".join(versions)


@pytest.fixture(scope="session", autouse=True)
def without_network_or_traces(tmp_path_factory):
    """Libraries keep settings and caches in the home folder, and some check for updates."""
    home = str(tmp_path_factory.mktemp("home"))
    set_here = {"HOME": home, "XDG_CONFIG_HOME": home, "XDG_CACHE_HOME": home, "YOLO_CONFIG_DIR": home}
    offline = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "YOLO_OFFLINE"), "1")
    os.environ.update(set_here | offline | {"OMP_NUM_THREADS": "1"})
