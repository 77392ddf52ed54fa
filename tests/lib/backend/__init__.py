"""A stand-in accelerator: torch's own way to pinned memory on machines without a device (`host.cpp`).

`build()` compiles it, once for each torch; `register()` makes it this process's accelerator, permanently.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import types
from pathlib import Path

import torch

HERE = Path(__file__).parent
SOURCE = HERE / "host.cpp"
NAME = "pinnable"


def library():
    """Where the compiled backend lies for this torch and this source."""
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]
    key = f"{torch.__version__}-{sys.implementation.cache_tag}-{digest}"
    return HERE.parents[2] / "target" / "test-backend" / key / "rustloader_test_host.so"


def build():
    """Compiles the backend unless that has been done; returns why that cannot be, or None.

    In a process of its own: cpp_extension loads what it has built, and that would stay.
    """
    if library().exists():
        return None
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        return "there is no C++ compiler (c++, or what CXX names)"
    # cpp_extension searches PATH for ninja; pip installs it beside the interpreter.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    if shutil.which("ninja", path=path) is None:
        return "there is no ninja (pip install ninja)"
    library().parent.mkdir(parents=True, exist_ok=True)
    done = subprocess.run([sys.executable, __file__], env=os.environ | {"PATH": path}, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{SOURCE} could not be compiled:\n{done.stdout}\n{done.stderr}")
    return None


def compile_here():
    from torch.utils import cpp_extension

    # A folder of its own: one that a build was killed in stays locked.
    with tempfile.TemporaryDirectory(dir=library().parent) as folder:
        cpp_extension.load(
            library().stem,
            [str(SOURCE)],
            extra_cflags=["-O1"],
            build_directory=folder,
            with_cuda=False,
            is_python_module=False,
        )
        os.replace(Path(folder, library().name), library())


def register():
    """Makes the backend this process's accelerator; gives what it counts."""
    torch.ops.load_library(str(library()))
    torch.utils.rename_privateuse1_backend(NAME)
    module = types.ModuleType(NAME)
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module.device_count = lambda: 2
    module.current_device = torch.accelerator.current_device_index
    module.set_device = torch.accelerator.set_device_index
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda seed: None
    torch._register_device_module(NAME, module)
    host = ctypes.CDLL(str(library()))
    host.host_thread.restype = ctypes.c_char_p
    return host


if __name__ == "__main__":
    compile_here()
