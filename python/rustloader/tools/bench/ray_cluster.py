"""``bench --ray``: gives a loader workers on a Ray cluster, and estimates whether they pay off."""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import select
import socket
import sys
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rustloader.system.formatting import count_of, duration, size
from rustloader.tools.harness.layout import number
from rustloader.tools.probe.cluster import reach
from rustloader.tools.probe.factory import Unusable, check_target

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

# The engine's name in results.
RAY = "ray"
# Duration in seconds of the measurement of the link, and maximum bytes per send and receive.
_LINK_SECONDS, _CHUNK_BYTES = 1.0, 1 << 20
# Maximum seconds without a byte during the measurement.
_LINK_SILENCE = 10.0


def check_ray() -> None:
    """Raises ``Unusable`` if Ray is not installed. Called before anything runs."""
    if importlib.util.find_spec("ray") is None:
        raise Unusable("--ray needs Ray: pip install 'rustloader[ray]'")


def give_workers(loader: DataLoader[Any], engine: str) -> None:
    """Makes a loader start its workers on the cluster for the engine "ray", and on this machine for any other.

    For "ray", a RayContext that the factory has set is kept.
    """
    from rustloader.remote.context import is_remote

    context = loader.multiprocessing_context
    if engine == RAY and not is_remote(context):
        from rustloader.ray import RayContext

        loader.multiprocessing_context = RayContext()
    elif engine != RAY and is_remote(context):
        loader.multiprocessing_context = None


@dataclass(frozen=True)
class Cluster:
    """The resources that a cluster has for workers.

    Attributes:
        cpus: number of free CPUs.
        nodes: number of nodes other than this machine.
        link: bytes per second over one connection from another node; from this machine if it is the only node.
    """

    cpus: float
    nodes: int
    link: float


def connect() -> Any:
    """Connects to the cluster that RAY_ADDRESS names, by default to the one on this machine. Returns ``ray``."""
    import ray

    if not ray.is_initialized():
        address = os.environ.get("RAY_ADDRESS") or "auto"
        try:
            reach(address)
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            raise Unusable(
                f"--ray: no Ray cluster answers at {address}: {reason}\n"
                "  start one (`ray start --head`), or name one in RAY_ADDRESS"
            ) from None
    return ray


def send_by_value(target: str) -> None:
    """Makes Ray pickle the definitions in the factory's file by value, because the nodes cannot import the file.

    Does nothing if the factory is in a module, which must be installed on the nodes.
    """
    place, _, is_file = check_target(target)
    if is_file:
        module = sys.modules[os.path.splitext(os.path.basename(place))[0]]
        connect().cloudpickle.register_pickle_by_value(module)


def measure_cluster() -> dict[str, Any]:
    """Determines the resources of the cluster. Returns a ``Cluster`` as a dictionary."""
    ray = connect()
    own_node = ray.get_runtime_context().get_node_id()
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    others = [node for node in nodes if node != own_node]
    link = _link_rate(ray, (others or nodes)[0])
    return asdict(Cluster(ray.available_resources().get("CPU", 0.0), len(others), link))


def _send(address: str, port: int, seconds: float) -> None:
    """Sends bytes to an address for ``seconds`` seconds. Runs on a node."""
    chunk = bytes(_CHUNK_BYTES)
    with socket.create_connection((address, port), timeout=10.0) as connection:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            connection.sendall(chunk)


def _link_rate(ray: Any, node: str) -> float:
    """Returns the bytes per second that a process on a node can send to this process, which discards them."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from rustloader.remote import handshake

    place = NodeAffinitySchedulingStrategy(node, soft=False)
    send = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=place)(_send)
    address = ray.util.get_node_ip_address()
    with handshake.listen(address) as listener:
        sent = send.remote(address, listener.getsockname()[1], _LINK_SECONDS)
        while not select.select([listener], [], [], 0.5)[0]:
            if ray.wait([sent], timeout=0)[0]:
                ray.get(sent)  # raises the error if the node could not send
        connection, _ = listener.accept()
    with connection:
        connection.settimeout(_LINK_SILENCE)
        total, buffer, begin = 0, bytearray(_CHUNK_BYTES), time.monotonic()
        try:
            while count := connection.recv_into(buffer):
                total += count
        except TimeoutError:
            raise Unusable(
                f"--ray: node {node} sent nothing for {_LINK_SILENCE:g} s while the link was measured"
            ) from None
        return total / (time.monotonic() - begin)


@dataclass(frozen=True)
class Price:
    """The cost model of workers on a cluster: the formula on the page "Beyond one machine".

    Attributes:
        batch_bytes: size of a batch in bytes.
        cpu_seconds: CPU time of a batch in seconds.
        cores: number of cores that workers may use on this machine.
        cluster: resources of the cluster.
    """

    batch_bytes: float
    cpu_seconds: float
    cores: int
    cluster: Cluster

    @property
    def local(self) -> float:
        """Batches per second that the cores of this machine can make."""
        return self.cores / max(self.cpu_seconds, 1e-9)

    @property
    def carried(self) -> float:
        """Batches per second that the link can carry."""
        return self.cluster.link / max(self.batch_bytes, 1.0)

    @property
    def replaced(self) -> float:
        """Number of cores needed to make as many batches as the link can carry."""
        return self.carried * self.cpu_seconds

    @property
    def pays(self) -> bool:
        """True if the cluster can make, and the link can carry, more batches than the cores of this machine make."""
        return self.replaced > self.cores and self.cluster.cpus > self.cores

    def __str__(self) -> str:
        cores = count_of(self.cores, "core")
        text = f"A batch is {size(self.batch_bytes)} and takes {duration(self.cpu_seconds)} of CPU time, so the "
        text += f"{cores} here make at most {number(self.local)} batches/s. The link carries "
        text += f"{number(self.cluster.link / 1e6)} MB/s: {number(self.carried)} batches/s, the work of "
        text += f"{number(self.replaced)} cores. "
        free = f"{self.cluster.cpus:g} CPUs are free in the cluster"
        if self.replaced <= self.cores:
            text += f"Workers on the cluster do not pay off: the link carries no more than the {cores} here make."
        elif self.cluster.cpus <= self.cores:
            text += f"Workers on the cluster do not pay off: {free}, no more than the {cores} here."
        else:
            useful = min(self.cluster.cpus, math.ceil(self.replaced))
            text += (
                f"Workers on the cluster pay off if there are at least {self.cores + 1}; up to {useful:g} help: {free}."
            )
        if not self.cluster.nodes:
            text += " The cluster is only this machine, so its CPUs are the cores here, and the link is the loopback."
        return text

    def as_dict(self) -> dict[str, Any]:
        """Returns the estimate for JSON."""
        rates = {"local_batches_per_second": self.local, "carried_batches_per_second": self.carried}
        return {**asdict(self), **rates, "replaced_cores": self.replaced, "pays": self.pays}
