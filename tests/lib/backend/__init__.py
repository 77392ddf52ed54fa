"""A stand-in accelerator (`host.cpp`), with which torch itself pins memory on machines without a device.

`build()` compiles it, once for each version of torch; `register()` makes it this process's accelerator, permanently.
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
    """The path of the backend that is compiled from this source for this version of torch."""
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]
    key = f"{torch.__version__}-{sys.implementation.cache_tag}-{digest}"
    return HERE.parents[2] / "target" / "test-backend" / key / "rustloader_test_host.so"


def build():
    """Compiles the backend if it is not compiled yet; returns why that is impossible, or None.

    Compiles in a process of its own: cpp_extension loads the library that it builds, which would stay loaded.
    """
    if library().exists():
        return None
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        return "there is no C++ compiler (c++, or the one that CXX names)"
    # cpp_extension searches PATH for ninja; pip installs it in the interpreter's folder.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    if shutil.which("ninja", path=path) is None:
        return "ninja is not installed (pip install ninja)"
    library().parent.mkdir(parents=True, exist_ok=True)
    result = subprocess.run([sys.executable, __file__], env=os.environ | {"PATH": path}, capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(f"{SOURCE} could not be compiled:\n{result.stdout}\n{result.stderr}")
    return None


def compile_here():
    from torch.utils import cpp_extension

    # A fresh folder: a build that is killed leaves its folder locked.
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
    """Makes the backend this process's accelerator; returns the library, whose functions read its counters."""
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
