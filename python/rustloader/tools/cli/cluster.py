"""State of the cluster as Ray reports it, and whether workers of this process may run on its nodes."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Any

from rustloader.settings.limits import REMOTE_START
from rustloader.system.formatting import size
from rustloader.tools.probe.cluster import reach

Line = tuple[str, str, str]

# Ray's own resources.
_RAY_RESOURCES = ("CPU", "GPU", "memory", "object_store_memory")


def cluster() -> Iterator[Line]:
    """Yields the findings, with advice if there is any: on Ray, on the cluster that RAY_ADDRESS names or this process
    is connected to, and on each of its nodes. Nothing where Ray is not installed."""
    try:
        version = metadata.version("ray")
    except metadata.PackageNotFoundError:
        return
    address = os.environ.get("RAY_ADDRESS")
    # A process that has not imported Ray is not connected.
    connected = "ray" in sys.modules and sys.modules["ray"].is_initialized()
    if not address and not connected:
        yield "Ray", f"{version}; RAY_ADDRESS names no cluster", ""
        return
    import ray

    if not connected:
        assert address
        try:
            reach(address)
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:
            found = f"{version}; {address} does not answer: {type(error).__name__}: {error}"
            yield "Ray", found, "start the cluster (`ray start --head`), or correct RAY_ADDRESS"
            return
    try:
        yield "Ray", f"{version}; {_free(ray.cluster_resources(), ray.available_resources())}", ""
        yield from _nodes(ray)
    finally:
        if not connected:
            ray.shutdown()


def _free(total: Mapping[str, float], free: Mapping[str, float]) -> str:
    """Describes the free part of the nodes' resources, with the resources that the user has named."""
    text = f"{free.get('CPU', 0):g} of {total.get('CPU', 0):g} CPUs free"
    if total.get("GPU"):
        text += f", {free.get('GPU', 0):g} of {total['GPU']:g} GPUs"
    if total.get("memory"):
        text += f", {size(free.get('memory', 0))} of {size(total['memory'])} memory"
    prefixes = ("node:", "accelerator_type:")
    own = (name for name in sorted(total) if name not in _RAY_RESOURCES and not name.startswith(prefixes))
    return text + "".join(f", {free.get(name, 0):g} of {total[name]:g} {name}" for name in own)


def _versions() -> dict[str, str]:
    """Runs on a node."""
    from rustloader.remote import handshake

    return handshake.versions()


def _nodes(ray: Any) -> Iterator[Line]:
    """Asks each node for its versions."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    # It needs torch, which doctor may have to report as missing.
    from rustloader.remote import handshake

    requests = {}
    for node in ray.nodes():
        if node["Alive"]:
            place = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            options = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": place}
            requests[f"{node['NodeManagerAddress']} ({node['NodeID'][:8]})"] = ray.remote(**options)(_versions).remote()
    ray.wait([*requests.values()], num_returns=len(requests), timeout=REMOTE_START.get())
    for name, answer in requests.items():
        try:
            installed = ray.get(answer, timeout=0)
        except Exception as error:
            reason = str(error).strip().rpartition("\n")[2] or type(error).__name__
            yield "Ray node", f"{name}: {reason}", "install rustloader there, with the same versions as here"
            continue
        text = ", ".join(f"{package} {version}" for package, version in installed.items())
        yield "Ray node", f"{name}: {text}", handshake.version_mismatch(installed) or ""
