"""Reports on the Ray cluster, and checks whether the nodes can run workers for this process."""

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

# The subject of a finding, its text, and advice.
Line = tuple[str, str, str]

# Resources that Ray itself defines.
_RAY_RESOURCES = ("CPU", "GPU", "memory", "object_store_memory")


def cluster() -> Iterator[Line]:
    """Yields findings about Ray, the cluster and each of its nodes, with any advice.

    The cluster is the one to which this process is connected, or else the one that RAY_ADDRESS names. Yields nothing if
    Ray is not installed.
    """
    try:
        version = metadata.version("ray")
    except metadata.PackageNotFoundError:
        return
    address = os.environ.get("RAY_ADDRESS")
    # Only a process that has imported Ray can be connected.
    connected = "ray" in sys.modules and sys.modules["ray"].is_initialized()
    if not address and not connected:
        yield "Ray", f"{version}; RAY_ADDRESS is not set", ""
        return
    import ray

    if not connected:
        assert address
        try:
            reach(address)
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:
            text = f"{version}; {address} does not answer: {type(error).__name__}: {error}"
            yield "Ray", text, "start the cluster (`ray start --head`), or correct RAY_ADDRESS"
            return
    try:
        yield "Ray", f"{version}; {_free_resources(ray.cluster_resources(), ray.available_resources())}", ""
        yield from _nodes(ray)
    finally:
        if not connected:
            ray.shutdown()


def _free_resources(total: Mapping[str, float], free: Mapping[str, float]) -> str:
    """Describes the free resources of the cluster, including custom resources."""
    text = f"{free.get('CPU', 0):g} of {total.get('CPU', 0):g} CPUs free"
    if total.get("GPU"):
        text += f", {free.get('GPU', 0):g} of {total['GPU']:g} GPUs"
    if total.get("memory"):
        text += f", {size(free.get('memory', 0))} of {size(total['memory'])} memory"
    prefixes = ("node:", "accelerator_type:")
    own = (name for name in sorted(total) if name not in _RAY_RESOURCES and not name.startswith(prefixes))
    return text + "".join(f", {free.get(name, 0):g} of {total[name]:g} {name}" for name in own)


def _versions() -> dict[str, str]:
    """Returns the versions of packages. Runs on a node."""
    from rustloader.remote import handshake

    return handshake.versions()


def _nodes(ray: Any) -> Iterator[Line]:
    """Yields a finding about each node and the versions installed there."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    # Imported late because it needs torch, which may be missing: `doctor` reports that.
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
