"""Settings of torch's allocator of pinned memory, and their effect on batches that ``bench`` has measured."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Iterator, Mapping

_MIB = 1 << 20
_GENERAL, _CUDA, _HIP = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"
# torch takes the first of them that is set (c10/core/AllocatorConfig.cpp), ...
_VARIABLES = (_GENERAL, _CUDA, _HIP)
# ... and for the settings of CUDA alone the first of these (c10/cuda/CUDAAllocatorConfig.h).
_CUDA_VARIABLES = (_CUDA, _HIP, _GENERAL)
_CUDA_SETTINGS = {
    "pinned_use_cuda_host_register",
    "pinned_use_hip_host_register",
    "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb",
    "pinned_free_catch_all",
}
# The version of torch that reads PYTORCH_ALLOC_CONF.
_SINCE_GENERAL = (2, 9)
# More than this share of a batch is lost to rounding: advice.
_MAX_LOSS_SHARE = 0.25
# Before this version of torch, sizes that are not rounded and are kept could be given out for larger ones.
_SAFE_THRESHOLD = (2, 15)

_MEANINGS = {
    "pinned_use_cuda_host_register": "new memory is mapped and then registered, not made by cudaHostAlloc",
    "pinned_use_hip_host_register": "new memory is mapped and then registered, not made by hipHostMalloc",
    "pinned_num_register_threads": "threads that register one block",
    "pinned_use_background_threads": "a thread looks for memory that the device is done with",
    "pinned_free_catch_all": "errors while pinned memory is freed are suppressed",
    "pinned_reserve_segment_size_mb": "MiB that are reserved at the first use, and given out in parts",
    "pinned_max_round_threshold_mb": "larger sizes in MiB are not rounded up to a power of two",
    "pinned_max_cached_size_mb": "larger blocks in MiB are given back to the system, not kept for the next batch",
}


def _written(environ: Mapping[str, str], name: str) -> dict[str, str]:
    """Returns the settings of pinned memory in a variable."""
    pairs = (entry.partition(":") for entry in environ.get(name, "").replace(" ", "").split(","))
    return {key: value for key, _, value in pairs if key.startswith("pinned_")}


def _variable_of(setting: str, environ: Mapping[str, str]) -> str:
    """Returns the variable that torch reads for a setting; "" if none is set."""
    names = _CUDA_VARIABLES if setting in _CUDA_SETTINGS else _VARIABLES
    known = [name for name in names if name != _GENERAL or _torch_version() >= _SINCE_GENERAL]
    return next((name for name in known if name in environ), "")


def pinned_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the settings of pinned memory that torch takes."""
    written = {name: _written(environ, name) for name in _VARIABLES}
    return {key: written[name][key] for name in written for key in written[name] if _variable_of(key, environ) == name}


def allocator(environ: Mapping[str, str]) -> tuple[str, str]:
    """Returns the settings in words, and advice."""
    parts, advice = [], []
    for name in _VARIABLES:
        taken, ignored = [], []
        for key, value in _written(environ, name).items():
            if _variable_of(key, environ) == name:
                taken.append(f"{key}:{value}{f' ({_MEANINGS[key]})' if key in _MEANINGS else ''}")
            else:
                ignored.append((key, _variable_of(key, environ)))
        if taken:
            parts.append(f"{name} has {', '.join(taken)}")
        advice += [f"torch ignores {key} in {name}: set it in {instead or _CUDA}" for key, instead in ignored]
    settings = pinned_settings(environ)
    if _limit(settings, "pinned_max_round_threshold_mb") < _limit(settings, "pinned_max_cached_size_mb"):
        advice += _overflow(settings)
    default = "torch's defaults: sizes are rounded up to a power of two, and all blocks are kept for later batches"
    return "; ".join(parts) or default, "; ".join(advice)


def _overflow(settings: Mapping[str, str]) -> list[str]:
    if _torch_version() >= _SAFE_THRESHOLD:
        return []
    limit = settings["pinned_max_round_threshold_mb"]
    return [f"this torch may give out too small blocks: set pinned_max_cached_size_mb:{limit} too, or update torch"]


def batches(path: str, environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yields the pinned memory that the batches of a file of ``bench --json`` take, with advice, for each size.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is no output of ``bench --json``.
    """
    with open(path) as file:
        try:
            results = json.load(file)["results"]
            sizes = sorted({round(point[side]["batch_bytes"]) for point in results for side in ("torch", "rustloader")})
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{path} is not what `rustloader bench --json` prints") from None
    settings = pinned_settings(environ)
    for nbytes in sizes:
        if nbytes:
            yield _batch(nbytes, settings)


def _batch(nbytes: int, settings: Mapping[str, str]) -> tuple[str, str]:
    taken = rounded(nbytes, settings)
    loss = taken / nbytes - 1
    text = f"{nbytes / _MIB:.4g} MiB as one tensor takes {taken / _MIB:.4g} MiB ({loss:.0%} more)"
    if nbytes > _limit(settings, "pinned_max_cached_size_mb"):
        return f"{text}, made anew for each batch", "raise pinned_max_cached_size_mb above the size of a batch"
    if loss <= _MAX_LOSS_SHARE:
        return text, ""
    advice = f"a batch size up to {taken / nbytes:.3g} times as large takes no more memory"
    if _torch_version() >= _SAFE_THRESHOLD:
        limit = max(1, nbytes // _MIB // 2)
        advice += f"; PYTORCH_ALLOC_CONF=pinned_max_round_threshold_mb:{limit} leaves this size as it is"
    return text, advice


def rounded(nbytes: int, settings: Mapping[str, str]) -> int:
    """Returns the number of bytes that torch's allocator takes for a tensor."""
    if nbytes > min(_limit(settings, "pinned_max_round_threshold_mb"), _limit(settings, "pinned_max_cached_size_mb")):
        return nbytes
    return 1 << (nbytes - 1).bit_length()


def _limit(settings: Mapping[str, str], name: str) -> float:
    """Returns a setting in bytes; infinite if it is missing or no number."""
    value = settings.get(name, "")
    return int(value) * _MIB if value.isdigit() else float("inf")


def _torch_version() -> tuple[int, int]:
    """Returns the installed version; without torch the latest that this module knows."""
    try:
        major, minor = importlib.metadata.version("torch").split(".")[:2]
    except importlib.metadata.PackageNotFoundError:
        return _SAFE_THRESHOLD
    return int(major), int(minor)
