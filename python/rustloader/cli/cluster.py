"""What Ray says of its cluster, and whether workers of this process may run on its nodes."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from importlib import metadata
from typing import Any

from rustloader.config import REMOTE_START
from rustloader.probe.cluster import reach

Line = tuple[str, str, str]


def cluster() -> Iterator[Line]:
    """What was found, and what to do, if anything: of Ray, of the cluster that RAY_ADDRESS names or this process is
    connected to, and of each of its nodes. Nothing where Ray is not installed."""
    try:
        version = metadata.version("ray")
    except metadata.PackageNotFoundError:
        return
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        yield "Ray", f"{version}; RAY_ADDRESS names no cluster", ""
        return
    import ray

    connected = ray.is_initialized()
    if not connected:
        try:
            reach(address)
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:
            found = f"{version}; {address} does not answer: {type(error).__name__}: {error}"
            yield "Ray", found, "start the cluster (`ray start --head`), or correct RAY_ADDRESS"
            return
    try:
        there, free = ray.cluster_resources(), ray.available_resources()
        found = f"{version}; {free.get('CPU', 0):g} of {there.get('CPU', 0):g} CPUs free"
        if there.get("GPU"):
            found += f", {free.get('GPU', 0):g} of {there['GPU']:g} GPUs"
        yield "Ray", found, ""
        yield from _nodes(ray)
    finally:
        if not connected:
            ray.shutdown()


def _versions() -> dict[str, str]:
    """Runs on a node."""
    from rustloader.remote import handshake

    return handshake.versions()


def _nodes(ray: Any) -> Iterator[Line]:
    """Asks each node for its versions."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    # It needs torch, which doctor may have to report as missing.
    from rustloader.remote import handshake

    asked = {}
    for node in ray.nodes():
        if node["Alive"]:
            place = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            options = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": place}
            asked[f"{node['NodeManagerAddress']} ({node['NodeID'][:8]})"] = ray.remote(**options)(_versions).remote()
    ray.wait([*asked.values()], num_returns=len(asked), timeout=REMOTE_START.get())
    for name, answer in asked.items():
        try:
            theirs = ray.get(answer, timeout=0)
        except Exception as error:
            reason = str(error).strip().rpartition("\n")[2] or type(error).__name__
            yield "Ray node", f"{name}: {reason}", "install rustloader there, with the same versions as here"
            continue
        told = ", ".join(f"{package} {version}" for package, version in theirs.items())
        yield "Ray node", f"{name}: {told}", handshake.skew(theirs) or ""
