"""Describes the settings of torch's allocator for pinned memory."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping

_MIB = 1 << 20
_GENERAL, _CUDA, _HIP = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"
# torch reads the first of these variables that is set (c10/core/AllocatorConfig.cpp).
_VARIABLES = (_GENERAL, _CUDA, _HIP)
# Settings specific to CUDA or HIP are an exception: torch reads them from the first of these variables that is set
# (c10/cuda/CUDAAllocatorConfig.h).
_CUDA_VARIABLES = (_CUDA, _HIP, _GENERAL)
_CUDA_SETTINGS = {
    "pinned_use_cuda_host_register",
    "pinned_use_hip_host_register",
    "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb",
    "pinned_free_catch_all",
}
# The first version of torch that reads PYTORCH_ALLOC_CONF.
_GENERAL_VERSION = (2, 9)
# The first version of torch in which a threshold for rounding is safe. Earlier versions may reuse a cached block for a
# tensor that is larger than the block.
_SAFE_THRESHOLD = (2, 15)

# Descriptions of the settings.
_MEANINGS = {
    "pinned_use_cuda_host_register": "new memory is mapped and then registered, not allocated by cudaHostAlloc",
    "pinned_use_hip_host_register": "new memory is mapped and then registered, not allocated by hipHostMalloc",
    "pinned_num_register_threads": "number of threads that register a block",
    "pinned_use_background_threads": "a thread checks which memory the device no longer uses",
    "pinned_free_catch_all": "errors from freeing pinned memory are suppressed",
    "pinned_reserve_segment_size_mb": "MiB reserved at the first use, and handed out in parts",
    "pinned_max_round_threshold_mb": "sizes above this many MiB are not rounded up to a power of two",
    "pinned_max_cached_size_mb": "blocks above this many MiB are returned to the system, not kept for later batches",
}


def _settings_in(environ: Mapping[str, str], name: str) -> dict[str, str]:
    """Returns the settings for pinned memory that an environment variable contains."""
    pairs = (entry.partition(":") for entry in environ.get(name, "").replace(" ", "").split(","))
    return {key: value for key, _, value in pairs if key.startswith("pinned_")}


def _variable_of(setting: str, environ: Mapping[str, str]) -> str:
    """Returns the name of the variable from which torch reads a setting; "" if none is set."""
    names = _CUDA_VARIABLES if setting in _CUDA_SETTINGS else _VARIABLES
    known = [name for name in names if name != _GENERAL or _torch_version() >= _GENERAL_VERSION]
    return next((name for name in known if name in environ), "")


def pinned_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the settings for pinned memory that torch uses."""
    written = {name: _settings_in(environ, name) for name in _VARIABLES}
    return {key: written[name][key] for name in written for key in written[name] if _variable_of(key, environ) == name}


def allocator(environ: Mapping[str, str]) -> tuple[str, str]:
    """Returns a description of the settings, and advice (an empty string if there is none)."""
    parts, advice = [], []
    for name in _VARIABLES:
        used, ignored = [], []
        for key, value in _settings_in(environ, name).items():
            if _variable_of(key, environ) == name:
                used.append(f"{key}:{value}{f' ({_MEANINGS[key]})' if key in _MEANINGS else ''}")
            else:
                ignored.append((key, _variable_of(key, environ)))
        if used:
            parts.append(f"{name} has {', '.join(used)}")
        advice += [f"torch ignores {key} in {name}: set it in {other or _CUDA}" for key, other in ignored]
    settings = pinned_settings(environ)
    if _limit(settings, "pinned_max_round_threshold_mb") < _limit(settings, "pinned_max_cached_size_mb"):
        advice += _overflow_advice(settings)
    default = "torch's defaults: sizes are rounded up to a power of two, and all blocks are kept for later batches"
    return "; ".join(parts) or default, "; ".join(advice)


def _overflow_advice(settings: Mapping[str, str]) -> list[str]:
    """Returns advice if this version of torch may reuse a block for a tensor larger than the block."""
    if _torch_version() >= _SAFE_THRESHOLD:
        return []
    limit = settings["pinned_max_round_threshold_mb"]
    remedy = f"set pinned_max_cached_size_mb:{limit} too, or update torch"
    return [f"this version of torch may allocate blocks that are too small: {remedy}"]


def _limit(settings: Mapping[str, str], name: str) -> float:
    """Returns the value of a setting in bytes; infinity if it is missing or not a number."""
    value = settings.get(name, "")
    return int(value) * _MIB if value.isdigit() else float("inf")


def _torch_version() -> tuple[int, int]:
    """Returns the installed version of torch; without torch, the latest version that this module knows."""
    try:
        major, minor = importlib.metadata.version("torch").split(".")[:2]
    except importlib.metadata.PackageNotFoundError:
        return _SAFE_THRESHOLD
    return int(major), int(minor)
